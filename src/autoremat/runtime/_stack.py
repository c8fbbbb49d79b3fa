"""Calls of regions that are running on a thread, and how they are closed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from autoremat.runtime import _torch_compat as compat

if TYPE_CHECKING:
    from autoremat.runtime._frame import Frame, Replay
    from autoremat.runtime._hooks import Swap
    from autoremat.runtime._recipe import Recipe
    from autoremat.runtime._selective import Player, Recorder


class Active:
    """A call of a region whose forward is running, on this thread's stack.

    Args:
        frame: This execution of the region; None for a region that runs inline.
        owner: What `enter` was given.
        level: How many regions around this one have the same call among theirs.
        first: In recompute of the region around it, the execution in forward that this one repeats.
        run: Which of the frame's runs.

    Attributes:
        end: Ends the calls of this owner, as `leave` does.
    """

    __slots__ = (
        "end", "first", "frame", "has_hooks", "is_open", "level", "mode", "num_holders", "owner", "run", "swap",
    )  # fmt: skip

    def __init__(
        self,
        frame: Frame | None,
        owner: object,
        level: int,
        end: Callable[[object], None],
        first: Frame | None = None,
        run: int = 0,
    ) -> None:
        self.end = end
        self.frame = frame
        self.owner = owner
        self.level = level
        self.first = first
        self.run = run
        self.is_open = True
        self.has_hooks = False
        self.mode: Recorder | None = None
        self.swap: Swap | None = None
        self.num_holders = 0 if frame is None else len(frame.holders)

    def close(self) -> None:
        """Pop this call's hooks and mode."""
        self.is_open = False
        if self.frame is not None:
            self.frame.is_running = False
        if self.swap is not None:
            self.swap.undo()
            self.swap = None
        if self.mode is not None:
            compat.pop_dispatch_mode()
        if self.has_hooks:
            compat.pop_hooks()

    def abandon(self) -> None:
        """Forward did not get to its end: what it left for recompute is of no use."""
        if self.frame is not None:
            self.frame.undo(self.num_holders)
        if self.first is not None:
            self.first.forget_entries()


class _Stack(threading.local):
    def __init__(self) -> None:
        self.items: list[Active | Replay] = []
        # Autograd alone does not keep a frame alive as long as its calls have saved nothing.
        self.spans: dict[Recipe, Frame] = {}


STACK = _Stack()
"""Regions running on this thread, and spans that may go on with a further call."""


def end_span(frame: Frame) -> None:
    """No further call belongs to this execution of a region."""
    frame.is_closed = True
    frame.spans.clear()
    spans = frame.parent.spans if frame.parent is not None else STACK.spans
    if spans.get(frame.recipe) is frame:
        del spans[frame.recipe]


def drop_spans(recipes: Iterable[Recipe]) -> None:
    """The forward around these regions is over: those that have not run their last call do not go on."""
    for recipe in recipes:
        STACK.spans.pop(recipe, None)


def active_regions() -> list[Active | Replay]:
    """Regions running on this thread, outermost first."""
    return STACK.items


def unwind(depth: int) -> None:
    """Close what an exception left open above this depth."""
    items = STACK.items
    while len(items) > depth:
        item = items.pop()
        item.close()
        if isinstance(item, Active) and item.mode is not None:
            item.abandon()


def close_through(active: Active) -> None:
    """Close a call that did not come to its end, and what is open inside it."""
    if active in STACK.items:
        unwind(STACK.items.index(active))


_NOTHING = contextlib.nullcontext()


def unwatched() -> contextlib.AbstractContextManager[None]:
    """A context for ops that are no part of the user's program: regions that are running do not count them."""
    modes = [item.mode for item in STACK.items if item.mode is not None]
    return _paused(modes) if modes else _NOTHING


@contextlib.contextmanager
def _paused(modes: list[Recorder | Player]) -> Iterator[None]:
    for mode in modes:
        mode.pause()
    try:
        yield
    finally:
        for mode in modes:
            mode.resume()


def end_call(module: Any) -> None:
    """End the region of a module before its other forward hooks run."""
    active = STACK.items[-1] if STACK.items else None
    if isinstance(active, Active) and active.owner is module:
        active.end(module)


def num_saved() -> int:
    """How many tensors the innermost region has saved so far."""
    active = STACK.items[-1]
    return len(active.frame.holders) if isinstance(active, Active) and active.frame is not None else 0

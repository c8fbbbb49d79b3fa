"""Hooks of others on modules inside a region: recompute runs those that the numbers need, and leaves out the rest.

A hook that only looks on (counts, logs, keeps activations) fires as often as in plain training. A hook that takes part
in the computation fires again in recompute: one that returns something, changes its module (``weight_norm``,
``spectral_norm``, pruning), changes a tensor, a flag or random state, or saves tensors for backward. Which of the two
a hook did is noted at each call in forward. A hook that does both fires again. So do both hooks of a pair (a pre-hook
and a forward hook of the same object or closure) if one of them must; recompute does not stop between the two.

Modules without hooks cost nothing; to watch a hook costs some tens of microseconds a call.

Known limits: hooks of modules that the region reaches through globals fire again, as do backward hooks if the region
takes gradients inside. Effects on anything but the hook's own module and tensors are not seen: mark such a hook with
`replay_safe`, or the value check of the first step will find what it changed.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from autoremat.runtime import _torch_compat as compat
from autoremat.runtime._ambient import drawn_from, read_flags, read_torch_random
from autoremat.runtime._links import tensors_in
from autoremat.runtime._module_state import ModuleWatch, drop_from, hooks_of, version_of
from autoremat.runtime._other_random import fingerprint
from autoremat.runtime._selective import Player, Recorder

Hook = TypeVar("Hook", bound=Callable[..., Any])
HookDict = dict[int, Callable[..., Any]]
Key = tuple[int, int]
"""Of a hook on a module: torch's number of the hook, id of the module."""
_MARK = "is_replay_safe"


def replay_safe(hook: Hook) -> Hook:
    """Declare that a module hook may and should fire again whenever a region is recomputed.

    Without it, a hook that returns nothing and changes nothing that can be seen is left out of recompute.

    Args:
        hook: A forward hook or forward pre-hook; register what is returned.

    Returns:
        The hook, marked. Also a decorator.

    Example:
        >>> calls = []
        >>> @replay_safe
        ... def count(module, args, output):
        ...     calls.append(type(module).__name__)
        >>> handle = torch.nn.Linear(2, 2).register_forward_hook(count)
    """

    @functools.wraps(hook)
    def marked(*args: Any, **kwargs: Any) -> Any:
        return hook(*args, **kwargs)

    marked.__dict__[_MARK] = True
    return marked  # type: ignore[return-value]


def _is_safe(hook: Callable[..., Any]) -> bool:
    if isinstance(hook, HookStandIn):
        return False
    module = getattr(_inner(hook), "__module__", None) or ""
    return getattr(hook, _MARK, False) or module.startswith("autoremat.")  # our own start and end regions


def _inner(hook: Any) -> Any:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return hook


def hook_dicts(dicts: Iterable[HookDict]) -> list[HookDict]:
    """Those of these dictionaries, and of the global ones, in which there are hooks to look after."""
    found = [hooks for hooks in dicts if hooks]
    found += [hooks for hooks in compat.global_hooks if hooks]
    return [hooks for hooks in found if not all(map(_is_safe, hooks.values()))] if found else found


@dataclass(slots=True)
class HookCall:
    """One call of a hook in forward.

    Attributes:
        is_needed: Whether recompute must run it.
        num_ops: How many counted ops it ran.
        counts: How often it ran each planned operator, by slot.
    """

    is_needed: bool
    num_ops: int = 0
    counts: tuple[int, ...] = ()


class HookLog:
    """What the hooks inside one execution of a region did."""

    __slots__ = ("calls", "hooks")

    def __init__(self) -> None:
        self.calls: dict[Key, list[HookCall]] = {}
        self.hooks: dict[Key, tuple[Callable[..., Any], bool]] = {}

    def observe(
        self,
        dicts: list[HookDict],
        end: Callable[[nn.Module], None],
        mode: Recorder | None,
        is_open: Callable[[], bool],
        num_saved: Callable[[], int],
    ) -> Swap:
        """Note from now on what these hooks do.

        Args:
            dicts: Where they are.
            end: Ends the region of a module, if it is running.
            mode: What counts the region's ops.
            is_open: Whether the region is still running.
            num_saved: Tells how many tensors have been saved so far.
        """
        return Swap(
            dicts, lambda hook, number, hooks: Observed(hook, number, hooks, end, self, mode, is_open, num_saved)
        )

    def seal(self) -> None:
        """At the end of forward: a pair of hooks of which one is needed is needed as a whole."""
        pre_hooks = [key for key in self.calls if not self.hooks[key][1]]
        hooks = [key for key in self.calls if self.hooks[key][1]]
        for first in pre_hooks:
            for second in hooks:
                if first[1] == second[1] and _are_paired(
                    first[0], self.hooks[first][0], second[0], self.hooks[second][0]
                ):
                    for a, b in zip(self.calls[first], self.calls[second], strict=False):
                        a.is_needed = b.is_needed = a.is_needed or b.is_needed
        self.hooks = {}


def _are_paired(number: int, pre_hook: Callable[..., Any], other: int, hook: Callable[..., Any]) -> bool:
    """Whether two hooks of a module have the same owner, or were registered one after the other and share variables."""
    pre_hook, hook = _inner(pre_hook), _inner(hook)
    owner = getattr(pre_hook, "__self__", None)
    if owner is not None or other != number + 1:
        return owner is not None and owner is getattr(hook, "__self__", None)
    cells = {id(cell) for cell in getattr(pre_hook, "__closure__", None) or ()}
    return any(id(cell) in cells for cell in getattr(hook, "__closure__", None) or ())


class HookStandIn:
    """Called in place of a hook.

    Args:
        hook: What it replaces; perhaps the stand-in of a region around this one.
        number: Number of the hook.
        hooks: The dictionary that the hook is in.
        end: Called with the module before a global forward hook runs: it comes before the hook that ends a region.
    """

    def __init__(
        self, hook: Callable[..., Any], number: int, hooks: HookDict, end: Callable[[nn.Module], None]
    ) -> None:
        self.hook = hook
        self.number = number
        self.real: Callable[..., Any] = hook.real if isinstance(hook, HookStandIn) else hook
        self._hooks = hooks
        self._end = end
        self._thread = threading.get_ident()
        self.is_over = False

    def __call__(self, module: nn.Module, *rest: Any) -> Any:
        if self.is_over or threading.get_ident() != self._thread:
            return self.hook(module, *rest)
        if self._hooks is compat.global_hooks[1]:
            self._end(module)
        return self.call(module, rest)

    def is_after(self, module: nn.Module) -> bool:
        """Whether it runs after forward."""
        return self._hooks is module._forward_hooks or self._hooks is compat.global_hooks[1]

    def call(self, module: nn.Module, rest: tuple[Any, ...]) -> Any:
        """Do what is done in place of the hook."""
        raise NotImplementedError


class Swap:
    """Stand-ins in the place of hooks.

    Args:
        dicts: Where the hooks are.
        make: Makes a stand-in from the hook, its number, and the dictionary.
    """

    __slots__ = ("_done",)

    def __init__(self, dicts: list[HookDict], make: Callable[..., HookStandIn]) -> None:
        self._done: list[tuple[HookDict, int, HookStandIn]] = []
        for hooks in dicts:
            for number, hook in hooks.items():
                if not _is_safe(hook):
                    self._done.append((hooks, number, make(hook, number, hooks)))
        for hooks, number, stand_in in self._done:
            hooks[number] = stand_in

    def undo(self) -> None:
        """Put the hooks back."""
        for hooks, number, stand_in in self._done:
            stand_in.is_over = True
            original = stand_in.hook
            while isinstance(original, HookStandIn) and original.is_over:  # of another thread, which was faster
                original = original.hook
            if hooks.get(number) is stand_in:  # it may have been removed meanwhile
                hooks[number] = original


class Observed(HookStandIn):
    """In forward: runs the hook and notes what it did. For the arguments see `HookLog.observe`."""

    def __init__(
        self,
        hook: Callable[..., Any],
        number: int,
        hooks: HookDict,
        end: Callable[[nn.Module], None],
        log: HookLog,
        mode: Recorder | None,
        is_open: Callable[[], bool],
        num_saved: Callable[[], int],
    ) -> None:
        super().__init__(hook, number, hooks, end)
        self._log, self._mode, self._is_open, self._num_saved = log, mode, is_open, num_saved

    def call(self, module: nn.Module, rest: tuple[Any, ...]) -> Any:
        """Run the hook and note what it did."""
        if not self._is_open():
            return self.hook(module, *rest)
        mode, num_saved, before = self._mode, self._num_saved(), _Surroundings(module, rest)
        position, counts = (mode.position, tuple(mode.counts)) if mode is not None else (0, ())
        result = self.hook(module, *rest)
        call = HookCall(result is not None or self._num_saved() != num_saved or before.are_changed(module))
        if mode is not None:
            call.num_ops = mode.position - position
            counts += (0,) * (len(mode.counts) - len(counts))
            call.counts = tuple(now - then for now, then in zip(mode.counts, counts, strict=True))
        key = self.number, id(module)
        self._log.calls.setdefault(key, []).append(call)
        self._log.hooks[key] = self.real, self.is_after(module)
        return result


class _Surroundings:
    """What a hook could change that recompute would have to see."""

    __slots__ = ("_dicts", "_flags", "_other_random", "_random", "_tensors", "_versions")

    def __init__(self, module: nn.Module, rest: tuple[Any, ...]) -> None:
        self._dicts: list[dict[str, Any]] = [d.copy() for d in (module.__dict__, module._parameters, module._buffers)]
        self._tensors = list(tensors_in(rest))
        self._tensors += [buffer for buffer in module._buffers.values() if buffer is not None]
        self._versions = [version_of(tensor) for tensor in self._tensors]
        self._random = read_torch_random(self._tensors)
        self._other_random = fingerprint()
        self._flags = self._read_flags()

    @staticmethod
    def _read_flags() -> tuple[Any, ...]:
        return read_flags(), torch.is_grad_enabled(), compat.dispatch_modes_active(), compat.top_hooks()

    def are_changed(self, module: nn.Module) -> bool:
        """Whether they are not what they were."""
        now = (module.__dict__, module._parameters, module._buffers)
        if any(map(_differ, self._dicts, now)) or self._flags != self._read_flags():
            return True
        if any(version_of(tensor) != version for tensor, version in zip(self._tensors, self._versions, strict=True)):
            return True
        with compat.unobserved():
            return self._other_random != fingerprint() or bool(drawn_from(self._random))


def _differ(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first.keys() != second.keys() or not all(map(operator.is_, first.values(), second.values()))


class Repeats:
    """The hooks in recompute of a region.

    Args:
        log: What they did in forward.
        player: What counts the ops in recompute.
        on_closed: Called when no pair of hooks is open any more.
    """

    __slots__ = ("_calls", "_next", "_on_closed", "_open", "_player")

    def __init__(self, log: HookLog | None, player: Player | None, on_closed: Callable[[], None]) -> None:
        self._calls = log.calls if log is not None else {}
        self._next: dict[Key, int] = {}
        self._open: list[tuple[nn.Module, set[int]]] = []
        self._player = player
        self._on_closed = on_closed

    @property
    def is_open(self) -> bool:
        """Whether a pre-hook has run whose forward hook is yet to run."""
        return bool(self._open)

    def stand_in_for(self, dicts: list[HookDict], end: Callable[[nn.Module], None]) -> Swap:
        """From now on run of these hooks only what is needed; ``end`` as for `HookLog.observe`."""
        return Swap(dicts, lambda hook, number, hooks: Repeated(hook, number, hooks, end, self))

    def take(self, number: int, module: nn.Module) -> HookCall | None:
        """What the hook did at this point in forward; None if it did not fire there."""
        call = self._peek(number, module)
        if call is not None:
            key = number, id(module)
            self._next[key] = self._next.get(key, 0) + 1
        return call

    def _peek(self, number: int, module: nn.Module) -> HookCall | None:
        key = number, id(module)
        calls, index = self._calls.get(key, ()), self._next.get(key, 0)
        return calls[index] if index < len(calls) else None

    def leave_out(self, call: HookCall) -> None:
        """Count the ops that the hook ran in forward."""
        if self._player is not None:
            self._player.skip(call.num_ops, call.counts)

    def begin(self, module: nn.Module) -> None:
        """A pre-hook is about to run: wait for the forward hooks that go with it."""
        if self._open and self._open[-1][0] is module:
            return
        numbers = [*module._forward_hooks, *compat.global_hooks[1]]
        needed = {n for n in numbers if (call := self._peek(n, module)) is not None and call.is_needed}
        if needed:
            self._open.append((module, needed))

    def end(self, number: int, module: nn.Module) -> None:
        """A forward hook has run."""
        if self._open and self._open[-1][0] is module:
            self._open[-1][1].discard(number)
            if not self._open[-1][1]:
                self._open.pop()
                if not self._open:
                    self._on_closed()


class Repeated(HookStandIn):
    """In recompute: runs the hook if the numbers need it."""

    def __init__(
        self,
        hook: Callable[..., Any],
        number: int,
        hooks: HookDict,
        end: Callable[[nn.Module], None],
        repeats: Repeats,
    ) -> None:
        super().__init__(hook, number, hooks, end)
        self._repeats = repeats

    def call(self, module: nn.Module, rest: tuple[Any, ...]) -> Any:
        """Run the hook as often as forward has shown it to be needed."""
        repeats = self._repeats
        call = repeats.take(self.number, module)
        if call is None:
            return None
        if not call.is_needed:
            repeats.leave_out(call)
            return None
        if not self.is_after(module):
            repeats.begin(module)
            return self.real(module, *rest)
        result = self.real(module, *rest)
        repeats.end(self.number, module)
        return result


def next_hook() -> int:
    """The number that torch will give the next hook that is registered."""
    return RemovableHandle.next_id


def take_back_hooks(first: int, tensors: list[torch.Tensor], watch: ModuleWatch | None) -> None:
    """Remove the hooks that recompute registered on what is there for good: forward's are there already.

    Args:
        first: What `next_hook` was before.
        tensors: From outside the region.
        watch: Of the region's modules.
    """
    if RemovableHandle.next_id == first:
        return
    for tensor in tensors:
        for hooks in hooks_of(tensor):
            drop_from(hooks, first)
    if watch is not None:
        watch.take_back_hooks(first)

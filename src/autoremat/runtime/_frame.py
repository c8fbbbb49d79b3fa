"""One execution of a region: what it holds between forward and backward, and how it is recomputed.

In forward, each tensor that autograd saves inside the region is replaced by an empty `Holder`. The first holder that
backward opens makes its `Frame` run the region again; that fills all holders, in the order in which forward made
them, and stops as soon as the last is full. In a plain backward a holder then keeps its tensor until autograd
releases it, and the frame lets go of its arguments. In one that keeps the graph (retain_graph, create_graph) a holder
gives its tensor away: the next backward recomputes, and between the two nothing is held. (Then a custom function that
reads ``ctx.saved_tensors`` twice in one backward has its region recomputed twice.)

A region inside another holds nothing: when the outer one is recomputed, the inner forward runs again, and the inner
frame takes its arguments and stored outputs from there. What runs again is a region of its own, the frame's twin, so
that ``torch.autograd.grad`` inside works in recompute, too; regions inside a twin run inline.

References: autograd -> holder -> frame -> arguments; frame -> holder is weak, so there are no cycles.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from autoremat._errors import RecomputeError
from autoremat.runtime import _torch_compat as compat
from autoremat.runtime._ambient import flags_set, random_set
from autoremat.runtime._checksum import checksum
from autoremat.runtime._holder import Holder, unpack
from autoremat.runtime._hooks import HookLog, Repeats, Swap, hook_dicts, tensor_hooks_kept
from autoremat.runtime._module_state import version_of
from autoremat.runtime._recipe import Entry, Recipe, counting_from
from autoremat.runtime._selective import Player, Recorder, Store
from autoremat.runtime._stand_in import StandIn
from autoremat.runtime._structure import tighten

MAX_NOTED_CALLS = 64
"""How many executions `explain` looks at, where forward runs and runs without a backward."""


class StopRecompute(BaseException):
    """Leaves the user's forward once recompute has what it needs; not an Exception, so that nobody catches it."""


class Frame:
    """One execution of a region in forward, and its recompute."""

    __slots__ = (
        "__weakref__", "changed", "children", "constants", "entry", "expected", "fn", "group", "holders", "hooks",
        "is_closed", "is_done", "is_inline", "is_kept", "lock", "parent", "recipe", "store", "sums", "wraps_inputs",
    )  # fmt: skip

    def __init__(self, recipe: Recipe, fn: Callable[..., Any], parent: Frame | None) -> None:
        self.recipe = recipe
        self.fn: Callable[..., Any] | None = fn
        self.parent = parent
        self.entry: Entry | None = None
        self.store: Store | None = None
        self.hooks: HookLog | None = None
        self.holders: list[weakref.ref[Holder]] = []
        self.expected: list[tuple[Any, torch.dtype, torch.device]] = []
        self.sums: list[int | None] | None = None
        self.constants: Collection[int] = ()
        self.changed: set[tuple[int, str]] = set()
        self.children: list[weakref.ref[Frame]] = []
        self.group: object | None = None
        self.is_closed = self.is_done = self.is_kept = self.is_inline = self.wraps_inputs = False
        self.lock = threading.RLock()

    def pack(self, tensor: torch.Tensor) -> Holder:
        """What autograd calls in forward for a tensor that it saves."""
        holder = Holder(self)
        self.holders.append(weakref.ref(holder))
        self.expected.append((tensor.shape, tensor.dtype, tensor.device))
        if self.sums is not None:
            self.sums.append(checksum(tensor, self.constants))
        return holder

    def recompute(self) -> None:
        """Run the region again and fill the holders."""
        with self.lock:
            if self.is_done:
                return
            if self.entry is None and self.parent is not None:
                self.parent.recompute()
            if self.entry is None:
                raise RecomputeError(
                    f"{self.recipe.name}: the region around it did not run it in recompute. The outer module's forward "
                    "took another path; take one of the two out of the plan."
                )
            Replay(self).run()
            self.recipe.learned.is_checked = True
            self.is_kept = compat.graph_is_kept()
            if self.is_kept:
                self.group = compat.graph_exec_group()
                if self.group is None:
                    compat.at_end_of_backward(self.forget)
            elif self.is_closed:
                self.release()

    def forget(self) -> None:
        """At the end of a backward that keeps the graph: let go of what can be recomputed."""
        with self.lock:
            if self.is_done:
                return
            for holder in self._alive_holders():
                holder.value = None
            for child in self.waiting_children(with_entry=True):
                child.entry = child.store = child.fn = None

    def _alive_holders(self) -> Iterator[Holder]:
        return (holder for ref in self.holders if (holder := ref()) is not None)

    def waiting_children(self, *, with_entry: bool) -> list[Frame]:
        """Regions inside this one that are to be recomputed, those that have or lack what they need for it."""
        children = [child for ref in self.children if (child := ref()) is not None]
        return [c for c in children if c.is_closed and not c.is_done and (c.entry is not None) is with_entry]

    def release(self) -> None:
        """Let go of everything but the holders."""
        self.is_done = True
        self.entry = self.store = self.fn = None
        self.sums = None


class Active:
    """A region whose forward is running, on this thread's stack.

    Args:
        frame: This execution; None for a region that runs inline.
        owner: What `enter` was given.
        first: In recompute of the region around it, the execution in forward that this one repeats.
    """

    __slots__ = ("first", "frame", "has_hooks", "is_open", "mode", "owner", "swap")

    def __init__(self, frame: Frame | None, owner: object, first: Frame | None = None) -> None:
        self.frame = frame
        self.owner = owner
        self.first = first
        self.is_open = True
        self.has_hooks = False
        self.mode: Recorder | None = None
        self.swap: Swap | None = None

    def close(self) -> None:
        """Pop this region's hooks and mode."""
        self.is_open = False
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
            self.frame.release()
        if self.first is not None:
            self.first.entry = self.first.store = self.first.fn = None


class _Stack(threading.local):
    def __init__(self) -> None:
        self.items: list[Active | Replay] = []


_STACK = _Stack()


def active_regions() -> list[Active | Replay]:
    """Regions running on this thread, outermost first."""
    return _STACK.items


def unwind(depth: int) -> None:
    """Close what an exception left open above this depth."""
    items = _STACK.items
    while len(items) > depth:
        item = items.pop()
        item.close()
        if isinstance(item, Active) and item.mode is not None:
            item.abandon()


def close_through(active: Active) -> None:
    """Close a region that did not come to its end, and what is open inside it."""
    if active in _STACK.items:
        unwind(_STACK.items.index(active))


def enter(
    recipe: Recipe, fn: Callable[..., Any], owner: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Active:
    """Start a region; `leave` must follow, whatever happens in between."""
    items = _STACK.items
    top = items[-1] if items else None
    if isinstance(top, Replay):
        first = top.next_child(recipe)
        frame = Frame(recipe, fn, None) if first is not None else None
        active = Active(frame, owner, first)
    elif top is not None and (top.first is not None or top.frame is None):
        active = Active(None, owner)
    else:
        parent = top.frame if top is not None else None
        frame = Frame(recipe, fn, parent)
        if parent is not None:
            parent.children.append(weakref.ref(frame))
        recipe.num_calls += 1
        if recipe.check == "always" or (recipe.check == "first" and not recipe.learned.is_checked):
            frame.sums = []
        active = Active(frame, owner)
    if active.frame is not None:
        _start(active, active.frame, fn, args, kwargs)
    elif isinstance(top, Replay) and not top.is_inline:
        compat.push_hooks(_keep, _identity)
        active.has_hooks = True
    items.append(active)
    if isinstance(top, Replay) and recipe.table is None:
        top.stop_if_satisfied()
    return active


def _start(active: Active, frame: Frame, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    recipe = frame.recipe
    frame.entry = entry = Entry(recipe, args, kwargs)
    first = active.first
    if first is not None:
        frame.is_inline = True
        first.fn, first.entry = fn, entry
        if entry.modules is not None:
            entry.modules.changed |= first.changed
    if frame.sums is not None and entry.modules is not None and recipe.watch is not None:
        frame.constants = recipe.watch.addresses(entry.modules)
    compat.push_hooks(frame.pack, unpack)
    active.has_hooks = True
    if recipe.table is not None:
        frame.store = Store()
        if first is not None:
            first.store = frame.store
        frame.wraps_inputs = compat.has_backward_hooks(active.owner)  # that op counts as the region's first
        active.mode = Recorder(recipe.table, frame.store)
        compat.push_dispatch_mode(active.mode)
    if first is not None:
        frame.hooks = first.hooks
    elif hooked := hook_dicts(recipe.hook_dicts()):
        frame.hooks = HookLog()
        active.swap = frame.hooks.observe(hooked, _end_call, active.mode, lambda: active.is_open, _num_saved)


def _num_saved() -> int:
    top = _STACK.items[-1]
    return len(top.frame.holders) if isinstance(top, Active) and top.frame is not None else 0


def _end_call(module: Any) -> None:
    """End the region of a module before its other forward hooks run."""
    items = _STACK.items
    if items and isinstance(items[-1], Active) and items[-1].owner is module:
        leave(module)


def leave(owner: object, *, failed: bool = False) -> None:
    """End the innermost region of this owner.

    Args:
        owner: What `enter` was given.
        failed: Whether forward raised an exception.
    """
    items = _STACK.items
    active = items[-1] if items else None
    if not isinstance(active, Active) or active.owner is not owner:
        return
    items.pop()
    active.close()
    frame = active.frame
    if frame is None:
        return
    if failed:
        active.abandon()
        return
    _finish(frame, active)
    if items and isinstance(items[-1], Replay):
        items[-1].stop_if_satisfied()


def _finish(frame: Frame, active: Active) -> None:
    recipe, entry = frame.recipe, frame.entry
    assert entry is not None
    entry.finish(recipe)
    if frame.store is not None:
        frame.store.seal()
    frame.is_closed = True
    if active.first is not None:
        return
    if frame.hooks is not None:
        frame.hooks.seal()
    if not recipe.num_recomputes and recipe.num_calls <= MAX_NOTED_CALLS and frame.parent is None:
        recipe.note(entry, frame.store)
    frame.constants = ()
    if not frame.holders and not frame.children:
        frame.release()
    elif frame.parent is not None:
        frame.changed = entry.modules.changed if entry.modules is not None else set()
        frame.entry = frame.store = frame.fn = None


class Replay:
    """The region running again in backward."""

    __slots__ = (
        "_base", "_child", "_children_left", "_error", "_frame", "_index", "_last", "_mode", "_repeats", "_swap",
    )  # fmt: skip

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._index = 0
        self._child = 0
        alive = [i for i, ref in enumerate(frame.holders) if (h := ref()) is not None and h.value is None]
        self._last = alive[-1] if alive else -1
        self._children_left = len(frame.waiting_children(with_entry=False))
        self._error: Exception | None = None
        self._mode: Player | None = None
        self._repeats: Repeats | None = None
        self._swap: Swap | None = None
        self._base = 0

    def close(self) -> None:
        """Pop hooks and mode."""
        if self._swap is not None:
            self._swap.undo()
            self._swap = None
        if self._mode is not None:
            compat.pop_dispatch_mode()
        compat.pop_hooks()

    def run(self) -> None:
        """Run it, up to the last saved tensor."""
        frame = self._frame
        recipe, entry = frame.recipe, frame.entry
        assert entry is not None
        entry.check(recipe)
        recipe.num_recomputes += 1
        with contextlib.ExitStack() as stack:
            stack.enter_context(flags_set(entry.flags))
            if entry.random:
                stack.enter_context(random_set(entry.random))
            if entry.modules is not None and recipe.watch is not None:
                stack.enter_context(recipe.watch.restored(entry.modules, keep=not frame.is_closed))
            stack.enter_context(tensor_hooks_kept(entry.outside_tensors()))
            if recipe.counters:
                stack.enter_context(counting_from(recipe.counters, entry.counts))
            tighten(entry.loose, recipe.name, recipe.learned.hold_all)
            self._execute(entry)
        if self._error is not None:
            raise self._error
        self._check_complete()

    def _execute(self, entry: Entry) -> None:
        frame, items = self._frame, _STACK.items
        fn = frame.fn
        assert fn is not None
        self._base = len(items)
        compat.push_hooks(self.pack, _identity)
        if frame.recipe.table is not None and frame.store is not None:
            self._mode = Player(frame.recipe.table, frame.store, frame.recipe.name)
            compat.push_dispatch_mode(self._mode)
        if hooked := hook_dicts(frame.recipe.hook_dicts()):
            self._repeats = Repeats(frame.hooks, self._mode, self.stop_if_satisfied)
            self._swap = self._repeats.stand_in_for(hooked, _end_call)
        items.append(self)
        try:
            args = compat.wrap_as_backward_hooks_do(entry.args) if frame.wraps_inputs else entry.args
            fn(*args, **entry.kwargs)
        except StopRecompute as stop:
            if stop.args[0] is not self:
                raise
        finally:
            unwind(self._base)
            self._count()

    def _count(self) -> None:
        mode, recipe = self._mode, self._frame.recipe
        if mode is not None:
            recipe.num_ops_run += mode.num_run
            recipe.num_ops_skipped += mode.num_skipped
            recipe.num_outputs_stored += mode.num_stored

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """What autograd calls for a tensor that it saves: the next holder gets it."""
        frame, index = self._frame, self._index
        self._index = index + 1
        # With its grad_fn, a kept tensor would hold the recomputed graph, and an output its own node.
        if not tensor.is_leaf:
            tensor = compat.detached(tensor) if self._mode is not None else tensor.detach()
        if index < len(frame.holders):
            holder = frame.holders[index]()
            seen = tensor.shape, tensor.dtype, tensor.device
            if frame.expected[index] != seen and frame.recipe.compares_shapes:
                self._refuse_shape(index, tensor)
            if holder is not None and holder.value is None:
                if isinstance(tensor, StandIn):
                    self._refuse(f"backward needs {tensor!r}. The plan does not fit; make it again with this batch.")
                if frame.sums is not None and index < len(frame.sums):
                    self._compare(index, tensor)
                holder.value, holder.version = tensor, version_of(tensor)
        elif frame.is_closed:
            self._refuse_number()
        if index >= self._last:
            self.stop_if_satisfied()
        return tensor

    def stop_if_satisfied(self) -> None:
        """Leave forward if nothing more is needed."""
        if self._index <= self._last or self._children_left or not self._frame.recipe.early_stop:
            return
        if self._repeats is None or not self._repeats.is_open:  # else the hook that closes a pair runs first
            raise StopRecompute(self)

    def _compare(self, index: int, tensor: torch.Tensor) -> None:
        sums = self._frame.sums
        assert sums is not None
        if sums[index] is not None and sums[index] != checksum(tensor):
            self._refuse(
                f"saved tensor {index} ({tensor.dtype}, {list(tensor.shape)}) has other values in recompute than in "
                "forward. Its forward depends on something that recompute cannot restore (a global, a side channel, "
                "a context manager, a nondeterministic kernel); pass it in as an argument, or take the region out of "
                "the plan."
            )

    def _refuse_shape(self, index: int, tensor: torch.Tensor) -> None:
        shape, dtype, device = self._frame.expected[index]
        self._refuse(
            "Recomputed values for the following tensors have different metadata than during the forward pass.\n"
            f"Saved tensor {index} was {dtype} {list(shape)} in forward and is {tensor.dtype} {list(tensor.shape)} in "
            f"recompute ({device}, {tensor.device}).\nIts forward took another path; make the choice once and pass it "
            "in, or take the region out of the plan."
        )

    def _refuse(self, cause: str) -> None:
        # Kept as well as raised: the user's forward may catch it, and the first refusal is the one that explains.
        if self._error is not None:
            raise self._error
        self._error = self._frame.recipe.error(f"{self._frame.recipe.name}: {cause}")
        raise self._error

    @property
    def is_inline(self) -> bool:
        """Whether regions inside this one are part of it."""
        return self._frame.is_inline

    def next_child(self, recipe: Recipe) -> Frame | None:
        """A region inside this one starts: its execution in forward, if that one is yet to be recomputed."""
        frame, index = self._frame, self._child
        self._child = index + 1
        if frame.is_inline:
            return None
        if index >= len(frame.children):
            if not frame.is_closed:
                return None
            self._refuse(f"{recipe.name} runs in recompute, not in forward. Take one of them out of the plan.")
        child = frame.children[index]()
        if child is None or child.is_done or not child.is_closed:
            return None
        if child.recipe.name != recipe.name:
            self._refuse(f"{recipe.name} runs where {child.recipe.name} ran in forward. Its forward took another path.")
        self._children_left -= child.entry is None
        return child

    def _check_complete(self) -> None:
        frame = self._frame
        if frame.store is not None and self._mode is not None:
            frame.store.check(frame.recipe.name, self._mode.skipped_writes)
        missing = [i for i, ref in enumerate(frame.holders) if (h := ref()) is not None and h.value is None]
        if missing:
            self._refuse_number()

    def _refuse_number(self) -> None:
        # Torch's words are part of the message: code and tests match on them.
        num_saved = len(self._frame.holders)
        more = ": trying to save more tensors during recomputation than during the original forward pass"
        self._refuse(
            "A different number of tensors was saved during the original forward and recomputation"
            f"{more if self._index > num_saved else ''}.\n"
            f"Number of tensors saved during forward: {num_saved}\n"
            f"Number of tensors saved during recomputation: {self._index}.\n"
            "Its forward took another path; make the choice once and pass it in, or take the region out of the plan."
        )


def _identity(tensor: Any) -> Any:
    return tensor


def _keep(tensor: torch.Tensor) -> torch.Tensor:
    """What autograd calls in an inner region that is not recomputed, while the outer one is."""
    return tensor if tensor.is_leaf else tensor.detach()

"""One execution of a region: what it holds between forward and backward.

In forward, each tensor that autograd saves inside the region is replaced by an empty `Holder`. The first holder that
backward opens makes its `Frame` run the region again (`Replay`); that fills all holders, in the order in which forward
made them. In a plain backward a holder then keeps its tensor until autograd releases it, and the frame lets go of its
arguments. In one that keeps the graph (retain_graph, create_graph) a holder gives its tensor away: the next backward
recomputes, and between the two nothing is held. (Then a custom function that reads ``ctx.saved_tensors`` twice in one
backward has its region recomputed twice.)

A region is one call or a span of calls, its `Run`s. A region inside another holds nothing: when the outer one is
recomputed, the inner forward runs again, and the inner frame takes its arguments and stored outputs from there. If it
consists of some of the outer one's own calls, it shares what that one noted when they started. What runs again is a
frame of its own (`Repeat`), so that ``torch.autograd.grad`` inside works in recompute, too; regions inside it are part
of it.

References: autograd -> holder -> frame -> arguments; frame -> holder is weak, so there are no cycles.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from autoremat._errors import RecomputeError
from autoremat.runtime import _torch_compat as compat
from autoremat.runtime._ambient import RandomStates, flags_set, random_set
from autoremat.runtime._checksum import checksum
from autoremat.runtime._clock import timed_recompute
from autoremat.runtime._holder import Holder
from autoremat.runtime._hooks import HookLog, Repeats, Swap, hook_dicts, next_hook, take_back_hooks
from autoremat.runtime._links import Returned, relinked, tensors_in
from autoremat.runtime._module_state import version_of
from autoremat.runtime._recipe import Recipe, Run, counting_from
from autoremat.runtime._selective import Player, Recorder, Store
from autoremat.runtime._stack import STACK, end_call, end_span, unwatched, unwind
from autoremat.runtime._stand_in import StandIn
from autoremat.runtime._structure import Copier, tighten


class StopRecompute(BaseException):
    """Leaves the user's forward once recompute has what it needs; not an Exception, so that nobody catches it."""


class Frame:
    """One execution of a region in forward, and its recompute.

    Attributes:
        recipe: What it has in common with other executions of the region.
        parent: The frame around it.
        plan: What puts the plan on the model that it ran under; None for a region by hand.
        runs: The calls that it consists of, as far as they have started.
        returned: Tensors that its calls have returned, for the later calls of a span; None for a region of one call.
        store: Stored outputs.
        hooks: What the hooks of others inside it did in forward.
        holders: What stands for its saved tensors in autograd's graph.
        expected: Shape, dtype and device of each.
        sums: Checksum of each, where values are compared.
        constants: Addresses that need no checksum, while a call is running.
        changed: Buffers and attributes that the first forward was seen to change, for each run.
        draws: Whether it drew random numbers, for each run; of a region inside another.
        random: The states from which it did, where a region around it leaves out draws that came before; else None.
        random_inside: The same before draws in its calls that come after skipped ones, by the op's position.
        children: Frames inside it, in the order in which they started.
        spans: Those of them that may go on with a further call, by recipe.
        group: The ``GraphExecGroup`` in which it was recomputed.
        is_running: Whether one of its calls is running.
        is_closed: Whether forward has left it for good.
        is_done: Whether it holds nothing any more.
        is_kept: Whether the backward that recomputed it keeps the graph for another.
        is_inline: Whether it repeats an execution in recompute, so that regions inside it are part of it.
    """

    __slots__ = (
        "__weakref__", "changed", "children", "constants", "draws", "expected", "group", "holders", "hooks",
        "is_closed", "is_done", "is_inline", "is_kept", "is_running", "lock", "parent", "plan", "random",
        "random_inside", "recipe", "recorder", "returned", "runs", "spans", "store", "sums",
    )  # fmt: skip

    def __init__(self, recipe: Recipe, parent: Frame | None) -> None:
        self.recipe = recipe
        self.parent = parent
        self.plan = recipe.plan() if recipe.plan is not None else None
        self.runs: list[Run] = []
        self.returned = Returned() if len(recipe.parts) > 1 else None
        self.store: Store | None = None
        self.recorder: Recorder | None = None
        self.hooks: HookLog | None = None
        self.holders: list[weakref.ref[Holder]] = []
        self.expected: list[tuple[Any, torch.dtype, torch.device]] = []
        self.sums: list[int | None] | None = None
        self.constants: Collection[int] = ()
        self.changed: list[set[tuple[int, str]]] = []
        self.draws: list[bool] = []
        self.random: list[RandomStates | None] = []
        self.random_inside: dict[int, RandomStates] = {}
        self.children: list[weakref.ref[Frame]] = []
        self.spans: dict[Recipe, Frame] = {}
        self.group: object | None = None
        self.is_running = self.is_closed = self.is_done = self.is_kept = self.is_inline = False
        self.lock = threading.RLock()

    @property
    def is_ready(self) -> bool:
        """Whether it can be recomputed: a region inside another must have been run again by that one."""
        return bool(self.runs) and all(run.entry is not None for run in self.runs)

    @property
    def shares_entries(self) -> bool:
        """Whether it consists of calls of the region around it, whose entries it uses."""
        return bool(self.runs) and self.runs[0].source is not None

    def leaves_out_draws(self) -> bool:
        """Whether recompute of it, or of a region around it, does not draw all random numbers that forward drew."""
        table, parent = self.recipe.table, self.parent
        return (table is not None and table.has_skipped_random) or (parent is not None and parent.leaves_out_draws())

    @property
    def notes_draws(self) -> bool:
        """Whether forward notes random states inside its calls: it skips draws, and so does a region around it."""
        table = self.recipe.table
        return (
            table is not None
            and table.has_skipped_random
            and self.parent is not None
            and self.parent.leaves_out_draws()
        )

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
            if not self.is_running:
                self.close()
            if not self.is_ready and self.parent is not None:
                self.parent.recompute()
            if not self.runs:
                raise RecomputeError(
                    f"{self.recipe.name}: an earlier recompute failed, and what it needed is gone. Run forward again."
                )
            if not self.is_ready:
                raise RecomputeError(
                    f"{self.recipe.name}: the region around it did not run it in recompute. The outer module's forward "
                    "took another path; take one of the two out of the plan."
                )
            replay = Replay(self)
            try:
                with timed_recompute(self.recipe.on_error), self._under_its_plan():
                    replay.run()
            except BaseException:
                for holder in self._alive_holders():
                    holder.value = None  # nobody may go on with half of it
                if replay.mode is not None and replay.mode.lets_go:
                    self.runs = []
                raise
            self.recipe.learned.is_checked = True
            self.is_kept = compat.graph_is_kept()
            if self.is_kept:
                self.group = compat.graph_exec_group()
                if self.group is None:
                    compat.at_end_of_backward(self.forget)
            elif self.is_closed:
                self.release()

    def _under_its_plan(self) -> contextlib.AbstractContextManager[None]:
        return self.plan.as_then() if self.plan is not None else contextlib.nullcontext()

    def close(self) -> None:
        """Forward has left it: a span that left out its last calls does not go on, a further call starts anew."""
        if not self.is_closed:
            end_span(self)
            if self.hooks is not None and not self.is_inline:
                self.hooks.seal()
            if self.parent is None and not self.is_inline:
                self.recipe.note(self.runs, self.store)
            for ref in self.children:
                child = ref()
                if child is not None and not child.is_running:
                    child.close()

    def is_intact(self) -> bool:
        """Whether what it stores is as its calls left it."""
        return self.store is None or all(version_of(o.tensor) == o.version for o in self.store.stored())

    def forget(self) -> None:
        """At the end of a backward that keeps the graph: let go of what can be recomputed."""
        with self.lock:
            if self.is_done:
                return
            for holder in self._alive_holders():
                holder.value = None
            for child in self.waiting_children(ready=True):
                child.forget_entries()

    def forget_entries(self) -> None:
        """Let go of what the region around this one can bring back by running it again."""
        for run in self.runs:
            run.entry = None
        self.store = None

    def _alive_holders(self) -> Iterator[Holder]:
        return (holder for ref in self.holders if (holder := ref()) is not None)

    def waiting_children(self, *, ready: bool) -> list[Frame]:
        """Regions inside this one that are to be recomputed, those that have or lack what they need for it."""
        children = [child for ref in self.children if (child := ref()) is not None]
        return [c for c in children if c.is_closed and not c.is_done and c.is_ready is ready]

    def undo(self, num_holders: int) -> None:
        """Forget the last call, which raised an exception."""
        self.runs.pop()
        del self.holders[num_holders:], self.expected[num_holders:]
        if self.sums is not None:
            del self.sums[num_holders:]
        end_span(self)
        if not self.runs:
            self.release()

    def release(self) -> None:
        """Let go of everything but the holders."""
        self.is_done = True
        self.runs, self.random = [], []
        self.store = self.recorder = self.plan = None
        self.sums = None


@dataclass(slots=True)
class Repeat:
    """A region inside one that is recomputed runs again.

    Attributes:
        first: Its execution in forward.
        frame: This one.
        was_ready: Whether the first could be recomputed already.
        run: Which call it has come to.
    """

    first: Frame
    frame: Frame
    was_ready: bool
    run: int = 0


class Replay:
    """The region running again in backward."""

    __slots__ = (
        "_base", "_child", "_children_left", "_error", "_frame", "_index", "_inline", "_is_needed_again", "_last",
        "_open", "_outputs", "_repeats", "_run", "_swap", "mode",
    )  # fmt: skip

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._index = 0
        self._child = 0
        self._open: dict[Recipe, Repeat] = {}
        self._inline: set[Recipe] = set()  # spans inside that nobody will ask for: their further calls are plain, too
        alive = [i for i, ref in enumerate(frame.holders) if (h := ref()) is not None and h.value is None]
        self._last = alive[-1] if alive else -1
        self._children_left = len(frame.waiting_children(ready=False))
        self._error: Exception | None = None
        table, store = frame.recipe.table, frame.store
        is_last = frame.is_closed and not compat.graph_is_kept()
        self.mode: Player | None = None
        if table is not None and store is not None:
            self.mode = Player(table, store, frame.recipe.name, lets_go=is_last and bool(frame.children))
        self._outputs: dict[int, list[torch.Tensor]] = {}
        # By a region inside that shares what the calls saw, or by another backward.
        self._is_needed_again = not is_last or bool(frame.children)
        self._repeats: Repeats | None = None
        self._swap: Swap | None = None
        self._base = 0
        self._run = 0

    def close(self) -> None:
        """Pop hooks and mode."""
        if self._swap is not None:
            self._swap.undo()
            self._swap = None
        if self.mode is not None:
            compat.pop_dispatch_mode()
        compat.pop_hooks()

    def run(self) -> None:
        """Run its calls, up to the last saved tensor."""
        frame = self._frame
        for run in frame.runs:
            assert run.entry is not None
            run.entry.check(frame.recipe)
        frame.recipe.num_recomputes += 1
        wanted = self._wanted_until()
        try:
            for index, run in enumerate(frame.runs):
                self._run = index
                with self._as_in_forward(run):
                    output = self._execute(run)
                if index in wanted:
                    self._outputs[index] = list(tensors_in(output))
                del output
                for done in [i for i in self._outputs if wanted[i] == index]:
                    del self._outputs[done]
        except StopRecompute as stop:
            if stop.args[0] is not self:
                raise
        finally:
            self._outputs.clear()
            self._open.clear()
            self._repeats = None
            self._count()
        if self._error is not None:
            raise self._error
        self._check_complete()

    def _wanted_until(self) -> dict[int, int]:
        """For each run whose outputs link to a later one: the last such run."""
        wanted: dict[int, int] = {}
        for index, run in enumerate(self._frame.runs[1:], start=1):
            assert run.entry is not None
            wanted.update({link.run: index for link in run.entry.links()})
        return wanted

    @contextlib.contextmanager
    def _as_in_forward(self, run: Run) -> Iterator[None]:
        """Everything around the program as it was when the call started in forward."""
        entry, recipe = run.entry, self._frame.recipe
        assert entry is not None
        with contextlib.ExitStack() as stack:
            stack.enter_context(flags_set(entry.flags))
            if entry.random:
                stack.enter_context(random_set(entry.random))
            if entry.modules is not None and entry.part.watch is not None:
                stack.enter_context(entry.part.watch.restored(entry.modules, keep=self._is_needed_again))
            stack.callback(take_back_hooks, next_hook(), entry.differentiable_args(), entry.part.watch)
            if entry.part.counters:
                stack.enter_context(counting_from(entry.part.counters, entry.counts))
            tighten(entry.loose, recipe.name, recipe.learned.hold_all)
            yield

    def _execute(self, run: Run) -> Any:
        items, entry = STACK.items, run.entry
        assert run.fn is not None
        assert entry is not None
        args, kwargs = entry.args, entry.kwargs
        if self._is_needed_again:  # forward may change the containers among them
            copier = Copier()
            args = tuple([copier.copy(arg, "an argument") for arg in args])
            kwargs = {key: copier.copy(arg, "an argument") for key, arg in kwargs.items()}
        if self._outputs:
            args = tuple([relinked(arg, self._outputs) for arg in args])
            kwargs = {key: relinked(arg, self._outputs) for key, arg in kwargs.items()}
        self._base = len(items)
        compat.push_hooks(self.pack, identity)
        if self.mode is not None:
            self.mode.left_out_draws = False
            compat.push_dispatch_mode(self.mode)
        if hooked := hook_dicts(entry.part.hook_dicts(with_own=self._frame.recipe.runs_own_hooks)):
            self._repeats = self._repeats or Repeats(self._frame.hooks, self.mode, self.stop_if_satisfied)
            self._swap = self._repeats.stand_in_for(hooked, end_call)
        items.append(self)
        try:
            if run.wraps_inputs:
                args = compat.wrap_as_backward_hooks_do(args)
            return run.fn(*args, **kwargs)
        finally:
            unwind(self._base)

    def _count(self) -> None:
        mode, recipe = self.mode, self._frame.recipe
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
            tensor = self._without_graph(tensor)
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

    def _without_graph(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.mode is None:
            return tensor.detach()
        stored = self.mode.original(tensor)
        return stored if stored is not None else compat.detached(tensor)

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

    def next_child(self, recipe: Recipe, part: int) -> Repeat | None:
        """A call of a region inside this one starts: the execution that repeats it, if it is yet to be recomputed."""
        if self._frame.is_inline:
            return None
        repeat = self._open.get(recipe) if part else None
        if repeat is not None:
            repeat.run += 1
            if repeat.run >= len(repeat.first.runs) or repeat.first.runs[repeat.run].part != part:
                self._refuse(f"{recipe.name} runs other calls in recompute than in forward. Take it out of the plan.")
        elif part and recipe in self._inline:
            return None
        else:
            first = self._first_call(recipe, part)
            if first is None:
                self._inline.add(recipe)
                return None
            self._inline.discard(recipe)
            repeat = self._open[recipe] = Repeat(first, Frame(recipe, None), was_ready=first.is_ready)
        repeat.frame.runs.append(Run(part, None))
        if repeat.first.shares_entries and repeat.run == 0 and not repeat.was_ready:
            self._hand_down(repeat.first)
        # What it needs is complete once its last call has started; what it stores, once that has ended.
        is_known = repeat.first.shares_entries and recipe.table is None
        if repeat.run == (0 if is_known else len(repeat.first.runs) - 1):
            self._children_left -= not repeat.was_ready
        return repeat

    def _first_call(self, recipe: Recipe, part: int) -> Frame | None:
        """The execution in forward of which the first call starts again now."""
        frame, index = self._frame, self._child
        self._child = index + 1
        self._open.pop(recipe, None)
        if index >= len(frame.children):
            if not frame.is_closed:
                return None
            self._refuse(f"{recipe.name} runs in recompute, not in forward. Take one of them out of the plan.")
        child = frame.children[index]()
        if child is None or child.is_done or not child.is_closed:
            return None
        if child.recipe.name != recipe.name or child.runs[0].part != part:
            self._refuse(f"{recipe.name} runs where {child.recipe.name} ran in forward. Its forward took another path.")
        return child

    def _hand_down(self, child: Frame) -> None:
        """Give a region of some of this one's calls what it needs to run on its own."""
        runs = {run.source: index for index, run in enumerate(child.runs) if run.source is not None}
        for run in child.runs:
            assert run.source is not None
            entry = self._frame.runs[run.source].entry
            assert entry is not None
            tighten(entry.loose, self._frame.recipe.name, self._frame.recipe.learned.hold_all)
            with unwatched():
                run.entry = entry.inside(runs, self._outputs)

    def _check_complete(self) -> None:
        frame = self._frame
        if self.mode is not None:
            self.mode.finish()
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


def identity(tensor: Any) -> Any:
    """An unpack hook that leaves a tensor as it is."""
    return tensor

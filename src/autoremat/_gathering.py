"""Gathers before forward and backward, reductions after backward: the events of ``fully_shard``, unit by unit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoremat._arrivals import Arrival, micro_step_edges
from autoremat._replay import GATHER, saved_in
from autoremat._rewrite import Insert, Rewriting
from autoremat._step_graph import BEFORE_STEP, ModuleCall, StepGraph

if TYPE_CHECKING:
    from autoremat._sharding import Sharding

Substitutes = dict[int, list[tuple[int, int, int]]]
"""By storage: from a clock to a clock of the recorded step, ops touch another one."""


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """Parameters that are gathered and reduced together.

    Attributes:
        path: Module path; "" is the root.
        parameters: Storages by name, in the order of the module's parameters.
        numel: Elements of one device's piece, padding included, by name.
        is_padded: Whether its first dimension does not divide by the number of devices, by name.
        itemsize: Bytes of an element as computed with.
        kept_itemsize: Bytes of an element as kept.
        reduce_itemsize: Bytes of an element as reduced.
    """

    path: str
    parameters: dict[str, int]
    numel: dict[str, int]
    is_padded: dict[str, bool]
    itemsize: int
    kept_itemsize: int
    reduce_itemsize: int


@dataclass(frozen=True, slots=True, eq=False)
class UnitCall:
    """A unit's call in one micro-step."""

    unit: Unit
    call: ModuleCall | None

    @property
    def span(self) -> ModuleCall:
        """The call, known to be there."""
        assert self.call is not None
        return self.call


def gather_and_reduce(
    graph: StepGraph, rewriting: Rewriting, calls: Sequence[UnitCall], arrived: Sequence[Arrival], how: Sharding
) -> Substitutes:
    """Put all gathers and reductions into a step.

    Args:
        graph: The step of one device.
        rewriting: The step being made.
        calls: The units' calls.
        arrived: Gradients, by arrival.
        how: What is sharded.

    Returns:
        What ops touch instead of whole parameters and gradients.
    """
    substitutes: Substitutes = defaultdict(list)
    for number, (_, stop) in enumerate(micro_step_edges(graph)):
        own = [c for c in calls if c.span.micro_step == number]
        here = [a for a in arrived if a.micro_step == number]
        if own:
            _MicroStep(graph, rewriting, own, here, how, substitutes, stop).run()
    return substitutes


class _MicroStep:
    """One forward and backward of all units."""

    def __init__(
        self,
        graph: StepGraph,
        rewriting: Rewriting,
        calls: Sequence[UnitCall],
        arrived: Sequence[Arrival],
        how: Sharding,
        substitutes: Substitutes,
        stop: int,
    ) -> None:
        self.graph, self.rewriting, self.how, self.substitutes = graph, rewriting, how, substitutes
        self.calls = sorted(calls, key=lambda c: c.span.index)
        self.arrived = {a.parameter: a for a in arrived}
        self.root = graph.calls[next(c.index for c in graph.calls if c.parent == -1 and c.end > calls[0].span.start)]
        self.stop = stop
        self.flat: dict[UnitCall, int] = {}
        """Buffers that are gathered and not yet copied out."""
        self.whole: dict[UnitCall, tuple[int, int]] = {}
        """Whole parameters that are there, and the clock since when."""
        self.reduced: int | None = None
        """Input of the last reduce-scatter."""

    def run(self) -> None:
        """Insert everything."""
        if self.how.stage == 3:
            self._forward()
        self._backward()

    # -- gathering --------------------------------------------------------------------------------------------

    def _bytes(self, unit: Unit) -> int:
        return sum(unit.numel.values()) * self.how.world_size * unit.itemsize

    def _gather(self, c: UnitCall, clock: int, phase: str) -> None:
        """Allocate the flat buffer; a cast to what is computed in is made first."""
        size = self._bytes(c.unit)
        cast = size // self.how.world_size if c.unit.kept_itemsize != c.unit.itemsize else 0
        made = self._insert(clock, GATHER, phase, c, workspace_bytes=cast, moved_bytes=2 * size)
        self.flat[c] = self.rewriting.allocate(made, size, "communication", f"{_name(c.unit)} on its way")

    def _copy_out(self, c: UnitCall, clock: int, phase: str) -> Insert:
        size = self._bytes(c.unit)
        made = self._insert(clock, "fsdp.copy_out", phase, c, moved_bytes=2 * size)
        made.inputs = (self.flat[c],)
        self.whole[c] = self.rewriting.allocate(made, size, "parameter", f"{_name(c.unit)} gathered"), clock
        return made

    def _reshard(self, c: UnitCall, until: int, at: Callable[[], int]) -> None:
        """Let go of whole parameters."""
        if c not in self.whole:
            return
        storage, since = self.whole.pop(c)
        self.rewriting.free(storage, at)
        for parameter in c.unit.parameters.values():
            self.substitutes[parameter].append((since, until, storage))

    def _insert(self, clock: int, name: str, phase: str, c: UnitCall, **about: int) -> Insert:
        return self.rewriting.insert(clock, name, phase, c.span.index, **about)  # type: ignore[arg-type]

    def _forward(self) -> None:
        """Each buffer lives until the next has been copied out, the last one until the model returns."""
        before: int | None = None
        for c in self.calls:
            self._gather(c, c.span.start, "forward")
            copied = self._copy_out(c, c.span.start, "forward")
            if before is not None:
                self.rewriting.free(before, copied.after)
            before = self.flat.pop(c)
        if before is not None:
            self.rewriting.free(before, self.rewriting.at(self.root.end))
        for c in self.calls:
            if self.how.reshard_after_forward and c.unit.path:
                self._reshard(c, c.span.end, self.rewriting.at(c.span.end))

    # -- backward ---------------------------------------------------------------------------------------------

    def _backward(self) -> None:
        """Walk through the moments at which units' backward begins and ends."""
        order = sorted(self.calls, key=lambda c: (c.span.end, -c.span.index))
        moments: list[tuple[int, int, int, UnitCall]] = []
        for c in order:
            begin = self._begin(c)
            if begin is None:
                continue
            index = c.span.index
            moments.append((begin, 1, index, c))
            moments.append((self.stop, 2, index, c) if self._ends_last(c) else (self._end(c), 0, -index, c))
        last: Insert | None = None
        for clock, kind, _, c in sorted(moments, key=lambda moment: moment[:3]):
            if kind == 1:
                if self.how.stage == 3:
                    self._pre_backward(c, clock, order)
            else:
                last = self._post_backward(c, clock) or last
        if self.reduced is not None and last is not None:
            self.rewriting.free(self.reduced, last.after)

    def _begin(self, c: UnitCall) -> int | None:
        """When backward first reads what was saved in a unit (of the root's: in the model, not in the loss)."""
        records = saved_in(self.graph, c.span.index)
        if c.span.index == self.root.index:
            records = [r for r in records if r.packed < self.root.end or r.call != self.root.index]
        return min((r.unpacked for r in records if r.unpacked is not None), default=None)

    def _end(self, c: UnitCall) -> int:
        """When the last of a unit's backward ops has run."""
        inside = self.graph.subtree(c.span.index)
        start = self.root.end
        return 1 + max(
            op.index for op in self.graph.ops[start : self.stop] if op.phase == "backward" and op.call in inside
        )

    def _ends_last(self, c: UnitCall) -> bool:
        """Whether no gradient leaves a unit through its inputs: its end is then not seen before that of backward."""
        return c.span.index == self.root.index or all(self.graph.storages[s].born == BEFORE_STEP for s in c.span.inputs)

    def _pre_backward(self, c: UnitCall, clock: int, order: Sequence[UnitCall]) -> None:
        if c not in self.whole:
            if c not in self.flat:
                self._gather(c, clock, "backward")
            copied = self._copy_out(c, clock, "backward")
            self.rewriting.free(self.flat.pop(c), copied.after)
        position = order.index(c)
        for ahead in reversed(order[max(0, position - self.how.prefetch) : position]):
            if ahead not in self.flat and ahead not in self.whole:
                self._gather(ahead, clock, "backward")

    def _post_backward(self, c: UnitCall, clock: int) -> Insert | None:
        """Let go of whole parameters, then reduce the gradients to one device's pieces."""
        unit, world_size = c.unit, self.how.world_size
        here = [self.arrived[name] for name in unit.parameters if name in self.arrived]
        if not here:
            self._reshard(c, clock, self.rewriting.at(clock))
            return None
        numel = sum(unit.numel[a.parameter] for a in here)
        copies = self._copy_in_workspace(unit, here) if self.graph.device_kind == "cpu" else 0
        copy_in = self._insert(clock, "fsdp.reduce_copy_in", "backward", c, workspace_bytes=copies)
        copy_in.inputs = tuple(a.gradient for a in here)
        copy_in.moved_bytes = 2 * numel * world_size * unit.reduce_itemsize
        self._reshard(c, clock, copy_in.before)
        if self.reduced is not None:
            self.rewriting.free(self.reduced, copy_in.before)
        size = numel * world_size * unit.reduce_itemsize
        self.reduced = self.rewriting.allocate(copy_in, size, "communication", f"{_name(unit)} gradients on their way")
        last = self._insert(clock, "fsdp.reduce_scatter", "backward", c)
        last.inputs = (self.reduced,)
        piece = self.rewriting.allocate(last, numel * unit.reduce_itemsize, "gradient", _name(unit))
        reduce_scatter = last
        if unit.reduce_itemsize != unit.kept_itemsize:
            last = self._insert(clock, "fsdp.cast_gradient", "backward", c)
            last.inputs = (piece,)
            self.rewriting.free(piece, last.after)
            piece = self.rewriting.allocate(last, numel * unit.kept_itemsize, "gradient", _name(unit))
        for a in here:  # a loop variable of torch's holds the last one until all is done
            self.rewriting.free(a.gradient, last.after if a is here[-1] else reduce_scatter.before)
            self.rewriting.relabel(a.gradient, "gradient", a.parameter)
        self._replace_gradients(c, here, piece, last)
        return last

    def _copy_in_workspace(self, unit: Unit, here: Sequence[Arrival]) -> int:
        """On CPU what does not divide is padded in a copy; where the dtype changes, one more copy at a time is made."""
        sizes = {a.parameter: unit.numel[a.parameter] * self.how.world_size * unit.itemsize for a in here}
        padded = sum(size for name, size in sizes.items() if unit.is_padded[name])
        return padded + (max(sizes.values()) if unit.reduce_itemsize != unit.itemsize else 0)

    def _replace_gradients(self, c: UnitCall, here: Sequence[Arrival], piece: int, last: Insert) -> None:
        """From now on ops touch pieces; where there are pieces already, the new ones are added to them and go."""
        end = len(self.graph.ops)
        is_added = here[0].adds_at is not None
        if is_added:
            self.rewriting.free(piece, last.after)
        for a in here:
            own = self.graph.storages[a.kept]
            if a.adds_at is not None and a.gradient != a.kept:
                self.substitutes[a.kept].insert(0, (a.adds_at, a.adds_at + 1, a.gradient))
            if own.born == BEFORE_STEP:
                self.rewriting.resize(own.index, c.unit.numel[a.parameter] * c.unit.kept_itemsize)
            elif not is_added:
                self.substitutes[a.kept].append((a.clock, end, piece))


def _name(unit: Unit) -> str:
    return unit.path or "the root"

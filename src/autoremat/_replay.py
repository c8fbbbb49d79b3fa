"""What recompute of one region runs, given what the region stores.

The rules are those of the runtime: ops run again in forward order up to the last tensor that autograd saved in the
region; an op is left out if its outputs are stored, or if nothing that runs or is needed reads them ("no dead
replay"); in-place ops on a stored tensor are left out too, since it is stored in its final state.

A region is one module call or a *span* of calls, in one module or in several. What forward does between the calls of a
span is not part of it: it does not run again. An argument that is the very tensor an earlier call of the span
returned is *linked*: recompute makes it. Any other argument is stored.

Source of the liveness rule: planner formulation 1, ``r_u >= r_o - x_u`` for each edge u -> o.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import pairwise

from autoremat._plan import UNCOUNTED_OPS
from autoremat._step_graph import ModuleCall, Op, SavedTensor, StepGraph

GATHER = "fsdp.all_gather"
"""The op that gathers a unit of a sharded step (see `_gathering`)."""


@dataclass(frozen=True, slots=True)
class RegionSpec:
    """A region of a `StepGraph`.

    Attributes:
        call: Index of the (first) module call.
        kept: Storages born in the region that are stored until its recompute.
        then: Further calls, in order, none inside another, that are recomputed together with the first.
        children: Regions inside this one: dropped again by its recompute.
        is_whole: Whether recompute runs every op up to its stop, as a plan does that lists nothing to skip.
    """

    call: int
    kept: frozenset[int] = frozenset()
    then: tuple[int, ...] = ()
    children: tuple[RegionSpec, ...] = ()
    is_whole: bool = False
    _hash: int = field(init=False, repr=False, compare=False)
    """Known from the start: nests, with all that is in them, are looked up all the time."""

    def __post_init__(self) -> None:
        parts = self.call, self.kept, self.then, self.children, self.is_whole
        object.__setattr__(self, "_hash", hash(parts))

    def __hash__(self) -> int:
        return self._hash

    @property
    def calls(self) -> tuple[int, ...]:
        """All calls of the region, in order."""
        return (self.call, *self.then)

    def with_children(self) -> Iterator[RegionSpec]:
        """This region and those inside it, outer ones first."""
        yield self
        for child in self.children:
            yield from child.with_children()

    def is_part_of(self, parent: RegionSpec) -> bool:
        """Whether this consists of calls of the region around it: their arguments are then known to that one."""
        return set(self.calls) <= set(parent.calls)


@dataclass(frozen=True, slots=True)
class Replay:
    """What recompute of a region does.

    Attributes:
        ops: Ops that run a kernel, in order.
        skipped: Ops with a kernel that are left out (before or after `stop`), in order.
        stop: Clock at which recompute ends: the last saved tensor is back.
        flops: FLOPs of `ops`.
        selective: Whether the runtime has to watch ops at all (something is stored or worth skipping).
        needed: Storages born in the region that autograd saved there, or that regions inside it hold.
    """

    ops: tuple[int, ...]
    skipped: tuple[int, ...]
    stop: int
    flops: int
    selective: bool
    needed: frozenset[int]


class Extent:
    """The ops of a region: those of its calls, without what runs between them."""

    __slots__ = ("_calls", "_end", "_graph", "_start", "_starts", "_stops")

    def __init__(self, graph: StepGraph, calls: Iterable[int]) -> None:
        self._graph, self._calls = graph, tuple(calls)
        first, *rest = [graph.calls[call] for call in self._calls]
        self._starts, self._stops = [first.start], [first.end]
        for call in rest:
            if self._stops[-1] == call.start:
                self._stops[-1] = call.end  # one stretch with the call before
            else:
                self._starts.append(call.start)
                self._stops.append(call.end)
        self._start, self._end = self._starts[0], self._stops[-1]

    @property
    def ranges(self) -> list[range]:
        """The ops of each call."""
        calls = [self._graph.calls[call] for call in self._calls]
        return [range(call.start, call.end) for call in calls]

    @property
    def has_gaps(self) -> bool:
        """Whether forward runs other ops between its calls."""
        return len(self._starts) > 1

    def __contains__(self, op: int) -> bool:
        """Whether the region contains an op."""
        if not self._start <= op < self._end:
            return False
        return len(self._starts) == 1 or op < self._stops[bisect_right(self._starts, op) - 1]

    def makes(self, storages: Iterable[int]) -> list[int]:
        """Those of some storages that are born in the region."""
        known, start, end = self._graph.storages, self._start, self._end
        if self.has_gaps:
            return [s for s in storages if known[s].born in self]
        return [s for s in storages if start <= known[s].born < end]

    def part_of_call(self, call: int) -> int | None:
        """Which of the region's calls contains a module call."""
        position = bisect_right(self._calls, call) - 1
        return position if position >= 0 and call in self._graph.subtree(self._calls[position]) else None

    def indices(self, stop: int | None = None) -> Iterator[int]:
        """Indices of its ops, up to a clock."""
        for start, end in zip(self._starts, self._stops, strict=True):
            yield from range(start, end if stop is None else min(end, stop))


def saved_in(graph: StepGraph, *calls: int) -> list[SavedTensor]:
    """What autograd saved during module calls, in order."""
    found: list[SavedTensor] = []
    for call in calls:
        inside = graph.subtree(call)
        span = graph.calls[call]
        found.extend(s for s in graph.saved_between(span.start, span.end) if s.call in inside)
    return found


def linked(graph: StepGraph, spec: RegionSpec) -> dict[int, dict[int, int]]:
    """For each call of a span: its arguments that an earlier call of the span made, and which call that was."""
    members = {call: position for position, call in enumerate(spec.calls)}
    return {
        call: {s: source for s, source in graph.calls[call].links if members.get(source, position) < position}
        for call, position in members.items()
    }


def held_inputs(graph: StepGraph, spec: RegionSpec) -> dict[int, int]:
    """Storages of arguments that a region holds until its recompute, and which of its calls first gets each."""
    if not spec.then:
        return dict.fromkeys(graph.calls[spec.call].inputs, 0)
    found: dict[int, int] = {}
    members = {call: part for part, call in enumerate(spec.calls)}
    for part, index in enumerate(spec.calls):
        call = graph.calls[index]
        links = [s for s, source in call.links if members.get(source, part) < part]
        for s in call.inputs:
            if s not in links:
                found.setdefault(s, part)
    return found


def is_uncounted(graph: StepGraph, op: Op) -> bool:
    """Whether forward and recompute may run this op a different number of times (see `UNCOUNTED_OPS`)."""
    if op.name in UNCOUNTED_OPS:
        return True
    return op.name == "aten._to_copy.default" and any(graph.storages[s].cause == "parameter" for s in op.inputs)


def gathers_units(graph: StepGraph, *calls: int) -> bool:
    """Whether parameters are gathered between the start of a region and its end.

    Recompute would gather all of a region's units and keep them; those of a span's own calls it would not gather.
    """
    start, end = graph.calls[calls[0]].start, graph.calls[calls[-1]].end
    return any(op.name == GATHER for op in graph.ops[start:end])


def replay(graph: StepGraph, spec: RegionSpec, saved: list[SavedTensor] | None = None) -> Replay:
    """Work out what recompute of a region runs.

    Args:
        graph: The step.
        spec: The region; storages in ``kept`` that are born elsewhere are ignored.
        saved: ``saved_in(graph, *spec.calls)`` if the caller has it.

    Returns:
        The ops that run, those left out, and where it stops.
    """
    return Recompute(graph, spec, saved).replay(spec.kept)


class Recompute:
    """Recompute of one region, for any choice of what the region stores.

    Args:
        graph: The step.
        spec: The region.
        saved: As for `replay`.
    """

    def __init__(self, graph: StepGraph, spec: RegionSpec, saved: list[SavedTensor] | None = None) -> None:
        self._graph = graph
        self._is_whole = spec.is_whole
        self._extent = extent = Extent(graph, spec.calls)
        saved = saved_in(graph, *spec.calls) if saved is None else saved
        self._needed, self._stop = _wanted(graph, spec, extent, saved)
        self._ops = [op for some in extent.ranges for op in graph.ops[some.start : some.stop] if not op.is_view]

    @cached_property
    def _in_reverse(self) -> list[tuple[Op, list[int], bool]]:
        """Ops up to the stop, the last first, with what they read of the region's, and whether they always run."""
        ops = [op for op in reversed(self._ops) if op.index < self._stop]
        return [(op, self._extent.makes(op.inputs), op.reads_value or is_uncounted(self._graph, op)) for op in ops]

    def replay(self, kept: Iterable[int]) -> Replay:
        """Work out what runs if these storages are stored."""
        kept = frozenset(self._extent.makes(kept))
        runs = [op for op in self._ops if op.index < self._stop]
        dead: list[Op] = []
        if kept or not self._is_whole:
            alive = self._alive(kept)
            dead = [op for op in self._ops if op.index not in alive]
        selective = bool(kept) or any(op.flops for op in dead if op.index < self._stop)
        if selective:
            runs = [op for op in runs if op.index in alive]
        return Replay(
            ops=tuple([op.index for op in runs]),
            skipped=tuple([op.index for op in dead]) if selective else (),
            stop=self._stop,
            flops=sum([op.flops for op in runs]),
            selective=selective,
            needed=self._needed,
        )

    def _alive(self, kept: frozenset[int]) -> set[int]:
        """Ops that make what is needed, from what is stored where that is possible."""
        live, found = set(self._needed - kept), set()
        for op, reads, always in self._in_reverse:
            if always or not (live.isdisjoint(op.outputs) and live.isdisjoint(op.mutates)):
                found.add(op.index)
                live.update([s for s in reads if s not in kept])
        return found


def _wanted(graph: StepGraph, spec: RegionSpec, extent: Extent, saved: list[SavedTensor]) -> tuple[frozenset[int], int]:
    """Storages that recompute must bring back, and the clock at which the last one is there."""
    storages = graph.storages
    stop = graph.calls[spec.call].start
    needed: set[int] = set()
    held = held_inputs(graph, spec) if spec.then else {}
    for child in spec.children:
        if saved_in(graph, *child.calls):
            stop = max(stop, _ready_at(graph, spec, child))
            needed.update(extent.makes(child.kept))
            inputs = held_inputs(graph, child)
            needed.update(
                s for s in extent.makes(inputs) if not is_from_argument(extent, held, s, child.calls[inputs[s]])
            )
    extents = [Extent(graph, child.calls) for child in spec.children]
    pairs = zip(spec.children, extents, strict=True)
    inside = sorted(((call, e) for child, e in pairs for call in child.calls), key=lambda pair: pair[0])
    first_calls = [call for call, _ in inside]

    @cache
    def around(call: int) -> Extent | None:
        """The region inside that a module call is part of."""
        position = bisect_right(first_calls, call) - 1
        inner = inside[position][1] if position >= 0 else None
        return None if inner is None or inner.part_of_call(call) is None else inner

    for record in saved:
        inner = around(record.call)
        s, born = record.storage, storages[record.storage].born
        if inner is None:
            stop = max(stop, record.packed)
        elif born in inner:
            continue
        if s not in needed and born in extent and not (held and is_from_argument(extent, held, s, record.call)):
            needed.add(s)
    return frozenset(needed), stop


def _ready_at(graph: StepGraph, spec: RegionSpec, child: RegionSpec) -> int:
    """Clock up to which recompute of a region must run so that a region inside it has all that it holds."""
    last = graph.calls[child.calls[-1]]
    # What recompute runs is worked out only where that decides whether it watches ops.
    own = Extent(graph, child.calls)
    stores = any(graph.storages[s].born in own for s in child.kept)
    if stores or (not child.is_whole and replay(graph, child).selective):
        return last.end
    return graph.calls[child.call].start if child.is_part_of(spec) else last.start


def is_from_argument(extent: Extent, held: dict[int, int], storage: int, call: int) -> bool:
    """Whether recompute of a module call in a region reads a storage from a stored argument.

    Args:
        extent: The region.
        held: Its `held_inputs`.
        storage: What is read.
        call: The module call, or one inside it.
    """
    part = held.get(storage)
    if part is None:
        return False
    at = extent.part_of_call(call)
    return at is not None and at >= part


def obstacle(graph: StepGraph, *calls: int) -> str | None:
    """Why module calls cannot be a region, or None.

    A region's arguments must still hold the same values when it is recomputed.
    """
    spec = RegionSpec(calls[0], then=calls[1:])
    extent = Extent(graph, calls)
    saved = saved_in(graph, *calls)
    start, end = graph.calls[calls[0]].start, graph.calls[calls[-1]].end
    until = min((s.unpacked for s in saved if s.unpacked is not None), default=end)
    read = {s for i in extent.indices() for s in graph.ops[i].inputs if graph.storages[s].born not in extent}
    read |= held_inputs(graph, spec).keys() if spec.then else set()
    for op in graph.ops[start:until]:
        for s in op.mutates:
            if s in read and graph.storages[s].cause not in ("buffer", "parameter"):
                return f"{op.name} changes one of its inputs in place"
    return None


def random_states(graph: StepGraph, call: ModuleCall, work: Replay) -> tuple[int, int]:
    """How many random states a region holds for one of its calls until recompute, and how many more until it ends.

    A call that draws nothing holds the state from its start until that is known, when it ends. Else: one from its
    start, one where an op draws after skipped ones. The state after a skipped op is held until it is known whether
    another op draws after it; two are alive while the next skipped op's replaces it.
    """
    left_out = set(work.skipped)
    draws = [op.index in left_out for op in graph.ops[call.start : call.end] if op.is_random]
    if not draws:
        return 0, 1
    pairs = list(pairwise(draws))
    after_skipped = sum(before and not skipped for before, skipped in pairs)
    passing = 2 if any(before and skipped for before, skipped in pairs) else int(any(draws))
    return 1 + after_skipped, passing

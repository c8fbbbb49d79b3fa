"""From a step to the chain problem: options of every candidate, and what each event demands.

All bytes are those of the ledger: demands are live bytes of the plain step, corrected by what an option changes. Where
the correction depends on other regions it is taken at its worst, so a path that fits here fits there; for nests it is
an estimate, and the ledger has the last word.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import overload

import numpy as np
import numpy.typing as npt

from autoremat._replay import Extent, RegionSpec, Replay, replay
from autoremat.solve._chain import Chain, Costs, Edge, NestEdge
from autoremat.solve._facts import Bytes, Facts
from autoremat.solve._nests import NestDemands, StoreSets, store_sets
from autoremat.solve._options import Option, RegionCost, cost_around, enumerate_options
from autoremat.solve._segments import Candidate, Segments, find_segments
from autoremat.solve._table import Pick
from autoremat.solve._units import Inner, moved

MAX_POINTS = 40
"""Limits on stored bytes tried for a candidate that holds much of the step."""
MIN_POINTS = 10
_MANY_KINDS = 40
_MUCH_SHARE = 1 / 80
FindWork = Callable[[RegionSpec], Replay]
"""What recompute of a region does, from somebody who has it."""
_EXACT_BITS = 48
"""Bits of a sum over all ops; a float has a few more, for several micro-steps."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A step ready to be solved for any limit.

    Attributes:
        facts: The step.
        segments: Its candidates.
        options: Options of each candidate (for its first member); those of equal candidates are made when asked for.
        sets: What nests may store.
        chain: The chain problem.
    """

    facts: Facts
    segments: Segments
    options: tuple[Sequence[Option], ...]
    sets: StoreSets
    chain: Chain

    def regions(self, picks: Iterable[Pick]) -> tuple[RegionSpec, ...]:
        """The regions of a path, in every micro-step."""
        steps, folded = range(len(self.facts.spans)), self.segments.rows.folded
        return tuple(folded(spec) for step in steps for spec in self._in_step(tuple(picks), step))

    def _in_step(self, picks: Sequence[Pick], step: int) -> tuple[RegionSpec, ...]:
        specs = []
        for number, position, inside in picks:
            children = self._in_step(inside, step)
            if number < 0:
                calls = self.segments.nests[-1 - number].members[step]
                kept = self._stored(calls, step, position)
                is_whole = bool(children) and not kept
                specs.append(RegionSpec(calls[0], kept, then=calls[1:], children=children, is_whole=is_whole))
            else:
                first, member = (self.segments.candidates[number].members[i] for i in (0, step))
                kept = moved(self.facts, first, member, self.options[number][position].kept)
                specs.append(member.spec(kept))
        return tuple(specs)

    def _stored(self, calls: Sequence[int], step: int, stores: int) -> frozenset[int]:
        """What of a store set is born in a nest."""
        extent = Extent(self.facts.graph, calls)
        return frozenset(s for s in self.sets[step][stores] if self.facts.graph.storages[s].born in extent)


def cost_of(
    facts: Facts, specs: Iterable[RegionSpec], op_cost: Sequence[float], region_cost: RegionCost | None = None
) -> float:
    """What recompute of regions costs, those inside included."""
    return costs_of(facts, specs, (op_cost,), region_cost)[0]


def costs_of(
    facts: Facts,
    specs: Iterable[RegionSpec],
    op_costs: Sequence[Sequence[float]],
    region_cost: RegionCost | None = None,
    find_work: FindWork | None = None,
) -> list[float]:
    """The same for several costs of ops at once; that of regions themselves is added to the first."""
    totals = [0.0] * len(op_costs)
    queue = list(specs)
    while queue:
        spec = queue.pop()
        work = find_work(spec) if find_work else replay(facts.graph, spec, facts.saved_in(*spec.calls))
        for position, op_cost in enumerate(op_costs):
            totals[position] += sum(op_cost[index] for index in work.ops)
        totals[0] += cost_around(spec.calls, work, region_cost)
        queue += spec.children
    return totals


def build_problem(
    facts: Facts, op_cost: Sequence[float], region_cost: RegionCost | None = None, *, flat: bool = False
) -> Problem:
    """Find candidates and options and write the chain problem.

    Args:
        facts: The step.
        op_cost: Cost of each op.
        region_cost: What a region costs beyond the ops that it runs again.
        flat: As for `find_segments`.
    """
    segments = find_segments(facts, flat=flat)
    options = _all_options(facts, segments, op_cost, region_cost)
    sets = store_sets(facts, segments, options) if segments.nests else ((frozenset(),),) * len(facts.spans)
    chain = _Demands(facts, segments, options, sets).chain(_weights(facts, op_cost), region_cost)
    return Problem(facts=facts, segments=segments, options=options, sets=sets, chain=chain)


def _weights(facts: Facts, op_cost: Sequence[float]) -> list[float]:
    """Cost of each op with a little for the bytes that it moves, as in options: else nests of free ops seem free.

    In units of which a float holds any sum exactly, so that equal stretches of a step have equal sums.
    """
    weights = [cost + facts.tie_cost * op.moved_bytes for cost, op in zip(op_cost, facts.graph.ops, strict=True)]
    unit = math.ldexp(1.0, math.frexp(sum(weights))[1] - _EXACT_BITS)
    return [round(weight / unit) * unit for weight in weights]


def _all_options(
    facts: Facts, segments: Segments, op_cost: Sequence[float], region_cost: RegionCost | None
) -> tuple[Sequence[Option], ...]:
    """Options of each candidate; equal candidates are solved once and their options moved."""
    total = sum(facts.graph.storages[s].num_bytes for s in facts.records_of) or 1
    num_kinds = len({candidate.kind for candidate in segments.candidates})
    solved: dict[int, tuple[Inner, tuple[Option, ...]]] = {}
    found: list[Sequence[Option]] = []
    for candidate in segments.candidates:
        inner = candidate.members[0]
        if candidate.kind not in solved:
            size = sum(facts.graph.storages[s].num_bytes for s in inner.needed)
            points = MAX_POINTS if size > _MUCH_SHARE * total else MIN_POINTS
            is_exact = num_kinds <= _MANY_KINDS or len(inner.written) == 1
            options = enumerate_options(
                facts, inner, op_cost, max_points=points, is_exact=is_exact, region_cost=region_cost
            )
            solved[candidate.kind] = (inner, tuple(options))
        source, known = solved[candidate.kind]
        found.append(known if source is inner else _Moved(facts, source, known, inner))
    return tuple(found)


class _Moved(Sequence[Option]):
    """The options of an equal candidate.

    Args:
        facts: The step.
        source: The one candidate.
        options: Its options.
        target: The other.
    """

    def __init__(self, facts: Facts, source: Inner, options: tuple[Option, ...], target: Inner) -> None:
        self._facts, self._source, self._options, self._target = facts, source, options, target

    def __len__(self) -> int:
        return len(self._options)

    @overload
    def __getitem__(self, position: int) -> Option: ...
    @overload
    def __getitem__(self, position: slice) -> Sequence[Option]: ...
    def __getitem__(self, position: int | slice) -> Option | Sequence[Option]:
        if isinstance(position, slice):
            return tuple(self[place] for place in range(*position.indices(len(self))))
        option = self._options[position]
        return dataclasses.replace(option, kept=moved(self._facts, self._source, self._target, option.kept))


@dataclass(frozen=True, slots=True)
class _Columns:
    """What the options of equal candidates have in common, each as a column (see `Option`)."""

    weight: Costs
    saved: Bytes
    recompute: Bytes
    freed: Bytes
    forward: Bytes
    selective: npt.NDArray[np.bool_]

    @staticmethod
    def of(options: Sequence[Option]) -> _Columns:
        """Those of these options."""
        rows = [(o.weight, o.saved_bytes, o.recompute_bytes, o.freed_bytes, o.forward, o.selective) for o in options]
        return _Columns(*map(np.array, zip(*rows, strict=True)))


class _Demands:
    """Computes what edges and positions demand, the highest over all micro-steps."""

    def __init__(
        self,
        facts: Facts,
        segments: Segments,
        options: Sequence[Sequence[Option]],
        sets: StoreSets,
    ) -> None:
        self.facts = facts
        self.segments = segments
        kinds: dict[int, Sequence[Option]] = {}
        for candidate, found in zip(segments.candidates, options, strict=True):
            kinds.setdefault(candidate.kind, found)
        self.options = {kind: _Columns.of(found) for kind, found in kinds.items()}
        self.sets = sets
        self.clocks = segments.clocks
        self.turns = [self._backward_clocks(step) for step in range(len(segments.clocks))]
        self.during, self.between = self._with_shared_inputs()
        self.born = [self._born(found) for found in sets]
        """For each micro-step: by store set, its bytes that are born before each clock."""
        self.asked = [self.during - born[:, 1:] for born in self.born]
        """The same of live bytes while each op runs, less what of the set is born by then."""

    def _born(self, sets: Sequence[frozenset[int]]) -> Bytes:
        storages = self.facts.graph.storages
        sizes = np.zeros((len(sets), len(self.facts.graph.ops) + 1), np.int64)
        for row, stored in zip(sizes, sets, strict=True):
            for s in stored:
                row[storages[s].born + 1] += storages[s].num_bytes
        return np.cumsum(sizes, axis=1)

    def _backward_clocks(self, step: int) -> list[int]:
        """When backward first reads something saved before each position: what lies before is then still to come."""
        graph, (_, end) = self.facts.graph, self.facts.spans[step]
        reads = sorted(
            (max(r.packed, graph.calls[r.call].start + 1), r.unpacked)
            for r in graph.saved
            if r.unpacked is not None and graph.calls[r.call].micro_step == step
        )
        found, earliest, position = [], end, 0
        for clock in self.clocks[step]:
            while position < len(reads) and reads[position][0] <= clock:
                earliest = min(earliest, reads[position][1])
                position += 1
            found.append(earliest)
        return [end, *found[1:]]

    def _with_shared_inputs(self) -> tuple[Bytes, Bytes]:
        """Live bytes as if every argument that several candidates would hold were held by them."""
        extra = np.zeros(len(self.facts.graph.ops) + 1, np.int64)
        until = dict.fromkeys(self.segments.shared, 0)
        for member in (m for c in self.segments.candidates for m in c.members):
            for s in (s for call in member.calls for s in self.facts.graph.calls[call].inputs):
                if s in until:
                    until[s] = max(until[s], member.at)
        for s, clock in until.items():
            extra[self.facts.deaths[s] : clock + 1] += self.facts.graph.storages[s].num_bytes
        return self.facts.during + extra[:-1], self.facts.between + extra

    def chain(self, op_cost: Sequence[float], region_cost: RegionCost | None) -> Chain:
        """The chain problem, nests priced by this cost of each op."""
        num = len(self.clocks[0])
        edges: list[list[Edge]] = [[] for _ in range(num)]
        nests: list[list[NestEdge]] = [[] for _ in range(num)]
        sums = np.cumsum([0.0, *op_cost]) * len(self.clocks)
        work = sums[np.array(self.clocks[0])]
        for number, candidate in enumerate(self.segments.candidates):
            begun = sums[self.facts.graph.calls[candidate.members[0].calls[-1]].start]
            edges[candidate.start].append(self._edge(number, candidate, work, begun))
        demands = NestDemands(self.facts, self.segments, self.sets, op_cost, (self.during, self.born), region_cost)
        for number, nest in enumerate(self.segments.nests):
            begun = sums[self.facts.graph.calls[nest.members[0][-1]].start]
            nests[nest.start].extend(demands.edges(number, nest, ready=(begun, work[nest.stop])))
        steps = list(zip(self.clocks, self.turns, strict=True))
        forward = np.array([self._highest_of_sets(step) for step in range(len(steps))]).max(axis=0)
        backward = [max(self._highest(t[p + 1], t[p]) for _, t in steps) for p in range(num - 1)]
        tail, reach = work.copy(), np.full(num, num)
        for nest in self.segments.nests:
            saved = next(filter(None, map(self.facts.saved_in, reversed(nest.members[0]))), None)
            if saved:
                packed, behind = max((r.packed, self.facts.graph.calls[r.call].end) for r in saved)
                tail[nest.stop], reach[nest.stop] = sums[packed], bisect_left(self.clocks[0], behind)
        shift = [max(int(self.between[t[p]] - self.between[c[p]]) for c, t in steps) for p in range(num)]
        return Chain(
            edges=tuple(map(tuple, edges)),
            nests=tuple(map(tuple, nests)),
            forward=forward,
            backward=np.array(backward, np.int64),
            shift=np.array(shift, np.int64),
            required=max(self._highest(c[-1], t[-1] + 1) for c, t in steps),
            stored=np.max([born[:, clocks] for born, clocks in zip(self.born, self.clocks, strict=True)], axis=0),
            work=work,
            tail=tail,
            reach=reach,
        )

    def _highest_of_sets(self, step: int) -> Bytes:
        """What the plain step demands in forward from each position to the next, by store set."""
        clocks, asked = self.clocks[step], self.asked[step]
        found = [asked[:, a:b].max(axis=1) if a < b else self.born[step][:, a] * -1 for a, b in pairwise(clocks)]
        return np.array(found, np.int64).reshape(len(found), len(asked)).T

    def _highest(self, start: int, stop: int) -> int:
        return int(self.during[start:stop].max(initial=0))

    def _edge(self, number: int, candidate: Candidate, work: Costs, begun: float) -> Edge:
        options = self.options[candidate.kind]
        parts = [self._member(candidate, member, step, options) for step, member in enumerate(candidate.members)]
        forward, backward, saved = zip(*parts, strict=True)
        return Edge(
            candidate=number,
            stop=candidate.stop,
            forward=reduce(np.maximum, forward),
            backward=reduce(np.maximum, backward),
            saved=reduce(np.minimum, saved),
            cost=options.weight * len(candidate.members),
            ready=np.where(options.selective, work[candidate.stop], begun),
        )

    def _held_inputs(self, member: Inner) -> int:
        """Bytes of arguments that only the region keeps alive."""
        graph = self.facts.graph
        inputs = set(self.facts.held_inputs(*member.calls)) - self.segments.shared
        return sum(graph.storages[s].num_bytes for s in inputs if self.facts.deaths[s] < member.at)

    def _member(self, candidate: Candidate, member: Inner, step: int, options: _Columns) -> tuple[Bytes, Bytes, Bytes]:
        held = self._held_inputs(member)
        asked = self.asked[step][:, None, member.start : member.end]
        forward = (asked + options.forward).max(axis=2) + held
        freed = options.freed - held
        recompute = self.between[member.at] - freed + options.recompute
        # What runs before its recompute, and after what lies behind it, finds it dropped.
        early = self._highest(self.turns[step][candidate.stop], member.at) - freed
        backward = np.maximum(np.maximum(recompute, early), self._highest(member.at, self.turns[step][candidate.start]))
        return forward, backward, options.saved - held

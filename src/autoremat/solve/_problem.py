"""From a step to the chain problem: options of every kind of candidate, and what each event demands.

All bytes are those of the ledger: `Chain` demands are live bytes of the plain step, corrected by what an option
changes. Where the correction depends on other regions it is taken at its worst, so a path that fits here fits there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from autoremat._replay import RegionSpec
from autoremat.solve._chain import Chain, Choice, Edge
from autoremat.solve._facts import Bytes, Facts
from autoremat.solve._options import Option, RegionCost, enumerate_options
from autoremat.solve._segments import Candidate, Segments, find_segments
from autoremat.solve._units import Inner

MAX_POINTS = 40
"""Limits on stored bytes tried for a candidate that holds much of the step."""
MIN_POINTS = 10


@dataclass(frozen=True, slots=True)
class Problem:
    """A step ready to be solved for any limit.

    Attributes:
        facts: The step.
        segments: Its candidates.
        options: Options of each candidate (for its first member).
        chain: The chain problem.
    """

    facts: Facts
    segments: Segments
    options: tuple[tuple[Option, ...], ...]
    chain: Chain

    def cost(self, choice: Choice) -> float:
        """Cost of a path's recomputes over all captured micro-steps, FLOPs or seconds."""
        return sum(
            self.options[number][position].cost * len(self.segments.candidates[number].members)
            for number, position in choice.options
        )

    def regions(self, choice: Choice) -> tuple[RegionSpec, ...]:
        """The regions of a path, in every micro-step."""
        specs: list[RegionSpec] = []
        for number, position in choice.options:
            candidate = self.segments.candidates[number]
            kept = self.options[number][position].kept
            first = candidate.members[0].call
            specs.extend(_moved(self.facts, first, member.call, kept) for member in candidate.members)
        return tuple(sorted(specs, key=lambda spec: self.facts.graph.calls[spec.call].start))


def _moved(facts: Facts, source: int, target: int, kept: Iterable[int]) -> RegionSpec:
    """The same stored outputs in an equal module call."""
    graph = facts.graph
    shift = graph.calls[target].start - graph.calls[source].start
    moved = set()
    for s in kept:
        birth = graph.storages[s].born
        moved.add(graph.ops[birth + shift].outputs[graph.ops[birth].outputs.index(s)])
    return RegionSpec(call=target, kept=frozenset(moved))


def build_problem(facts: Facts, op_cost: Sequence[float], region_cost: RegionCost | None = None) -> Problem:
    """Find candidates and options and write the chain problem.

    Args:
        facts: The step.
        op_cost: Cost of each op.
        region_cost: What a region costs beyond the ops that it runs again.
    """
    segments = find_segments(facts)
    options = _all_options(facts, segments, op_cost, region_cost)
    return Problem(facts=facts, segments=segments, options=options, chain=_Demands(facts, segments, options).chain())


def _all_options(
    facts: Facts, segments: Segments, op_cost: Sequence[float], region_cost: RegionCost | None
) -> tuple[tuple[Option, ...], ...]:
    """Options of each candidate; equal candidates are solved once and their options moved."""
    solved: dict[Hashable, tuple[int, tuple[Option, ...]]] = {}
    found: list[tuple[Option, ...]] = []
    for candidate in segments.candidates:
        inner = candidate.members[0]
        if candidate.kind not in solved:
            num_leaves = candidate.stop - candidate.first
            points = MAX_POINTS if num_leaves > 1 or len(segments.leaves) < 2 * MAX_POINTS else MIN_POINTS
            options = enumerate_options(facts, inner, op_cost, max_points=points, region_cost=region_cost)
            solved[candidate.kind] = (inner.call, tuple(options))
        source, solution = solved[candidate.kind]
        found.append(tuple(_move_option(facts, source, inner, option) for option in solution))
    return tuple(found)


def _move_option(facts: Facts, source: int, inner: Inner, option: Option) -> Option:
    if source == inner.call:
        return option
    return dataclasses.replace(option, kept=_moved(facts, source, inner.call, option.kept).kept)


class _Demands:
    """Computes what edges and positions demand, the highest over all micro-steps."""

    def __init__(self, facts: Facts, segments: Segments, options: Sequence[Sequence[Option]]) -> None:
        self.facts = facts
        self.segments = segments
        self.options = options
        self.starts = [[facts.graph.calls[m.call].start for m in leaf.members] for leaf in segments.leaves]
        self.ends = [[facts.graph.calls[m.call].end for m in leaf.members] for leaf in segments.leaves]
        self.clocks = [[m.at for m in leaf.members] for leaf in segments.leaves]
        self.during, self.between = self._with_shared_inputs()

    def _with_shared_inputs(self) -> tuple[Bytes, Bytes]:
        """Live bytes as if every argument that several candidates would hold were held by them."""
        extra = np.zeros(len(self.facts.graph.ops) + 1, np.int64)
        for s in self.segments.shared:
            holders = [m for c in self.segments.candidates for m in c.members]
            until = max(m.at for m in holders if s in self.facts.graph.calls[m.call].inputs)
            extra[self.facts.deaths[s] : until + 1] += self.facts.graph.storages[s].num_bytes
        return self.facts.during + extra[:-1], self.facts.between + extra

    def chain(self) -> Chain:
        """The chain problem."""
        num_leaves = len(self.segments.leaves)
        edges: list[list[Edge]] = [[] for _ in range(num_leaves + 1)]
        for position in range(num_leaves):
            edges[position + 1].append(self._plain(position))
        for number, candidate in enumerate(self.segments.candidates):
            edges[candidate.stop].append(self._region(number, candidate))
        required = np.array([self._gap(position) for position in range(num_leaves + 1)], np.int64)
        return Chain(edges=tuple(map(tuple, edges)), required=required)

    def _highest(self, start: int, stop: int) -> int:
        return int(self.during[start:stop].max(initial=0))

    def _until(self, position: int, step: int) -> int:
        """Clock at which backward reaches what lies before a leaf."""
        return self.clocks[position - 1][step] if position else self.facts.spans[step][1]

    def _plain(self, position: int) -> Edge:
        demands = []
        for step, (start, end) in enumerate(zip(self.starts[position], self.ends[position], strict=True)):
            demands.append(self._highest(start, end))
            demands.append(self._highest(self.clocks[position][step], self._until(position, step)))
        zero = np.zeros(1, np.int64)
        return Edge(position, position + 1, -1, np.array([max(demands)], np.int64), zero, zero.astype(float))

    def _gap(self, position: int) -> int:
        """What lies between two leaves in forward; after the last, the loss and the first of backward too."""
        demands = []
        for step, (first, last) in enumerate(self.facts.spans):
            start = self.ends[position - 1][step] if position else first
            if position < len(self.starts):
                stop = self.starts[position][step]
            else:
                stop = self._until(position, step) if position else last
            demands.append(self._highest(start, stop))
        return max(demands)

    def _region(self, number: int, candidate: Candidate) -> Edge:
        required, saved = [], []
        for step, member in enumerate(candidate.members):
            held = self._held_inputs(member)
            demand, frees = self._member(candidate, member, step, self.options[number], held)
            required.append(demand)
            saved.append(frees)
        cost = np.array([option.weight for option in self.options[number]]) * len(candidate.members)
        return Edge(candidate.first, candidate.stop, number, np.max(required, axis=0), np.min(saved, axis=0), cost)

    def _held_inputs(self, member: Inner) -> int:
        """Bytes of arguments that only the region keeps alive."""
        facts = self.facts
        inputs = set(facts.graph.calls[member.call].inputs) - self.segments.shared
        return sum(facts.graph.storages[s].num_bytes for s in inputs if facts.deaths[s] < member.at)

    def _member(
        self, candidate: Candidate, member: Inner, step: int, options: Sequence[Option], held: int
    ) -> tuple[Bytes, Bytes]:
        span = self.facts.graph.calls[member.call]
        forward = self.during[span.start : span.end] + np.array([option.forward for option in options])
        backward = self._highest(member.at, self._until(candidate.first, step))
        freed = np.array([option.freed_bytes for option in options]) - held
        recompute = self.between[member.at] - freed + np.array([option.recompute_bytes for option in options])
        required = np.maximum(np.maximum(forward.max(axis=1, initial=0) + held, recompute), backward)
        return required, np.array([option.saved_bytes for option in options], np.int64) - held

"""Plans near those of the table, for small steps: one region more, one less, or one with other stored outputs.

The table takes what one region does to another at its worst, and nests store one of few sets. In a step of a few dozen
ops that decides, and so few plans lie near those that the table proposes that many of them can be priced.

Source: Paquete, Chiarandini and Stuetzle, "Pareto local optimum sets in the biobjective traveling salesman problem"
(2004): look around every solution that no other beats in both objectives, until there is no new one.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import nsmallest
from typing import Protocol, TypeVar

from autoremat._replay import Extent, RegionSpec
from autoremat.solve._problem import Problem
from autoremat.solve._rows import Calls

Regions = tuple[RegionSpec, ...]
MAX_OPS = 64
"""Ops of a small step."""
MAX_TRIES = 1000
"""How many plans are priced."""
NUM_BEATEN = 5
"""At how many plans that others beat it is looked next when all of those that none beats were looked at."""
PEAK_WEIGHT = 3.0
"""What a share of the plain peak more than needed counts beside a share of the cost of the step, to choose these."""


class Priced(Protocol):
    """A plan with its price."""

    @property
    def regions(self) -> Regions:
        """Its regions."""

    @property
    def rank(self) -> tuple[float, float]:
        """Lower is cheaper."""

    @property
    def peak_bytes(self) -> int:
        """Its peak."""


P = TypeVar("P", bound=Priced)


def explore(
    seeds: Iterable[P],
    near: Nearby,
    rank_of: Callable[[Regions], tuple[float, float]],
    price: Callable[[Regions], P],
    *,
    scale: tuple[float, int],
) -> list[P]:
    """Price plans around others.

    Args:
        seeds: Where to begin.
        near: The plans near one.
        rank_of: What a plan costs.
        price: Its peak as well.
        scale: Cost and peak of the plain step, bytes.

    Returns:
        The plans that none beats in both cost and peak, those of the smallest peak first.
    """
    known, done, tries = {plan.regions: plan for plan in seeds}, set[Regions](), MAX_TRIES
    front = _unbeaten(known.values())
    while tries and (around := _next(known.values(), front, done, scale)):
        for plan in around:
            done.add(plan.regions)
            for regions in near.plans(plan.regions):
                if tries and regions not in known and rank_of(regions) < front[0].rank:
                    known[regions], tries = price(regions), tries - 1
        front = _unbeaten(known.values())
    return front


def _unbeaten(plans: Iterable[P]) -> list[P]:
    found: list[P] = []
    for plan in sorted(plans, key=lambda plan: (plan.peak_bytes, plan.rank)):
        if not found or plan.rank < found[-1].rank:
            found.append(plan)
    return found


def _next(plans: Iterable[P], front: Sequence[P], done: set[Regions], scale: tuple[float, int]) -> list[P]:
    """Plans to look at: those that none beats, or some that are beaten by little."""
    left = [plan for plan in front if plan.regions not in done]
    if left:
        return left
    (cost, num_bytes), peaks, costs = scale, [p.peak_bytes for p in front], [-p.rank[0] for p in front]

    def beaten_by(plan: P) -> float:
        """How much less it would have to cost, or to need, to be beaten by none."""
        cheaper = front[bisect_right(peaks, plan.peak_bytes) - 1]
        smaller = front[min(bisect_left(costs, -plan.rank[0]), len(front) - 1)]
        less_bytes = PEAK_WEIGHT * (plan.peak_bytes - smaller.peak_bytes) / num_bytes
        return min((plan.rank[0] - cheaper.rank[0]) / cost, less_bytes)

    return nsmallest(NUM_BEATEN, (plan for plan in plans if plan.regions not in done), key=beaten_by)


class Nearby:
    """The plans near another.

    Args:
        problem: The step.
        allowed: Storages that may be stored.
    """

    def __init__(self, problem: Problem, allowed: frozenset[int]) -> None:
        self._graph = problem.facts.graph
        self._allowed = allowed
        self._sets: dict[Calls, dict[frozenset[int], None]] = {}
        """What regions over these calls may store."""
        for candidate, options in zip(problem.segments.candidates, problem.options, strict=True):
            sets = self._sets.setdefault(candidate.members[0].written, {frozenset(): None})
            sets.update(dict.fromkeys(option.kept for option in options))
        for nest in problem.segments.nests:
            self._sets.setdefault(problem.segments.rows.short(nest.members[0]), {frozenset(): None})

    @staticmethod
    def is_for(problem: Problem) -> bool:
        """Whether a step is small, and has no copies of a region that would have to change with it."""
        graph = problem.facts.graph
        return len(graph.ops) <= MAX_OPS and len({call.path for call in graph.calls}) == len(graph.calls)

    def plans(self, regions: Sequence[RegionSpec]) -> Iterator[Regions]:
        """Plans with one region less, one whose stored outputs are others by one op, or one more."""
        return self._changed(tuple(regions), None)

    def _changed(self, specs: Regions, around: RegionSpec | None) -> Iterator[Regions]:
        for place, spec in enumerate(specs):
            before, behind = specs[:place], specs[place + 1 :]
            yield (*before, *spec.children, *behind)
            for outputs in self._outputs(spec):
                kept = spec.kept - outputs if outputs <= spec.kept else spec.kept | outputs
                yield (*before, _with(spec, kept, spec.children), *behind)
            for children in self._changed(spec.children, spec):
                yield (*before, _with(spec, spec.kept, children), *behind)
        for calls, sets in self._sets.items():
            if around is None or self._is_in(calls, around.calls):
                yield from self._with_another(specs, calls, sets)

    def _with_another(self, specs: Regions, calls: Calls, sets: Iterable[frozenset[int]]) -> Iterator[Regions]:
        """With a region around those that it contains; none if it would overlap with one."""
        start, end = self._graph.calls[calls[0]].start, self._graph.calls[calls[-1]].end
        inside = tuple(spec for spec in specs if self._is_in(spec.calls, calls))
        before = tuple(spec for spec in specs if self._graph.calls[spec.calls[-1]].end <= start)
        behind = tuple(spec for spec in specs if self._graph.calls[spec.call].start >= end)
        if len(before) + len(inside) + len(behind) == len(specs):
            for kept in sets:
                yield (*before, _with(RegionSpec(calls[0], then=calls[1:]), kept, inside), *behind)

    def _is_in(self, calls: Calls, around: Calls) -> bool:
        """Whether a region may lie in another: some of its calls, or calls in one of them."""
        if set(calls) < set(around):
            return True
        trees = (self._graph.subtree(call) for call in around)
        return any(calls[0] in tree and calls[-1] in tree and calls[0] != tree.start for tree in trees)

    def _outputs(self, spec: RegionSpec) -> Iterator[frozenset[int]]:
        """What the region may store, op by op."""
        extent, graph = Extent(self._graph, spec.calls), self._graph
        for index in extent.indices():
            found = frozenset(s for s in graph.ops[index].outputs if graph.storages[s].born == index)
            if found & self._allowed:
                yield found & self._allowed


def _with(spec: RegionSpec, kept: frozenset[int], children: Regions) -> RegionSpec:
    return dataclasses.replace(spec, kept=kept, children=children, is_whole=bool(children) and not kept)

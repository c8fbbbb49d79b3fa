"""The options of one region: which of its storages to keep, from none to all that is worth it.

Planner formulation 1 (see `_program`), for a falling limit on stored bytes: by dynamic programming (`_pareto`), or by
HiGHS where the region branches too widely for that. Each solution is then priced by the rules of replay, so an option's
cost and bytes never come from the tolerances of a solver.

Known limit: at most `max_points` options; the exact frontier can have more.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autoremat._replay import Recompute, Replay, random_states
from autoremat.solve._facts import Bytes, Facts
from autoremat.solve._pareto import Choices, best_choices
from autoremat.solve._program import RESOLUTION, Program
from autoremat.solve._units import Inner, Unit, build_units

RegionCost = Callable[[int, Replay], float]
"""What a call of a region costs beyond the ops that run again."""
_MANY_UNITS = 60
"""Regions of more units than this get fewer points, in proportion: solving one takes longer."""
_MIN_POINTS = 10
TIE_BREAK = 1e-4
"""Weight of moved and of stored bytes against the cost of the whole region: breaks ties, decides nothing else."""


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a region.

    Attributes:
        kept: Storages that it stores.
        cost: What its recompute costs, FLOPs or seconds, the region itself included.
        weight: Cost plus a little for the bytes that its recompute moves, so that equal costs are told apart.
        saved_bytes: What it frees between its forward and its recompute; negative if it holds more than the plain step.
        recompute_bytes: Largest live bytes of its recompute, above what lives just before.
        freed_bytes: What is not alive just before its recompute and is in the plain step.
        forward: Change of live bytes against the plain step while each of its forward ops runs.
        selective: Whether it watches ops; then a region around runs its calls to their end.
    """

    kept: frozenset[int]
    cost: float
    weight: float
    saved_bytes: int
    recompute_bytes: int
    freed_bytes: int
    forward: Bytes
    selective: bool


def enumerate_options(
    facts: Facts,
    inner: Inner,
    op_cost: Sequence[float],
    *,
    max_points: int,
    is_exact: bool = True,
    region_cost: RegionCost | None = None,
) -> list[Option]:
    """Find the options of a region, cheapest (most bytes kept) first.

    Args:
        facts: The step.
        inner: The region.
        op_cost: Cost of each op of the step.
        max_points: How many limits on stored bytes to try.
        region_cost: What a region costs beyond the ops that it runs again.
        is_exact: Solve the integer program where dynamic programming gives up; False rounds its relaxation, which takes
            a tenth of the time.

    Returns:
        Options none of which is beaten by another in cost, bytes freed and bytes of recompute together.
    """
    units = build_units(facts, inner, op_cost)
    recompute = Recompute(facts.graph, inner.spec(), facts.saved_in(*inner.calls))
    options: dict[frozenset[int], Option] = {}
    for stored in _candidates(units, max_points, is_exact):
        work = recompute.replay(stored)
        kept = _prune(facts, work, stored)
        if kept not in options:
            work = work if kept == stored else recompute.replay(kept)
            around = cost_around(inner.written, work, region_cost)
            options[kept] = _price(facts, inner, kept, work, op_cost, around)
    return _undominated(list(options.values()))


def cost_around(calls: Sequence[int], work: Replay, region_cost: RegionCost | None) -> float:
    """What a region costs beyond the ops that it runs again."""
    return 0.0 if region_cost is None else sum(region_cost(call, work) for call in calls)


def _candidates(units: Sequence[Unit], max_points: int, is_exact: bool) -> list[frozenset[int]]:
    """What to store, cheapest first."""
    choices = best_choices(units, tie_break=TIE_BREAK)
    if choices is not None:
        return _thinned(choices, max_points)
    points = min(max_points, max(_MIN_POINTS, max_points * _MANY_UNITS // max(1, len(units))))
    return _sweep(units, points) if is_exact else _rounded(units, points)


def _thinned(choices: Choices, max_points: int) -> list[frozenset[int]]:
    """All choices if they are few, else the best below limits that fall in equal steps, and those at the knees."""
    found = set(range(len(choices.num_bytes)))
    if len(found) > max_points:
        num_knees = max_points // 3
        limits = np.linspace(0, choices.num_bytes[-1], max_points - num_knees).astype(np.int64)
        found = {bisect.bisect_right(choices.num_bytes, limit) - 1 for limit in limits}
        knees = [position for position in _knees(choices) if position not in found]
        found |= set(knees[:: -(-len(knees) // num_knees) or 1])
    return [choices.stored(position) for position in sorted(found, reverse=True)]


def _knees(choices: Choices) -> list[int]:
    """Positions of the choices on the lower convex hull of cost over bytes."""
    sizes, costs = choices.num_bytes, choices.cost
    hull: list[int] = []
    for position in range(len(sizes)):
        while len(hull) > 1:
            first, middle = hull[-2:]
            rise = (costs[position] - costs[first]) * (sizes[middle] - sizes[first])
            if rise > (costs[middle] - costs[first]) * (sizes[position] - sizes[first]):
                break
            hull.pop()
        hull.append(position)
    return hull


def _sweep(units: Sequence[Unit], max_points: int) -> list[frozenset[int]]:
    """Stored storages for a falling limit on stored bytes."""
    program = Program(units, tie_break=TIE_BREAK)
    stored, stored_bytes = program.solve(None)
    found = [stored]
    step = stored_bytes // max(1, max_points - 1) + 1
    while stored_bytes > 0:
        limit = max(0, stored_bytes - max(step, program.total_bytes // RESOLUTION))
        stored, now = program.solve(limit)
        found.append(stored)
        stored_bytes = min(now, limit)
    return found


def _rounded(units: Sequence[Unit], max_points: int) -> list[frozenset[int]]:
    """The same from the linear relaxation, each solution rounded down and up."""
    program = Program(units, tie_break=TIE_BREAK, is_integer=False)
    _, total_bytes = program.solve(None)
    found: dict[frozenset[int], None] = {}
    for point in range(max_points + 1):
        for stored in program.rounded(total_bytes * (max_points - point) // max_points):
            found[stored] = None
    return list(found)


def _prune(facts: Facts, work: Replay, kept: frozenset[int]) -> frozenset[int]:
    """Leave out storages that neither autograd nor an op that runs reads, and those that recompute makes anyway."""
    ops = [facts.graph.ops[index] for index in work.ops]
    read = {s for op in ops for s in op.inputs}
    made = {s for op in ops for s in op.outputs}
    return (kept & (read | work.needed)) - made


def _price(
    facts: Facts, inner: Inner, kept: frozenset[int], work: Replay, op_cost: Sequence[float], around: float
) -> Option:
    graph = facts.graph
    states = [random_states(graph, graph.calls[call], work) for call in inner.written]
    held_states, passing_states = sum(held for held, _ in states), max(passing for _, passing in states)
    rng_bytes = graph.rng_state_bytes * held_states
    dropped = [s for s in inner.needed if s not in kept]
    extra = [s for s in kept if facts.deaths[s] < inner.at]
    size = {s: graph.storages[s].num_bytes for s in (*dropped, *extra)}
    held = sum(size[s] for s in extra) + rng_bytes
    forward = np.zeros(inner.end - inner.start + 1, np.int64)
    forward[0] += rng_bytes + graph.rng_state_bytes * passing_states
    for s in dropped:
        forward[min(inner.deaths[s], inner.end) - inner.start] -= size[s]
    for s in extra:
        forward[min(facts.deaths[s], inner.end) - inner.start] += size[s]
    cost = float(sum(op_cost[index] for index in work.ops)) + around
    return Option(
        kept=kept,
        cost=cost,
        weight=cost + facts.tie_cost * sum(graph.ops[index].moved_bytes for index in work.ops),
        saved_bytes=sum(size[s] for s in dropped if s not in inner.pinned) - held,
        recompute_bytes=_recompute_bytes(facts, inner, kept, work) + graph.rng_state_bytes * min(1, held_states),
        freed_bytes=sum(size[s] for s in dropped if inner.deaths[s] <= inner.at) - held,
        forward=np.cumsum(forward)[:-1],
        selective=work.selective,
    )


def _recompute_bytes(facts: Facts, inner: Inner, kept: frozenset[int], work: Replay) -> int:
    """Peak of a recompute: what autograd saved stays, the rest dies as it did in forward."""
    graph = facts.graph
    live = peak = 0
    dying: dict[int, int] = {}
    for index in work.ops:
        for clock in [c for c in dying if c <= index]:
            live -= dying.pop(clock)
        op = graph.ops[index]
        passing = op.workspace_bytes
        for s in dict.fromkeys(op.outputs):
            storage = graph.storages[s]
            if storage.born != index:
                continue
            if s in kept:
                passing += storage.num_bytes
                continue
            live += storage.num_bytes
            if s not in inner.needed:
                dying[storage.last_ref] = dying.get(storage.last_ref, 0) + storage.num_bytes
        peak = max(peak, live + passing)
    return peak


def _undominated(options: list[Option]) -> list[Option]:
    """Drop options that another one beats or equals in cost, freed bytes and recompute bytes."""
    options.sort(
        key=lambda o: (o.weight, -o.saved_bytes, o.recompute_bytes - o.freed_bytes, len(o.kept), sorted(o.kept))
    )
    best: list[Option] = []
    for option in options:
        rise = option.recompute_bytes - option.freed_bytes
        if not any(b.saved_bytes >= option.saved_bytes and b.recompute_bytes - b.freed_bytes <= rise for b in best):
            best.append(option)
    return best

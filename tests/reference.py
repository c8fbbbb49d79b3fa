"""Brute force for small cases: what the solvers must reach and may not claim to beat."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from autoremat._ledger import expand, peak_bytes
from autoremat._replay import RegionSpec, obstacle
from autoremat._schedule import Action
from autoremat._step_graph import StepGraph
from machine import Machine, run_schedule


def all_kept_sets(graph: StepGraph, call: int) -> Iterator[frozenset[int]]:
    """Every set of storages of a call that can be stored: legality is asked of the abstract machine."""
    span = graph.calls[call]
    inside = [s.index for s in graph.storages if span.start <= s.born < span.end]
    for size in range(len(inside) + 1):
        for kept in itertools.combinations(inside, size):
            if is_legal(graph, [RegionSpec(call, frozenset(kept))]):
                yield frozenset(kept)


def is_legal(graph: StepGraph, specs: Sequence[RegionSpec]) -> bool:
    """Whether the machine accepts the schedule of these regions."""
    try:
        run_schedule(graph, expand(graph, specs))
    except AssertionError:
        return False
    return True


def cost_of(graph: StepGraph, specs: Sequence[RegionSpec], op_cost: Sequence[float]) -> float:
    """What recompute of these regions costs, those inside included."""
    return sum(op_cost[event.op] for event in expand(graph, specs).events if event.action is Action.RECOMPUTE)


def live_before(graph: StepGraph, specs: Sequence[RegionSpec], op: int) -> int:
    """Live bytes when an op of forward or backward is about to run, recomputes before it not yet started."""
    schedule = expand(graph, specs)
    machine = Machine(graph, schedule)
    for event in schedule.events:
        if machine.clock == op and event.action in (Action.FORWARD, Action.BACKWARD, Action.RECOMPUTE):
            break
        machine._apply(event)
    return machine.live_bytes()


def disjoint_calls(graph: StepGraph) -> Iterator[tuple[int, ...]]:
    """Every set of disjoint module calls below the model's own that may be regions (one micro-step)."""
    calls = [c.index for c in graph.calls if c.parent >= 0 and obstacle(graph, c.index) is None]
    for size in range(len(calls) + 1):
        for chosen in itertools.combinations(calls, size):
            if all(b not in graph.subtree(a) for a, b in itertools.combinations(chosen, 2)):
                yield chosen


def best_cost(graph: StepGraph, budget_bytes: int, op_cost: Sequence[float]) -> float:
    """Least cost of any disjoint regions with any stored outputs within a budget; infinite if there are none."""
    legal = {call.index: list(all_kept_sets(graph, call.index)) for call in graph.calls if call.parent >= 0}
    best = float("inf")
    for calls in disjoint_calls(graph):
        for kept in itertools.product(*(legal[call] for call in calls)):
            specs = [RegionSpec(call, k) for call, k in zip(calls, kept, strict=True)]
            cost = cost_of(graph, specs, op_cost)
            if cost < best and peak_bytes(graph, expand(graph, specs)) <= budget_bytes:
                best = cost
    return best

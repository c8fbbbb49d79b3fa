"""Bound, exact optimum and plan, in this order, on small steps: the optimum is Checkmate's integer program."""

from __future__ import annotations

import math
import random

import pytest

from autoremat._ledger import expand, peak_bytes
from autoremat._step_graph import StepGraph
from autoremat.solve import Planner
from autoremat.solve._bounds import Bound
from autoremat.solve._facts import collect_facts
from oracle import Checkmate
from strategies import build_step

KINDS = ("linear", "gelu", "norm", "attention")


def random_step(seed: int) -> StepGraph:
    rng = random.Random(seed)
    leaves = [(rng.choice(KINDS), rng.randrange(3), rng.randint(1, 8)) for _ in range(rng.randint(3, 4))]
    return build_step(tuple((f"h.{i}", (leaf,)) for i, leaf in enumerate(leaves)), loss_bytes=rng.randint(2, 6))


@pytest.mark.parametrize("seed", range(8))
def test_the_optimum_is_between_bound_and_plan(seed: int) -> None:
    graph = random_step(seed)
    op_cost = [float(op.flops + op.moved_bytes) for op in graph.ops]
    planner = Planner(graph, op_cost=op_cost, price=lambda specs: peak_bytes(graph, expand(graph, specs)))
    oracle = Checkmate(graph, op_cost)
    for share in (0.0, 0.4):
        budget = planner.smallest_bytes + int(share * (planner.plain_bytes - planner.smallest_bytes))
        solution = planner.plan(budget)
        optimum = oracle.optimum(budget)
        assert optimum is not None
        of_hooks = Checkmate(graph, op_cost, where_read=True).optimum(budget)
        assert of_hooks is not None
        assert solution.bound <= optimum * (1 + 1e-6) <= of_hooks * (1 + 2e-6) <= solution.cost * (1 + 3e-6)
        if share:
            assert solution.cost <= optimum + 0.03 * sum(op_cost)


def test_no_hook_runs_an_op_again_between_two_ops_of_one_node() -> None:
    """What the exact optimum drops until the weight's gradient is there, a hook brings back before either gradient."""
    kinds = (("norm", 3), ("attention", 8), ("attention", 8), ("linear", 5))
    graph = build_step(tuple((f"h.{i}", ((kind, 0, size),)) for i, (kind, size) in enumerate(kinds)), loss_bytes=10)
    op_cost = [float(op.flops + op.moved_bytes) for op in graph.ops]
    planner = Planner(graph, op_cost=op_cost, price=lambda specs: peak_bytes(graph, expand(graph, specs)))
    budget = planner.smallest_bytes + 1
    of_hooks = Checkmate(graph, op_cost, where_read=True).optimum(budget)
    assert planner.plan(budget).cost == pytest.approx(of_hooks)
    optimum = Checkmate(graph, op_cost).optimum(budget)
    assert optimum is not None
    assert optimum < 0.6 * planner.plan(budget).cost


def test_events_that_are_not_looked_at_twice_change_no_bound() -> None:
    block = tuple((kind, 0, size) for kind, size in (("norm", 4), ("linear", 12), ("gelu", 12), ("linear", 4)))
    graph = build_step(tuple((f"h.{i}", block) for i in range(16)), loss_bytes=8)
    op_cost = [float(op.flops) for op in graph.ops]
    facts = collect_facts(graph, op_cost)
    high = peak_bytes(graph, expand(graph))
    low = high // 3
    bound = Bound(facts, op_cost, low, high)
    assert {event._is_small for events in bound._steps for event in events} == {True, False}
    for share in range(0, 10, 2):
        budget = low + share * (high - low) // 10
        cell = (budget - bound._low) // bound._width
        grid = [bound._low + position * bound._width for position in (cell, cell + 1)]
        every = [max(event.least_cost(budget, grid) for event in events) for events in bound._steps]
        assert bound.at(budget) == sum(every)
    assert bound.at(low) > 0


def test_the_oracle_knows_the_plain_peak_and_what_is_too_little() -> None:
    graph = random_step(0)
    oracle = Checkmate(graph, [1.0] * len(graph.ops))
    peak = peak_bytes(graph, expand(graph))
    assert oracle.optimum(peak) == 0
    assert (oracle.optimum(peak - 1) or 0) > 0
    assert oracle.optimum(1) == math.inf


def test_the_oracle_finds_the_only_way_there_is() -> None:
    """HiGHS 1.16 presolves this program to one that has no solution."""
    kinds = (("norm", 2), ("norm", 3), ("linear", 3), ("linear", 1), ("linear", 8))
    graph = build_step(tuple((f"h.{i}", ((kind, 0, size),)) for i, (kind, size) in enumerate(kinds)), loss_bytes=5)
    assert Checkmate(graph, [float(op.flops + op.moved_bytes) for op in graph.ops]).optimum(24) == pytest.approx(16)

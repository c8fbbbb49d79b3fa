"""Bound, exact optimum and plan, in this order, on small steps: the optimum is Checkmate's integer program."""

from __future__ import annotations

import math
import random

import pytest

from autoremat._ledger import expand, peak_bytes
from autoremat._step_graph import StepGraph
from autoremat.solve import Planner
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
        assert solution.bound <= optimum * (1 + 1e-6) <= solution.cost * (1 + 2e-6)
        if share:
            assert solution.cost <= optimum + 0.03 * sum(op_cost)


def test_the_oracle_knows_the_plain_peak_and_what_is_too_little() -> None:
    graph = random_step(0)
    oracle = Checkmate(graph, [1.0] * len(graph.ops))
    peak = peak_bytes(graph, expand(graph))
    assert oracle.optimum(peak) == 0
    assert (oracle.optimum(peak - 1) or 0) > 0
    assert oracle.optimum(1) == math.inf

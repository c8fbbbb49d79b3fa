"""Plans near others, in small steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoremat._ledger import expand, peak_bytes
from autoremat._replay import RegionSpec
from autoremat._step_graph import StepGraph
from autoremat.solve import Planner
from autoremat.solve._nearby import MAX_OPS, Nearby
from autoremat.solve._stages import Stages
from machine import run_schedule
from oracle import Checkmate
from strategies import build_step, step_graphs

LAYERS = (("gelu", 2), ("linear", 6), ("norm", 8), ("attention", 4), ("linear", 4), ("attention", 4), ("linear", 4))


def costs_of(graph: StepGraph) -> list[float]:
    return [float(op.flops + op.moved_bytes) for op in graph.ops]


def planner_of(graph: StepGraph) -> Planner:
    def price(specs: Sequence[RegionSpec]) -> int:
        return peak_bytes(graph, expand(graph, specs))

    return Planner(graph, op_cost=costs_of(graph), price=price)


@pytest.fixture
def layers() -> StepGraph:
    return build_step(tuple((f"h.{i}", ((kind, 0, size),)) for i, (kind, size) in enumerate(LAYERS)), loss_bytes=5)


def test_a_plan_is_found_near_those_of_the_table(layers: StepGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    """A nest that stores four outputs, none of the sets that the table knows; it is as cheap as any schedule can be."""
    monkeypatch.setattr(Stages, "of", staticmethod(lambda *_: None))
    planner = planner_of(layers)
    budget = planner.smallest_bytes + int(0.3 * (planner.plain_bytes - planner.smallest_bytes))
    found = planner.plan(budget)
    run_schedule(layers, expand(layers, found.regions))
    assert found.cost == pytest.approx(Checkmate(layers, costs_of(layers)).optimum(budget))
    monkeypatch.setattr("autoremat.solve._nearby.MAX_TRIES", 0)
    assert planner_of(layers).plan(budget).cost > found.cost


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(step_graphs(max_blocks=3, max_ops=4), st.floats(0, 1))
def test_every_plan_near_another_is_legal(graph: StepGraph, share: float) -> None:
    planner = planner_of(graph)
    if not Nearby.is_for(planner._problem):
        return
    solution = planner.plan(planner.smallest_bytes + int(share * (planner.plain_bytes - planner.smallest_bytes)))
    for regions in list(Nearby(planner._problem, planner._storable).plans(solution.regions))[::3]:
        run_schedule(graph, expand(graph, regions))


def test_large_steps_and_steps_that_call_modules_again_are_left_alone(layers: StepGraph) -> None:
    assert Nearby.is_for(planner_of(layers)._problem)
    many = build_step(tuple((f"h.{i}", (("linear", 0, 4),)) for i in range(MAX_OPS // 3)))
    assert not Nearby.is_for(planner_of(many)._problem)
    again = build_step((("h", (("linear", 0, 4),)), ("h", (("linear", 0, 4),))))
    assert not Nearby.is_for(planner_of(again)._problem)

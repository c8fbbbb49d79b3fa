"""The planner as a whole: legal, within budget, monotone, deterministic."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from autoremat._ledger import expand, peak_bytes
from autoremat._step_graph import StepGraph
from autoremat.solve import Planner
from machine import run_schedule
from strategies import step_graphs


def planner_of(graph: StepGraph) -> Planner:
    return Planner(
        graph,
        op_cost=[float(op.flops) for op in graph.ops],
        price=lambda specs: peak_bytes(graph, expand(graph, specs)),
    )


@settings(deadline=None)
@given(step_graphs(max_blocks=5), st.floats(0, 1))
def test_a_plan_is_legal_and_within_its_budget(graph: StepGraph, share: float) -> None:
    planner = planner_of(graph)
    budget = planner.smallest_bytes + int(share * (planner.plain_bytes - planner.smallest_bytes))
    solution = planner.plan(budget)
    schedule = expand(graph, solution.regions)
    run_schedule(graph, schedule)
    assert peak_bytes(graph, schedule) == solution.peak_bytes <= budget

"""How much work planning is, counted: times are those of `benchmarks/solve_times.py`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest

from autoremat._expand import Expansion
from autoremat._ledger import expand, peak_bytes
from autoremat._prices import Prices
from autoremat._replay import RegionSpec
from autoremat.solve import Planner
from autoremat.solve._facts import collect_facts
from autoremat.solve._nests import NestDemands
from autoremat.solve._options import enumerate_options
from autoremat.solve._problem import build_problem
from autoremat.solve._program import Program
from strategies import Recipe, build_step

LAYER: Recipe = (("norm", 0, 4), ("call", (("linear", 0, 16), ("gelu", 0, 16), ("linear", 0, 4)), 0), ("add", 2, 4))


def work_of(num_layers: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, int, int]:
    """For a plan of so many equal layers: regions solved, calls costed, states of the table, peaks asked for."""
    num_solved = num_costs = num_priced = 0
    graph = build_step(tuple((f"h.{i}", LAYER) for i in range(num_layers)), loss_bytes=20)

    def counted(*args: Any, **more: Any) -> Any:
        nonlocal num_solved
        num_solved += 1
        return enumerate_options(*args, **more)

    def counted_cost(*args: Any) -> tuple[float, float]:
        nonlocal num_costs
        num_costs += 1
        return work_out_cost(*args)

    def price(specs: Sequence[RegionSpec]) -> int:
        nonlocal num_priced
        num_priced += 1
        return peak_bytes(graph, expand(graph, specs))

    work_out_cost = NestDemands._work_out_cost
    monkeypatch.setattr(NestDemands, "_work_out_cost", counted_cost)

    monkeypatch.setattr("autoremat.solve._problem.enumerate_options", counted)
    planner = Planner(graph, op_cost=[float(op.flops) for op in graph.ops], price=price)
    planner.plan((planner.smallest_bytes + planner.plain_bytes) // 2)
    monkeypatch.undo()
    return num_solved, num_costs, len(planner._table._values), num_priced


def test_equal_layers_are_solved_once_and_share_the_states_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work for twice the layers: no more regions to solve, and a table that grows with length, not with its square."""
    few, many = (work_of(num_layers, monkeypatch) for num_layers in (10, 20))
    assert many[:2] == few[:2]
    assert many[2] <= 2 * few[2]
    assert max(few[3], many[3]) <= 80


@pytest.mark.parametrize(("num_layers", "longest"), [(8, 8), (9, 4)])
def test_nests_of_more_than_half_of_a_long_row_store_nothing(
    monkeypatch: pytest.MonkeyPatch, num_layers: int, longest: int
) -> None:
    monkeypatch.setattr("autoremat.solve._nests.LONG_ROW", 8)
    narrow: Recipe = (("linear", 0, 2), ("norm", 0, 2), ("gelu", 0, 2), ("linear", 0, 8), ("add", 2, 8), ("gelu", 0, 8))
    graph = build_step(tuple((f"h.{i}", narrow) for i in range(num_layers)))
    costs = [float(op.flops) for op in graph.ops]
    problem = build_problem(collect_facts(graph, costs), costs)
    found: dict[int, int] = {}
    for nest in chain.from_iterable(problem.chain.nests):
        length = len(problem.segments.nests[-1 - nest.number].members[0])
        found[nest.stores] = max(length, found.get(nest.stores, 0))
    assert found.pop(0) == num_layers
    assert set(found.values()) == {longest}


def test_what_a_region_does_is_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    worked_out: list[RegionSpec] = []

    def counted(graph: Any, specs: Sequence[RegionSpec], **more: Any) -> Any:
        worked_out.extend(specs)
        return Expansion(graph, specs, **more)

    monkeypatch.setattr("autoremat._prices.Expansion", counted)
    graph = build_step(tuple((f"h.{i}", LAYER) for i in range(12)), loss_bytes=20)
    Planner(graph, op_cost=[float(op.flops) for op in graph.ops], price=Prices(graph).peak_bytes).frontier(8)
    assert len(worked_out) == len(set(worked_out)) > 12


def test_no_more_limits_are_tried_where_the_smallest_is_met_and_the_next_has_a_higher_peak() -> None:
    graph = build_step(tuple((f"h.{i}", LAYER) for i in range(12)), loss_bytes=20)
    priced: list[int] = []

    def price(specs: Sequence[RegionSpec]) -> int:
        priced.append(peak_bytes(graph, expand(graph, specs)))
        return priced[-1]

    planner = Planner(graph, op_cost=[float(op.flops) for op in graph.ops], price=price)
    assert planner.smallest_bytes == planner._table.smallest_limit
    assert priced[-2] == planner.smallest_bytes < priced[-1]


def test_no_program_is_solved_for_the_bound_of_a_plan_that_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    solved = []

    def counted(self: Program, limit_bytes: int) -> tuple[float, float]:
        solved.append(limit_bytes)
        return optimum(self, limit_bytes)

    optimum = Program.optimum
    monkeypatch.setattr(Program, "optimum", counted)
    graph = build_step(tuple((f"h.{i}", LAYER) for i in range(12)), loss_bytes=20)
    planner = Planner(graph, op_cost=[float(op.flops) for op in graph.ops], price=Prices(graph).peak_bytes)
    free = planner.plan((9 * planner.plain_bytes + planner.smallest_bytes) // 10)
    assert free.regions
    assert free.cost == free.bound == 0
    assert not solved
    assert planner.plan(planner.smallest_bytes).bound > 0
    assert solved

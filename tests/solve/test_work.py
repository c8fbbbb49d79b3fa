"""How much work planning is, counted: times are those of `benchmarks/solve_times.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from autoremat._ledger import expand, peak_bytes
from autoremat._replay import RegionSpec
from autoremat.solve import Planner
from autoremat.solve._options import enumerate_options
from strategies import Recipe, build_step

LAYER: Recipe = (("norm", 0, 4), ("call", (("linear", 0, 16), ("gelu", 0, 16), ("linear", 0, 4)), 0), ("add", 2, 4))


def work_of(num_layers: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, int]:
    """Regions solved, states of the table, and peaks asked of the ledger, for a plan of so many equal layers."""
    num_solved = num_priced = 0
    graph = build_step(tuple((f"h.{i}", LAYER) for i in range(num_layers)), loss_bytes=20)

    def counted(*args: Any, **more: Any) -> Any:
        nonlocal num_solved
        num_solved += 1
        return enumerate_options(*args, **more)

    def price(specs: Sequence[RegionSpec]) -> int:
        nonlocal num_priced
        num_priced += 1
        return peak_bytes(graph, expand(graph, specs))

    monkeypatch.setattr("autoremat.solve._problem.enumerate_options", counted)
    planner = Planner(graph, op_cost=[float(op.flops) for op in graph.ops], price=price)
    planner.plan((planner.smallest_bytes + planner.plain_bytes) // 2)
    return num_solved, len(planner._table._values), num_priced


def test_equal_layers_are_solved_once_and_share_the_states_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work for twice the layers: no more regions to solve, and a table that grows with length, not with its square."""
    few, many = (work_of(num_layers, monkeypatch) for num_layers in (10, 20))
    assert many[0] == few[0]
    assert many[1] <= 2 * few[1]
    assert max(few[2], many[2]) <= 80

"""The exact program for any shape of graph, against brute force and the ledger."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

import autoremat as ar
from autoremat._ledger import expand, peak_bytes
from autoremat._replay import RegionSpec
from autoremat._step_graph import StepGraph
from autoremat.solve import Planner, _planner
from autoremat.solve._facts import collect_facts
from autoremat.solve._general import General, branches
from autoremat.solve._problem import build_problem
from strategies import Recipe, build_step, step_graphs

slow = settings(deadline=None, max_examples=8, suppress_health_check=list(HealthCheck))
MAX_CHOICES = 60


class Tower(nn.Sequential):
    """Residual blocks."""

    def __init__(self, depth: int, width: int, factor: int) -> None:
        super().__init__(
            *(
                nn.Sequential(nn.Linear(width, factor * width), nn.GELU(), nn.Linear(factor * width, width))
                for _ in range(depth)
            )
        )


class TwoTowers(nn.Module):
    """Two towers that are joined at the end: neither feeds the other."""

    def __init__(self, depth: int = 3, width: int = 8) -> None:
        super().__init__()
        self.left, self.right, self.tail = Tower(depth, width, 4), Tower(depth, width, 2), Tower(1, width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.tail(self.left(x) * self.right(x.flip(0)))
        return out


def traced(model: nn.Module, *shape: int, accumulate: int = 1) -> StepGraph:
    return ar.trace(
        model, torch.ones(*shape), loss=lambda out: out.square().mean(), optimizer=None, accumulate=accumulate
    )


@pytest.fixture(scope="module")
def towers() -> StepGraph:
    return traced(TwoTowers(), 64, 8, accumulate=2)


def flops_of(graph: StepGraph) -> list[float]:
    return [float(op.flops) for op in graph.ops]


def general_of(graph: StepGraph) -> General:
    cost = [float(op.flops + op.moved_bytes) for op in graph.ops]
    return General(build_problem(collect_facts(graph, cost), cost))


def ledger_peak(graph: StepGraph, regions: tuple[RegionSpec, ...]) -> int:
    return peak_bytes(graph, expand(graph, regions))


def planner_of(graph: StepGraph) -> Planner:
    return Planner(graph, op_cost=flops_of(graph), price=lambda specs: peak_bytes(graph, expand(graph, specs)))


def every_choice(general: General) -> Iterator[tuple[int, ...]]:
    """Every set of columns of which no two have an op in common."""
    taken = [set(clique) for clique in general.cliques]

    def extend(first: int, chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        yield chosen
        for column in range(first, general.effects.num_columns):
            if not any(column in clique and clique.intersection(chosen) for clique in taken):
                yield from extend(column + 1, (*chosen, column))

    return extend(0, ())


def has_changed_buffers(graph: StepGraph) -> bool:
    return any(graph.storages[s].cause == "buffer" for op in graph.ops for s in op.mutates)


@settings(slow, max_examples=5)
@given(step_graphs(max_blocks=2), st.floats(0, 1))
def test_the_answer_is_the_best_of_all_choices(graph: StepGraph, share: float) -> None:
    general = general_of(graph)
    assume(general.effects.num_columns and not has_changed_buffers(graph))
    choices = list(itertools.islice(every_choice(general), MAX_CHOICES + 1))
    assume(len(choices) <= MAX_CHOICES)
    peaks = [ledger_peak(graph, general._regions(set(columns))) for columns in choices]
    limit = min(peaks) + int(share * (max(peaks) - min(peaks)))
    best = min(general.costs[list(c)].sum() for c, peak in zip(choices, peaks, strict=True) if peak <= limit)
    answer = general.solve(limit, max_nodes=10_000)
    assert answer.regions is not None
    assert ledger_peak(graph, answer.regions) <= limit
    assert answer.cost == pytest.approx(best, rel=1e-3, abs=1e-6)
    assert answer.bound <= best * (1 + 1e-6) + 1e-6
    assert general.solve(min(peaks) - 1).regions is None


def test_the_answer_is_the_best_where_the_solver_presolves_to_another_program() -> None:
    inner: Recipe = (("gelu", 0, 3), ("norm", 0, 1))
    graph = build_step((("g.0", (("relu_", 0, 4),)), ("h.1", (("call", inner, 0),))), loss_bytes=2)
    general = general_of(graph)
    choices = list(every_choice(general))
    peaks = [ledger_peak(graph, general._regions(set(columns))) for columns in choices]
    for limit in range(min(peaks), max(peaks) + 1):
        best = min(general.costs[list(c)].sum() for c, peak in zip(choices, peaks, strict=True) if peak <= limit)
        assert general.solve(limit, max_nodes=10_000).cost == pytest.approx(best, rel=1e-3, abs=1e-6)


@slow
@given(step_graphs(max_blocks=4), st.integers(0, 9))
def test_the_bytes_of_a_choice_are_those_of_the_ledger(graph: StepGraph, number: int) -> None:
    assume(not has_changed_buffers(graph))
    check_bytes(graph, random.Random(number))


def test_the_bytes_of_branches_are_those_of_the_ledger(towers: StepGraph) -> None:
    for number in range(4):
        check_bytes(towers, random.Random(number))


def check_bytes(graph: StepGraph, choose: random.Random) -> None:
    general = general_of(graph)
    chosen: list[int] = []
    for column in choose.sample(range(general.effects.num_columns), general.effects.num_columns):
        if not any(column in clique and set(clique).intersection(chosen) for clique in general.cliques):
            chosen.append(column)
    values = np.zeros(general.effects.num_columns)
    values[chosen] = 1
    assert general.effects.profile(values).max() == ledger_peak(graph, general._regions(set(chosen)))


def test_towers_branch_and_a_stack_does_not(towers: StepGraph) -> None:
    assert branches(collect_facts(towers, flops_of(towers)))
    stack = traced(Tower(4, 8, 2), 4, 8)
    assert not branches(collect_facts(stack, flops_of(stack)))


def test_a_step_without_candidates_has_no_answer() -> None:
    graph = traced(nn.Linear(4, 4), 2, 4)
    assert general_of(graph).solve(10).regions is None


def test_nothing_is_found_below_the_best(towers: StepGraph) -> None:
    general = general_of(towers)
    limit = ledger_peak(towers, ()) * 3 // 4
    best = general.solve(limit, max_nodes=10_000)
    assert best.regions is not None
    assert general.solve(limit, below=0.99 * best.cost).regions is None
    assert general.solve(limit, below=1.01 * best.cost, max_nodes=10_000).cost == pytest.approx(best.cost, rel=1e-3)


class Blind(Planner):
    """Finds nothing in its table."""

    def _solve(self, limit_bytes: int) -> None:  # type: ignore[override]
        return None


def test_the_planner_takes_what_the_program_finds(towers: StepGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the table, plans are those of the program: within budget, no dearer with more, the same every time."""
    monkeypatch.setattr(_planner, "CLASSIC_NAMES", ("every-block",))
    monkeypatch.setattr("autoremat.solve._nearby.MAX_TRIES", 0)

    def price(specs: tuple[RegionSpec, ...]) -> int:
        return peak_bytes(towers, expand(towers, specs))

    planner, again = (Blind(towers, op_cost=flops_of(towers), price=price) for _ in range(2))  # type: ignore[arg-type]
    low, high = planner.smallest_bytes, planner.plain_bytes
    budgets = [low + (high - low) * part // 8 for part in (1, 3, 5, 7)]
    plans = [planner.plan(budget) for budget in budgets]
    known = {(), planner.plan(low).regions, *(priced.regions for priced in planner._others)}
    assert any(plan.regions not in known for plan in plans)
    assert all(plan.bound <= plan.cost and plan.peak_bytes <= b for plan, b in zip(plans, budgets, strict=True))
    assert all(before.cost >= after.cost for before, after in itertools.pairwise(plans))
    assert [again.plan(budget) for budget in reversed(budgets)] == plans[::-1]


def test_a_ledger_that_sees_more_than_the_program_is_believed(towers: StepGraph) -> None:
    def price(specs: tuple[RegionSpec, ...]) -> int:
        return peak_bytes(towers, expand(towers, specs)) * (101 if specs else 100) // 100

    planner = Blind(towers, op_cost=flops_of(towers), price=price)  # type: ignore[arg-type]
    budget = (planner.smallest_bytes + planner.plain_bytes) // 2
    solution = planner.plan(budget)
    assert solution.peak_bytes == price(solution.regions) <= budget

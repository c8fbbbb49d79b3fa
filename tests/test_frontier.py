"""The frontier: every plan of a step from one solve, and `plan` picking from it."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import autoremat as ar
from autoremat import Frontier, FrontierPoint
from autoremat._tables import classics_table, frontier_table


@pytest.fixture(scope="module")
def graph():
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Dropout(0.1)) for _ in range(8)]
    return ar.trace(nn.Sequential(*blocks), torch.ones(512, 64), loss=lambda out: out.square().mean())


@pytest.fixture(scope="module")
def curve(graph):
    return ar.frontier(graph, num_points=16)


def test_peaks_rise_and_overhead_falls(curve, graph):
    peaks = [point.peak_bytes for point in curve.points]
    costs = [point.overhead_flops for point in curve.points]
    assert 8 <= len(peaks) <= 16
    assert peaks == sorted(set(peaks))
    assert costs == sorted(set(costs), reverse=True)
    assert costs[-1] == 0
    assert peaks[0] == curve.smallest_bytes
    assert curve.plain_bytes == ar.profile(graph).peak_bytes
    assert all(0 <= point.bound <= point.overhead_flops for point in curve.points)


def test_each_point_has_its_plan(curve, graph):
    for point in curve.points:
        plan = curve.plan(point.peak_bytes)
        assert plan.planned.peak_bytes <= point.peak_bytes
        assert plan.overhead_flops <= point.overhead_flops
    for point in curve.points[::5]:
        assert curve.plan(point.peak_bytes).to_json() == ar.plan(graph, budget=point.peak_bytes).to_json()


def test_plans_do_not_depend_on_what_was_asked_before(curve, graph):
    budgets = [curve.smallest_bytes + i * (curve.plain_bytes - curve.smallest_bytes) // 5 for i in range(6)]
    alone = [ar.plan(graph, budget=budget).to_json() for budget in budgets]
    other = ar.frontier(graph, num_points=5)
    assert [other.plan(budget).to_json() for budget in reversed(budgets)] == alone[::-1]
    overheads = [curve.plan(budget).overhead_flops for budget in budgets]
    assert overheads == sorted(overheads, reverse=True)


def test_a_point_is_found_by_budget(curve):
    assert curve.point(curve.smallest_bytes - 1) is None
    assert curve.point(curve.smallest_bytes) == curve.points[0]
    assert curve.point(curve.points[3].peak_bytes) == curve.points[3]
    assert curve.point("1TiB") == curve.points[-1]


def test_a_budget_below_the_smallest_is_infeasible(curve):
    with pytest.raises(ar.BudgetInfeasible) as caught:
        curve.plan(curve.smallest_bytes - 1)
    assert caught.value.smallest_bytes == curve.smallest_bytes


def test_time_is_minimised_for_a_target(graph):
    timed = ar.frontier(graph, num_points=6, target="rtx3090-24g")
    assert timed.objective == "time"
    seconds = [point.overhead_s for point in timed.points]
    assert seconds == sorted(seconds, reverse=True)


def test_schedules_by_name_are_priced_like_plans(graph):
    curve = ar.frontier(graph, num_points=4, classics=True)
    assert [named.name for named in curve.classics][:2] == ["none", "every-block"]
    for named in curve.classics:
        plan = ar.classic(graph, named.name)
        assert (plan.planned.peak_bytes, plan.overhead_flops) == (named.peak_bytes, named.overhead_flops)
        assert plan.budget_bytes is plan.bound is plan.smallest_bytes is None
    assert len(classics_table(curve).rows) == len(curve.classics)
    assert curve.classics[0].peak_bytes == curve.plain_bytes


def test_an_unknown_schedule_is_refused_with_the_names(graph):
    with pytest.raises(ar.UsageError, match="every-block, every:2, uniform:2, sqrt"):
        ar.classic(graph, "all")


def test_bad_options_are_refused_before_tracing():
    with pytest.raises(ar.UsageError, match="at least 2 points"):
        ar.frontier(nn.Linear(1, 1), torch.ones(1, 1), num_points=1)
    with pytest.raises(ar.UsageError, match="objective='speed'"):
        ar.frontier(nn.Linear(1, 1), torch.ones(1, 1), objective="speed")


def test_json_has_all_but_the_plans(curve):
    read = json.loads(curve.to_json())
    assert set(read) == {
        *("points", "classics", "plain_bytes", "smallest_bytes", "static_bytes", "model", "target", "objective")
    }
    assert read.pop("classics") == []
    assert [FrontierPoint(**point) for point in read.pop("points")] == list(curve.points)
    assert Frontier(points=curve.points, **read) == curve


def test_a_long_frontier_is_shown_in_part():
    points = tuple(FrontierPoint(100 + i, 1 - i / 99, 1 - i / 99, 0.0, 100 - i) for i in range(100))
    table = frontier_table(Frontier(points=points, plain_bytes=199, smallest_bytes=100))
    assert len(table.rows) == 24
    assert next(iter(table.columns[0].cells)) == "100 B"
    assert list(table.columns[0].cells)[-1] == "199 B"

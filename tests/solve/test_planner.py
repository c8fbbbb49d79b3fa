"""The planner as a whole: legal, within budget, near the best, never beaten by its own bound, deterministic."""

from __future__ import annotations

import dataclasses
import math
import statistics

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoremat._ledger import expand, peak_bytes
from autoremat._replay import RegionSpec, replay
from autoremat._step_graph import StepGraph
from autoremat.solve import CLASSIC_NAMES, Planner, Solution, classic_regions, frontier_regions, plan_regions
from autoremat.solve._facts import collect_facts
from autoremat.solve._problem import build_problem
from autoremat.solve._segments import is_possible
from autoremat.solve._table import Table
from autoremat.solve._variants import storable, stores_more
from machine import run_schedule
from reference import best_cost, cost_of
from strategies import TRANSFORMER, Recipe, build_step, recipes, step_graphs

slow = settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow])


def flops_of(graph: StepGraph) -> list[float]:
    return [float(op.flops) for op in graph.ops]


def planner_of(graph: StepGraph, op_cost: list[float] | None = None) -> Planner:
    return Planner(
        graph, op_cost=op_cost or flops_of(graph), price=lambda specs: peak_bytes(graph, expand(graph, specs))
    )


def budget_at(planner: Planner, share: float) -> int:
    """A budget between the smallest possible (0) and the plain peak (1)."""
    return planner.smallest_bytes + int(share * (planner.plain_bytes - planner.smallest_bytes))


def stack(num_blocks: int, **more: int) -> StepGraph:
    return build_step(tuple((f"h.{i}", TRANSFORMER) for i in range(num_blocks)), loss_bytes=20, **more)


def without_spans(graph: StepGraph) -> StepGraph:
    """The same step with every argument made anew: single calls can be regions, spans cannot."""
    return dataclasses.replace(graph, calls=tuple(dataclasses.replace(call, links=()) for call in graph.calls))


@slow
@given(step_graphs(max_blocks=5), st.floats(0, 1))
def test_a_plan_is_legal_and_within_its_budget(graph: StepGraph, share: float) -> None:
    planner = planner_of(graph)
    budget = budget_at(planner, share)
    solution = planner.plan(budget)
    schedule = expand(graph, solution.regions)
    run_schedule(graph, schedule)
    assert peak_bytes(graph, schedule) == solution.peak_bytes <= budget
    assert solution.cost == cost_of(graph, solution.regions, flops_of(graph))


@slow
@given(step_graphs(max_blocks=5), st.floats(0, 1))
def test_the_bound_is_not_above_the_plan(graph: StepGraph, share: float) -> None:
    planner = planner_of(graph, [float(op.flops + op.moved_bytes) for op in graph.ops])
    solution = planner.plan(budget_at(planner, share))
    assert 0 <= solution.bound <= solution.cost


@slow
@given(st.lists(recipes(max_ops=3, nested=False), min_size=1, max_size=2), st.floats(0, 1))
def test_bound_optimum_and_plan_are_in_order(blocks: list[Recipe], share: float) -> None:
    graph = without_spans(build_step(tuple((f"{'hg'[i]}.{i}", recipe) for i, recipe in enumerate(blocks))))
    planner = planner_of(graph)
    budget = budget_at(planner, share)
    solution = planner.plan(budget)
    assert solution.bound <= best_cost(graph, budget, flops_of(graph)) <= solution.cost


@slow
@given(step_graphs(max_blocks=6), st.floats(0, 1), st.floats(0, 1))
def test_more_budget_never_costs_more(graph: StepGraph, one: float, other: float) -> None:
    planner = planner_of(graph)
    low, high = sorted((one, other))
    assert planner.plan(budget_at(planner, high)).cost <= planner.plan(budget_at(planner, low)).cost


@slow
@given(step_graphs(), st.floats(0, 1))
def test_the_same_input_gives_the_same_plan(graph: StepGraph, share: float) -> None:
    first, second = planner_of(graph), planner_of(graph)
    assert first.plan(budget_at(first, share)) == second.plan(budget_at(second, share))


def test_a_budget_of_the_plain_peak_needs_no_regions() -> None:
    graph = stack(3)
    planner = planner_of(graph)
    assert planner.plan(planner.plain_bytes) == Solution(
        regions=(), cost=0.0, peak_bytes=planner.plain_bytes, smallest_bytes=planner.smallest_bytes, bound=0.0
    )


def test_a_budget_below_the_possible_returns_the_smallest() -> None:
    planner = planner_of(stack(3))
    solution = planner.plan(planner.smallest_bytes - 1)
    assert solution.peak_bytes == solution.smallest_bytes == planner.smallest_bytes
    assert planner.plan(planner.smallest_bytes).peak_bytes == planner.smallest_bytes
    assert planner.plan(1).bound == math.inf


def test_elementwise_work_is_dropped_first() -> None:
    graph = stack(6)
    planner = planner_of(graph)
    solution = planner.plan(budget_at(planner, 0.6))
    assert solution.cost == 0
    assert solution.regions


def test_a_nest_stores_what_is_costly_to_make(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of blocks that are narrow inside, as a ResNet's, what is inside is stored and the wide rest comes back twice."""
    narrow: Recipe = (
        ("linear", 0, 2),
        ("norm", 0, 2),
        ("gelu", 0, 2),
        ("linear", 0, 8),
        ("norm", 0, 8),
        ("gelu", 0, 8),
    )
    graph = build_step(tuple((f"h.{i}", (*narrow[:5], ("add", 2, 8), narrow[5])) for i in range(4)), loss_bytes=4)
    monkeypatch.setattr("autoremat.solve._facts.SMALL_STEP_OPS", 0)  # which finds it by trying
    planner = planner_of(graph)
    monkeypatch.setattr("autoremat.solve._nests.SET_SHARES", ())
    without = planner_of(graph)
    budget = budget_at(without, 0.2)
    assert planner.plan(budget).cost < 0.9 * without.plan(budget).cost
    assert any(spec.children and spec.kept for spec in planner.plan(budget).regions)
    run_schedule(graph, expand(graph, planner.plan(budget).regions))


@slow
@given(step_graphs(max_blocks=3, max_ops=4), st.data())
def test_every_nest_is_legal_with_every_store_set_and_any_regions_inside(graph: StepGraph, data: st.DataObject) -> None:
    problem = build_problem(collect_facts(graph, flops_of(graph)), flops_of(graph))
    for nests in problem.chain.nests:
        for nest in nests:
            start = problem.segments.nests[-1 - nest.number].start
            inside = [
                (edge.candidate, option, ())
                for position in range(start, nest.stop)
                for edge in problem.chain.edges[position]
                for option in range(len(edge.cost))
                if edge.stop < nest.stop
            ]
            chosen = [data.draw(st.sampled_from(inside))] if inside else []
            run_schedule(graph, expand(graph, problem.regions([(nest.number, nest.stores, tuple(chosen))])))


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
def test_every_micro_step_gets_the_same_regions(share: float) -> None:
    graph = stack(4, num_micro_steps=2)
    planner = planner_of(graph)
    solution = planner.plan(budget_at(planner, share))
    by_step: dict[int, list[tuple[str, int, list[int]]]] = {0: [], 1: []}
    for spec in solution.regions:
        call = graph.calls[spec.call]
        kept = sorted(graph.storages[s].born - call.start for s in spec.kept)
        by_step[call.micro_step].append((call.path, call.number, kept))
    assert by_step[0] == by_step[1] != []


def test_the_budget_is_used_where_it_binds() -> None:
    graph = stack(12, unit_bytes=1 << 20)
    planner = planner_of(graph)
    used = [planner.plan(budget).peak_bytes / budget for budget in (budget_at(planner, s / 10) for s in range(10))]
    assert min(used) >= 0.97
    assert statistics.mean(used) >= 0.98


def test_the_frontier_falls() -> None:
    graph = stack(6)
    curve = frontier_regions(graph, op_cost=flops_of(graph), price=lambda s: peak_bytes(graph, expand(graph, s)))
    assert len(curve) >= 5
    assert curve[0].peak_bytes == curve[0].smallest_bytes
    assert curve[-1].cost == 0
    for cheaper, dearer in zip(curve[1:], curve[:-1], strict=True):
        assert cheaper.peak_bytes > dearer.peak_bytes
        assert cheaper.cost < dearer.cost


def test_plan_regions_is_the_planner() -> None:
    graph = stack(3)

    def price(specs: object) -> int:
        return peak_bytes(graph, expand(graph, specs))  # type: ignore[arg-type]

    planner = planner_of(graph)
    budget = budget_at(planner, 0.3)
    assert plan_regions(graph, budget_bytes=budget, op_cost=flops_of(graph), price=price) == planner.plan(budget)


def test_the_limit_is_corrected_by_what_the_ledger_says() -> None:
    """A ledger that sees a tenth more than the chain model still gets a plan within budget that uses it well."""
    graph = stack(8, unit_bytes=1 << 20)

    def price(specs: tuple[RegionSpec, ...]) -> int:
        return peak_bytes(graph, expand(graph, specs)) * 11 // 10

    planner = Planner(graph, op_cost=flops_of(graph), price=price)  # type: ignore[arg-type]
    budget = budget_at(planner, 0.4)
    solution = planner.plan(budget)
    assert solution.peak_bytes == price(solution.regions) <= budget
    assert solution.peak_bytes >= 0.95 * budget


def test_a_limit_that_the_ledger_pushes_below_the_possible_falls_back_to_the_smallest() -> None:
    """A ledger that sees one plan only within budget: the tightest of the chain."""
    graph = stack(4, unit_bytes=1 << 20)
    tightest = planner_of(graph).plan(1).regions

    def price(specs: tuple[RegionSpec, ...]) -> int:
        return 1 << 20 if tuple(specs) == tightest else 1 << 40

    planner = Planner(graph, op_cost=flops_of(graph), price=price)  # type: ignore[arg-type]
    assert planner.smallest_bytes == 1 << 20
    assert planner.plan(1 << 30).regions == tightest


class Blind(Planner):
    """Finds nothing in its table: only schedules by name are left."""

    def _solve(self, limit_bytes: int) -> None:  # type: ignore[override]
        return None


@pytest.mark.parametrize("name", ["every-block", "save:matmuls", "uniform:2"])
def test_no_plan_is_dearer_than_a_schedule_by_name_that_fits(name: str) -> None:
    graph = stack(6)
    planner = Blind(graph, op_cost=flops_of(graph), price=lambda specs: peak_bytes(graph, expand(graph, specs)))
    regions = classic_regions(graph, name)
    assert regions
    # One cell of the tree of budgets: what is closer together counts as the same budget.
    budget = peak_bytes(graph, expand(graph, regions)) + (planner.plain_bytes - planner.smallest_bytes) // 1024 + 1
    solution = planner.plan(budget)
    assert solution.peak_bytes <= budget
    assert solution.cost <= cost_of(graph, regions, flops_of(graph))


def test_regions_that_the_budget_does_not_need_are_left_out() -> None:
    block: Recipe = (("call", (("linear", 0, 8), ("gelu", 0, 8), ("linear", 0, 4)), 0),)
    graph = build_step(tuple((f"h.{i}", block) for i in range(8)))
    costs = [float(op.flops + op.moved_bytes) for op in graph.ops]
    planner = Blind(graph, op_cost=costs, price=lambda specs: peak_bytes(graph, expand(graph, specs)))
    budget = budget_at(planner, 0.5)
    named = [classic_regions(graph, name) for name in CLASSIC_NAMES]
    fitting = [regions for regions in named if regions and peak_bytes(graph, expand(graph, regions)) <= budget]
    solution = planner.plan(budget)
    assert solution.peak_bytes <= budget
    assert solution.cost < min(cost_of(graph, regions, costs) for regions in fitting)


def test_with_memory_for_everything_even_free_ops_are_not_dropped() -> None:
    block: Recipe = (("linear", 0, 8), ("norm", 0, 8), ("gelu", 0, 8), ("norm", 0, 8), ("gelu", 0, 8))
    graph = build_step(tuple((f"h.{i}", (("call", block, 0), ("call", block, 0))) for i in range(3)), loss_bytes=4)
    facts = collect_facts(graph, flops_of(graph))
    problem = build_problem(facts, flops_of(graph))
    assert len(problem.sets[0]) > 1
    assert min(nest.cost for nests in problem.chain.nests for nest in nests) > 0
    assert Table(problem.chain).picks(1 << 40) == ()


def test_nests_store_what_the_ledger_shows_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table knows few sets of outputs that nests may store; here another one fits."""
    monkeypatch.setattr("autoremat.solve._nearby.MAX_TRIES", 0)
    monkeypatch.setattr("autoremat.solve._stages.Stages.of", lambda *_: None)
    layers: list[Recipe] = [(("norm", 0, 8),), (("linear", 0, 5),)] * 3
    graph = build_step(tuple((f"h.{i}", layer) for i, layer in enumerate(layers)))
    costs = [float(op.flops + op.moved_bytes) for op in graph.ops]
    planner = planner_of(graph, costs)
    found = planner.plan(planner.smallest_bytes)
    run_schedule(graph, expand(graph, found.regions))
    monkeypatch.setattr("autoremat.solve._planner.MAX_REFINEMENTS", 0)
    without = planner_of(graph, costs)
    assert found.peak_bytes <= without.smallest_bytes
    assert found.cost < 0.6 * without.plan(without.smallest_bytes).cost


@slow
@given(step_graphs(max_blocks=3, max_ops=4))
def test_every_output_that_a_nest_may_store_besides_is_legal(graph: StepGraph) -> None:
    facts = collect_facts(graph, flops_of(graph))
    problem = build_problem(facts, flops_of(graph))
    for nests in problem.chain.nests:
        for nest in nests[:1]:
            start = problem.segments.nests[-1 - nest.number].start
            inside = [(e.candidate, 0, ()) for e in problem.chain.edges[start] if e.stop < nest.stop][:1]
            (spec, *_) = problem.regions([(nest.number, nest.stores, tuple(inside))])
            for other in stores_more(facts, spec, storable(problem), [1.0] * len(graph.ops)):
                run_schedule(graph, expand(graph, [other]))


@slow
@given(step_graphs(max_blocks=3, max_ops=4))
def test_no_schedule_by_name_has_a_smaller_peak(graph: StepGraph) -> None:
    planner, facts = planner_of(graph), collect_facts(graph, flops_of(graph))
    for name in CLASSIC_NAMES:
        regions = classic_regions(graph, name) or ()
        if all(is_possible(facts, spec.calls) for region in regions for spec in region.with_children()):
            peak = peak_bytes(graph, expand(graph, regions))
            assert planner.smallest_bytes <= peak
            assert planner.plan(peak).cost <= cost_of(graph, regions, flops_of(graph))


def test_a_nest_that_stores_the_outputs_of_one_op_more_leaves_that_op_out() -> None:
    graph = build_step((("h.0", (("norm", 0, 4), ("attention", 0, 4), ("linear", 0, 4))), ("h.1", (("linear", 0, 4),))))
    facts = collect_facts(graph, flops_of(graph))
    first, second = (call.index for call in graph.calls if call.parent == 0)
    nest = RegionSpec(first, then=(second,), children=(RegionSpec(second),))
    attention = next(op for op in graph.ops if "sdpa" in op.name)
    allowed = frozenset(range(len(graph.storages)))
    found = next(stores_more(facts, nest, allowed, [float(op.index == attention.index) for op in graph.ops]))
    assert found.kept == frozenset(attention.outputs[:2]), "the third is read by nobody"
    assert attention.index not in replay(graph, found).ops


@pytest.mark.parametrize("num_blocks", [2, 4])
def test_nests_cost_what_the_table_says(num_blocks: int) -> None:
    """Also where a region inside makes its nest run on to the region's end."""
    block: Recipe = (
        ("norm", 0, 4),
        ("call", (("linear", 0, 12), ("attention", 1, 4), ("linear", 0, 4)), 0),
        ("add", 2, 4),
        ("norm", 0, 4),
        ("call", (("linear", 0, 16), ("gelu", 0, 16), ("linear", 0, 4)), 0),
        ("add", 2, 4),
    )
    graph = build_step(tuple((f"h.{i}", block) for i in range(num_blocks)), loss_bytes=20)
    facts = dataclasses.replace(collect_facts(graph, flops_of(graph)), tie_cost=0.0)
    problem = build_problem(facts, flops_of(graph))
    own = {(nest.number, nest.stores): nest.cost for nests in problem.chain.nests for nest in nests}
    costs = flops_of(graph)
    seen = set()
    for n, nest in enumerate(problem.segments.nests):
        for c, candidate in enumerate(problem.segments.candidates):
            if nest.start <= candidate.start and candidate.stop < nest.stop:
                for o, option in enumerate(problem.options[c]):
                    (region,) = problem.regions([(-1 - n, 0, ((c, o, ()),))])
                    edge = next(e for e in problem.chain.edges[candidate.start] if e.candidate == c)
                    late = float(problem.chain.late(np.array([edge.stop]), edge.ready[o : o + 1], nest.stop)[0])
                    assert cost_of(graph, (region,), costs) == own[-1 - n, 0] + late + option.cost
                    seen.add(np.sign(late))
    assert seen == {-1, 0, 1}


@slow
@given(step_graphs())
def test_what_the_frontier_shows_can_be_asked_for(graph: StepGraph) -> None:
    planner = planner_of(graph)
    for point in planner.frontier(8):
        assert point.peak_bytes >= planner.smallest_bytes
        again = planner.plan(point.peak_bytes)
        assert (again.peak_bytes, again.cost) == (point.peak_bytes, point.cost)

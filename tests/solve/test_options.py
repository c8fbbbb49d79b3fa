"""Options of one region against every legal set of stored outputs."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from autoremat._replay import RegionSpec
from autoremat._step_graph import StepGraph
from autoremat.solve._facts import collect_facts
from autoremat.solve._options import Option, enumerate_options
from autoremat.solve._segments import find_segments
from autoremat.solve._units import Inner
from reference import all_kept_sets, cost_of, is_legal, live_before
from strategies import Recipe, build_step, recipes, scaled

EVERY_LIMIT = 200
"""More points than a small region has bytes: the whole frontier."""


def single_calls(graph: StepGraph, op_cost: list[float]) -> list[Inner]:
    candidates = find_segments(collect_facts(graph, op_cost)).candidates
    return [c.members[0] for c in candidates if len(c.members[0].calls) == 1]


def options_of(graph: StepGraph, op_cost: list[float]) -> tuple[int, list[Option]]:
    facts = collect_facts(graph, op_cost)
    inner = single_calls(graph, op_cost)[0]
    return inner.calls[0], enumerate_options(facts, inner, op_cost, max_points=EVERY_LIMIT)


def costs_of(graph: StepGraph, objective: str) -> list[float]:
    return [float(op.flops if objective == "flops" else op.moved_bytes + op.flops) for op in graph.ops]


small = settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


@small
@given(recipes(max_ops=4, nested=False), st.sampled_from(("flops", "time")))
def test_no_legal_choice_beats_an_option_at_its_own_bytes(recipe: Recipe, objective: str) -> None:
    graph = build_step((("h.0", recipe), ("g.0", (("linear", 0, 2),))))
    op_cost = costs_of(graph, objective)
    assume(single_calls(graph, op_cost))
    call, options = options_of(graph, op_cost)
    turn = next(op.index for op in graph.ops if op.name == "aten.log_softmax.default")
    asked = min(r.unpacked for r in graph.saved if r.call == call and r.unpacked is not None)

    def live(kept: frozenset[int]) -> tuple[int, int]:
        """At the turn, and when backward reaches the region: what leaves the region may be alive at the first only."""
        return tuple(live_before(graph, [RegionSpec(call, kept)], clock) for clock in (turn, asked))

    choices = [(live(kept), cost_of(graph, [RegionSpec(call, kept)], op_cost)) for kept in all_kept_sets(graph, call)]
    for option in options:
        if objective == "time" and not option.kept:
            # Recompute without stored outputs watches no ops, so it runs cheap dead ones too.
            continue
        specs = [RegionSpec(call, option.kept)]
        assert is_legal(graph, specs)
        assert option.cost == cost_of(graph, specs, op_cost)
        own = live(option.kept)
        cheapest = min(cost for other, cost in choices if other[0] <= own[0] and other[1] <= own[1])
        assert option.cost <= cheapest * (1 + 1e-4)


@small
@given(recipes(max_ops=5), st.sampled_from((0, 1)))
def test_bytes_of_an_option_are_those_of_the_ledger(recipe: Recipe, rng_state_bytes: int) -> None:
    graph = build_step((("h.0", recipe), ("g.0", (("linear", 0, 2),))), rng_state_bytes=rng_state_bytes)
    assume(single_calls(graph, costs_of(graph, "flops")))
    call, options = options_of(graph, costs_of(graph, "flops"))
    turn = next(op.index for op in graph.ops if op.name == "aten.log_softmax.default")
    plain = live_before(graph, [], turn)
    held = sum(
        graph.storages[s].num_bytes
        for s in graph.calls[call].inputs
        if not any(r.storage == s for r in graph.saved) and graph.storages[s].last_ref < len(graph.ops)
    )
    for option in options:
        assert plain - live_before(graph, [RegionSpec(call, option.kept)], turn) >= option.saved_bytes - held


@pytest.mark.parametrize("factor", [1, 10**9])
def test_options_do_not_depend_on_the_scale_of_bytes(factor: int) -> None:
    block: Recipe = (("linear", 0, 4), ("gelu", 0, 4), ("dropout", 0, 4), ("attention", 1, 4), ("linear", 0, 1))
    graph = build_step((("h.0", block), ("h.1", block)))
    _, small_options = options_of(graph, costs_of(graph, "flops"))
    _, options = options_of(scaled(graph, factor), costs_of(graph, "flops"))
    assert [o.kept for o in options] == [o.kept for o in small_options]
    assert [o.saved_bytes for o in options] == [factor * o.saved_bytes for o in small_options]

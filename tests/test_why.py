"""What `why` says of a plan, each claim against steps that are priced, run or solved on their own."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from torch import nn

import autoremat as ar
from autoremat import _why_tables
from autoremat._ledger import expand
from autoremat._planning import Planning
from autoremat._regions import resolve
from autoremat._replay import RegionSpec
from autoremat._schedule import Action
from autoremat._targets import get_target
from autoremat._why import why
from machine import Machine
from oracle import Checkmate
from strategies import build_step, step_graphs

NUM_TOKENS, VOCABULARY = 96, 384
CPU = get_target("cpu")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Words(nn.Module):
    """Blocks, then logits that are larger than all that the blocks save."""

    def __init__(self, vocabulary=VOCABULARY):
        super().__init__()
        self.blocks = nn.Sequential(*[Block() for _ in range(6)])
        self.head = nn.Linear(32, vocabulary)

    def forward(self, x):
        return self.head(self.blocks(x))


def cross_entropy(logits):
    return nn.functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))


@pytest.fixture(scope="module")
def built():
    torch.manual_seed(0)
    model, batch = nn.Sequential(*[Block() for _ in range(6)]), torch.randn(256, 32)
    return model, batch, ar.trace(model, batch, loss=lambda y: y.square().sum())


@pytest.fixture(scope="module")
def curve(built):
    return ar.frontier(built[2], num_points=16)


@pytest.fixture(scope="module", params=[0.0, 0.4])
def reasoned(request, built, curve):
    """A step, a plan for it and why it is as it is: at the smallest budget, and where it stores something."""
    budget = curve.smallest_bytes + int(request.param * (curve.plain_bytes - curve.smallest_bytes))
    plan = curve.plan(budget)
    return built[2], plan, ar.why(built[2], plan)


def lives(graph, plan):
    """Live bytes of a plan at each op that runs for the first time, and in order, by the abstract machine."""
    schedule = expand(graph, resolve(graph, plan))
    machine, by_op, in_order = Machine(graph, schedule), {}, []
    for event in schedule.events:
        machine._apply(event)
        if event.op >= 0:
            in_order.append((machine.live_bytes() + graph.ops[event.op].workspace_bytes, event))
            if event.action is not Action.RECOMPUTE:
                by_op[event.op] = in_order[-1][0]
                machine.numbers += graph.ops[event.op].kept_bytes
    return by_op, in_order


def left_out(plan, name):
    return dataclasses.replace(plan, regions=tuple(r for r in plan.regions if r.name != name))


def test_a_region_is_compared_with_the_step_without_it(reasoned):
    graph, plan, reasons = reasoned
    assert [region.name for region in reasons.regions if " > " not in region.name] == [r.name for r in plan.regions]
    planned = lives(graph, plan)[0]
    for region, written in zip(reasons.regions, plan.regions, strict=True):
        other = left_out(plan, region.name)
        by_op, in_order = lives(graph, other)
        profile = ar.profile(graph, other)
        breaks = [f"{e.action.value}, {graph.calls[graph.ops[e.op].call].path or 'the model itself'}, "
                  f"{graph.ops[e.op].name}" for size, e in in_order if size > plan.budget_bytes]  # fmt: skip
        assert region.peak_without_bytes == max(size for size, _ in in_order) == profile.peak_bytes
        assert region.freed_bytes == max(by_op[op] - planned[op] for op in planned)
        assert region.breaks_at == (breaks[0] if breaks else None)
        assert region.flops == plan.planned.flops - profile.flops
        assert region.overhead == pytest.approx(region.flops / graph.flops)
        assert region.stored_bytes == sum(saved.num_bytes for saved in written.saved)
        assert region.bytes_per_flop == (region.freed_bytes / region.flops if region.flops else None)
        assert bool(region.dearest) == (region.flops > 0)


def test_the_peak_without_a_region_is_what_a_run_without_it_measures(built, curve):
    model, batch, graph = built
    plan = curve.plan(curve.smallest_bytes)
    region = ar.why(graph, plan).regions[1]
    usage = ar.measure(model, batch, left_out(plan, region.name), loss=lambda y: y.square().sum(), num_steps=1)
    assert usage.planned.peak_bytes == region.peak_without_bytes > curve.smallest_bytes


def test_overhead_bound_and_limit_are_the_plans(reasoned):
    _, plan, reasons = reasoned
    assert (reasons.limit_bytes, reasons.peak_bytes) == (plan.budget_bytes, plan.planned.peak_bytes)
    assert reasons.overhead == pytest.approx(plan.overhead_flops)
    assert reasons.bound == plan.bound
    assert reasons.possible_gain == pytest.approx(1 - (1 + plan.bound) / (1 + plan.overhead_flops))
    # What the sentence says is rounded up: it stays true.
    said = float(reasons.claim.split("more than ")[1].split(" %")[0]) / 100
    assert reasons.possible_gain <= said < reasons.possible_gain + 0.001


def test_other_budgets_are_the_planners(reasoned, curve):
    _, plan, reasons = reasoned
    found = [other for other in (reasons.more, reasons.less) if other is not None]
    assert found
    for other in found:
        same = curve.plan(other.budget_bytes)
        assert (other.peak_bytes, other.num_regions) == (same.planned.peak_bytes, len(same.regions))
        assert other.overhead_flops == pytest.approx(same.overhead_flops)
        assert other.overhead_s == pytest.approx(same.overhead_s)
        assert other.bound == same.bound
        names, then = [[r.name for r in p.regions] for p in (plan, same)]
        assert set(names) - set(other.without) <= set(then)
        assert set(then) - set(other.instead) <= set(names)
    assert reasons.more.overhead_flops < reasons.overhead
    assert str(round(100 * reasons.more.overhead_flops, 1)) in reasons.next_step


def test_a_region_that_only_stores_other_outputs_is_said_to(reasoned):
    more = dataclasses.replace(reasoned[2].more, without=("h.0", "h.1", "x"), instead=("h.0", "h.1", "y"))
    row = _why_tables._budget_row(reasoned[2], more)
    assert row[-1] == "without x; instead y; other stored outputs in h.{0-1}"
    same = dataclasses.replace(more, without=("h.0",), instead=("h.0",))
    assert _why_tables._budget_row(reasoned[2], same)[-1] == "other stored outputs in h.0"


def test_a_step_that_buys_nothing_grows_to_the_next_cheaper_plan(built, curve):
    plan = curve.plan(curve.smallest_bytes)
    more = ar.why(built[2], plan, step=1).more
    resolution = (curve.plain_bytes - curve.smallest_bytes) >> 8
    assert more.overhead_flops < plan.overhead_flops
    assert curve.plan(more.budget_bytes - resolution - 1).overhead_flops == plan.overhead_flops


def test_the_plain_step_has_no_reasons(built, curve):
    reasons = ar.why(built[2], curve.plan(curve.plain_bytes))
    assert (reasons.regions, reasons.more, reasons.possible_gain) == ((), None, 0)
    assert "buys nothing" in reasons.next_step
    assert "any cheaper" in reasons.claim
    assert ar.why(built[2], curve.plan(curve.smallest_bytes)).less is None


def test_a_plan_without_a_budget_is_held_against_its_own_peak(built):
    graph = built[2]
    plan = ar.classic(graph, "every-block")
    reasons = ar.why(graph, plan)
    assert reasons.limit_bytes == plan.planned.peak_bytes
    assert len(reasons.regions) == 6
    assert all((r.breaks_at is not None) == (r.peak_without_bytes > reasons.limit_bytes) for r in reasons.regions)


def test_time_is_explained_where_time_was_minimised(built):
    graph = built[2]
    curve = ar.frontier(graph, num_points=4, objective="time")
    plan = curve.plan(curve.points[1].peak_bytes)
    reasons = ar.why(graph, plan)
    assert reasons.overhead == pytest.approx(plan.overhead_s)
    assert "faster" in reasons.claim
    total = plan.plain.seconds
    for region in reasons.regions:
        specs = resolve(graph, left_out(plan, region.name))
        seconds = Planning(graph, CPU, "time").make_plan(specs).planned.seconds
        assert region.seconds == pytest.approx(plan.planned.seconds - seconds)
        assert region.overhead == pytest.approx(region.seconds / total)


def test_regions_inside_others_are_taken_out_alone(built):
    graph = built[2]
    nested = ar.classic(graph, "recursive")
    found = {region.name: region for region in ar.why(graph, nested).regions}
    outer, inner = nested.regions[0], nested.regions[0].children[0]
    assert f"{outer.name} > {inner.name}" in found
    less = dataclasses.replace(outer, children=outer.children[1:])
    other = dataclasses.replace(nested, regions=(less, *nested.regions[1:]))
    profile, region = ar.profile(graph, other), found[f"{outer.name} > {inner.name}"]
    assert region.peak_without_bytes == profile.peak_bytes
    assert region.flops == nested.planned.flops - profile.flops


def test_the_floor_is_the_smallest_plan(built, curve):
    found = ar.why(built[2], curve.plan(curve.plain_bytes)).floor
    profile = ar.profile(built[2], curve.plan(curve.smallest_bytes))
    assert found.smallest_bytes == sum(part.num_bytes for part in found.parts) == curve.smallest_bytes
    assert found.by_cause == {cause: size for cause, size in profile.peak_by_cause.items() if size}
    assert found.at == profile.peak_at
    assert found.largest == profile.alive_at_peak[: len(found.largest)]
    assert found.parts[0].num_bytes == max(part.num_bytes for part in found.parts)
    assert found.least_bytes <= found.smallest_bytes


def kinds(model, batch, loss, **options):
    graph = ar.trace(model, batch, loss=loss, **options)
    found = Planning(graph, CPU, "flops").floor()
    return {part.kind: part.num_bytes for part in found.parts}, found


def test_logits_are_named_with_their_share_of_activations():
    parts, found = kinds(Words(), torch.randn(NUM_TOKENS, 32), cross_entropy, optimizer=None)
    logits = NUM_TOKENS * VOCABULARY * 4
    # At the turn: log-softmax or its gradient, and the gradient of the logits.
    assert parts["loss"] % logits == 0
    assert parts["loss"] >= 2 * logits
    share = parts["loss"] / (found.smallest_bytes - parts["states"] - parts["inputs"])
    assert found.parts[0].kind == "loss"
    assert found.advice == f"The loss: {100 * share:.1f} % of activation bytes. Use a chunked loss."
    with pytest.raises(ar.BudgetInfeasible, match=r"The loss: .* Use a chunked loss"):
        ar.plan(Words(), torch.randn(NUM_TOKENS, 32), loss=cross_entropy, optimizer=None, budget=1)


def test_what_else_can_dominate_is_named():
    wide = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    assert kinds(wide, torch.ones(2, 256), lambda y: y.sum(), optimizer="adamw:fused")[1].parts[0].kind == "states"
    _, found = kinds(Words(8), torch.randn(2048, 32), cross_entropy, optimizer=None)
    assert found.parts[0].kind == "working"
    assert "blocks." in found.advice
    large = nn.Sequential(nn.Flatten(), nn.Linear(4096, 1))
    assert kinds(large, torch.ones(64, 4096), lambda y: y.sum(), optimizer=None)[1].parts[0].kind == "inputs"


@settings(max_examples=6, deadline=None)
@given(graph=step_graphs(max_micro_steps=1))
def test_no_choice_of_regions_is_below_the_least_peak(graph):
    planner = Planning(graph, CPU, "flops").planner
    calls = [call.index for call in graph.calls if call.parent == 0][:3]
    for size in range(len(calls) + 1):
        for chosen in itertools.combinations(calls, size):
            specs = [RegionSpec(call) for call in chosen]
            try:
                peak = Machine(graph, expand(graph, specs)).run()
            except AssertionError:
                continue  # not a schedule that may run
            assert planner.least_bytes <= peak
    assert planner.least_bytes <= planner.smallest_bytes


@pytest.mark.parametrize("sizes", [(2, 1, 3), (4, 4)])
def test_the_oracle_finds_no_schedule_below_the_least_peak(sizes):
    blocks = tuple((f"h.{i}", (("linear", 0, size), ("gelu", 0, size))) for i, size in enumerate(sizes))
    graph = build_step(blocks, loss_bytes=3)
    planner = Planning(graph, CPU, "flops").planner
    oracle = Checkmate(graph, [float(op.flops + op.moved_bytes) for op in graph.ops])
    assert oracle.optimum(planner.plain_bytes, time_limit_s=20) is not None
    assert planner.least_bytes > 0
    assert oracle.optimum(planner.least_bytes - 1, time_limit_s=20) in (None, float("inf"))


def test_plans_of_many_regions_are_explained_in_part(built, monkeypatch):
    monkeypatch.setattr("autoremat._why.MAX_REGIONS", 2)
    graph = built[2]
    reasons = why(Planning(graph, CPU, "flops"), ar.classic(graph, "every-block"))
    assert (len(reasons.regions), reasons.num_left_out) == (2, 4)
    assert "4 more" in _why_tables.reasons_table(reasons).caption


def test_like_regions_share_a_row(reasoned):
    _, _, reasons = reasoned
    rows = _why_tables.reason_rows(reasons.regions)
    assert len(rows) < len(reasons.regions)
    assert reasons.to_dict()["regions"][0]["name"] == reasons.regions[0].name
    assert reasons.floor.advice in repr(reasons)

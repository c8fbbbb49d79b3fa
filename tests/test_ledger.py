"""The ledger: every schedule is legal, the sums are right, and the machine's memory agrees."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import autoremat as ar
from autoremat._ledger import expand, peak_bytes, price
from autoremat._prices import Prices
from autoremat._regions import describe_all, resolve
from autoremat._replay import RegionSpec, replay
from autoremat._schedule import Action
from machine import run_schedule
from region_choices import region_specs, slack_bytes
from strategies import step_graphs
from zoo import MODELS


@given(step_graphs(nested=False), st.data())
@settings(max_examples=60, deadline=None)
def test_the_machine_accepts_expanded_schedules(graph, data):
    blocks = [
        c.index for c in graph.calls if c.parent == (0 if c.micro_step == 0 else c.parent) and c.path.count(".") == 1
    ]
    chosen = data.draw(st.sets(st.sampled_from(blocks))) if blocks else set()
    specs = [RegionSpec(c) for c in sorted(chosen)]
    schedule = expand(graph, specs)
    assert Prices(graph).peak_bytes(specs) == peak_bytes(graph, schedule)
    workspace = max(op.workspace_bytes for op in graph.ops)
    peak = run_schedule(graph, schedule)
    assert peak <= peak_bytes(graph, schedule) <= peak + workspace


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_machine_accepts_schedules_of_real_models(name, keep):
    case = MODELS[name]()
    graph = ar.trace(case.build(), case.batch, loss=case.loss_fn)
    specs = region_specs(graph, case.paths, keep=keep)
    schedule = expand(graph, specs)
    run_schedule(graph, schedule)
    assert schedule.count(Action.RECOMPUTE) == sum(len(replay(graph, s).ops) for s in specs)
    prices = Prices(graph)
    assert prices.recomputed(specs) == [event.op for event in schedule.events if event.action is Action.RECOMPUTE]
    for some in (specs, specs[::2], specs[1:]):  # what one region does is known from before
        assert prices.peak_bytes(some) == peak_bytes(graph, expand(graph, some))


@pytest.mark.parametrize("kind", ["plain", "recompute", "selective"])
@pytest.mark.parametrize("name", MODELS)
def test_the_predicted_peak_is_the_measured_peak(name, kind):
    case = MODELS[name]()
    model = case.build()
    graph = ar.trace(model, case.batch, loss=case.loss_fn)
    specs = [] if kind == "plain" else region_specs(graph, case.paths, keep=kind == "selective")
    plan = ar.Plan(regions=describe_all(graph, specs))
    assert {(s.call, s.kept) for s in resolve(graph, plan)} == {(s.call, s.kept) for s in specs}
    predicted = peak_bytes(graph, expand(graph, specs))
    usage = ar.measure(model, case.batch, plan, loss=case.loss_fn, num_steps=1, plain=False)
    assert usage.planned.static_bytes == graph.static_bytes
    assert 0 <= predicted - usage.planned.peak_bytes <= slack_bytes(graph, specs)


def test_causes_sum_to_the_peak_and_phases_come_in_order():
    case = MODELS["gpt2"]()
    graph = ar.trace(case.build(), case.batch, loss=case.loss_fn, accumulate=2)
    found = price(graph, expand(graph), [1.0] * len(graph.ops))
    assert sum(found.peak_by_cause.values()) == found.peak_bytes == peak_bytes(graph, expand(graph))
    assert [name for name, _ in found.phases] == ["forward", "backward", "forward", "backward", "optimizer"]
    assert found.step_s == len(graph.ops)
    assert found.flops == graph.flops
    assert max(sum(values) for values in zip(*found.by_cause.values(), strict=True)) == found.peak_bytes


def test_the_highest_moments_are_local_peaks_in_order():
    case = MODELS["gpt2"]()
    graph = ar.trace(case.build(), case.batch, loss=case.loss_fn)
    found = price(graph, expand(graph), [1.0] * len(graph.ops))
    totals = [0, *(sum(values) for values in zip(*found.by_cause.values(), strict=True)), 0]
    first, *others = found.high_moments
    assert (first.at, first.num_bytes) == (found.peak_at, found.peak_bytes)
    sizes = [moment.num_bytes for moment in found.high_moments]
    assert sizes == sorted(sizes, reverse=True)
    assert len({moment.at for moment in found.high_moments}) == len(sizes) > 3
    for moment in found.high_moments:
        point = round(moment.second)  # each op takes a second, and the first ends after one
        assert totals[point] == moment.num_bytes > totals[point - 1]
        assert next(size for size in totals[point:] if size != moment.num_bytes) < moment.num_bytes
    assert others[-1].num_bytes > found.static_bytes


def test_recompute_leaves_out_what_only_stored_outputs_need():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return torch.tanh(self.b(torch.sigmoid(self.a(x))))

    graph = ar.trace(nn.Sequential(Block()), torch.ones(2, 8), loss=lambda y: y.sum(), optimizer=None)
    block = next(c for c in graph.calls if c.path == "0")
    by_name = {graph.ops[i].name: graph.ops[i] for i in range(block.start, block.end)}
    tanh, sigmoid = by_name["aten.tanh.default"], by_name["aten.sigmoid.default"]
    nothing = replay(graph, RegionSpec(block.index))
    assert [graph.ops[i].name.split(".")[1] for i in nothing.ops] == ["addmm", "sigmoid", "addmm", "tanh"]
    assert not nothing.selective
    kept = replay(graph, RegionSpec(block.index, frozenset({tanh.outputs[0]})))
    assert [graph.ops[i].name.split(".")[1] for i in kept.ops] == ["addmm", "sigmoid"]
    both = replay(graph, RegionSpec(block.index, frozenset({tanh.outputs[0], sigmoid.outputs[0]})))
    assert both.ops == ()
    assert both.flops == 0
    assert len(both.skipped) == 4


def test_what_is_alive_says_which_line_made_it():
    case = MODELS["gpt2"]()
    items = ar.profile(ar.trace(case.build(), case.batch, optimizer=None)).alive_at_peak
    by_op = {item.name: item for item in items if item.cause == "activation" and "h.0.attn" in item.module}
    assert by_op["aten._safe_softmax.default"].line.startswith("transformers/integrations/sdpa_attention.py:")
    assert all(item.line == "" for item in items if item.cause == "parameter")
    graph = ar.trace(nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4), loss=lambda y: (y * y).exp().sum())
    made = next(op for op in graph.ops if op.name == "aten.exp.default")
    assert made.line.rpartition("/")[2].split(":")[0] == "test_ledger.py"
    assert {op.line for op in graph.ops if op.phase != "forward"} == {""}


@pytest.mark.parametrize("num_threads", [1, 2])
def test_workspaces_are_those_of_the_threads_at_hand(num_threads):
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        case = MODELS["resnet"]()
        model = case.build()
        predicted = ar.profile(ar.trace(model, case.batch, loss=case.loss_fn)).peak_bytes
        measured = ar.measure(model, case.batch, loss=case.loss_fn, num_steps=1).planned.peak_bytes
    finally:
        torch.set_num_threads(before)
    assert predicted == measured

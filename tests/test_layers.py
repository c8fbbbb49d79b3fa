"""The map of layers: rows add up to what ledger and graph say, each storage once."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

import autoremat as ar
from autoremat import Plan, Region, Report, UsageError
from autoremat._step_graph import BEFORE_STEP


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(16, 64), nn.Linear(64, 16), nn.Dropout(0.5)

    def forward(self, x):
        return x + self.drop(self.down(self.up(x).relu()))


class _Net(nn.Module):
    """Three blocks, one of them called twice, and a parameter of a module that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(3))
        self.holder = nn.Module()
        self.holder.scale = nn.Parameter(torch.ones(16))

    def forward(self, x):
        for block in (*self.blocks, self.blocks[1]):
            x = block(x)
        return (x * self.holder.scale).square().mean()


@pytest.fixture(scope="module")
def graph():
    return ar.trace(_Net(), torch.ones(32, 16))


PLAN = Plan(
    regions=(Region("blocks.0", then=()), Region("blocks.1"), Region("blocks.2", children=(Region("blocks.2.up"),)))
)


def _rows(found):
    return {row.path: row for row in found.layers}


def test_rows_add_up(graph):
    found = ar.layers(graph, PLAN)
    root = found.layers[0]
    for name in root.total.to_dict():
        own = sum(getattr(row.own, name) for row in found.layers)
        assert own == pytest.approx(getattr(root.total, name), rel=1e-12)
    assert root.total.flops == graph.flops
    assert root.total.recomputed_flops == ar.profile(graph, PLAN).recomputed_flops > 0
    assert root.total.parameter_bytes == sum(p.numel() * 4 for p in _Net().parameters())
    assert sum(op.num_calls for op in found.ops) == len(graph.ops)
    assert sum(op.cost.plain_bytes for op in found.ops) == root.total.plain_bytes
    assert sum(op.cost.seconds for op in found.ops) > root.total.seconds, "the optimizer is no layer's"


def test_bytes_are_those_alive_when_backward_begins(graph):
    """By brute force: what was born before the first op of backward, and is read or released after it began."""
    turn = next(op.index for op in graph.ops if op.phase == "backward")
    last = {s.index: s.last_ref for s in graph.storages}
    for saved in graph.saved:
        last[saved.storage] = max(last[saved.storage], saved.released)
    alive = [s for s in graph.storages if BEFORE_STEP < s.born < turn < last[s.index]]
    assert ar.layers(graph).layers[0].total.plain_bytes == sum(s.num_bytes for s in alive) > 0


def test_a_plan_says_what_it_does_to_each_layer(graph):
    rows = _rows(ar.layers(graph, PLAN))
    assert rows["blocks.1"].num_calls == 2
    assert (rows["blocks.1"].treatment, rows["blocks.1"].note) == ("region", "stores its inputs")
    assert rows["blocks.1.up"].treatment == "inside"
    assert rows["blocks.2"].note == "stores its inputs; 1 region inside"
    assert rows["blocks.2.up"].treatment == "region"
    assert rows[""].treatment == ""
    assert rows["blocks.0"].total.planned_bytes < rows["blocks.0"].total.plain_bytes
    assert rows["blocks.0"].total.recomputed_flops == 2 * (2 * 32 * 16 * 64), (
        "up and down: a plan by hand skips nothing"
    )
    assert rows["blocks.0"].own.parameter_bytes == 0
    assert rows[""].own.parameter_bytes == 16 * 4, "the holder is never called: the nearest that is has its parameter"


def test_random_states_that_a_region_holds_are_its_own(graph):
    row = _rows(ar.layers(graph, PLAN))["blocks.0"]
    assert row.own.planned_bytes == graph.rng_state_bytes > 0, "its argument is the batch, which is there anyway"


def test_every_point_of_a_profile_says_what_happens(graph):
    found = ar.profile(graph, PLAN)
    assert len(found.events) == len(found.seconds)
    assert {event.action for event in found.events} == {"forward", "recompute", "backward", "optimizer"}
    assert found.peak_at == ", ".join(
        [(e := found.events[found.peak_point]).action, e.module or "the model itself", e.op]
    )


def test_a_report_from_python(graph, tmp_path):
    curve = ar.frontier(graph, num_points=4, classics=True)
    report = ar.report(graph, plan=curve.plan(curve.plain_bytes - 1), frontier=curve, name="net")
    assert isinstance(report, Report)
    assert report.section.plan.planned.peak_bytes < curve.plain_bytes
    assert report.section.frontier.classics
    assert report.section.layers == ar.layers(graph, report.section.plan)
    for name in ("a.html", "a.json", "a.svg"):
        report.save(tmp_path / name)
    assert (tmp_path / "a.html").read_text() == report.to_html()
    assert "<iframe srcdoc=" in report._repr_html_()
    assert pickle.loads(pickle.dumps(report.section.layers)) == report.section.layers
    with pytest.raises(UsageError, match=r"\.html"):
        report.save(tmp_path / "a.txt")
    with pytest.raises(UsageError, match="Cannot write"):
        report.save(tmp_path / "no" / "a.html")


def test_a_report_wants_one_thing_of_each_kind(graph):
    with pytest.raises(UsageError, match="not both"):
        ar.report(graph, plan=PLAN, budget="1GiB")
    with pytest.raises(UsageError, match="needs a batch"):
        ar.report(_Net())
    with pytest.raises(UsageError, match="already"):
        ar.report(graph, torch.ones(1))
    plain = ar.report(graph, frontier=False)
    assert (plain.section.plan, plain.section.frontier, plain.section.planned) == (None, None, None)

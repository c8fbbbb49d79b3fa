"""What is around the model in a step: tied and frozen parameters, gradients, and any optimizer's state."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoremat as ar
from autoremat._ledger import expand, peak_bytes
from autoremat._model_states import StatesFactory

IDS = torch.arange(32).remainder(64).view(2, 16)
EMBEDDING, HIDDEN, FROZEN = 4 * 64 * 32, 4 * (2 * 32 * 64 + 64 + 32), 4 * (32 * 32 + 32)
TRAINED = EMBEDDING + HIDDEN


class Tied(nn.Module):
    """An embedding that is the head too, a layer that trains, a layer that is frozen."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.hidden = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(self.frozen(x + self.hidden(x)))


def loss_of(logits):
    return F.cross_entropy(logits.flatten(0, 1), IDS.flatten())


class Lazy(torch.optim.Optimizer):
    """State of several dtypes and shapes, some of it in a list, made at the first step."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            if not state:
                state["half"] = torch.zeros_like(p, dtype=torch.bfloat16)
                state["rows"] = torch.zeros(len(p))
                state["history"] = [torch.zeros_like(p) for _ in range(2)]
            state["half"].lerp_(p.grad.to(torch.bfloat16), 0.1)
            state["rows"].add_(p.grad.flatten(1).sum(1) if p.dim() > 1 else p.grad)
            state["history"][0].copy_(p.grad)
            p.sub_(state["half"].float(), alpha=1e-3)


def grouped(params):
    """Options by group: weight decay for matrices, a third state for the rest."""
    params = list(params)
    return torch.optim.AdamW(
        [
            {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0, "amsgrad": True},
        ]
    )


def muon(params):
    return torch.optim.Muon([p for p in params if p.dim() == 2])


NUM_TRAINED = 5
MATRICES = EMBEDDING + 4 * 2 * 32 * 64
STATE_BYTES = {
    "sgd": 0,
    "sgd-momentum": TRAINED,
    "sgd-momentum:foreach": TRAINED,
    "adamw": 2 * TRAINED + 4 * NUM_TRAINED,
    "adamw:fused": 2 * TRAINED + 4 * NUM_TRAINED,
    "adamw:foreach": 2 * TRAINED + 4 * NUM_TRAINED,
    "lazy": TRAINED // 2 + 4 * (64 + 64 + 64 + 32 + 32) + 2 * TRAINED,
    "grouped": 2 * TRAINED + (TRAINED - MATRICES) + 4 * NUM_TRAINED,
    "muon": MATRICES,
    "nadam": 2 * TRAINED + 8 * NUM_TRAINED,
    "adafactor": None,
    "adafactor:foreach": None,
}
FACTORIES = {"lazy": Lazy, "grouped": grouped, "muon": muon, "nadam": torch.optim.NAdam}


@pytest.mark.parametrize("name", STATE_BYTES)
def test_an_optimizer_has_its_state_and_the_step_its_peak(name):
    torch.manual_seed(0)
    model, optimizer = Tied(), FACTORIES.get(name, name)
    graph = ar.trace(model, IDS, loss=loss_of, optimizer=optimizer)
    usage = ar.measure(model, IDS, loss=loss_of, optimizer=optimizer, num_steps=1).planned
    sums = bytes_by_cause(graph)
    if STATE_BYTES[name] is not None:
        assert sums.get("optimizer_state", 0) == STATE_BYTES[name]
    assert sums["parameter"] == TRAINED + FROZEN
    assert sums["gradient"] == TRAINED
    assert graph.static_bytes == usage.static_bytes
    assert peak_bytes(graph, expand(graph)) == usage.peak_bytes


def bytes_by_cause(graph):
    sums = {}
    for storage in graph.storages:
        sums[storage.cause] = sums.get(storage.cause, 0) + storage.num_bytes
    return sums


def test_tied_parameters_count_once_and_frozen_ones_have_neither_gradient_nor_state():
    graph = ar.trace(Tied(), IDS, loss=loss_of, optimizer="sgd-momentum")
    names = {cause: [s.label for s in graph.storages if s.cause == cause] for cause in ("parameter", "gradient")}
    trained = ["embed.weight", "hidden.0.weight", "hidden.0.bias", "hidden.2.weight", "hidden.2.bias"]
    assert names["parameter"] == [*trained, "frozen.weight", "frozen.bias"]
    assert sorted(names["gradient"]) == sorted(trained)
    assert [s.label for s in graph.storages if s.cause == "optimizer_state"] == [
        f"{name}.momentum_buffer" for name in trained
    ]


def test_gradients_appear_in_the_order_of_backward():
    graph = ar.trace(Tied(), IDS, loss=loss_of)
    born = {s.label: s.born for s in graph.storages if s.cause == "gradient"}
    assert sorted(born, key=born.__getitem__)[:2] != ["embed.weight", "hidden.0.weight"]
    assert born["hidden.2.weight"] < born["hidden.0.weight"]


@pytest.mark.parametrize("gradients", ["fresh", "kept"])
def test_parameters_that_the_optimizer_leaves_out_get_fresh_gradients_too(gradients):
    graph = ar.trace(Tied(), IDS, loss=loss_of, optimizer=muon, gradients=gradients)
    static = TRAINED + FROZEN + IDS.nbytes + MATRICES + (TRAINED if gradients == "kept" else 0)
    assert graph.static_bytes == static


def average_of_every(model):
    """An average that takes temporaries: one parameter at a time, by a formula of Python's."""
    return torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda mean, new, n: mean * 0.9 + new * 0.1)


AROUND = {
    "scaler": ({"scaler": True}, 8, 0),
    "ema": ({"ema": True}, 0, TRAINED + FROZEN + 8),
    "both": ({"scaler": True, "ema": True}, 8, TRAINED + FROZEN + 8),
    "own average": ({"ema": average_of_every}, 0, TRAINED + FROZEN + 8),
}


@pytest.mark.parametrize("precision", [None, "amp-fp16"])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw:fused", Lazy])
@pytest.mark.parametrize("case", AROUND)
def test_scaler_and_average_are_counted_and_the_peak_is_the_measured_one(case, optimizer, precision):
    options, scaler_bytes, average_bytes = AROUND[case]
    options = options | {"optimizer": optimizer, "precision": precision}
    torch.manual_seed(0)
    model = Tied()
    plain = ar.trace(model, IDS, loss=loss_of, optimizer=optimizer, precision=precision)
    graph = ar.trace(model, IDS, loss=loss_of, **options)
    usage = ar.measure(model, IDS, loss=loss_of, num_steps=1, **options).planned
    kept, sums = bytes_by_cause(plain), bytes_by_cause(graph)
    assert sums["optimizer_state"] == kept["optimizer_state"] + scaler_bytes
    assert sums.get("ema", 0) == average_bytes
    assert graph.static_bytes == plain.static_bytes + scaler_bytes + average_bytes == usage.static_bytes
    assert peak_bytes(graph, expand(graph)) == usage.peak_bytes
    if "scaler" in options:
        assert any("non_finite_check_and_unscale" in op.name for op in graph.ops)


def regions(*paths):
    return ar.Plan(regions=tuple(ar.Region(path) for path in paths))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw:fused", "sgd-momentum"])
def test_verify_sees_the_overflow_left_out_and_the_next_step_taken(optimizer, accumulate):
    torch.manual_seed(0)
    model = Tied()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    options = {"optimizer": optimizer, "precision": "amp-fp16", "accumulate": accumulate, "ema": True}
    report = ar.verify(model, IDS, regions("hidden"), loss=loss_of, scaler=True, **options)
    assert report.equal, report.differences
    assert report.num_skipped_steps == 1
    assert report.num_recomputed_regions == 2 * accumulate
    assert report.num_compared["parameter"] == 2 * len(list(model.parameters()))
    assert report.num_compared["loss"] == 2
    assert report.num_compared["ema"] == 2 * (len(list(model.parameters())) + 1)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_verify_names_the_parameters_and_state_that_a_wrong_gradient_reaches():
    model = nn.Sequential(nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 32), nn.Tanh()))
    runs = itertools.count(1)
    model[0].weight.register_hook(lambda gradient: gradient * next(runs))  # another gradient in every run
    options = {"optimizer": "sgd-momentum", "scaler": True, "ema": True, "precision": "amp-fp16"}
    report = ar.verify(model, torch.ones(2, 32), regions("1"), loss=lambda y: y.square().mean(), **options)
    assert {(d.kind, d.name) for d in report.differences} == {
        ("gradient", "0.weight"),
        ("parameter", "0.weight"),
        ("optimizer state", "0.weight.momentum_buffer"),
        ("ema", "ema.module.0.weight"),
    }


def test_states_that_cannot_stand_together_are_refused():
    model = nn.Linear(4, 1)
    for call in (ar.trace, ar.measure):
        with pytest.raises(ar.UsageError, match="optimizer step"):
            call(model, torch.ones(2, 4), loss=lambda y: y.mean(), optimizer=None, ema=True)
        with pytest.raises(ar.UsageError, match="amp-fp16"):
            call(model, torch.ones(2, 4), loss=lambda y: y.mean(), scaler=True, precision="fp16")
    with pytest.raises(ar.UsageError, match="optimizer="):
        ar.verify(model, torch.ones(2, 4), regions(), loss=lambda y: y.mean(), scaler=True)


def test_a_scaler_says_how_it_scales():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=7)
    states = StatesFactory.parse("sgd", scaler=scaler).build(nn.Linear(2, 2))
    assert states.scaler is not scaler
    assert states.scaler.state_dict() == scaler.state_dict()
    off = torch.amp.GradScaler("cpu", enabled=False)
    assert StatesFactory.parse("sgd", scaler=off).build(nn.Linear(2, 2)).scaler is None

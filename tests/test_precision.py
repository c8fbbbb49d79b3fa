"""Low precision beside fp32: how far gradients are apart, and in which layers."""

from __future__ import annotations

import io
import math

import pytest
import torch
from torch import nn

import autoremat as ar
from autoremat import _tables

X = torch.linspace(-1, 1, 64).view(4, 16)
NO_PLAN = ar.Plan(regions=())


class Cancels(nn.Module):
    """A layer whose gradient depends on a small difference of large numbers: bfloat16 loses it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 16)
        self.fragile = nn.Linear(16, 16)
        self.last = nn.Linear(16, 1)

    def forward(self, x):
        lost = (self.fragile(x) + 1000.0) - 1000.0
        return self.last(self.first(x)).square().mean() + lost.square().mean()


def layers_of(model, precision, **options):
    report = ar.verify(model, X, NO_PLAN, precision=precision, against_fp32=True, **options)
    assert report.equal
    return {layer.path: layer for layer in report.layers}


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.3), nn.Linear(32, 1))


def mean_square(y):
    return y.float().square().mean()


def test_fp32_against_itself_does_not_differ():
    layers = layers_of(mlp(), None, loss=mean_square)
    assert {path: layer.difference for path, layer in layers.items()} == {"0": 0.0, "3": 0.0}


def test_norms_are_those_of_each_layers_gradients():
    model = mlp().eval()
    model[2].p = 0.0
    layers = layers_of(model, "amp-bf16", loss=mean_square)
    mean_square(model(X)).backward()
    for path in ("0", "3"):
        gradients = [p.grad.flatten() for p in model.get_submodule(path).parameters()]
        assert layers[path].fp32_norm == pytest.approx(float(torch.cat(gradients).norm()), rel=1e-5)
        assert 0 < layers[path].difference < 0.1
        assert not layers[path].is_large


def test_dropout_is_the_same_in_both():
    layers = layers_of(mlp(), "amp-bf16", loss=mean_square)
    assert all(0 < layer.difference < 0.1 for layer in layers.values())


def test_the_layer_where_precision_is_lost_is_named():
    model = Cancels().to(torch.bfloat16)
    report = ar.verify(model, X.to(torch.bfloat16), NO_PLAN, against_fp32=True)
    assert [layer.path for layer in report.layers if layer.is_large] == ["fragile"]
    assert report.layers[0].path == "fragile"
    assert all(p.grad is None for p in model.parameters())
    assert model.first.weight.dtype == torch.bfloat16


class Tiny(nn.Module):
    """Gradients below what float16 can hold, unless the loss is scaled."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return self.head(self.body(x)).float().square().mean() * 1e-6


def test_a_scaler_brings_back_gradients_that_fp16_loses():
    alone = layers_of(Tiny(), "amp-fp16")
    scaled = layers_of(Tiny(), "amp-fp16", scaler=True, optimizer="sgd")
    assert alone["body"].is_large
    assert not scaled["body"].is_large
    assert scaled["body"].difference < alone["body"].difference


class Overflows(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(16, 16)

    def forward(self, x):
        return (self.body(x) * 1e4).float().square().mean() * 1e4


def test_a_gradient_that_is_not_finite_is_infinitely_far():
    layers = layers_of(Overflows(), "amp-fp16")
    assert math.isinf(layers["body"].difference)
    assert layers["body"].is_large


def test_the_table_names_the_layers():
    from rich.console import Console

    report = ar.verify(Tiny(), X, NO_PLAN, precision="amp-fp16", against_fp32=True)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(_tables.verify_table(report))
    text = console.export_text()
    assert "gradients against fp32" in text
    assert "body" in text
    assert report.to_dict()["layers"][0]["path"] == report.layers[0].path

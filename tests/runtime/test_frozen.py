"""Frozen parameters: spans whose first calls save nothing, and every plan of a frontier whatever is trained."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
import torch
from torch import nn

import autoremat as ar
from autoremat._plan import Plan
from autoremat._regions import describe_all, resolve
from autoremat.runtime import apply
from chains import Chain, random_regions, span, with_random_saves
from comparing import assert_equal_to_plain
from reference import is_legal

BATCH = (torch.ones(2, 4, 16),)
PATTERNS = ["h.4.", "h.3.up", "h.5.down.bias", "h.1.norm", "h.0.up", "up.bias"]
"""What is trained: all that has this in its name."""


def only(model: nn.Module, *trained: str) -> nn.Module:
    """The model, of which only parameters with one of these in their names are trained."""
    for name, p in model.named_parameters():
        p.requires_grad_(any(part in name for part in trained))
    return model


@pytest.mark.parametrize("number", range(20))
def test_random_nests_with_stored_outputs(number):
    choose = random.Random(number)
    model = only(Chain(6, dropout=0.2, link=choose.choice(["same", "tuple", "glue"])), choose.choice(PATTERNS))
    graph = ar.trace(model, BATCH, optimizer=None)
    hand = resolve(graph, Plan(tuple(random_regions(choose, 0, 5, 2))))
    specs = [with_random_saves(choose, graph, spec) for spec in hand]
    assert_equal_to_plain(model, BATCH, Plan(describe_all(graph, specs if is_legal(graph, specs) else hand)))


@pytest.mark.parametrize("children", [(), [span(1, 3)], [span(0, 1)]])
def test_a_span_is_one_region_though_its_first_calls_save_nothing(children):
    model = only(Chain(4, dropout=0.2), "h.3")
    (executed, *_) = assert_equal_to_plain(model, BATCH, Plan((span(0, 3, children),)))
    assert (executed.num_calls, executed.num_recomputes) == (2, 2)


def test_a_span_that_is_left_early_holds_nothing_after_forward():
    model = only(Chain(4), "h.3")
    held = []
    model.h[0].register_forward_pre_hook(lambda _, args: held.append(weakref.ref(args[0])))
    model.h[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with apply(model, Plan((span(0, 3),))):
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(2, 4, 16))
        gc.collect()
        assert held[0]() is None


class Adapted(nn.Module):
    """A linear layer with an adapter of low rank, as in LoRA."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base, self.drop = nn.Linear(width, width, bias=False), nn.Dropout(0.1)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(self.drop(x))) * 2.0


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.query, self.out = nn.LayerNorm(width), Adapted(width), nn.Linear(width, width)

    def forward(self, x, positions):
        y = self.norm(x)
        return x + self.out(torch.tanh(self.query(y) * positions))


class Positions(nn.Module):
    """What a rotary embedding is: no parameter, and nothing that autograd saves."""

    def forward(self, x):
        return torch.arange(x.shape[1]).float()[None, :, None].cos() * 0.5


class Adapters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.positions, self.head = nn.Embedding(16, 8), Positions(), nn.Linear(8, 16)
        self.h = nn.ModuleList(Layer(8) for _ in range(2))

    def forward(self, ids):
        x = self.embed(ids)
        positions = self.positions(x)
        for layer in self.h:
            x = layer(x, positions)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("trained", [("query.down", "query.up"), ("query.up", "norm.bias"), ("embed",)])
def test_every_plan_of_the_frontier_can_be_run(trained):
    ids = torch.arange(256).reshape(4, 64) % 16
    model = only(Adapters(), *trained)
    frontier = ar.frontier(ar.trace(model, ids, optimizer=None))
    for point in frontier.points:
        report = ar.verify(model, ids, frontier.plan(point.peak_bytes))
        assert report.equal, report

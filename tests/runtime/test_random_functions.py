"""Random networks of modules and functions under random regions over both: plain's numbers, bytes as predicted."""

import dataclasses
import os
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoremat as ar
from autoremat._dry_run import dry_run
from autoremat._plan import Plan
from autoremat._regions import describe_all, resolve
from autoremat._replay import Extent, RegionSpec, obstacle
from chains import functions_in, with_random_saves
from comparing import assert_equal_to_plain, seed
from reference import is_legal

WIDTH = 16
BATCH = (torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH),)
STEPS = ("linear", "tanh", "relu_", "skip", "drop", "view", "cat", "mul", "module", "add_", "chunk", "norm", "grad")


class Random(nn.Module):
    """Random steps, some of them of modules and most of them of functions; blocks of them inside."""

    def __init__(self, choose, depth):
        super().__init__()
        self.steps = choose.choices(STEPS, k=choose.randint(2, 7))
        self.layers = nn.ModuleList(self._layer(step, choose, depth) for step in self.steps)
        self.weight = nn.Parameter(torch.linspace(0.5, 1, WIDTH))

    def _layer(self, step, choose, depth):
        if step == "module" and depth:
            return Random(choose, depth - 1)
        return nn.BatchNorm1d(WIDTH) if step == "norm" else nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        start = x
        for step, layer in zip(self.steps, self.layers, strict=True):
            x = self.step(step, layer, x, start)
        return x

    def step(self, step, layer, x, start):
        match step:
            case "linear":
                return F.linear(x, layer.weight, layer.bias)
            case "tanh":
                return torch.tanh(x)
            case "relu_":
                return F.relu(x * 2, inplace=True)
            case "skip":
                return x + start
            case "drop":
                return F.dropout(x, 0.3)
            case "view":
                return x.view(-1, 2).t().reshape(x.shape)
            case "cat":
                return torch.cat([x[:, : WIDTH // 2].exp(), start.narrow(1, 0, WIDTH // 2)], dim=1).sin()
            case "mul":
                return x * self.weight
            case "add_":
                y = x * 0.5
                y += start
                return y
            case "chunk":
                left, right = x.chunk(2, dim=1)
                return torch.cat((right.sigmoid(), left), dim=1)
            case "grad":
                with torch.no_grad():
                    scale = x.abs().mean()
                return x / (1 + scale)
            case _:
                return layer(x)


def random_network(choose):
    seed()
    model = nn.Sequential(*(Random(choose, 1) for _ in range(choose.randint(1, 2))))
    model.append(nn.Linear(WIDTH, WIDTH))
    return model


def random_spans(choose, graph, calls, depth):
    """Regions of some of these sibling calls, with others inside."""
    found, at = [], 0
    while at < len(calls):
        size = choose.randint(1, min(6, len(calls) - at))
        own = calls[at : at + size]
        at += size
        if choose.random() < 0.3 or obstacle(graph, *own) is not None:
            continue
        inside = []
        if depth and size > 1:
            inside = [s for s in random_spans(choose, graph, own, depth - 1) if len(s.calls) < size]
        elif depth:
            inside = random_spans(choose, graph, children(graph, own[0]), depth - 1)
        found.append(RegionSpec(own[0], then=tuple(own[1:]), children=tuple(inside)))
    return found


def unchanged(graph, spec):
    """A region that stores nothing which an op outside of it changes: recompute would refuse that."""
    inside = set(Extent(graph, spec.calls).indices())
    changed = {s for op in graph.ops if op.index not in inside for s in op.mutates}
    return dataclasses.replace(
        spec, kept=spec.kept - changed, children=tuple(unchanged(graph, child) for child in spec.children)
    )


def children(graph, call):
    return [c.index for c in graph.calls if c.parent == call]


def check_random(number):
    """Train a random network under random regions; returns the plan."""
    choose = random.Random(number)
    model = random_network(choose)
    graph = ar.trace(model, BATCH[0], optimizer=None, loss=square)
    top = children(graph, 0)
    around = choose.choice([top, *(children(graph, call) for call in top)])
    hand = random_spans(choose, graph, around, 2)
    specs = [with_random_saves(choose, graph, spec) for spec in hand]
    specs = [unchanged(graph, spec) for spec in specs]
    specs = next(some for some in (specs, hand, []) if is_legal(graph, some))
    plan = Plan(describe_all(graph, specs))
    assert_equal_to_plain(model, BATCH, plan, square)
    assert specs == [] or sorted(s.calls for s in resolve(graph, plan)) == sorted(s.calls for s in specs)
    return plan


def square(y):
    return y.square().sum()


def test_random_networks(all_functions):
    plans = [check_random(number) for number in range(40)]
    assert len({path.rpartition(".")[2] for plan in plans for path in functions_in(plan.regions)}) > 10


@pytest.mark.slow
def test_many_random_networks(all_functions):
    for number in range(1000, 1000 + int(os.environ.get("AUTOREMAT_EXAMPLES", "200"))):
        check_random(number)


@pytest.mark.parametrize("number", range(6))
def test_random_regions_take_the_bytes_that_the_ledger_predicts(all_functions, number):
    choose = random.Random(number)
    model, batch = random_network(choose), (torch.ones(512, WIDTH),)
    graph = ar.trace(model, batch, optimizer=None, loss=square)
    specs = [s for call in children(graph, 0) for s in random_spans(choose, graph, children(graph, call), 0)]
    plan = Plan(describe_all(graph, specs))
    predicted = ar.profile(graph, plan).peak_bytes
    dry = dry_run(model, batch, plan, optimizer=None, loss=square).peak_bytes
    measured = ar.measure(model, batch, plan, optimizer=None, loss=square, num_steps=0, plain=False).planned.peak_bytes
    assert predicted == dry == measured

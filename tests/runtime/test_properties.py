"""Random small networks under random legal plans: bit for bit the plain run."""

import copy
import itertools
import os
import random
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import autoremat.runtime as ar
from autoremat._plan import CallName, Plan, Region
from comparing import assert_same, seed, train
from region_recording import keepable, record, region

WIDTH = 6
OPS = (
    "linear", "shared", "tanh", "relu_", "dropout", "skip", "norm", "add_", "view", "chunk", "mask", "branch",
    "counter", "buffer", "exp", "detach", "softmax",
)  # fmt: skip
KINDS = ("none", "whole", "selective", "children", "spans", "spans of blocks", "spans across blocks")
"""What regions a plan has in a block."""


class Random(nn.Module):
    """A chain of randomly chosen small pieces: branches, skips, shared modules, dropout, in-place ops, views."""

    def __init__(self, ops, shared):
        super().__init__()
        self.ops = tuple(ops)
        self.shared = shared
        self.layers = nn.ModuleList(self._layer(op) for op in ops)
        self.register_buffer("average", torch.zeros(WIDTH))
        self.calls = 0

    def _layer(self, op):
        if op in ("linear", "branch"):
            return nn.Linear(WIDTH, WIDTH)
        if op == "norm":
            return nn.BatchNorm1d(WIDTH)
        return nn.Dropout(0.3) if op == "dropout" else nn.Identity()

    def forward(self, x, options):
        start = x
        for op, layer in zip(self.ops, self.layers, strict=True):
            x = self.step(op, layer, x, start, options)
        return x

    def step(self, op, layer, x, start, options):  # noqa: C901
        match op:
            case "linear" | "norm" | "dropout":
                return layer(x)
            case "shared":
                return self.shared(x)
            case "tanh" | "exp" | "detach":
                return x.tanh() if op == "tanh" else (-x.abs()).exp() if op == "exp" else x * x.detach().tanh()
            case "relu_":
                return torch.relu_(x * 1.5)
            case "skip":
                return x + start
            case "add_":
                return (x * 0.5).add_(options["scale"][0])
            case "view":
                return x.view(-1, 2).t().reshape(x.shape)
            case "chunk":
                a, b = x.chunk(2, dim=1)
                return torch.cat([b.sigmoid(), a], dim=1)
            case "mask":
                return x if options["mask"] is None else x * options["mask"]
            case "branch":
                return layer(x) if random.random() < 0.5 else x.sin()
            case "counter":
                self.calls += 1
                return x / self.calls
            case "buffer":
                with torch.no_grad():
                    self.average.lerp_(x.mean(0), 0.5)
                return x - self.average.clone()
            case _:
                return x.softmax(-1)


class Net(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        shared = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.ModuleList(Random(ops, shared) for ops, _ in blocks)
        self.order = tuple(i for i, (_, times) in enumerate(blocks) for _ in range(times))

    def forward(self, x):
        options = {"scale": (2.0, None), "mask": torch.ones(WIDTH).cumsum(0)}
        for i in self.order:
            x = self.inner[i](x, options)
        return x


blocks = st.lists(
    st.tuples(st.lists(st.sampled_from(OPS), min_size=1, max_size=7), st.integers(1, 2)), min_size=1, max_size=4
)


def spans(choose, paths, depth=2):
    """Random spans of these modules, some of them with regions inside."""
    found, at = [], 0
    while at < len(paths):
        size = choose.randint(1, len(paths) - at)
        names = paths[at : at + size]
        if choose.random() < 0.7:
            inner = spans(choose, names, depth - 1) if depth else ()
            children = tuple(r for r in inner if len(r.calls) < size)
            then = tuple(CallName(name) for name in names[1:])
            found.append(Region(names[0], then=then, children=children))
        at += size
    return tuple(found)


def block_regions(choose, shape, i, model, x):
    """Regions in one block, and their kind."""
    (ops, times), path = shape[i], f"inner.{i}"
    kind = choose.choice(["none", "whole", "selective", "selective", "children", "spans"])
    if kind == "selective" and ("branch" in ops or times > 1):
        kind = "whole"  # another draw takes another path: what is stored of one call does not fit another
    if kind == "whole":
        return kind, [Region(path, number=choose.choice([None, 0]))]
    if kind == "selective":
        seed(1)
        recording = record(copy.deepcopy(model), path, lambda m: m(x))
        return kind, [region(path, recording, [s for s in keepable(recording) if choose.random() < 0.5])]
    if kind == "children":
        inside = [Region(f"{path}.layers.{j}") for j in range(len(ops)) if choose.random() < 0.5]
        return kind, [Region(path, children=tuple(inside))]
    return kind, spans(choose, [f"{path}.layers.{j}" for j in range(len(ops))]) if kind == "spans" else ()


def check(shape, choice):
    """Train such a network plain and under a plan; returns the kind of regions in each block."""
    choose = random.Random(choice)
    seed()
    model = Net(shape).train()
    x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH).requires_grad_()
    kind = choose.random()
    if kind < 0.2:
        kinds, regions = ["spans of blocks"] * len(shape), spans(choose, [f"inner.{i}" for i in range(len(shape))])
    elif kind < 0.4:
        layers = [f"inner.{i}.layers.{j}" for i, (ops, _) in enumerate(shape) for j in range(len(ops))]
        kinds, regions = ["spans across blocks"] * len(shape), spans(choose, layers)
    else:
        kinds, found = zip(*[block_regions(choose, shape, i, model, x) for i in range(len(shape))], strict=True)
        regions = itertools.chain.from_iterable(found)
    expected = train(copy.deepcopy(model), (x,), lambda y: y.square().sum())
    ar.apply(model, Plan(tuple(regions)), check="always")
    assert_same(expected, train(model, (x,), lambda y: y.square().sum()))
    return kinds


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(blocks, st.integers(0, 1000))
def test_random_networks_under_random_plans(shape, choice):
    check(shape, choice)


def random_shape(choose):
    """As ``blocks`` draws them, but never only one, and at a fifth of the cost."""
    return [(choose.choices(OPS, k=choose.randint(1, 7)), choose.randint(1, 2)) for _ in range(choose.randint(2, 4))]


@pytest.mark.slow
def test_many_random_networks_under_random_plans():
    covered = Counter()
    for number in range(int(os.environ.get("AUTOREMAT_EXAMPLES", "400"))):
        choose = random.Random(number)
        shape = random_shape(choose)
        kinds = check(shape, choose.randrange(1000))
        covered.update((op, kind) for (ops, _), kind in zip(shape, kinds, strict=True) for op in set(ops))
    possible = set(itertools.product(OPS, KINDS)) - {("branch", "selective")}
    assert min(covered[pair] for pair in possible) >= 10, covered

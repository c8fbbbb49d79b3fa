"""Live bytes of planned steps: what is held, until when, and that nothing is left."""

import functools
import gc
import random
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import autoremat.runtime as ar
from autoremat._plan import CallName, OpCall, Plan, Region, SavedOutput

WIDTH = 1000
UNIT = 4 * WIDTH


class Live(TorchDispatchMode):
    """Bytes of storages born under it: how many are alive, and the most there ever were."""

    def __init__(self, *known):
        super().__init__()
        self.now = self.peak = 0
        self.seen = {tensor.untyped_storage()._cdata: None for tensor in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf.untyped_storage())
        return out

    def add(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key in self.seen or not size:
            return
        self.now += size
        self.peak = max(self.peak, self.now)
        self.seen[key] = weakref.ref(storage, functools.partial(self.free, key, size))

    def free(self, key, size, _):
        if self.seen.pop(key, None) is not None:
            self.now -= size


@pytest.fixture(autouse=True, scope="module")
def warm():
    """What torch imports and keeps at its first dispatch mode and first backward is no part of a measurement."""
    for _ in range(2):
        with Live():
            torch.randn(4, requires_grad=True).tanh().sum().backward()
    gc.collect()


class Tanh(nn.Module):
    def forward(self, x):
        return x.tanh()


class Span(nn.Module):
    """Children in a row: a binary or flat tree of modules with tanh layers as leaves."""

    def __init__(self, *children):
        super().__init__()
        self.parts = nn.ModuleList(children)

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x


def tree(factors):
    """A tree of spans with these fan-outs, outermost first; leaves are layers."""
    if not factors:
        return Tanh()
    return Span(*[tree(factors[1:]) for _ in range(factors[0])])


def regions(factors, path=""):
    """A region for every span below the root."""
    if len(factors) == 1:
        return ()
    prefix = f"{path}." if path else ""
    return tuple(
        Region(f"{prefix}parts.{i}", children=regions(factors[1:], f"{prefix}parts.{i}")) for i in range(factors[0])
    )


def peak_units(factors, *, planned):
    """Peak of forward and backward in units of a layer's output, after a first step."""
    model = tree(factors)
    if planned:
        ar.apply(model, Plan(regions(factors)), check="never")
    x = torch.randn(WIDTH, requires_grad=True)
    model(x).sum().backward()
    gc.collect()
    gc.disable()
    try:
        with Live(x) as live:
            model(x).sum().backward()
    finally:
        gc.enable()
    assert live.now <= UNIT  # the gradient
    return live.peak / UNIT


def test_flat_and_nested_regions_of_64_layers():
    plain = peak_units([64], planned=False)
    flat = peak_units([8, 8], planned=True)
    nested = peak_units([4, 4, 4], planned=True)
    binary = peak_units([2] * 6, planned=True)
    assert 64 <= plain < 67
    # Inputs of 8 regions and the 8 layers of one, and what backward has in flight.
    assert flat < 8 + 8 + 3
    assert nested < 4 + 4 + 4 + 3
    assert binary < 6 + 2 + 4


@pytest.mark.parametrize("levels", [4, 6, 8, 10])
def test_recursive_regions_grow_with_the_logarithm(levels):
    assert peak_units([2] * levels, planned=True) < levels + 6


def test_flat_regions_grow_with_the_square_root():
    for side in (4, 8, 16, 32):
        assert peak_units([side, side], planned=True) < 2 * side + 3


def test_nested_regions_recompute_each_level_once():
    factors = [2, 2, 2]
    model = tree(factors)
    calls = []
    for name, module in model.named_modules():
        if isinstance(module, Tanh):
            module.register_forward_pre_hook(ar.replay_safe(lambda *_, name=name: calls.append(name)))
    ar.apply(model, Plan(regions(factors)))
    model(torch.randn(4, requires_grad=True)).sum().backward()
    # Every layer runs in forward; in an outer recompute those before the last inner region; in its inner recompute.
    assert len(calls) == 8 + 4 + 8


def test_a_stored_output_is_held_and_released():
    class Two(nn.Module):
        def forward(self, x):
            return x.sin().exp().cos()

    kept = Region("0", saved=(SavedOutput("aten.exp.default", 0, 0, "", 0),), skipped=(OpCall("aten.exp.default", 0),))
    for region, held in ((Region("0"), 1), (kept, 2)):
        model = nn.Sequential(Two(), Tanh())
        ar.apply(model, Plan((region,)), check="never")
        x = torch.randn(WIDTH, requires_grad=True)
        gc.disable()
        try:
            with Live(x) as live:
                y = model(x)
                # The region's output, which tanh does not keep, is gone; tanh's own output is kept.
                assert live.now == held * UNIT
                y.sum().backward()
                del y
                assert live.now == UNIT
        finally:
            gc.enable()


def test_a_graph_that_is_dropped_frees_everything_without_the_collector():
    model = tree([2, 4])
    ar.apply(model, Plan(regions([2, 4])))
    x = torch.randn(WIDTH, requires_grad=True)
    gc.disable()
    try:
        with Live(x) as live:
            y = model(x)
            del y
            assert live.now == 0
    finally:
        gc.enable()


def test_switching_plans_on_and_off_leaks_nothing_and_changes_nothing():
    def losses(switch):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Tanh()) for _ in range(4)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        choose, applied, seen, objects = random.Random(0), None, [], []
        for step in range(300):
            if switch and choose.random() < 0.3:
                if applied is None:
                    size = choose.randint(1, 4)
                    single = tuple(Region(str(i)) for i in range(size))
                    spans = (Region("0", then=tuple(CallName(str(i)) for i in range(1, 4)), children=single[:3]),)
                    applied = ar.apply(model, Plan(choose.choice([single, spans])))
                else:
                    applied.remove()
                    applied = None
            optimizer.zero_grad()
            loss = model(torch.ones(2, 8)).square().sum()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
            if step in (150, 299):
                gc.collect()
                objects.append(sum(isinstance(o, torch.Tensor) for o in gc.get_objects() if type(o) is torch.Tensor))
        return seen, objects

    plain, _ = losses(switch=False)
    planned, objects = losses(switch=True)
    assert plain == planned
    assert objects[0] == objects[1]

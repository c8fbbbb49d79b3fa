"""Recompute sees what forward saw, and leaves no trace. Each test is a kind of fault that was reported in public."""

import random
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import autoremat.runtime as ar
from around import Around, Block, X
from autoremat._errors import RecomputeError
from autoremat._plan import Plan, Region
from comparing import compare, seed, train


def compare_blocks(*classes, **kwargs):
    paths = [f"blocks.{i}" for i in range(len(classes))]
    return compare(lambda: Around(*[c() for c in classes]), (X,), paths, loss_fn=lambda y: y.square().sum(), **kwargs)


@pytest.mark.parametrize("draw", [random.random, lambda: float(np.random.rand()), lambda: float(torch.rand(()))])
def test_branches_taken_at_random(draw):
    class Branch(Block):
        def forward(self, x):
            for _ in range(5):
                x = torch.tanh(self.lin(x) if draw() > 0.5 else self.other(x))
            return x

    compare_blocks(Branch, Branch)


def test_random_numbers_that_start_late_are_refused_once():
    class Late(Block):
        def forward(self, x):
            return torch.tanh(self.lin(x) * (random.random() if self.starts else 1.0))

        starts = False

    model = Around(Late())
    ar.apply(model, Plan((Region("blocks.0"),)))
    train(model, (X,), torch.sum)
    model.blocks[0].starts = True
    with pytest.raises(RecomputeError, match="random numbers for the first time"):
        train(model, (X,), torch.sum)
    train(model, (X,), torch.sum)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, lambda n: nn.BatchNorm1d(n, momentum=None)])
def test_batch_norm_counts_once(norm):
    class Normed(Block):
        def __init__(self):
            super().__init__()
            self.norm = norm(8)

        def forward(self, x):
            return torch.tanh(self.norm(self.lin(x)))

    compare_blocks(Normed, Normed, steps=3)


def test_batch_norm_run_twice_before_one_backward():
    model = Around(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()))
    ar.apply(model, Plan((Region("blocks.0"),)), check="always")
    a, b = model(X), model(X * 2)
    (a.sum() + b.sum()).backward()
    assert model.blocks[0][1].num_batches_tracked == 2


def test_buffer_read_and_written():
    class Average(Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x):
            h = self.lin(x)
            self.steps += 1
            with torch.no_grad():
                self.mean.lerp_(h.mean(0), 0.1)
            return torch.tanh(h - self.mean) / self.steps

    compare_blocks(Average, Average, steps=3)


def test_buffer_changed_without_a_new_version():
    class Counts(Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.ones(8))

        def forward(self, x):
            y = torch.tanh(self.lin(x) + self.count)
            self.count.data.add_(1)
            return y

    compare(lambda: Around(Counts()), (X,), ["blocks.0"], loss_fn=torch.sum, steps=3)


def test_tensor_attribute_that_carries_state():
    class Neuron(Block):
        def __init__(self):
            super().__init__()
            self.charge = torch.zeros(4, 8)

        def forward(self, x):
            self.charge = self.charge.detach() * 0.9 + self.lin(x)
            return torch.sigmoid(self.charge)

    compare_blocks(Neuron, Neuron, steps=3)


def test_tensor_attribute_changed_in_place():
    class Neuron(Block):
        def __init__(self):
            super().__init__()
            self.count = torch.zeros(8)

        def forward(self, x):
            self.count += 1
            return torch.sigmoid(self.lin(x) * self.count.clone())

    compare_blocks(Neuron, Neuron, steps=3)


@pytest.mark.parametrize("container", [list, dict, SimpleNamespace])
def test_statistics_collected_in_a_container(container):
    class Router(Block):
        def __init__(self):
            super().__init__()
            self.log = []

        def forward(self, x):
            p = self.lin(x).softmax(-1)
            self.log.append(float(p.detach().max()))
            return torch.tanh(p * len(self.log))

    compare_blocks(Router, Router)
    model = Around(Router())
    ar.apply(model, Plan((Region("blocks.0"),)))
    model(X).sum().backward()
    assert len(model.blocks[0].log) == 1


def test_attribute_set_outside_and_cleared_before_backward():
    class Adapter(Block):
        offset = None

        def forward(self, x):
            return torch.tanh(self.lin(x) + (0 if self.scale is None else self.scale * self.other(x)))

        scale = None

    class Net(Around):
        def forward(self, x):
            for block in self.blocks:
                block.scale = 3.0
            out = super().forward(x)
            for block in self.blocks:
                block.scale = None
            return out

    build = lambda: Net(Adapter(), Adapter())  # noqa: E731
    compare(build, (X,), ["blocks.0", "blocks.1"], loss_fn=lambda y: y.square().sum())


def test_code_path_that_depends_on_a_call_count():
    class Switch(Block):
        calls = 0

        def forward(self, x):
            self.calls += 1
            h = self.lin(x)
            return h * torch.sigmoid(h) if self.calls % 2 else F.silu(h)

    compare_blocks(Switch, Switch, steps=3)


def test_training_flag_changed_before_backward():
    def run(apply):
        seed()
        model = Around(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), nn.Sequential(nn.BatchNorm1d(8), nn.Tanh()))
        if apply:
            ar.apply(model, Plan((Region("blocks.0"), Region("blocks.1"))), check="always")
        seed(1)
        out = model(X)
        model.eval()
        out.sum().backward()
        assert not any(m.training for m in model.modules())
        return [p.grad for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))


class Halved(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 0.5 if func is F.linear else out


@pytest.mark.parametrize(
    "around",
    [Halved, lambda: torch.autocast("cpu", dtype=torch.bfloat16), lambda: torch.device("cpu")],
)
def test_modes_of_forward_are_back_in_recompute(around):
    def run(apply):
        seed()
        model = Around(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
        if apply:
            ar.apply(model, Plan((Region("blocks.0"), Region("blocks.1"))), check="always")
        with around():
            out = model(X)
        out.float().sum().backward()
        return [p.grad for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))


def test_default_dtype_and_device_and_attention_flags():
    seen = []

    class Sees(Block):
        def forward(self, x):
            made = torch.empty(1)
            seen.append((made.dtype, made.device.type, torch.backends.cuda.math_sdp_enabled()))
            return torch.tanh(self.lin(x))

    model = Around(Sees())
    ar.apply(model, Plan((Region("blocks.0"),)))
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            out = model(X)
    finally:
        torch.set_default_dtype(torch.float32)
    out.sum().backward()
    assert seen == [(torch.float64, "meta", False)] * 2
    assert torch.get_default_dtype() is torch.float32
    assert torch.backends.cuda.math_sdp_enabled()


def test_functional_call_weights():
    model = Around(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    weights = {name: (p.detach() * 2).requires_grad_() for name, p in model.named_parameters()}

    def grads():
        out = torch.func.functional_call(model, weights, (X,))
        return torch.autograd.grad(out.sum(), list(weights.values()))

    plain = grads()
    ar.apply(model, Plan((Region("blocks.0"),)), check="always")
    assert all(torch.equal(a, b) for a, b in zip(plain, grads(), strict=True))


def test_vmapped_gradients_run_plain():
    model = Around(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    ar.apply(model, Plan((Region("blocks.0"),)))
    weights = {name: p.detach() for name, p in model.named_parameters()}
    loss = lambda w, x: torch.func.functional_call(model, w, (x[None],)).sum()  # noqa: E731
    grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, X)
    assert grads["pre.weight"].shape == (4, 8, 8)


@dataclass
class Cache:
    keys: list
    length: int = 0


@pytest.mark.parametrize("make", [dict, lambda: Cache([]), lambda: SimpleNamespace(keys=[], length=0)])
def test_caches_among_the_arguments(make):
    class Attention(Block):
        def forward(self, x, cache):
            if isinstance(cache, dict):
                cache["k"] = torch.cat([cache["k"], self.lin(x)]) if "k" in cache else self.lin(x)
                keys = cache["k"]
            else:
                cache.keys.append(self.lin(x))
                cache.length += 1
                keys = torch.cat(cache.keys)
            return torch.softmax(self.other(x) @ keys.T, -1) @ keys

    class Net(Around):
        def forward(self, x):
            cache = make()
            for block in self.blocks:
                x = block(block(x, cache), cache)
            self.length = len(cache["k"]) if isinstance(cache, dict) else sum(map(len, cache.keys))
            return self.head(x)

    build = lambda: Net(Attention(), Attention())  # noqa: E731
    compare(build, (X,), ["blocks.0", "blocks.1"], loss_fn=lambda y: y.square().sum())


def test_attributes_of_tensors_are_kept():
    class Masked(Block):
        def forward(self, x, mask):
            return torch.tanh(self.lin(x) * mask * getattr(mask, "scale", 1.0))

    class Net(Around):
        def forward(self, x):
            mask = torch.ones_like(x)
            mask.scale = 4.0
            return self.blocks[0](x, mask)

    compare(lambda: Net(Masked()), (X,), ["blocks.0"], loss_fn=torch.sum)


def test_keyword_tensors_that_need_gradients():
    class Cross(Block):
        def forward(self, x, memory=None):
            return torch.tanh(self.lin(x) + self.other(memory))

    class Net(Around):
        def forward(self, x):
            memory = self.pre(x).exp()
            for block in self.blocks:
                x = block(x, memory=memory)
            return x

    compare(lambda: Net(Cross(), Cross()), (X,), ["blocks.0", "blocks.1"], loss_fn=torch.sum)


def test_module_replaced_after_apply():
    model = Around(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh()))
    ar.apply(model, Plan((Region("blocks.0"),)), check="always")
    model(X).sum().backward()
    model.blocks[0][0] = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    model(X).sum().backward()
    assert model.blocks[0][0][1].num_batches_tracked == 1


def test_what_a_cache_holds_of_other_layers_is_held_only_if_recompute_reads_it():
    class Layer:
        keys = None

    class Peeks(Block):
        def forward(self, x, cache, index):
            cache[index].keys = self.lin(x)
            before = cache[index - 1].keys
            if before is None:
                return torch.tanh(cache[index].keys)
            assert before.shape == x.shape  # metadata is there in any case
            return torch.tanh(cache[index].keys + (before.detach() if self.reads else 0))

        reads = False

    class Net(Around):
        def forward(self, x):
            cache = [Layer() for _ in self.blocks]
            for i, block in enumerate(self.blocks):
                x = block(self.pre(x), cache, i)
            return x

    model = Net(Peeks(), Peeks(), Peeks())
    ar.apply(model, Plan(tuple(Region(f"blocks.{i}") for i in range(3))), check="always")
    train(model, (X,), torch.sum)
    for block in model.blocks:
        block.reads = True
    for _ in range(2):
        with pytest.raises(RecomputeError, match=r"reads argument 1\[\d\], 'keys', which forward left alone"):
            train(model, (X,), torch.sum)
    train(model, (X,), torch.sum)

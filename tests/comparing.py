"""Run a training step twice, plain and under a plan, and compare whatever a user could notice, bit by bit."""

from __future__ import annotations

import copy
import random

import numpy as np
import torch

import autoremat.runtime as ar
from autoremat._plan import Plan, Region


def seed(number=0):
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def call(model, batch):
    return model(**batch) if isinstance(batch, dict) else model(*batch)


def train(model, batch, loss_fn, *, steps=2, autocast=None):
    """A few steps of SGD; returns everything observable."""
    seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            loss = loss_fn(call(model, batch))
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
    seen = {f"loss {i}": loss for i, loss in enumerate(losses)}
    seen |= {f"grad {name}": p.grad for name, p in model.named_parameters()}
    seen |= {f"parameter {name}": p.detach() for name, p in model.named_parameters()}
    seen |= {f"buffer {name}": b for name, b in model.named_buffers()}
    values = batch.values() if isinstance(batch, dict) else batch
    for i, value in enumerate(values):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            seen[f"input grad {i}"] = value.grad
            value.grad = None
    seen["torch random"] = torch.get_rng_state()
    seen["python random"] = random.getstate()
    seen["numpy random"] = np.random.get_state()[1].tolist()
    seen["attributes"] = {
        f"{name}.{key}": value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, (int, float, str, bool))
    }
    return seen


def assert_same(plain, planned):
    assert plain.keys() == planned.keys()
    for name, value in plain.items():
        other = planned[name]
        if isinstance(value, torch.Tensor):
            assert isinstance(other, torch.Tensor), name
            assert value.dtype == other.dtype, name
            assert torch.equal(value, other) or torch.allclose(value, other, rtol=0, atol=0, equal_nan=True), name
        else:
            assert value == other, name


def compare(build, batch, regions, *, loss_fn=lambda out: out.loss, check="always", **kwargs):
    """Train two copies; returns what the planned one executed."""
    seed()
    model = build().train()
    plain = copy.deepcopy(model)
    expected = train(plain, batch, loss_fn, **kwargs)
    applied = ar.apply(model, Plan(tuple(Region(r) if isinstance(r, str) else r for r in regions)), check=check)
    assert_same(expected, train(model, batch, loss_fn, **kwargs))
    executed = applied.executed
    assert all(region.num_recomputes for region in executed), executed
    return executed


def assert_equal_to_plain(model, batch, plan, loss_fn=lambda out: out, **kwargs):
    """Train two copies; returns what the planned one executed."""
    model.train()
    plain = train(copy.deepcopy(model), batch, loss_fn, **kwargs)
    planned_model = copy.deepcopy(model)
    with ar.apply(planned_model, plan, check="always") as applied:
        assert_same(plain, train(planned_model, batch, loss_fn, **kwargs))
        return applied.executed

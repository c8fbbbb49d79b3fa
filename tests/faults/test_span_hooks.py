"""Hooks on and inside the calls of spans, and of spans in spans."""

import pytest
import torch
from torch import nn

import autoremat.runtime as ar
from autoremat._plan import Plan
from chains import Chain, nested, uniform
from comparing import seed

BATCH = torch.ones(2, 4, 16)


def run(regions, *, acts):
    seed()
    model, fired = Chain(8, dropout=0.2).train(), []
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda m, a, name=name: fired.append(("before", name)))
        module.register_forward_hook(lambda m, a, o, name=name: fired.append(("after", name)))
        if acts and isinstance(module, nn.Linear):
            module.register_forward_hook(lambda m, a, o: o.sin().exp())
    if regions:
        ar.apply(model, Plan(regions), check="always")
    loss = model(BATCH)
    grads = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    loss.backward()
    return [*grads, *(p.grad for p in model.parameters()), torch.get_rng_state()], fired


@pytest.mark.parametrize("acts", [False, True])
@pytest.mark.parametrize(
    "regions", [uniform(8, 3), uniform(8, 8), nested(0, 7, 2), nested(0, 7, 2, whole=True), nested(0, 7, 3)]
)
def test_hooks_fire_as_in_plain_training(regions, acts):
    (expected, plain), (found, planned) = run((), acts=acts), run(regions, acts=acts)
    assert plain == planned
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))

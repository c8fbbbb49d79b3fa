"""Each kind of fault on every model of the zoo: equal to the plain run, or refused with the region's name."""

import copy
import random

import pytest
import torch
from torch import nn

import autoremat.runtime as ar
from autoremat._errors import RecomputeError
from autoremat._plan import Plan, Region
from comparing import assert_same, call, seed, train
from zoo import MODELS

CHANNEL = {"factor": 1.0}
"""Something that a region depends on and that recompute knows nothing of."""


@pytest.fixture(autouse=True)
def _reset():
    CHANNEL["factor"] = 1.0


@pytest.fixture(params=MODELS)
def case(request):
    return MODELS[request.param]()


def built(case):
    seed()
    return case.build().train()


def planned(model, case, **kwargs):
    ar.apply(model, Plan(tuple(Region(path) for path in case.paths)), **kwargs)
    return model


def part_of(model, path):
    """A module inside a region that is called with one tensor and holds parameters; the region's own if it has none."""
    region = model.get_submodule(path)
    for module in region.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)) or type(module).__name__ == "Conv1D":
            return module
    return region


def change_forward(module, change):
    """Make a module's output pass through a function."""
    original = module.forward

    def forward(*args, **kwargs):
        output = original(*args, **kwargs)
        if isinstance(output, tuple):
            return change(module, output[0]), *output[1:]
        return change(module, output)

    module.forward = forward


def loss_of(model, case):
    seed(1)
    return case.loss_fn(call(model, case.batch))


def region_name(path):
    return rf"Region '{path}' \("


def test_parameter_changed_before_backward(case):
    model, path = planned(built(case), case), case.paths[-1]
    loss = loss_of(model, case)
    name, parameter = next(iter(model.get_submodule(path).named_parameters()))
    with torch.no_grad():
        parameter.mul_(1.01)
    with pytest.raises(RecomputeError, match=rf"{region_name(path)}.*: parameter {path}\.{name} has been modified"):
        loss.backward()
    assert parameter.grad is None


@pytest.mark.parametrize("kind", ["values", "order", "number", "shape"])
def test_another_way_in_recompute(case, kind):
    model, path = built(case), case.paths[-1]
    if part_of(model, path) is model.get_submodule(path) and kind in ("number", "shape"):
        pytest.skip("what follows the last saved tensor does not run again")

    def change(_module, output):
        if CHANNEL["factor"] == 1.0:
            return (output * 1.0).sin() if kind in ("values", "order") else output
        if kind == "values":
            return (output * 2.0).sin()
        if kind == "order":
            return (output * 1.0).flip(-1).sin()
        return output.exp().log() if kind == "number" else output[:1].exp().log().expand_as(output)

    change_forward(part_of(model, path), change)
    planned(model, case)
    loss = loss_of(model, case)
    CHANNEL["factor"] = 2.0
    with pytest.raises(RecomputeError, match=region_name(path)):
        loss.backward()
    assert all(p.grad is None for p in model.get_submodule(path).parameters())


def test_forward_that_depends_on_its_own_calls_and_on_chance(case):
    def change(module, output):
        module.num_calls = getattr(module, "num_calls", 0) + 1
        drawn = random.random() + torch.rand((), device=output.device)
        return (output * drawn).sin() if module.num_calls % 2 else (output * drawn).cos()

    def run(apply):
        model = built(case)
        for path in case.paths:
            change_forward(part_of(model, path), change)
        return train(planned(model, case, check="always") if apply else model, case.batch, case.loss_fn, steps=3)

    assert_same(run(apply=False), run(apply=True))


def test_flags_toggled_before_backward(case):
    def run(apply):
        model = built(case)
        if apply:
            planned(model, case, check="always")
        loss = loss_of(model, case)
        model.eval()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss.backward()
        return [p.grad for p in model.parameters()]

    for plain, ours in zip(run(apply=False), run(apply=True), strict=True):
        assert (plain is None and ours is None) or torch.equal(plain, ours)


def test_hooks_on_every_module_fire_as_in_plain_training(case):
    def run(apply):
        model, fired = built(case), []
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda m, a, name=name: fired.append(("before", name)))
            module.register_forward_hook(lambda m, a, o, name=name: fired.append(("after", name)))
            if isinstance(module, nn.Linear):
                module.register_full_backward_pre_hook(lambda m, go, name=name: fired.append(("backward", name)))
        if apply:
            planned(model, case, check="always")
        result = train(model, case.batch, case.loss_fn, steps=1)
        return result, fired

    (expected, plain), (result, ours) = run(apply=False), run(apply=True)
    assert plain == ours
    assert_same(expected, result)


def test_two_forwards_before_their_backwards(case):
    def run(apply):
        model = built(case)
        if apply:
            planned(model, case, check="always")
        first, second = loss_of(model, case), case.loss_fn(call(copy.copy(model), case.batch))
        second.backward()
        first.backward()
        return [p.grad for p in model.parameters()]

    for plain, ours in zip(run(apply=False), run(apply=True), strict=True):
        assert (plain is None and ours is None) or torch.equal(plain, ours)


def test_backwards_over_a_graph_that_is_kept(case):
    def run(apply):
        model = built(case)
        if apply:
            planned(model, case, check="always")
        loss = loss_of(model, case)
        parameters = list(model.parameters())
        first = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        some = torch.autograd.grad(loss, parameters[-2:], retain_graph=True, allow_unused=True)
        loss.backward()
        return [*first, *some, *(p.grad for p in parameters)]

    for plain, ours in zip(run(apply=False), run(apply=True), strict=True):
        assert (plain is None and ours is None) or torch.equal(plain, ours)


@pytest.mark.parametrize("name", ["mlp", "resnet"])
def test_gradient_penalty(name):
    case = MODELS[name]()

    def run(apply):
        model = built(case)
        if apply:
            planned(model, case, check="always")
        loss = loss_of(model, case)
        parameters = list(model.parameters())
        grads = torch.autograd.grad(loss, parameters, create_graph=True)
        (loss + sum(g.square().sum() for g in grads)).backward()
        return [p.grad for p in parameters]

    assert all(torch.equal(a, b) for a, b in zip(run(apply=False), run(apply=True), strict=True))

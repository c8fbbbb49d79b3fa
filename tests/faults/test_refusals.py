"""What cannot be reproduced is refused by name, before any gradient is used."""

import contextlib

import pytest
import torch
from torch import nn

import autoremat.runtime as ar
from autoremat._errors import RecomputeError
from autoremat._plan import OpCall, Plan, Region, SavedOutput

X = torch.linspace(-1, 1, 32).view(4, 8)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x, mask=1.0):
        return torch.tanh(self.lin(x) * mask)


class Net(nn.Module):
    def __init__(self, blocks=2):
        super().__init__()
        self.pre, self.blocks = nn.Linear(8, 8), nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x):
        x = self.pre(x)
        for block in self.blocks:
            x = block(x)
        return x


def planned(model, **kwargs):
    ar.apply(model, Plan((Region("blocks.0"), Region("blocks.1"))), **kwargs)
    return model


@pytest.mark.parametrize("name", ["blocks.1.lin.weight", "blocks.1.lin.bias"])
def test_parameter_changed_between_forward_and_backward(name):
    model = planned(Net())
    out = model(X)
    with torch.no_grad():
        model.get_parameter(name).add_(0.1)
    with pytest.raises(RecomputeError, match=rf"Region 'blocks.1' \(Block\): parameter {name} has been modified"):
        out.sum().backward()
    assert model.blocks[1].lin.weight.grad is None


def test_buffer_changed_between_forward_and_backward():
    model = Net()
    model.blocks[0].register_buffer("shift", torch.ones(8))
    planned(model)
    out = model(X)
    model.blocks[0].shift.add_(1)
    with pytest.raises(RecomputeError, match="tensor blocks.0.shift has been modified"):  # noqa: RUF043
        out.sum().backward()


@pytest.mark.parametrize("how", ["positional", "keyword"])
def test_input_changed_between_forward_and_backward(how):
    class Masks(Net):
        def forward(self, x):
            mask = torch.ones_like(x)
            for block in self.blocks:
                x = block(x, mask) if how == "positional" else block(x, mask=mask)
                mask += 1
            return x

    model = planned(Masks())
    name = "argument 1" if how == "positional" else "argument 'mask'"
    with pytest.raises(RecomputeError, match=rf"Region 'blocks.1' \(Block\): {name} has been modified"):
        model(X).sum().backward()


def test_region_that_changes_its_own_input():
    class InPlace(Block):
        def forward(self, x):
            return torch.tanh(self.lin(x.add_(1)))

    model = Net()
    model.blocks[0] = InPlace()
    planned(model)
    with pytest.raises(RecomputeError, match=r"Region 'blocks.0' \(InPlace\): argument 0 has been modified"):
        model(X).sum().backward()


SIDE_CHANNEL = {"factor": 1.0}


class Global(Block):
    def forward(self, x):
        return torch.tanh(self.lin(x) * SIDE_CHANNEL["factor"])


@pytest.mark.parametrize("check", ["first", "always", "never"])
def test_value_check_finds_what_shapes_hide(check):
    model = Net()
    model.blocks[0] = Global()
    planned(model, check=check)
    out = model(X)
    SIDE_CHANNEL["factor"] = 2.0
    try:
        expected = (
            contextlib.nullcontext()
            if check == "never"
            else pytest.raises(
                RecomputeError, match=r"Region 'blocks.0' \(Global\): saved tensor \d .* has other values in recompute"
            )
        )
        with expected:
            out.sum().backward()
    finally:
        SIDE_CHANNEL["factor"] = 1.0


def test_first_check_covers_every_call_of_the_first_step():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Global()

        def forward(self, x):
            x = self.block(x)
            SIDE_CHANNEL["factor"] = 2.0
            x = self.block(x)
            SIDE_CHANNEL["factor"] = 1.0
            return x

    model = Shared()
    ar.apply(model, Plan((Region("block"),)))
    with pytest.raises(RecomputeError, match="other values"):
        model(X).sum().backward()


def test_routing_that_came_out_differently():
    class Routed(Block):
        def forward(self, x):
            order = [0, 1, 2, 3] if SIDE_CHANNEL["factor"] == 1.0 else [1, 0, 3, 2]
            return torch.tanh(self.lin(x[order]))

    model = Net()
    model.blocks[0] = Routed()
    planned(model)
    out = model(X)
    SIDE_CHANNEL["factor"] = 2.0
    try:
        with pytest.raises(RecomputeError, match="other values"):
            out.sum().backward()
    finally:
        SIDE_CHANNEL["factor"] = 1.0


def saved(op, occurrence=0):
    return SavedOutput(op, occurrence, 0, "", 0)


def test_stored_output_changed_in_place_after_the_region():
    class Two(Block):
        def forward(self, x):
            h = self.lin(x)
            return h, torch.tanh(h)

    class Adds(Net):
        def forward(self, x):
            h, t = self.blocks[0](self.pre(x))
            h += 1
            return self.blocks[1](h + t)

    model = Adds()
    model.blocks[0] = Two()
    kept = Region("blocks.0", saved=(saved("aten.addmm.default"),), skipped=(OpCall("aten.addmm.default", 0),))
    ar.apply(model, Plan((kept,)))
    with pytest.raises(RecomputeError, match=r"Region 'blocks.0'.*stored output of aten.addmm.default .*modified"):
        model(X).sum().backward()


def test_skipped_op_whose_output_is_needed():
    model = Net()
    ar.apply(model, Plan((Region("blocks.0", skipped=(OpCall("aten.addmm.default", 0),)),)))
    with pytest.raises(RecomputeError, match=r"Region 'blocks.0' .*reads the output of aten.addmm.default"):
        model(X).sum().backward()


def test_skipped_op_whose_output_backward_needs():
    model = Net()
    ar.apply(model, Plan((Region("blocks.0", skipped=(OpCall("aten.tanh.default", 0),)),)))
    with pytest.raises(RecomputeError, match=r"Region 'blocks.0' .*backward needs <the output of aten.tanh.default"):
        model(X).sum().backward()


def test_planned_op_in_another_place():
    class Moves(Block):
        def forward(self, x):
            x = x + 1 if SIDE_CHANNEL["factor"] == 1.0 else x
            return torch.tanh(self.lin(x)).sin()

    model = Net()
    model.blocks[0] = Moves()
    kept = Region("blocks.0", saved=(saved("aten.addmm.default"),), skipped=(OpCall("aten.addmm.default", 0),))
    ar.apply(model, Plan((kept,)), check="never")
    out = model(X)
    SIDE_CHANNEL["factor"] = 2.0
    try:
        with pytest.raises(RecomputeError, match=r"call 0 of aten.addmm.default was op \d of the region in forward"):
            out.sum().backward()
    finally:
        SIDE_CHANNEL["factor"] = 1.0


def test_a_refusal_swallowed_by_the_users_forward_is_raised_all_the_same():
    class Swallows(Block):
        def forward(self, x):
            try:
                return torch.tanh(self.lin(x) * SIDE_CHANNEL["factor"])
            except RuntimeError:
                return torch.tanh(self.lin(x))

    model = Net()
    model.blocks[0] = Swallows()
    planned(model)
    out = model(X)
    SIDE_CHANNEL["factor"] = 2.0
    try:
        with pytest.raises(RecomputeError, match="other values"):
            out.sum().backward()
    finally:
        SIDE_CHANNEL["factor"] = 1.0


def test_saved_tensor_changed_in_place_inside_the_region():
    class Breaks(Block):
        def forward(self, x):
            h = torch.sigmoid(self.lin(x))
            h.add_(1)
            return h.exp()

    model = Net()
    model.blocks[0] = Breaks()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(X).sum().backward()
    planned(model)
    with pytest.raises(RecomputeError, match=r"Region 'blocks.0' \(Breaks\).*modified by an inplace operation"):
        model(X).sum().backward()


@pytest.mark.parametrize("in_recompute", [False, True])
def test_out_of_memory_and_retry(in_recompute):
    class Fails(Block):
        def forward(self, x):
            h = torch.dropout(self.lin(x), 0.5, True)
            calls.append(1)
            if len(calls) == (2 if in_recompute else 1):
                raise torch.OutOfMemoryError("pretended")
            return torch.tanh(h).exp()

    calls = [0, 0]

    def grads(model):
        torch.manual_seed(1)
        model(X).sum().backward()
        return [p.grad for p in model.parameters()]

    torch.manual_seed(0)
    model = Net()
    model.blocks[0] = Fails()
    plain = grads(model)
    model.zero_grad()
    applied = ar.apply(model, Plan((Region("blocks.0"), Region("blocks.1"))))
    calls.clear()
    with pytest.raises(torch.OutOfMemoryError):
        model(X).sum().backward()
    model.zero_grad()
    assert torch.is_grad_enabled()
    assert all(torch.equal(a, b) for a, b in zip(plain, grads(model), strict=True))
    assert applied.executed


def test_stored_output_that_recompute_changes():
    class Scales(Block):
        def forward(self, x):
            h = self.lin(x)
            h.mul_(2)
            return torch.tanh(h)

    model = Net()
    model.blocks[0] = Scales()
    kept = Region("blocks.0", saved=(saved("aten.addmm.default"),), skipped=(OpCall("aten.addmm.default", 0),))
    applied = ar.apply(model, Plan((kept,)), check="never")
    with pytest.raises(RecomputeError, match="recompute changed a stored output"):
        model(X).sum().backward()
    applied.remove()
    skipped = (OpCall("aten.addmm.default", 0), OpCall("aten.mul_.Tensor", 0))
    ar.apply(model, Plan((Region("blocks.0", saved=kept.saved, skipped=skipped),)), check="always")
    model(X).sum().backward()

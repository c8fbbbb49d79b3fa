"""`checkpoint` refuses what it cannot reproduce, and leaves nothing behind."""

import gc
import weakref

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint

import autoremat.runtime as ar
from autoremat._errors import RecomputeError, UsageError


@pytest.mark.parametrize("in_recompute", [False, True])
def test_exceptions_leave_nothing_behind(in_recompute):
    fails = [False]

    def function(x):
        y = x.sin()
        if fails[0]:
            raise ValueError("on purpose")
        return y.exp()

    x = torch.randn(4, requires_grad=True)
    if in_recompute:
        y = ar.checkpoint(function, x)
        fails[0] = True
        with pytest.raises(ValueError, match="on purpose"):
            y.sum().backward(retain_graph=True)
        fails[0] = False
        y.sum().backward()
        assert torch.equal(x.grad, torch.autograd.grad(x.sin().exp().sum(), x)[0])
    else:
        fails[0] = True
        with pytest.raises(ValueError, match="on purpose"):
            ar.checkpoint(function, x)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        x.exp()
    assert packed
    x.exp().sum().backward()


def test_without_preserving_random_numbers():
    x = torch.ones(100, requires_grad=True)
    y = ar.checkpoint(lambda t: torch.nn.functional.dropout(t).sin(), x, preserve_rng_state=False)
    before = torch.get_rng_state()
    y.sum().backward()
    assert not torch.equal(before, torch.get_rng_state())


def test_other_values_in_recompute_are_refused():
    factor = [2.0]

    def function(x):
        return (x * factor[0]).sin()

    x = torch.randn(4, requires_grad=True)
    y = ar.checkpoint(function, x)
    factor[0] = 3.0
    with pytest.raises(torch_checkpoint.CheckpointError, match="other values in recompute"):
        y.sum().backward()


def test_other_shapes_in_recompute_are_refused():
    size = [2]

    def function(x):
        return x[: size[0]].sin().exp()

    x = torch.randn(4, requires_grad=True)
    y = ar.checkpoint(function, x)
    size[0] = 3
    with pytest.raises(
        RecomputeError, match=r"checkpoint of .*function.*\n.*\[2\] in forward and is torch.float32 \[3\]"
    ):
        y.sum().backward()


@pytest.mark.parametrize("fewer", [True, False])
def test_another_number_of_saved_tensors_is_refused(fewer):
    times = [3]

    def function(x):
        for _ in range(times[0]):
            x = x.sin()
        return x

    x = torch.randn(4, requires_grad=True)
    y = ar.checkpoint(function, x, early_stop=False)
    times[0] = 2 if fewer else 4
    with pytest.raises(RecomputeError, match=f"different number(.|\n)*forward: 3\n.*recomputation: {times[0]}"):
        y.sum().backward()


def test_debug_lists_the_ops():
    flag = [True]

    def function(x):
        return x.sin().exp() if flag[0] else x.cos()[:2].exp()

    x = torch.randn(4, requires_grad=True)
    y = ar.checkpoint(function, x, debug=True)
    flag[0] = False
    with pytest.raises(RecomputeError) as error:
        y.sum().backward()
    assert "aten.sin.default" in str(error.value)
    assert "aten.cos.default" in str(error.value)


def test_an_input_changed_in_place_is_refused_by_name():
    x = torch.randn(4, requires_grad=True)
    mask = {"inner": [torch.ones(4)]}
    y = ar.checkpoint(lambda t, mask: (t * mask["inner"][0]).sin(), x, mask=mask)
    mask["inner"][0].add_(1)
    with pytest.raises(RecomputeError, match=r"argument 'mask'\['inner'\]\[0\] has been modified by an inplace"):
        y.sum().backward()


def test_refuses_arguments_it_does_not_know():
    x = torch.randn(4, requires_grad=True)
    with pytest.raises(UsageError, match="determinism_check"):
        ar.checkpoint(torch.sin, x, determinism_check="some")
    with pytest.raises(UsageError, match="debug=True"):
        ar.checkpoint(torch.sin, x, debug=True, context_fn=lambda: None)


def test_no_cycles():
    gc.collect()
    gc.disable()
    try:
        x = torch.randn(1000, requires_grad=True)
        big = torch.randn(1000)
        y = ar.checkpoint(lambda t, b: (t * b).sin().exp(), x.clone(), big)
        storage = weakref.ref(big)
        del big
        assert storage() is not None
        y.sum().backward()
        del y
        assert storage() is None
        big = torch.randn(1000)
        y = ar.checkpoint(lambda t, b: (t * b).sin().exp(), x.clone(), big)
        storage = weakref.ref(big)
        del big, y
        assert storage() is None
    finally:
        gc.enable()


def test_saved_tensors_are_freed_as_backward_proceeds():
    alive = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, number):
            ctx.number = number
            big = x.clone()
            ctx.save_for_backward(big)
            return big * 1

        @staticmethod
        def backward(ctx, grad):
            alive.append((ctx.number, sum(ref() is not None for ref in refs)))
            (big,) = ctx.saved_tensors
            refs.append(weakref.ref(big))
            return grad, None

    refs = []

    def function(t):
        for number in range(4):
            t = Watch.apply(t, number)
        return t

    ar.checkpoint(function, torch.randn(123, requires_grad=True)).sum().backward()
    assert alive == [(3, 0), (2, 0), (1, 0), (0, 0)]

"""`checkpoint` means what torch's non-reentrant checkpoint means."""

import contextlib
import functools
import random

import numpy as np
import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

import autoremat.runtime as ar
from autoremat._errors import UsageError
from comparing import seed


def grads_of(function, *inputs, run=None, **kwargs):
    """Gradients of inputs and parameters, plain (run=None) or checkpointed."""
    seed(3)
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves, **kwargs) if run is None else run(function, *leaves, **kwargs)
    first = out if isinstance(out, torch.Tensor) else out[0]
    return torch.autograd.grad(first.sum(), leaves, allow_unused=True), torch.get_rng_state()


@pytest.fixture
def net():
    seed()
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 4))


def count_calls(function):
    def counted(*args, **kwargs):
        counted.calls += 1
        return function(*args, **kwargs)

    counted.calls = 0
    return counted


def assert_equal_grads(function, *inputs, **kwargs):
    plain, plain_state = grads_of(function, *inputs, **kwargs)
    ours, our_state = grads_of(function, *inputs, run=ar.checkpoint, **kwargs)
    for a, b in zip(plain, ours, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    assert torch.equal(plain_state, our_state)


def test_same_gradients_and_random_numbers(net):
    assert_equal_grads(net, torch.randn(3, 4))


@pytest.mark.parametrize("use_reentrant", [None, False])
def test_not_reentrant_unless_asked_for(use_reentrant):
    x = torch.randn(4, requires_grad=True)
    y = ar.checkpoint(lambda t: t.sin().exp(), x, use_reentrant=use_reentrant)
    (g,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(g, torch.autograd.grad(x.sin().exp().sum(), x)[0])


def test_keyword_none_and_nested_arguments():
    def function(x, scale, *, extra=None, table=None, flag=True):
        y = x.sin() * scale["a"][0] + table[1]
        return (y if flag else -y) if extra is None else y * extra

    x = torch.randn(4)
    constants = {"scale": {"a": [torch.tensor(2.0)]}, "table": (None, torch.tensor(1.0))}
    for extra in (None, torch.randn(4), 3):
        assert_equal_grads(functools.partial(function, extra=extra, **constants), x)


def test_outputs_of_any_structure():
    def function(x):
        return {"y": [x.sin(), None, 3]}, x.detach()

    x = torch.randn(4, requires_grad=True)
    out, detached = ar.checkpoint(function, x)
    assert not detached.requires_grad
    assert out["y"][1:] == [None, 3]
    out["y"][0].sum().backward()
    assert torch.equal(x.grad, x.detach().cos())


def test_unused_outputs():
    def function(x):
        return x.sin(), x.exp().log()

    x = torch.randn(4, requires_grad=True)
    used, _ = ar.checkpoint(function, x)
    used.sum().backward()
    assert torch.equal(x.grad, x.detach().cos())


def test_no_input_needs_a_gradient(net):
    x = torch.randn(3, 4)
    seed()
    net(x).sum().backward()
    expected = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    seed()
    ar.checkpoint(net, x).sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(expected, net.parameters(), strict=True))


def test_double_backward():
    def function(x, w):
        return torch.tanh(x * w).exp()

    def second(run):
        x = torch.linspace(-1, 1, 5, dtype=torch.float64).requires_grad_()
        w = torch.linspace(1, 2, 5, dtype=torch.float64).requires_grad_()
        y = function(x, w) if run is None else run(function, x, w)
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return torch.autograd.grad((g**2).sum(), (x, w))

    for a, b in zip(second(None), second(ar.checkpoint), strict=True):
        assert torch.equal(a, b)


def test_gradcheck_and_gradgradcheck():
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    run = functools.partial(ar.checkpoint, lambda t: t.sin() * t.exp())
    assert torch.autograd.gradcheck(run, (x,))
    assert torch.autograd.gradgradcheck(run, (x,))


def test_backward_twice_fails_as_plain():
    x = torch.randn(4, requires_grad=True)
    y = ar.checkpoint(lambda t: t.sin().exp(), x)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


def test_partial_backward():
    function = count_calls(lambda x, w: ((x * w).tanh(), (x + w).exp().sin()))
    x, w = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    a, b = ar.checkpoint(function, x, w)
    (ga,) = torch.autograd.grad(a.sum(), x)
    (gb,) = torch.autograd.grad(b.sum(), w)
    pa, pb = (x * w).tanh(), (x + w).exp().sin()
    assert torch.equal(ga, torch.autograd.grad(pa.sum(), x)[0])
    assert torch.equal(gb, torch.autograd.grad(pb.sum(), w)[0])
    assert function.calls == 2


def test_gradient_inside_the_function():
    def function(x):
        y = x.sin().exp()
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return g.tanh()

    assert_equal_grads(function, torch.randn(4))


class _ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, x.exp())
        return x.exp()

    @staticmethod
    def backward(ctx, grad):
        assert len(ctx.saved_tensors) == 2
        first, second = ctx.saved_tensors[1], ctx.saved_tensors[1]
        assert first.data_ptr() == second.data_ptr()
        return grad * first


def test_custom_function_that_reads_saved_tensors_twice():
    assert_equal_grads(lambda x: _ReadsTwice.apply(x.sin()).cos(), torch.randn(4))


def test_stops_early_unless_told_not_to():
    tail = count_calls(lambda y: y + 1)

    def function(x):
        return tail(x.sin().exp())

    def calls(**kwargs):
        tail.calls = 0
        x = torch.randn(4, requires_grad=True)
        ar.checkpoint(function, x, **kwargs).sum().backward()
        return tail.calls

    assert calls() == 1
    assert calls(early_stop=False) == 2
    with torch_checkpoint.set_checkpoint_early_stop(False):
        assert calls() == 2


def test_context_fn():
    seen = []

    @contextlib.contextmanager
    def note(name):
        seen.append(name)
        yield
        seen.append("after " + name)

    x = torch.randn(4, requires_grad=True)
    y = ar.checkpoint(torch.sin, x, context_fn=lambda: (note("forward"), note("recompute")))
    assert seen == ["forward", "after forward"]
    with contextlib.suppress(StopIteration):
        y.sum().backward()
    assert seen[2] == "recompute"


def test_context_fn_takes_torchs_selective_contexts():
    def policy(_context, op, *_args, **_kwargs):
        save = op is torch.ops.aten.mm.default
        return (
            torch_checkpoint.CheckpointPolicy.MUST_SAVE if save else torch_checkpoint.CheckpointPolicy.PREFER_RECOMPUTE
        )

    contexts = functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, policy)
    x, w = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    ar.checkpoint(lambda x, w: (x @ w).sin() @ w, x, w, context_fn=contexts).sum().backward()
    expected = torch.autograd.grad(((x @ w).sin() @ w).sum(), (x, w))
    assert torch.equal(x.grad, expected[0])
    assert torch.equal(w.grad, expected[1])


@pytest.mark.parametrize("inner", [ar.checkpoint, functools.partial(torch_checkpoint.checkpoint, use_reentrant=False)])
@pytest.mark.parametrize("outer", [ar.checkpoint, functools.partial(torch_checkpoint.checkpoint, use_reentrant=False)])
def test_nested(inner, outer):
    def function(x, w):
        y = inner(lambda t: (t * w).tanh().exp(), x)
        return inner(lambda t: (t + w).sin() * t, y) * y

    seed(3)
    x, w = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    ours = torch.autograd.grad(outer(function, x, w).sum(), (x, w))
    y = (x * w).tanh().exp()
    plain = torch.autograd.grad(((y + w).sin() * y * y).sum(), (x, w))
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


def test_nested_recomputes_each_level_once_more():
    leaf = count_calls(lambda t: t.sin().exp())

    def middle(x):
        return ar.checkpoint(leaf, ar.checkpoint(leaf, x))

    x = torch.randn(4, requires_grad=True)
    y = ar.checkpoint(middle, x)
    assert leaf.calls == 2
    y.sum().backward()
    # The middle runs again up to where the second leaf starts; then each leaf runs again.
    assert leaf.calls == 2 + 1 + 2
    plain = torch.autograd.grad(x.sin().exp().sin().exp().sum(), x)[0]
    assert torch.equal(x.grad, plain)


def test_hooks_of_others_outside_and_inside():
    packed = []

    def pack(t):
        packed.append(t)
        return t

    def function(x):
        y = x.sin()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = y.exp()
        return y.tanh()

    assert_equal_grads(function, torch.randn(4))
    inside = len(packed)
    assert inside >= 2
    x = torch.randn(4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = ar.checkpoint(lambda t: t.sin().exp(), x)
        z = y.tanh()
    assert len(packed) == inside + 1
    z.sum().backward()


def test_a_keyboard_interrupt_leaves_nothing_behind():
    def function(x):
        x.sin()
        raise KeyboardInterrupt

    x = torch.randn(4, requires_grad=True)
    with pytest.raises(KeyboardInterrupt):
        ar.checkpoint(function, x)
    assert_equal_grads(torch.sin, torch.randn(4))
    x.exp().sum().backward()
    assert torch.equal(x.grad, x.detach().exp())


def test_python_and_numpy_random_numbers():
    def function(x):
        return x.sin() * random.random() * float(np.random.rand()) * torch.rand(4)

    assert_equal_grads(function, torch.randn(4))
    seed(5)
    plain = random.random(), np.random.rand()
    seed(5)
    x = torch.randn(4, requires_grad=True)
    ar.checkpoint(lambda x: x.sin().exp(), x).sum().backward()
    assert plain == (random.random(), np.random.rand())


def test_a_generator_among_the_arguments():
    def function(x, generator):
        return x * torch.rand(4, generator=generator)

    def run(call):
        generator = torch.Generator().manual_seed(7)
        x = torch.ones(4, requires_grad=True)
        call(function, x, generator).sum().backward()
        return x.grad, generator.get_state()

    plain, ours = run(lambda f, *a: f(*a)), run(ar.checkpoint)
    assert torch.equal(plain[0], ours[0])
    assert torch.equal(plain[1], ours[1])


def test_loop_variables_are_those_of_the_call():
    layers = [nn.Linear(4, 4) for _ in range(3)]
    x = torch.randn(2, 4, requires_grad=True)

    def run(call):
        h = x
        for layer in layers:
            h = call(lambda t: layer(t).tanh(), h)  # noqa: B023 (the point of the test)
        (grad,) = torch.autograd.grad(h.sum(), x)
        assert layer is layers[-1]
        return grad

    assert torch.equal(run(lambda f, *a: f(*a)), run(ar.checkpoint))


@pytest.mark.parametrize("segments", [1, 2, 3, 4])
def test_sequential(net, segments):
    assert_equal_grads(net, torch.randn(3, 4))
    plain, state = grads_of(net, torch.ones(3, 4))
    ours, our_state = grads_of(lambda x: ar.checkpoint_sequential(net, segments, x), torch.ones(3, 4))
    assert torch.equal(plain[0], ours[0])
    assert torch.equal(state, our_state)
    with pytest.raises(UsageError, match="does not know nonsense"):
        ar.checkpoint_sequential(net, 2, torch.ones(3, 4), nonsense=1)


NORM = nn.BatchNorm1d(4)


def normalized(x):
    return NORM(x).tanh()


@pytest.mark.parametrize(
    "function", [normalized, NORM, NORM.forward, functools.partial(NORM), lambda x: normalized(x) * 2]
)
def test_a_module_is_found_however_a_function_reaches_it(function):
    def inside(x):
        return function(x).exp()

    x = torch.randn(3, 4)
    for number, call in enumerate((function, inside), start=1):
        NORM.reset_running_stats()
        ar.checkpoint(call, x).sum().backward()
        assert NORM.num_batches_tracked == 1, number


def test_each_function_of_a_module_is_checked():
    lin, factor, x = nn.Linear(4, 4), [2.0], torch.randn(3, 4)
    ar.checkpoint(lambda t: lin(t).exp(), x).sum().backward()
    y = ar.checkpoint(lambda t: (lin(t) * factor[0]).exp(), x)
    factor[0] = 3.0
    with pytest.raises(torch_checkpoint.CheckpointError, match="other values"):
        y.sum().backward()

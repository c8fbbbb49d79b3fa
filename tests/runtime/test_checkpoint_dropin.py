"""What torch's own tests ask of its non-reentrant checkpoint, asked of ours."""

import contextlib
import functools
import gc
import weakref

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint

import autoremat.runtime as ar
from autoremat._errors import UsageError


def count_calls(function):
    def counted(*args, **kwargs):
        counted.calls += 1
        return function(*args, **kwargs)

    counted.calls = 0
    return counted


def leaf(size=4):
    return torch.linspace(-1, 1, size, dtype=torch.float64).requires_grad_()


def gradient(function):
    def of(x):
        return torch.autograd.grad(function(x).sum(), x, create_graph=True)[0]

    return of


def region(function):
    return functools.partial(ar.checkpoint, function)


def sin_exp_sin(x):
    return x.sin().exp().sin()


def with_gradients_inside(x):
    for _ in range(2):
        torch.autograd.grad(sin_exp_sin(x).sum(), x)
    return x.sin()


c, g = region, gradient


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("function", [sin_exp_sin, with_gradients_inside])
@pytest.mark.parametrize(
    ("plain", "nested"),
    [
        (lambda f: f, lambda f: c(c(f))),
        (g, lambda f: g(c(c(c(f))))),
        (lambda f: g(g(f)), lambda f: g(c(g(f)))),
        (lambda f: g(g(f)), lambda f: c(g(g(c(f))))),
        (lambda f: g(g(f)), lambda f: g(c(g(c(f))))),
        (lambda f: g(g(g(f))), lambda f: g(c(g(c(g(c(f))))))),
    ],
)
def test_gradients_taken_inside_nested_regions(early_stop, function, plain, nested):
    x = leaf()
    with torch_checkpoint.set_checkpoint_early_stop(early_stop):
        expected, found = plain(function)(x), nested(function)(x)
        assert torch.equal(expected, found)
        if expected.requires_grad:
            again = [torch.autograd.grad(value.sum(), x)[0] for value in (expected, found)]
            assert torch.equal(*again)


def test_two_regions_inside_a_region_with_gradients_of_gradients():
    def inner(x):
        return c(lambda t: t.cos().sin().exp())(c(sin_exp_sin)(x))

    x = leaf()
    expected = g(g(lambda t: sin_exp_sin(t).cos().sin().exp()))(x)
    assert torch.equal(expected, g(g(c(inner)))(x))
    assert torch.equal(expected, g(c(g(c(inner))))(x))


def test_nested_regions_leave_no_cycles():
    gc.collect()
    gc.disable()
    try:
        x = leaf()
        y = g(c(g(c(with_gradients_inside))))(x.clone())
        node, marker = y.grad_fn, type("Marker", (), {})()
        node.metadata["marker"] = marker
        alive = weakref.ref(marker)
        del marker, node
        assert alive() is not None
        del y
        assert alive() is None
    finally:
        gc.enable()


def test_each_backward_that_keeps_the_graph_recomputes():
    function = count_calls(sin_exp_sin)
    x = leaf()
    y = ar.checkpoint(function, x)
    for number in range(1, 4):
        y.sum().backward(retain_graph=number < 3)
        assert function.calls == 1 + number
    assert torch.equal(x.grad, 3 * torch.autograd.grad(sin_exp_sin(x).sum(), x)[0])


def test_saved_tensors_read_outside_a_backward_are_not_held():
    function = count_calls(lambda x: (x * x, x.exp())[1])
    y = ar.checkpoint(function, leaf())
    for number in range(2, 4):
        assert torch.equal(y.grad_fn._saved_result, leaf().exp())
        assert function.calls == number
    y.sum().backward()
    assert function.calls == 4
    with pytest.raises(RuntimeError, match="already been freed"):
        y.grad_fn._saved_result  # noqa: B018 (reading is the point)


class Watched(torch.autograd.Function):
    """Counts how many of its saved tensors are alive, over all calls."""

    alive: list

    @staticmethod
    def forward(ctx, x):
        saved = x.clone()
        ctx.save_for_backward(saved)
        return saved * 1

    @staticmethod
    def backward(ctx, grad):
        (saved,) = ctx.saved_tensors
        Watched.alive.append(weakref.ref(saved))
        return grad


@pytest.mark.parametrize("keep", [False, True])
def test_recomputed_tensors_die_as_backward_proceeds(keep):
    Watched.alive = []
    counts = []

    def function(x):
        for _ in range(3):
            x = Watched.apply(x)
            x.register_hook(lambda grad: counts.append(sum(ref() is not None for ref in Watched.alive)))
        return x

    ar.checkpoint(function, leaf()).sum().backward(retain_graph=keep)
    assert len(Watched.alive) == 3
    assert counts == [0, 0, 0]
    assert not any(ref() is not None for ref in Watched.alive)


class Noted(torch.autograd.Function):
    """Saves a tensor, and notes it each time."""

    saved: list

    @staticmethod
    def forward(ctx, x):
        copy = x.clone()
        ctx.save_for_backward(copy)
        Noted.saved.append(weakref.ref(copy))
        return copy * 1

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


@pytest.mark.parametrize("how", ["a kept backward", "a look at a saved tensor"])
def test_what_was_recomputed_and_not_used_is_let_go_of(how):
    Noted.saved = []
    used, other = ar.checkpoint(lambda x: (x.exp(), Noted.apply(x)), leaf(), early_stop=False)
    if how == "a kept backward":
        used.sum().backward(retain_graph=True)
    else:
        assert used.grad_fn._saved_result.shape == (4,)
    assert len(Noted.saved) == 2
    assert all(ref() is None for ref in Noted.saved)
    other.sum().backward()


def test_nested_regions_recompute_in_each_backward_that_keeps_the_graph():
    inner = count_calls(sin_exp_sin)
    x = leaf()
    y = ar.checkpoint(lambda t: ar.checkpoint(inner, ar.checkpoint(inner, t)), x)
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
    calls = inner.calls
    second = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
    assert inner.calls == 2 * calls - 2
    third = torch.autograd.grad(y.sum(), x)[0]
    expected = torch.autograd.grad(sin_exp_sin(sin_exp_sin(x)).sum(), x)[0]
    assert all(torch.equal(expected, found) for found in (first, second, third))


class ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.exp(), x.sin())
        return x.exp() + x.sin().sum()

    @staticmethod
    def backward(ctx, grad):
        first = ctx.saved_tensors[0] * 1
        return grad * first * ctx.saved_tensors[1]


def test_saved_tensors_read_twice_in_a_backward_that_keeps_the_graph():
    def function(x):
        return ReadsTwice.apply(x.sin()).cos()

    x = leaf()
    y = ar.checkpoint(function, x)
    expected = torch.autograd.grad(function(x).sum(), x)[0]
    for _ in range(2):
        assert torch.equal(expected, torch.autograd.grad(y.sum(), x, retain_graph=True)[0])


@pytest.mark.skipif(not hasattr(torch_checkpoint, "GraphExecGroup"), reason="torch without GraphExecGroup")
def test_graph_execution_groups():
    function = count_calls(lambda x: ((y := x.sin().cos()), y.sin().cos()))
    x = leaf()
    y, z = ar.checkpoint(function, x)
    with torch_checkpoint.GraphExecGroup():
        (grad_y,) = torch.autograd.grad(z.sum(), y, retain_graph=True)
        (grad_x,) = torch.autograd.grad(y, x, grad_y, retain_graph=True)
        assert function.calls == 2
        with pytest.raises(torch_checkpoint.CheckpointError, match="Performing two backward calls that overlap"):
            torch.autograd.grad(z.sum(), y)
    assert torch.equal(grad_x, torch.autograd.grad(x.sin().cos().sin().cos().sum(), x)[0])
    assert torch.equal(grad_y, torch.autograd.grad(z.sum(), y)[0])


def test_early_stop_of_the_context_comes_first():
    tail = count_calls(torch.clone)

    def calls(outside, inside):
        tail.calls = 0
        with torch_checkpoint.set_checkpoint_early_stop(outside):
            y = ar.checkpoint(lambda x: tail(x.sin().cos()), leaf(), early_stop=inside)
        y.sum().backward()
        return tail.calls

    assert calls(outside=False, inside=True) == 2
    assert calls(outside=True, inside=False) == 1


def test_debug_switch_of_torch_comes_first():
    flag = [True]

    def message(given, switch):
        flag[0] = True
        with torch_checkpoint.set_checkpoint_debug_enabled(switch):
            y = ar.checkpoint(lambda x: x.sin().exp() if flag[0] else x.cos()[:2].exp(), leaf(), debug=given)
            flag[0] = False
            with pytest.raises(torch_checkpoint.CheckpointError, match="have different metadata") as error:
                y.sum().backward()
        return str(error.value)

    assert "because you passed `debug=True` to checkpoint" in message(given=False, switch=True)
    assert "debug=True" not in message(given=True, switch=False)


def test_recomputed_on_another_device_is_refused():
    device = ["cpu"]
    y = ar.checkpoint(lambda x: x.sin() * torch.ones(4, device=device[0]).to("cpu", torch.float64), leaf())
    y.sum().backward()
    y = ar.checkpoint(lambda x: x.sin() if device[0] == "cpu" else x.to("meta").sin().to("cpu"), leaf())
    device[0] = "meta"
    with pytest.raises(torch_checkpoint.CheckpointError, match=r"different metadata(.|\n)*\(cpu, meta\)"):
        y.sum().backward()


def test_more_tensors_than_in_forward():
    times = [2]

    def function(x):
        for _ in range(times[0]):
            x = x.sin()
        return x

    x = leaf()
    y = ar.checkpoint(function, x, early_stop=False)
    times[0] = 3
    with pytest.raises(torch_checkpoint.CheckpointError, match="trying to save more tensors during recomputation"):
        y.sum().backward()


def test_a_context_sees_the_ops_that_torchs_shows_it():
    class Names(torch.utils._python_dispatch.TorchDispatchMode):
        def __init__(self):
            self.names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    def seen(checkpoint):
        forward, recompute = Names(), Names()
        y = checkpoint(torch.exp, leaf(), use_reentrant=False, context_fn=lambda: (forward, recompute))
        y.sum().backward()
        return forward.names, recompute.names

    assert seen(ar.checkpoint) == seen(torch_checkpoint.checkpoint)


def test_selective_context_that_allows_changed_values():
    save_sin = functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, [torch.ops.aten.sin.default])

    def run(context_fn):
        ar.checkpoint(lambda x: x.sin().mul_(2).cos().exp(), leaf(), context_fn=context_fn).sum().backward()

    with pytest.raises(RuntimeError, match="has been mutated"):
        run(save_sin)
    run(functools.partial(save_sin, allow_cache_entry_mutation=True))
    y = ar.checkpoint(sin_exp_sin, leaf(), context_fn=save_sin)
    y.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="Trying to backward an extra time"):
        y.sum().backward()


def test_a_context_that_swallows_an_exception_is_refused():
    def fails(_x):
        raise ValueError

    contexts = (contextlib.suppress(ValueError), contextlib.nullcontext())
    with pytest.raises(RuntimeError, match="suppressed an exception raised during the checkpointed forward"):
        ar.checkpoint(fails, leaf(), context_fn=lambda: contexts)
    y = leaf().exp()
    assert isinstance(y.grad_fn._raw_saved_result.data, torch.Tensor)


def test_contexts_are_not_entered_without_gradients():
    def refuse():
        raise AssertionError

    with torch.no_grad():
        assert not ar.checkpoint(torch.exp, leaf(), context_fn=refuse).requires_grad


def test_the_reentrant_kind_is_torchs():
    x = leaf()
    y = ar.checkpoint(torch.exp, x, use_reentrant=True)
    assert type(y.grad_fn).__name__ == "CheckpointFunctionBackward"
    with pytest.raises(RuntimeError, match="incompatible"):
        torch.autograd.grad(y.sum(), x)
    with pytest.raises(UsageError, match="Unexpected keyword arguments: scale"):
        ar.checkpoint(torch.exp, x, use_reentrant=True, scale=2)
    with pytest.raises(UsageError, match="only supported when use_reentrant=False"):
        ar.checkpoint(torch.exp, x, use_reentrant=True, debug=True)
    layers = [torch.nn.Linear(4, 4, dtype=torch.float64) for _ in range(2)]
    out = ar.checkpoint_sequential(layers, 2, x, use_reentrant=True)
    with pytest.raises(RuntimeError, match="incompatible"):
        torch.autograd.grad(out.sum(), x)


@pytest.mark.parametrize("segments", [0, 3])
def test_segments_that_cannot_be_made(segments):
    with pytest.raises(UsageError, match=f"2 functions make 1 to 2 segments, not {segments}"):
        ar.checkpoint_sequential([torch.sin, torch.exp], segments, leaf())


def test_under_the_compiler_a_side_effect_happens_once():
    class Counts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.num_calls = 0

        def forward(self, x):
            self.num_calls += 1
            return x.sin().exp()

    module, x = Counts(), leaf()
    torch.compiler.reset()
    try:
        y = torch.compile(lambda t: ar.checkpoint(module, t) * 2, backend="aot_eager", fullgraph=True)(x)
    finally:
        torch.compiler.reset()
    (found,) = torch.autograd.grad(y.sum(), x)
    assert torch.allclose(found, torch.autograd.grad((x.sin().exp() * 2).sum(), x)[0])
    assert module.num_calls == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler asks for it
def test_a_graph_break_leaves_the_compilers_settings_alone():
    def breaks(x):
        x = x.sin()
        torch._dynamo.graph_break()
        return x.exp()

    torch.compiler.reset()
    try:
        y = torch.compile(lambda t: ar.checkpoint(breaks, t) * 2, backend="aot_eager")(x := leaf())
    finally:
        torch.compiler.reset()
    (found,) = torch.autograd.grad(y.sum(), x)
    assert torch.allclose(found, torch.autograd.grad((x.sin().exp() * 2).sum(), x)[0])
    assert not torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint

"""Hooks on modules inside a region: as often as in plain training, and in recompute where the numbers need them."""

import contextlib
import functools
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import autoremat.runtime as ar
from around import Around, Block, X
from autoremat._errors import RecomputeError
from autoremat._plan import OpCall, Plan, Region, SavedOutput
from comparing import assert_same, seed, train


class Inner(Block):
    def forward(self, x):
        return torch.tanh(self.other(torch.tanh(self.lin(x)))).exp()


SELECTIVE = Region(
    "blocks.0",
    saved=(SavedOutput("aten.addmm.default", 1, 0, "", 0),),
    skipped=(OpCall("aten.addmm.default", 1),),
)
PLANS = {
    "plain": None,
    "region": Plan((Region("blocks.0"),)),
    "nested": Plan((Region("blocks.0", children=(Region("blocks.0.lin"), Region("blocks.0.other"))),)),
    "selective": Plan((SELECTIVE,)),
}


def compare(add_hooks, *, plans=("region", "nested", "selective"), **kwargs):
    """Train with hooks, plain and planned; returns what ``add_hooks`` did for each."""
    noted = []
    expected = None
    for name in ("plain", *plans):
        seed()
        model = Around(Inner())
        notes = []
        removed = add_hooks(model, notes)
        if PLANS[name] is not None:
            ar.apply(model, PLANS[name], check="always")
        try:
            result = train(model, (X,), torch.sum, **kwargs)
        finally:
            if removed is not None:
                removed.remove()
        noted.append(notes)
        expected = expected or result
        assert_same(expected, result)
    return noted


def assert_hooks_fire_as_plain(add_hooks, **kwargs):
    plain, *planned = compare(add_hooks, **kwargs)
    assert plain
    assert planned
    assert all(notes == plain for notes in planned)


def test_hooks_that_look_on():
    def add_hooks(model, notes):
        for name, module in model.blocks[0].named_modules():
            module.register_forward_pre_hook(lambda m, a, name=name: notes.append(("pre", name)))
            module.register_forward_pre_hook(lambda m, a, k, name=name: notes.append("keywords"), with_kwargs=True)
            module.register_forward_hook(lambda m, a, o, name=name: notes.append(("post", name)))

    assert_hooks_fire_as_plain(add_hooks)


@pytest.mark.parametrize("compute", [lambda o: o.detach().square().mean(), lambda o: o.detach().addmm(o, o.t() @ o)])
def test_hooks_that_compute_something_on_the_side(compute):
    def add_hooks(model, notes):
        for module in (model.blocks[0].lin, model.blocks[0].other):
            module.register_forward_hook(lambda m, a, o: notes.append(torch.no_grad()(compute)(o).sum().item()))

    assert_hooks_fire_as_plain(add_hooks)


def double_in_place(_module, _args, output):
    output.mul_(2)


@pytest.mark.parametrize("changes", ["input", "keyword", "output", "output in place"])
def test_hooks_that_change_something(changes):
    def add_hooks(model, notes):
        lin = model.blocks[0].lin
        if changes == "input":
            lin.register_forward_pre_hook(lambda m, a: a[0].sin())
        elif changes == "keyword":
            lin.register_forward_pre_hook(lambda m, a, k: ((), {"input": a[0].sin()}), with_kwargs=True)
        elif changes == "output":
            lin.register_forward_hook(lambda m, a, o: o.sin())
        else:
            lin.register_forward_hook(double_in_place)
        lin.register_forward_hook(lambda m, a, o: notes.append("looks on"))

    assert_hooks_fire_as_plain(add_hooks, plans=("region", "nested") if changes == "output in place" else tuple(PLANS))


def test_a_hook_that_does_both_fires_again():
    def add_hooks(model, notes):
        model.blocks[0].lin.register_forward_hook(lambda m, a, o: notes.append("both") or o.sin())

    plain, planned = compare(add_hooks, plans=("region",))
    assert len(planned) == 2 * len(plain)


@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm", "prune", "parametrized", "parametrized spectral"])
def test_hooks_that_make_the_weight(kind):
    def add_hooks(model, notes):
        lin = model.blocks[0].lin
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            if kind in ("weight_norm", "spectral_norm"):
                getattr(nn.utils, kind)(lin)
            elif kind == "prune":
                prune.random_unstructured(lin, "weight", 0.5)
            elif kind == "parametrized":
                parametrizations.weight_norm(lin)
            else:
                parametrizations.spectral_norm(lin)
        lin.register_forward_pre_hook(lambda m, a: notes.append(1))

    assert_hooks_fire_as_plain(add_hooks, plans=("region",))


def test_hooks_that_draw_random_numbers():
    def add_hooks(model, notes):
        lin, other = model.blocks[0].lin, model.blocks[0].other
        lin.register_forward_pre_hook(lambda m, a: notes.append(torch.rand(()).item()))
        other.register_forward_hook(lambda m, a, o: o + torch.rand_like(o))

    plain, *planned = compare(add_hooks)
    assert all(set(notes) == set(plain) for notes in planned)


def test_a_hook_that_sets_what_forward_reads():
    class Reads(Inner):
        scale = 1.0

        def forward(self, x):
            return super().forward(x * self.scale)

    def run(apply):
        seed()
        model = Around(nn.Sequential(Reads()))
        model.blocks[0][0].register_forward_pre_hook(lambda m, a: setattr(m, "scale", m.scale * 2))
        if apply:
            ar.apply(model, Plan((Region("blocks.0"),)), check="always")
        return train(model, (X,), torch.sum)

    assert_same(run(apply=False), run(apply=True))


def test_a_loss_that_a_hook_makes_on_the_side():
    def run(apply):
        seed()
        model = Around(Inner())
        losses = []
        model.blocks[0].lin.register_forward_hook(lambda m, a, o: losses.append(o.square().mean()))
        if apply:
            ar.apply(model, Plan((Region("blocks.0"),)), check="always")
        out = model(X).sum()
        (out + losses[0]).backward()
        return [p.grad for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(apply=False), run(apply=True), strict=True))


class Wraps:
    """A pre-hook that opens something and a forward hook that closes it."""

    def __init__(self, module, notes, make_context, *, changes=False):
        self.notes, self.make_context, self.changes, self.open = notes, make_context, changes, []
        module.register_forward_pre_hook(self.before)
        module.register_forward_hook(self.after)

    def before(self, _module, args):
        context = self.make_context()
        context.__enter__()
        self.open.append(context)
        return (args[0] * 2,) if self.changes else None

    def after(self, _module, _args, _output):
        self.open.pop().__exit__(None, None, None)
        self.notes.append(len(self.open))


@pytest.mark.parametrize(
    ("context", "where"),
    [(context, where) for context in ("none", "changes", "saved tensors", "no_grad") for where in ("lin", "both")]
    + [("autocast", "lin")],
)
def test_pairs_of_hooks_are_closed(context, where):
    packed = []

    def contexts():
        return {
            "none": contextlib.nullcontext,
            "changes": contextlib.nullcontext,
            "autocast": functools.partial(torch.autocast, "cpu", dtype=torch.float16),
            "saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(1) or t, _same),
            "no_grad": torch.no_grad,
        }[context]

    pairs = []

    def add_hooks(model, notes):
        for name in ("lin", "other") if where == "both" else (where,):
            pairs.append(Wraps(getattr(model.blocks[0], name), notes, contexts(), changes=context == "changes"))

    autocast = torch.bfloat16 if context == "autocast" else None
    plain, *planned = compare(add_hooks, plans=("region",), autocast=autocast)
    assert not any(pair.open for pair in pairs)
    assert all(set(notes) == {0} for notes in (plain, *planned))
    if context == "none":
        assert all(notes == plain for notes in planned)


def test_a_pair_of_functions_that_share_a_variable():
    def add_hooks(model, notes):
        opened = []

        def before(_module, args):
            opened.append(1)
            return (args[0].sin(),)

        def after(_module, _args, _output):
            opened.pop()
            notes.append(len(opened))

        model.blocks[0].lin.register_forward_pre_hook(before)
        model.blocks[0].lin.register_forward_hook(after)
        model.blocks[0].other.register_forward_hook(after_another)

    def after_another(_module, _args, _output):
        counted.append(1)

    counted = []
    plain, planned = compare(add_hooks, plans=("region",))
    assert set(planned) == {0}
    assert len(planned) == 2 * len(plain)
    assert len(counted) == 2 * len(plain)


def _same(tensor):
    return tensor


def test_recompute_does_not_stop_between_the_hooks_of_a_pair():
    order = []

    class Ends(Block):
        def forward(self, x):
            return self.lin(torch.tanh(self.other(x)))  # the last saved tensor is back inside lin

    model = Around(Ends())
    model.blocks[0].lin.register_forward_pre_hook(lambda m, a: order.append("before") or (a[0] * 1,))
    model.blocks[0].lin.register_forward_hook(lambda m, a, o: order.append("after") or o * 1)
    ar.apply(model, Plan((Region("blocks.0"),)), check="always")
    model(X).sum().backward()
    assert order == ["before", "after"] * 2


@pytest.mark.parametrize("changes", [False, True])
def test_global_hooks(changes):
    class Handles(list):
        def remove(self):
            for handle in self:
                handle.remove()

    def add_hooks(model, notes):
        everywhere = nn.modules.module
        names = {module: name for name, module in model.named_modules()}

        def before(module, args):
            notes.append(("before", names[module]))

        def after(module, args, output):
            notes.append(("after", names[module]))

        def change(module, args, output):
            return output.sin().exp() if names[module].startswith("blocks.0") else None

        handles = Handles([everywhere.register_module_forward_hook(change)] if changes else [])
        handles.append(everywhere.register_module_forward_pre_hook(before))
        handles.append(everywhere.register_module_forward_hook(after))
        return handles

    assert_hooks_fire_as_plain(add_hooks, plans=("region", "nested"))
    assert not nn.modules.module._global_forward_hooks


def test_backward_hooks():
    def add_hooks(model, notes):
        for name, module in model.blocks[0].named_modules():
            module.register_full_backward_pre_hook(lambda m, go, name=name: notes.append(("before", name)))
            module.register_full_backward_hook(lambda m, gi, go, name=name: notes.append(("after", name)))
        model.blocks[0].lin.register_full_backward_hook(lambda m, gi, go: (gi[0] * 2,))

    assert_hooks_fire_as_plain(add_hooks)


@pytest.mark.parametrize("where", ["inside", "input", "parameter", "parameter once added up"])
def test_tensor_hooks_registered_in_forward(where):
    fired = []

    class Registers(Block):
        def forward(self, x):
            h = self.lin(x)
            if where == "inside":
                h.register_hook(lambda grad: fired.append(1) or grad * 2)
            elif where == "input":
                x.register_hook(lambda grad: fired.append(1) or grad * 2)
            elif where == "parameter":
                self.lin.weight.register_hook(lambda grad: fired.append(1) or grad * 2)
            else:
                self.lin.weight.register_post_accumulate_grad_hook(double)
            return torch.tanh(h).exp()

    def double(parameter):
        fired.append(1)
        parameter.grad.mul_(2)

    def run(apply):
        fired.clear()
        seed()
        model = Around(nn.Sequential(Registers()))
        if apply:
            ar.apply(model, Plan((Region("blocks.0"),)), check="always")
        model(X).sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None], len(fired)

    (plain, plain_fired), (planned, planned_fired) = run(apply=False), run(apply=True)
    assert plain_fired == planned_fired == 1
    assert all(torch.equal(a, b) for a, b in zip(plain, planned, strict=True))


def test_module_hooks_registered_in_forward():
    class Registers(Block):
        def forward(self, x):
            self.lin.register_forward_hook(lambda m, a, o: o.sin())
            return torch.tanh(self.lin(x)).exp()

    def run(apply):
        seed()
        model = Around(nn.Sequential(Registers()))
        if apply:
            ar.apply(model, Plan((Region("blocks.0"),)))
        model(X).sum().backward()
        assert len(model.blocks[0][0].lin._forward_hooks) == 1
        return [p.grad for p in model.parameters() if p.grad is not None]

    assert all(torch.equal(a, b) for a, b in zip(run(apply=False), run(apply=True), strict=True))


def test_hooks_registered_after_forward_do_not_fire_in_recompute():
    model = Around(Inner())
    applied = ar.apply(model, Plan((Region("blocks.0"),)))
    fired = []
    out = model(X)
    model.blocks[0].lin.register_forward_hook(lambda m, a, o: fired.append(1) or o * 2)
    out.sum().backward()
    assert applied.executed[0].num_recomputes == 1
    assert not fired
    model(X)
    assert fired == [1]


def test_replay_safe_hooks_fire_again():
    for mark, num_fired in ((lambda hook: hook, 1), (ar.replay_safe, 2)):
        fired = []
        model = Around(Inner())
        model.blocks[0].lin.register_forward_hook(mark(lambda m, a, o, fired=fired: fired.append(1)))
        ar.apply(model, Plan((Region("blocks.0"),)))
        model(X).sum().backward()
        assert len(fired) == num_fired


def test_a_hook_whose_effect_is_not_seen_is_refused_or_marked():
    def build(mark):
        model = Around(Inner())
        factor = [1.0]

        def sets_a_global(_module, _args):
            factor[0] = 2.0

        model.blocks[0].lin.register_forward_pre_hook(mark(sets_a_global))
        model.blocks[0].other.register_forward_hook(lambda m, a, o: o * factor[0])
        ar.apply(model, Plan((Region("blocks.0"),)))
        out = model(X)
        factor[0] = 1.0
        return out

    with pytest.raises(RecomputeError, match="other values"):
        build(_same).sum().backward()
    build(ar.replay_safe).sum().backward()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_hooks_are_in_place_after_an_exception(error):
    fails = [True]

    def hook(_module, _args, _output):
        if fails[0]:
            raise error

    model = Around(Inner())
    model.blocks[0].lin.register_forward_hook(hook)
    ar.apply(model, Plan((Region("blocks.0"),)))
    with contextlib.suppress(error):
        model(X)
    assert list(model.blocks[0].lin._forward_hooks.values()) == [hook]
    fails[0] = False
    model(X).sum().backward()
    assert list(model.blocks[0].lin._forward_hooks.values()) == [hook]


def test_a_hook_that_removes_itself():
    model = Around(Inner())
    fired = []
    handle = model.blocks[0].lin.register_forward_hook(lambda m, a, o: fired.append(1) or handle.remove())
    ar.apply(model, Plan((Region("blocks.0"),)), check="always")
    for _ in range(2):
        model(X).sum().backward()
    assert fired == [1]
    assert not model.blocks[0].lin._forward_hooks


def test_hooks_of_modules_in_a_checkpoint():
    def run(checkpoint):
        seed()
        block, fired = Inner(), []
        for module in block.modules():
            module.register_forward_pre_hook(lambda m, a: fired.append("before"))
            module.register_forward_hook(lambda m, a, o: fired.append("after"))
        block.lin.register_forward_hook(lambda m, a, o: o.sin())
        block.register_forward_hook(lambda m, a, o: o.sin().exp())
        call = functools.partial(ar.checkpoint, block) if checkpoint else block
        call(X).sum().backward()
        return fired, [p.grad for p in block.parameters()]

    (plain, expected), (ours, grads) = run(checkpoint=False), run(checkpoint=True)
    assert plain == ours
    assert all(torch.equal(a, b) for a, b in zip(expected, grads, strict=True))


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def test_hooks_where_gradients_are_taken_inside(depth, early_stop):
    """A hook that acts at the first of two calls, in a function that takes a gradient between them."""
    lin = nn.Linear(8, 8)
    looked_on, acts = [], []

    def act(_module, args, output):
        acts.append(args[0].is_leaf)
        return output.sin().exp() if acts[-1] else None

    lin.register_forward_hook(act)
    lin.register_forward_hook(lambda m, a, o: looked_on.append(1))

    def function(x):
        h = torch.tanh(lin(x))
        (g,) = torch.autograd.grad(h.square().sum(), x, create_graph=True)
        return lin(h + g).exp()

    def run(wrap):
        looked_on.clear()
        acts.clear()
        x = X.clone().requires_grad_()
        grads = torch.autograd.grad(wrap(function)(x).sum(), (x, lin.weight))
        return grads, len(looked_on)

    def wrap(function):
        for _ in range(depth):
            function = functools.partial(ar.checkpoint, function, early_stop=early_stop)
        return function

    (expected, num_plain), (grads, num_ours) = run(_same), run(wrap)
    assert num_plain == num_ours == 2
    assert acts.count(False) == 1
    assert all(torch.equal(a, b) for a, b in zip(expected, grads, strict=True))


def test_global_hooks_and_a_checkpointed_function():
    fired = []
    lin = nn.Linear(8, 8)
    handle = nn.modules.module.register_module_forward_hook(lambda m, a, o: fired.append(1) or o.sin())
    try:
        expected = torch.autograd.grad(lin(X).exp().sum(), lin.weight)[0]
        (grad,) = torch.autograd.grad(ar.checkpoint(lambda x: lin(x).exp(), X).sum(), lin.weight)
    finally:
        handle.remove()
    assert torch.equal(expected, grad)

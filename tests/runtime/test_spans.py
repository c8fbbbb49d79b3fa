"""Spans of sibling calls and nested regions, also inside forwards that are not ours: same numbers as plain."""

import copy
import gc
import random
import weakref

import pytest
import torch
from torch import nn

import autoremat as ar
from autoremat._errors import PlanError, RecomputeError
from autoremat._plan import CallName, Plan, Region
from autoremat._regions import describe_all, resolve
from autoremat._replay import RegionSpec
from autoremat.runtime import apply
from chains import Block, Chain, nested, random_regions, span, uniform, with_random_saves
from comparing import assert_equal_to_plain
from reference import is_legal

BATCH = (torch.ones(2, 4, 16),)
LINKS = ["same", "tuple", "view", "glue"]


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize(
    "regions", [uniform(8, 3), uniform(8, 8), nested(0, 7, 2), nested(0, 7, 2, whole=True), nested(0, 7, 3)]
)
def test_gradients_are_those_of_plain(link, regions):
    executed = assert_equal_to_plain(Chain(8, dropout=0.2, link=link), BATCH, Plan(regions))
    assert all(region.num_calls == region.num_recomputes == 2 for region in executed)


@pytest.mark.parametrize("number", range(30))
def test_random_nests_with_stored_outputs(number):
    choose = random.Random(number)
    model = Chain(6, dropout=0.2, link=choose.choice(LINKS))
    graph = ar.trace(model, BATCH, optimizer=None)
    hand = resolve(graph, Plan(tuple(random_regions(choose, 0, 5, 2))))
    specs = [with_random_saves(choose, graph, spec) for spec in hand]
    if not is_legal(graph, specs):
        specs = hand
    assert_equal_to_plain(model, BATCH, Plan(describe_all(graph, specs)))


class Dropping(Chain):
    """Leaves out some layers at random, as LayerDrop does."""

    def forward(self, x):
        for block in self.h:
            if torch.rand(()) < 0.6:
                x = block(x)
        return x.sum()


def test_layers_left_out_at_random():
    for regions in (uniform(8, 4), nested(0, 7, 2)):
        assert_equal_to_plain(Dropping(8), BATCH, Plan(regions), steps=6)


class Looping(nn.Module):
    """The same two blocks, called over and over (ALBERT, universal transformers)."""

    def __init__(self):
        super().__init__()
        self.a, self.b = Block(16, 0.1), Block(16, 0.1)

    def forward(self, x):
        for _ in range(3):
            x = self.b(self.a(x))
        return x.sum()


def test_shared_blocks_called_in_a_loop():
    by_call = Region("a", 0, then=(CallName("b", 0), CallName("a", 1), CallName("b", 1)), children=(Region("a", 1),))
    for region in (Region("a", then=(CallName("b"),)), by_call):
        executed = assert_equal_to_plain(Looping(), BATCH, Plan((region,)))
        assert all(r.num_calls == r.num_recomputes for r in executed)
    graph = ar.trace(Looping(), BATCH, optimizer=None)
    assert describe_all(graph, resolve(graph, Plan((by_call,)))) == (by_call,)
    assert len(resolve(graph, Plan((Region("a", then=(CallName("b"),)),)))) == 3


class ChangingBetween(Chain):
    """Changes what a block returned in place before the next one gets it."""

    def forward(self, x):
        for block in self.h:
            x = block(x)
            x.add_(1.0)
        return x.sum()


def test_an_output_changed_in_place_between_calls_is_stored_not_linked():
    assert_equal_to_plain(ChangingBetween(4), BATCH, Plan(uniform(4, 4)))
    assert_equal_to_plain(ChangingBetween(4), BATCH, Plan(nested(0, 3, 2, whole=True)))


class Cutting(Block):
    """Returns a value without a gradient, beside one with."""

    def forward(self, x):
        out = super().forward(x)
        return out.detach(), out.sum()


class Marking(nn.Module):
    """Asks for gradients of what a block returned, as input-gradient hooks of adapters do."""

    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList([Cutting(16), Block(16), Block(16)])
        self.h[1].requires_grad_(False)  # saves tensors for the gradient of its input only
        self.h[2].requires_grad_(False)

    def forward(self, x):
        x, loss = self.h[0](x)
        x.requires_grad_()
        return loss + self.h[2](self.h[1](x)).sum()


@pytest.mark.parametrize("regions", [uniform(3, 3), (span(0, 2, [span(0, 1)]),)])
def test_a_linked_output_that_was_made_to_require_gradients(regions):
    assert_equal_to_plain(Marking(), BATCH, Plan(regions))


class Collecting(nn.Module):
    """Appends to a list that it is given, and to one of its own, and has statistics."""

    def __init__(self, width):
        super().__init__()
        self.block, self.norm, self.seen = Block(width), nn.BatchNorm1d(width), []

    def forward(self, x, losses):
        out = self.norm(self.block(x).flatten(0, 1)).view(x.shape)
        losses.append(out.square().mean() * len(losses))
        self.seen.append(len(losses))
        return out * (len(losses) + len(self.seen))


class Side(nn.Module):
    def __init__(self, num_blocks):
        super().__init__()
        self.h = nn.ModuleList(Collecting(16) for _ in range(num_blocks))

    def forward(self, x):
        losses = []
        for block in self.h:
            x = block(x, losses)
        return x.sum() + torch.stack(losses).sum()


@pytest.mark.parametrize("regions", [uniform(4, 4), nested(0, 3, 2, whole=True), nested(0, 3, 2)])
def test_lists_and_statistics_are_as_forward_saw_them(regions):
    model = Side(4)
    assert_equal_to_plain(model, BATCH, Plan(regions), steps=3)
    with apply(model, Plan(regions)):
        model(*BATCH).backward()
    assert [block.seen for block in model.h] == [[1], [2], [3], [4]]
    assert model.h[0].norm.num_batches_tracked == 1


def test_two_forwards_before_one_backward():
    model = Chain(8, dropout=0.1)
    other = (torch.randn(2, 4, 16),)
    torch.manual_seed(3)
    (model(*BATCH) + model(*other)).backward()
    plain = [p.grad.clone() for p in model.parameters()]
    for regions in (uniform(8, 3), nested(0, 7, 2, whole=True)):
        model.zero_grad()
        torch.manual_seed(3)
        with apply(model, Plan(regions)):
            (model(*BATCH) + model(*other)).backward()
        assert all(torch.equal(a, p.grad) for a, p in zip(plain, model.parameters(), strict=True))


class Fragile(Block):
    """May fail when it has already saved tensors."""

    def forward(self, x, fails=False):
        out = super().forward(x)
        if fails:
            raise ValueError("no")
        return out


class Failing(nn.Module):
    """Calls a block again when it failed, and keeps the error, which keeps what was saved until then."""

    def __init__(self, num_blocks):
        super().__init__()
        self.h = nn.ModuleList(Fragile(16, 0.1) for _ in range(num_blocks))

    def forward(self, x):
        errors = []
        for i, block in enumerate(self.h):
            try:
                x = block(x, fails=i == 2)
            except ValueError as error:
                errors.append(error)
                x = block(x * 2)
        loss = x.sum()
        loss.errors = errors
        return loss


@pytest.mark.parametrize("regions", [uniform(5, 5), nested(0, 4, 2, whole=True)])
def test_a_call_that_fails_and_is_made_again(regions):
    assert_equal_to_plain(Failing(5), BATCH, Plan(regions))


class Exposing(nn.Module):
    """Hands out an intermediate value that its own result was computed from."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x):
        middle = x + self.weight
        return (middle * 2.0).sin(), middle


class ChangingExposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList(Exposing() for _ in range(2))

    def forward(self, x):
        x, middle = self.h[0](x)
        middle.add_(5.0)
        x, _ = self.h[1](x)
        return x.sum() + middle.sum()


def test_a_stored_output_changed_between_calls_is_refused():
    model = ChangingExposed()
    graph = ar.trace(model, BATCH, optimizer=None)
    first, second = (call.index for call in graph.calls if call.parent == 0 and not call.is_function)
    middle = next(op.outputs[0] for op in graph.ops if op.name == "aten.add.Tensor" and op.call in graph.subtree(first))
    assert_equal_to_plain(model, BATCH, Plan((Region("h.0", then=(CallName("h.1"),)),)))
    with apply(model, Plan(describe_all(graph, [RegionSpec(first, frozenset({middle}), (second,))])), check="never"):
        loss = model(*BATCH)
        with pytest.raises(RecomputeError, match=r"stored output of aten\.add\.Tensor has been modified"):
            loss.backward()


class Averaging(Side):
    """Reads an average before it updates it."""

    def __init__(self, num_blocks):
        super().__init__(num_blocks)
        self.h = nn.ModuleList(Averaged(16) for _ in range(num_blocks))


class Averaged(Collecting):
    def __init__(self, width):
        super().__init__(width)
        self.register_buffer("average", torch.ones(width))

    def forward(self, x, losses):
        x = x * self.average.clone()
        with torch.no_grad():
            self.average.lerp_(x.mean((0, 1)), 0.5)
        return super().forward(x, losses)


@pytest.mark.parametrize("make", [lambda: Chain(6), lambda: Averaging(6)])
@pytest.mark.parametrize("regions", [uniform(6, 1), uniform(6, 3), nested(0, 5, 2, whole=True)])
def test_backward_twice_and_retain_graph(make, regions):
    def gradients(model):
        for _ in range(2):  # what a region changes is found out in its first forward
            model.zero_grad()
            loss = model(*BATCH)
            loss.backward(retain_graph=True)
            loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    torch.manual_seed(0)
    model = make()
    plain = gradients(copy.deepcopy(model))
    with apply(model, Plan(regions), check="always"):
        planned = gradients(model)
    assert all(torch.equal(a, b) for a, b in zip(plain, planned, strict=True))


def test_a_parameter_changed_between_forward_and_backward_is_refused_by_name():
    model = Chain(4)
    with apply(model, Plan(nested(0, 3, 2, whole=True))):
        loss = model(*BATCH)
        with torch.no_grad():
            model.h[2].up.weight.add_(1)
        with pytest.raises(RecomputeError, match=r"parameter h\.2\.up\.weight has been modified"):
            loss.backward()


def test_explain_lists_what_a_span_stores_that_does_not_link():
    def held(link):
        model = Chain(4, link=link)
        with apply(model, Plan((span(0, 3),))):
            model(*BATCH).backward()
            return ar.explain(model).regions[0]

    assert (held("same").path, held("same").last) == ("h.0", "h.3")
    assert [s.name for s in held("same").held] == ["argument 0"]
    names = [s.name for s in held("glue").held]
    assert names == ["argument 0", "argument 0 of h.1", "argument 0 of h.2", "argument 0 of h.3"]


def test_explain_names_the_calls_of_a_span_that_did_not_run():
    model = Chain(4)
    model.h = model.h[:3]
    with apply(model, Plan((span(0, 2),))):
        model.h = model.h[:2]
        model(*BATCH).backward()
        region = ar.explain(model).regions[0]
    assert region.unmatched == ("call of h.2",)
    assert [s.name for s in region.held] == ["argument 0"]


@pytest.mark.parametrize(
    ("regions", "message"),
    [
        ((span(0, 1), span(1, 2)), "twice for the same call"),
        ((span(0, 3, [span(2, 4)]),), "not inside it"),
        ((span(0, 3, [span(0, 3)]),), "frees nothing"),
        ((span(0, 3, [span(1, 2), span(2, 3)]),), "twice for the same call"),
        ((span(0, 1), Region("h.1.up")), "lies inside region"),
    ],
)
def test_regions_that_do_not_nest_are_refused(regions, message):
    model = Chain(6)
    with pytest.raises(PlanError, match=message):
        apply(model, Plan(regions))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class _Shared(nn.Module):
    """Two layers with one activation for both, as in ResNets."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.act = nn.Linear(16, 32), nn.Linear(32, 16), nn.Tanh()

    def forward(self, x):
        return self.act(self.down(self.act(self.up(x))))


class _TwoShared(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = _Shared(), _Shared()

    def forward(self, x):
        return self.b(self.a(x)).sum()


def test_a_region_inside_a_nest_keeps_the_number_of_a_module_that_is_called_again_there():
    graph = ar.trace(_TwoShared(), BATCH, optimizer=None)
    index = {(call.path, call.number): call.index for call in graph.calls}
    child = RegionSpec(index["a.up", 0], then=(index["a.act", 0],))
    spec = RegionSpec(index["a", 0], then=(index["b", 0],), children=(child,), is_whole=True)
    (region,) = describe_all(graph, [spec])
    assert [call.number for call in region.children[0].calls] == [0, 0]
    assert [found.children[0].calls for found in resolve(graph, Plan((region,)))] == [child.calls]
    assert_equal_to_plain(_TwoShared(), BATCH, Plan((region,)))


@pytest.mark.parametrize("then", [(), uniform(4, 2), (*uniform(3, 1), span(3, 3))], ids=["none", "spans", "blocks"])
def test_recompute_runs_under_the_plan_of_its_forward_whatever_is_on_in_backward(then):
    model = Chain(4, dropout=0.0)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(model(*BATCH), parameters)
    inside = (Region("h.1.norm", then=(CallName("h.1.up"),)),)
    applied = apply(model, Plan((*nested(2, 3, 2), Region("h.1", children=inside))), check="never")
    loss = model(*BATCH)
    applied.remove()
    recipes = applied._recipes
    del applied
    other = apply(model, Plan(then), check="never")
    assert all(map(torch.equal, expected, torch.autograd.grad(loss, parameters)))
    assert all(recipe.num_recomputes == 1 for _, recipe in recipes)
    assert all(map(torch.equal, expected, torch.autograd.grad(model(*BATCH), parameters)))
    assert all(region.num_recomputes == 1 for region in other.executed)


def test_what_recompute_puts_on_again_is_gone_after_it():
    model = Chain(2, dropout=0.0)
    applied = apply(model, Plan(uniform(2, 1)))
    applied.remove()
    with applied.as_then(), applied.as_then():
        assert all(block._forward_hooks and block._forward_pre_hooks for block in model.h)
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in model.h)


def test_a_plan_and_its_model_go_without_garbage_collection():
    gc.collect()
    gc.disable()
    try:
        model = Chain(4, dropout=0.0)
        applied = apply(model, Plan((*nested(2, 3, 2), span(0, 1))))
        model(*BATCH).backward()
        applied.remove()
        gone = weakref.ref(model), weakref.ref(applied), weakref.ref(model.h[0])
        del model, applied
        assert [reference() for reference in gone] == [None] * 3
    finally:
        gc.enable()


class Drawing(nn.Module):
    """Draws twice, with something in between."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16), nn.Dropout(), nn.Dropout()

    def forward(self, x):
        return self.second(self.down(self.first(self.up(x)))).tanh()


@pytest.mark.parametrize("span_size", [1, 2])
def test_a_region_draws_after_draws_that_it_and_the_one_around_it_leave_out(span_size):
    model = nn.Sequential(*(Drawing() for _ in range(4)))
    graph = ar.trace(model, BATCH[0], loss=torch.sum, optimizer=None)
    calls = [next(c for c in graph.calls if c.path == str(i)) for i in range(4)]
    firsts = [next(c for c in graph.calls if c.path == f"{i}.first") for i in range(4)]
    kept = frozenset(s for c in firsts for op in graph.ops[c.start : c.end] for s in op.outputs)
    around, (inner, *rest) = [c.index for c in calls], [c.index for c in calls[3 - span_size : 3]]
    spec = RegionSpec(around[0], kept, tuple(around[1:]), (RegionSpec(inner, kept, tuple(rest)),))
    plan = Plan(describe_all(graph, [spec]))
    assert any("bernoulli" in op.op for op in plan.regions[0].skipped)
    assert any("bernoulli" in op.op for op in plan.regions[0].children[0].skipped)
    assert_equal_to_plain(model, BATCH[:1], plan, loss_fn=torch.sum)

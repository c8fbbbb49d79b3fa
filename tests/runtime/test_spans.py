"""Spans of sibling calls and nested regions: same numbers as plain, and the bytes that the ledger predicts."""

import copy
import itertools
import random

import pytest
import torch
from torch import nn

import autoremat as ar
from autoremat._errors import PlanError, RecomputeError
from autoremat._ledger import expand, peak_bytes
from autoremat._measure import record_memory
from autoremat._plan import CallName, Plan, Region
from autoremat._regions import describe_all, resolve
from autoremat._replay import Extent, RegionSpec
from autoremat.runtime import apply
from chains import Block, Chain, nested, random_regions, span, uniform, with_random_saves
from comparing import assert_same, train
from reference import is_legal
from zoo import MODELS

BATCH = (torch.ones(2, 4, 16),)
LINKS = ["same", "tuple", "view", "glue"]


def assert_equal_to_plain(model, batch, plan, loss=lambda out: out, steps=2):
    model.train()
    plain = train(copy.deepcopy(model), batch, loss, steps=steps)
    planned_model = copy.deepcopy(model)
    with apply(planned_model, plan, check="always") as applied:
        planned = train(planned_model, batch, loss, steps=steps)
        executed = applied.executed
    assert_same(plain, planned)
    return executed


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


# -- bytes --------------------------------------------------------------------------------------------------------


def wide_chain(num_blocks, dropout=0.0):
    """Activations outweigh parameters, so that the peak is that of activations."""
    return Chain(num_blocks, width=8, dropout=dropout), (torch.ones(2, 256, 8),)


def measured_and_predicted(num_blocks, regions, dropout=0.0):
    model, batch = wide_chain(num_blocks, dropout)
    plan = Plan(regions)
    predicted = ar.profile(ar.trace(model, batch, optimizer=None), plan).peak_bytes
    measured = ar.measure(model, batch, plan, optimizer=None, num_steps=1).planned.peak_bytes
    return measured, predicted


@pytest.mark.parametrize(
    "regions",
    [uniform(64, 8), nested(0, 63, 2), nested(0, 63, 4), nested(0, 63, 2, whole=True)],
    ids=["[8]", "[2]x6", "[4]x3", "[1][2]x6"],
)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_64_layers_peak_where_the_ledger_says(regions, dropout):
    measured, predicted = measured_and_predicted(64, regions, dropout)
    assert measured == predicted


def levels(first, last, arities):
    """Spans cut by one arity a level; the innermost pieces are spans without regions inside them."""
    if not arities:
        return ()
    size = (last - first + 1) // arities[0]
    return tuple(span(a, a + size - 1, levels(a, a + size - 1, arities[1:])) for a in range(first, last + 1, size))


@pytest.mark.parametrize("arities", [[8], [4, 4], [2, 2, 2, 2, 2]])
def test_the_classic_levels_peak_where_the_ledger_says(arities):
    measured, predicted = measured_and_predicted(64, levels(0, 63, arities))
    assert measured == predicted


def predicted_units(graph, regions):
    """Peak above the plain step's static bytes, in outputs of a block."""
    static = sum(s.num_bytes for s in graph.storages if s.born == -1)
    specs = resolve(graph, Plan(regions))
    return (peak_bytes(graph, expand(graph, specs)) - static) / (2 * 256 * 8 * 4)


def assert_growth(sizes):
    deep, flat = [], []
    for n in sizes:
        model, batch = wide_chain(n)
        graph = ar.trace(model, batch, optimizer=None, gradients="kept")
        deep.append(predicted_units(graph, nested(0, n - 1, 2)))
        flat.append(predicted_units(graph, uniform(n, int(n**0.5))))
    added = [b - a for a, b in itertools.pairwise(deep)]
    assert max(added) <= 2.5, "four times the layers: two outputs more, one for each level"
    grown = [b / a for a, b in itertools.pairwise(flat)]
    assert all(1.6 < factor < 2.2 for factor in grown), "four times the layers: twice the outputs"


def test_recursive_nesting_grows_with_the_logarithm_and_flat_spans_with_the_root():
    assert_growth([16, 64, 256])


@pytest.mark.slow
def test_memory_of_1024_layers_grows_as_that_of_64():
    assert_growth([16, 64, 256, 1024])


@pytest.mark.slow
@pytest.mark.parametrize("num_blocks", [16, 256, 1024])
def test_long_recursive_chains_peak_where_the_ledger_says(num_blocks):
    measured, predicted = measured_and_predicted(num_blocks, nested(0, num_blocks - 1, 2))
    assert measured == predicted
    measured, predicted = measured_and_predicted(num_blocks, uniform(num_blocks, int(num_blocks**0.5)))
    assert measured == predicted


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("gpt2", "transformer.h"),
        ("llama", "model.layers"),
        ("bert", "bert.encoder.layer"),
        ("t5", "encoder.block"),
        ("t5", "decoder.block"),
        ("t5", "encoder.block.1.layer"),
        ("vit", "vit.layers"),
    ],
)
def test_spans_of_transformers_models(name, prefix):
    case = MODELS[name]()
    model = case.build()
    plan = Plan((span(0, 1, [span(0, 0, name=prefix)], name=prefix),))
    predicted = ar.profile(ar.trace(model, case.batch, loss=case.loss_fn), plan).peak_bytes
    measured = ar.measure(model, case.batch, plan, loss=case.loss_fn, num_steps=1, plain=False).planned.peak_bytes
    assert measured == predicted
    assert ar.verify(model, case.batch, plan, loss=case.loss_fn).equal


@pytest.fixture(scope="module")
def gpt2():
    case = MODELS["gpt2"]()
    model = case.build()
    return case, model, ar.trace(model, case.batch, loss=case.loss_fn, optimizer=None)


@pytest.mark.parametrize("number", range(8))
def test_stored_outputs_of_inner_and_outer_regions_are_held_as_predicted(gpt2, number):
    """Random draws, numbers that autograd keeps, spans inside a block: what a small chain does not have."""
    case, model, graph = gpt2
    choose = random.Random(number)
    calls = {call.path: call.index for call in graph.calls}
    block, inner = calls["transformer.h.1"], (calls["transformer.h.1.ln_2"], calls["transformer.h.1.mlp"])
    first = calls["transformer.h.0"]

    def kept(*region):
        born = [s.index for s in graph.storages if s.born in Extent(graph, region)]
        return frozenset(choose.sample(born, choose.randint(0, 3)))

    def whole():
        child = RegionSpec(inner[0], kept(*inner), inner[1:])
        if choose.random() < 0.5:
            return RegionSpec(block, kept(block), children=(child,))
        parts = (RegionSpec(first, kept(first)), RegionSpec(block, kept(block), children=(child,)))
        return RegionSpec(first, kept(first, block), (block,), children=parts)

    spec = next(spec for spec in iter(whole, None) if is_legal(graph, [spec]))
    plan = Plan(describe_all(graph, [spec]))
    measured = ar.measure(
        model, case.batch, plan, loss=case.loss_fn, optimizer=None, num_steps=1, plain=False
    ).planned.peak_bytes
    assert measured == peak_bytes(graph, expand(graph, [spec]))
    assert ar.verify(model, case.batch, plan, loss=case.loss_fn).equal


def test_an_inner_region_draws_what_forward_drew_though_the_outer_one_leaves_draws_out(gpt2):
    case, model, graph = gpt2
    calls = {call.path: call.index for call in graph.calls}
    block, inner = calls["transformer.h.1"], (calls["transformer.h.1.ln_2"], calls["transformer.h.1.mlp"])
    masks = [
        s.index
        for s in graph.storages
        if s.born in Extent(graph, [block]) and graph.ops[s.born].name == "aten.empty_like.default"
    ]
    assert len(masks) == 3
    for mask in masks:
        spec = RegionSpec(block, frozenset({mask}), children=(RegionSpec(inner[0], then=inner[1:]),))
        plan = Plan(describe_all(graph, [spec]))
        assert ar.verify(model, case.batch, plan, loss=case.loss_fn).equal
        usage = ar.measure(model, case.batch, plan, loss=case.loss_fn, optimizer=None, num_steps=1, plain=False)
        assert usage.planned.peak_bytes == peak_bytes(graph, expand(graph, [spec]))


# -- forwards that are not ours -----------------------------------------------------------------------------------


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
    first, second = (call.index for call in graph.calls if call.parent == 0)
    middle = next(op.outputs[0] for op in graph.ops if op.name == "aten.add.Tensor" and op.call == first)
    assert_equal_to_plain(model, BATCH, Plan((Region("h.0", then=(CallName("h.1"),)),)))
    with apply(model, Plan(describe_all(graph, [RegionSpec(first, frozenset({middle}), (second,))])), check="never"):
        loss = model(*BATCH)
        with pytest.raises(RecomputeError, match=r"stored output of aten\.add\.Tensor has been modified"):
            loss.backward()


class Wrapped(nn.Module):
    def __init__(self, num_blocks, dropout):
        super().__init__()
        self.body = Chain(num_blocks, 8, dropout)

    def forward(self, x):
        return self.body(x) * 2


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_spans_inside_a_module_that_is_a_region(dropout):
    inner = tuple(span(i, i + 2, name="body.h") for i in (0, 3, 6))
    plan = Plan((Region("body", children=inner),))
    model, batch = Wrapped(9, dropout), (torch.ones(2, 256, 8),)
    predicted = ar.profile(ar.trace(model, batch, optimizer=None), plan).peak_bytes
    measured = ar.measure(model, batch, plan, optimizer=None, num_steps=1, plain=False).planned.peak_bytes
    assert measured == predicted
    assert_equal_to_plain(model, batch, plan)


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


def test_nothing_lives_on():
    model, batch = wide_chain(8)
    with apply(model, Plan(nested(0, 7, 2, whole=True))):
        model(*batch).backward()
        model.zero_grad()
        live = [record_memory(lambda: (model(*batch).backward(), model.zero_grad())[0])[1] for _ in range(3)]
    assert all(sum(num_bytes for _, num_bytes in events) == 0 for events in live)


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

"""Bytes of spans of sibling calls and of nested regions: what the ledger predicts is what a real step takes."""

import functools
import itertools
import random

import pytest
import torch
from torch import nn

import autoremat as ar
from autoremat._ledger import expand, peak_bytes
from autoremat._measure import record_memory
from autoremat._plan import Plan, Region
from autoremat._regions import describe_all, resolve
from autoremat._replay import Extent, RegionSpec
from autoremat._schedule import Action
from autoremat.runtime import apply
from chains import Chain, ThinChain, nested, span, uniform
from comparing import assert_equal_to_plain
from reference import is_legal
from zoo import MODELS


@functools.cache
def traced(make, num_blocks, gradients="fresh", **options):
    """A chain, a batch of which activations outweigh the parameters, and their step."""
    model, batch = make(num_blocks, **options), (torch.ones(2, 256, 8),)
    return model, batch, ar.trace(model, batch, optimizer=None, gradients=gradients)


wide_chain = functools.partial(traced, Chain, width=8)


def assert_peak_is_predicted(model, batch, graph, regions):
    plan = Plan(regions)
    measured = ar.measure(model, batch, plan, optimizer=None, num_steps=0, plain=False).planned.peak_bytes
    assert measured == ar.profile(graph, plan).peak_bytes


@pytest.mark.parametrize(
    "regions",
    [uniform(64, 8), nested(0, 63, 2), nested(0, 63, 4), nested(0, 63, 2, whole=True)],
    ids=["[8]", "[2]x6", "[4]x3", "[1][2]x6"],
)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_64_layers_peak_where_the_ledger_says(regions, dropout):
    assert_peak_is_predicted(*wide_chain(64, dropout=dropout), regions)


def levels(first, last, arities):
    """Spans cut by one arity a level; the innermost pieces are spans without regions inside them."""
    if not arities:
        return ()
    size = (last - first + 1) // arities[0]
    return tuple(span(a, a + size - 1, levels(a, a + size - 1, arities[1:])) for a in range(first, last + 1, size))


@pytest.mark.parametrize("arities", [[8], [4, 4], [2, 2, 2, 2, 2]])
def test_the_classic_levels_peak_where_the_ledger_says(arities):
    assert_peak_is_predicted(*wide_chain(64, dropout=0.0), levels(0, 63, arities))


def predicted_units(graph, regions):
    """Peak above the plain step's static bytes, in outputs of a block."""
    static = sum(s.num_bytes for s in graph.storages if s.born == -1)
    specs = resolve(graph, Plan(regions))
    return (peak_bytes(graph, expand(graph, specs)) - static) / (2 * 256 * 8 * 4)


def assert_growth(graphs):
    """``graphs`` have four times the layers of the one before."""
    deep, flat = [], []
    for num_blocks, graph in graphs.items():
        deep.append(predicted_units(graph, nested(0, num_blocks - 1, 2)))
        flat.append(predicted_units(graph, uniform(num_blocks, int(num_blocks**0.5))))
    added = [b - a for a, b in itertools.pairwise(deep)]
    assert max(added) <= 2.5, "two outputs more, one for each level"
    grown = [b / a for a, b in itertools.pairwise(flat)]
    assert all(1.6 < factor < 2.2 for factor in grown), "twice the outputs"


def test_recursive_nesting_grows_with_the_logarithm_and_flat_spans_with_the_root():
    assert_growth({n: wide_chain(n, gradients="kept")[-1] for n in (16, 64)})


@pytest.mark.slow
def test_memory_of_1024_layers_grows_as_that_of_64():
    assert_growth({n: traced(ThinChain, n)[-1] for n in (16, 64, 256, 1024)})


@pytest.mark.slow
@pytest.mark.parametrize("regions", [nested(0, 1023, 2), uniform(1024, 32)], ids=["recursive", "flat"])
def test_1024_layers_peak_where_the_ledger_says(regions):
    assert_peak_is_predicted(*traced(ThinChain, 1024), regions)


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


def test_nothing_lives_on():
    model, batch = Chain(8, width=8), (torch.ones(2, 256, 8),)
    with apply(model, Plan(nested(0, 7, 2, whole=True))):
        model(*batch).backward()
        model.zero_grad()
        live = [record_memory(lambda: (model(*batch).backward(), model.zero_grad())[0])[1] for _ in range(3)]
    assert all(sum(num_bytes for _, num_bytes in events) == 0 for events in live)


def test_what_a_nest_stores_takes_memory_until_its_recompute_has_read_it():
    """Three blocks that are dropped again, then three that backward needs: what the first store is gone by then."""
    model, batch, graph = wide_chain(6)
    calls = [c.index for c in graph.calls if c.path in {f"h.{i}" for i in range(6)}]
    stored = frozenset(
        op.outputs[0] for op in graph.ops if op.name == "aten.tanh.default" and op.index in Extent(graph, calls[:3])
    )
    inner = RegionSpec(calls[0], then=tuple(calls[1:3]))
    nest = RegionSpec(calls[0], stored, tuple(calls[1:]), (inner,))
    assert_peak_is_predicted(model, batch, graph, describe_all(graph, [nest]))
    assert ar.verify(model, batch, Plan(describe_all(graph, [nest])), optimizer=None).equal
    events = expand(graph, [nest]).events
    recompute = [i for i, e in enumerate(events) if e.action is Action.RECOMPUTE and e.region == 0]
    assert stored <= {e.storage for e in events[recompute[0] : recompute[-1]] if e.action is Action.DROP}


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_an_inner_region_casts_its_arguments_under_autocast_as_often_as_forward_did(name):
    """In recompute they are leaves that require gradients, whose casts autocast would keep for the next call."""
    case = MODELS[name]()
    model = case.build()
    graph = ar.trace(model, case.batch, loss=case.loss_fn, optimizer=None, precision="amp-bf16")
    calls = {call.path: call.index for call in graph.calls}
    outer = calls[case.paths[0]]
    inner = next(c.index for c in graph.calls if c.path.startswith(case.paths[0]) and "elf" in c.path.split(".")[-1])
    products = [op for op in graph.ops[graph.calls[inner].start : graph.calls[inner].end] if "mm" in op.name]
    kept = frozenset(op.outputs[-1] for op in products[1:])
    spec = RegionSpec(outer, children=(RegionSpec(inner, kept),))
    plan = Plan(describe_all(graph, [spec]))
    options = {"loss": case.loss_fn, "optimizer": None, "precision": "amp-bf16"}
    assert ar.verify(model, case.batch, plan, **options).equal
    usage = ar.measure(model, case.batch, plan, num_steps=1, plain=False, **options)
    assert usage.planned.peak_bytes == peak_bytes(graph, expand(graph, [spec]))

"""Regions that are alike are worked out once, and what is known of one holds for the others."""

import dataclasses
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoremat._expand import Expansion, expand
from autoremat._ledger import peak_bytes
from autoremat._prices import Prices
from autoremat._replay import RegionSpec, replay
from strategies import TRANSFORMER, build_step, step_graphs

BLOCK = (("norm", 0, 2), ("call", (("linear", 0, 3), ("relu_", 0, 3), ("dropout", 0, 2)), 0), ("attention", 2, 2))


def stored(graph, call, choice):
    """Outputs of some ops of a call, the same ones in every call that is like it."""
    ops = graph.ops[graph.calls[call].start : graph.calls[call].end]
    made = (s for op in ops[choice::3] for s in op.outputs if graph.storages[s].born == op.index and not op.mutates)
    return frozenset(made) if choice < 3 else frozenset()


def specs_of(graph, choice, is_whole):
    """Every module call but the model's own, and every two blocks that follow one another."""
    blocks = [c for c in graph.calls if c.parent >= 0 and graph.calls[c.parent].parent == -1]
    calls = [(c.index,) for c in graph.calls if c.parent >= 0]
    calls += [(a.index, b.index) for a, b in pairwise(blocks) if a.micro_step == b.micro_step]
    for first, *then in calls:
        yield RegionSpec(first, stored(graph, first, choice), then=tuple(then), is_whole=is_whole and choice == 3)


def in_any_order(recompute):
    """A recompute without the order of storages that go at once: that of a set."""
    groups = [(recompute.highest[0], set())]
    for storage, highest in zip(recompute.passing, recompute.highest[1:], strict=True):
        groups[-1][1].add(storage)
        if highest >= 0:
            groups.append((highest, set()))
    return recompute.moment, recompute.left, recompute.ops, groups


def check(graph, specs):
    """All that a region does is the same whether another that is alike was worked out before or not."""
    prices, num_clocks = Prices(graph), len(graph.ops) + 1
    for spec in specs:
        assert prices.work(spec) == replay(graph, spec)
        known, found = (some._alone(spec) for some in (prices, Prices(graph)))
        assert list(map(in_any_order, known.recomputes)) == list(map(in_any_order, found.recomputes))
        assert (known.remaining, known.wanted) == (found.remaining, found.wanted)
        for before, now in ((known.early, found.early), (known.late, found.late)):
            assert (before.by_clock(num_clocks) == now.by_clock(num_clocks)).all()


@given(step_graphs(max_blocks=6), st.integers(0, 3), st.booleans())
@settings(max_examples=40, deadline=None)
def test_what_is_known_of_one_region_holds_for_those_that_are_alike(graph, choice, is_whole):
    specs = list(specs_of(graph, choice, is_whole))
    check(graph, specs)
    prices = Prices(graph)
    assert [prices.peak_bytes([s]) for s in specs] == [peak_bytes(graph, expand(graph, [s])) for s in specs]


CHANGES = {
    "storages": ({"num_bytes": 100}, {"last_ref": 1000}, {"last_ref": 40}),
    "ops": (
        *({"workspace_bytes": 60}, {"kept_bytes": 3}, {"flops": 7}, {"name": "aten.item.default"}, {"inputs": ()}),
        *({"is_view": True}, {"reads_value": True}, {"is_random": True}),
    ),
    "saved": ({"released": 1000}, {"released": 60}, {"unpacked": None}, {"unpacked": 50}, {"call": 0}, {"storage": 0}),
    "calls": ({"links": ()}, {"inputs": ()}, {"inputs": (0,)}),
}


def with_one_change(what, num_layers=4):
    """Equal layers but for one thing in one of them."""
    graph = build_step(tuple((f"h.{i}", BLOCK) for i in range(num_layers)), rng_state_bytes=1)
    start, end = next((call.start, call.end) for call in graph.calls if call.path == "h.2")
    clocks = {
        "storages": [storage.born for storage in graph.storages],
        "ops": range(len(graph.ops)),
        "saved": [record.packed for record in graph.saved],
        "calls": [call.start for call in graph.calls],
    }
    items = getattr(graph, what)
    for place, item in enumerate(items):
        for change in CHANGES[what] if start <= clocks[what][place] < end else ():
            some = {key: min(value, len(graph.ops)) if value == 1000 else value for key, value in change.items()}
            changed = (*items[:place], dataclasses.replace(item, **some), *items[place + 1 :])
            yield dataclasses.replace(graph, **{what: changed})


@pytest.mark.parametrize("what", CHANGES)
def test_a_region_is_not_alike_if_anything_that_counts_is_different(what):
    for graph in with_one_change(what):
        for choice in (0, 3):
            check(graph, specs_of(graph, choice, is_whole=False))


def test_equal_layers_are_worked_out_once_but_for_the_first_and_the_last(monkeypatch):
    worked_out = []

    def counted(graph, specs, **more):
        worked_out.append(specs)
        return Expansion(graph, specs, **more)

    monkeypatch.setattr("autoremat._prices.Expansion", counted)
    for num_layers in (4, 12):
        graph = build_step(tuple((f"h.{i}", TRANSFORMER) for i in range(num_layers)), num_micro_steps=2)
        layers = [RegionSpec(call.index) for call in graph.calls if call.path.count(".") == 1]
        assert len(layers) == 2 * num_layers
        worked_out.clear()
        Prices(graph).peak_bytes(layers)
        assert len(worked_out) == 3

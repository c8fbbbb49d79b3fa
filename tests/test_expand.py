"""Spans and nested regions written out as schedules: the abstract machine executes each, and agrees on the peak."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import autoremat as ar
from autoremat._errors import PlanError, PlanMismatch
from autoremat._ledger import expand, peak_bytes
from autoremat._plan import CallName, Plan, Region
from autoremat._prices import Prices
from autoremat._regions import describe_all, resolve
from autoremat._replay import Extent, RegionSpec
from autoremat._schedule import Action, Event
from chains import Chain, nested, span, uniform
from machine import run_schedule


@pytest.fixture(scope="module")
def graphs():
    return {
        link: ar.trace(Chain(8, width=8, link=link), (torch.ones(2, 64, 8),), optimizer=None)
        for link in ("same", "tuple", "view", "glue")
    }


def without_workspace(graph, specs):
    schedule = expand(graph, specs)
    machine_peak = run_schedule(graph, schedule)
    assert machine_peak + graph.hidden_bytes == peak_bytes(graph, schedule) == Prices(graph).peak_bytes(specs)
    return machine_peak


def regions(draw, first, last, depth):
    """Random regions over blocks first..last: spans, with regions inside them."""
    found, at = [], first
    while at <= last:
        size = draw(st.integers(1, last - at + 1))
        if draw(st.booleans()):
            is_whole = depth == 0 and size == last - first + 1
            inner = regions(draw, at, at + size - 1, depth - 1) if depth and size > 1 and not is_whole else ()
            inner = [r for r in inner if len(r.calls) < size]
            found.append(span(at, at + size - 1, inner))
        at += size
    return found


@given(data=st.data(), link=st.sampled_from(["same", "tuple", "view", "glue"]))
@settings(max_examples=150, deadline=None)
def test_random_spans_and_nests_are_legal(graphs, data, link):
    plan = Plan(regions=tuple(regions(data.draw, 0, 7, 3)))
    graph = graphs[link]
    specs = resolve(graph, plan)
    without_workspace(graph, specs)
    assert describe_all(graph, specs) == plan.regions


def test_a_span_stores_only_its_first_input(graphs):
    graph = graphs["same"]
    schedule = expand(graph, resolve(graph, Plan((span(0, 7),))))
    alive = set()
    for event in schedule.events:
        if event.action is Action.BACKWARD:
            break
        if event.op >= 0:
            alive |= {s for s in graph.ops[event.op].outputs if graph.storages[s].born == event.op}
        if event.action is Action.DROP:
            alive.discard(event.storage)
    paths = [graph.calls[graph.ops[graph.storages[s].born].call].path for s in alive]
    assert not [path for path in paths if path.startswith("h.")]


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_random_nests_that_store_outputs_are_legal(graphs, data):
    graph = graphs["same"]

    def storing(spec):
        born = [s.index for s in graph.storages if s.born in Extent(graph, spec.calls)]
        kept = frozenset(data.draw(st.lists(st.sampled_from(born), max_size=6)))
        children = tuple(storing(child) for child in spec.children)
        return dataclasses.replace(spec, kept=kept, children=children, is_whole=spec.is_whole and not kept)

    specs = resolve(graph, Plan(regions=tuple(regions(data.draw, 0, 7, 2))))
    without_workspace(graph, [storing(spec) for spec in specs])


def recompute_of_all(graph, spec):
    """Events of the recompute of the outermost region."""
    events = expand(graph, [spec]).events
    found = [i for i, event in enumerate(events) if event.action is Action.RECOMPUTE and event.region == 0]
    return events[found[0] : found[-1] + 1]


def blocks(graph, first, last):
    return [c.index for c in graph.calls if c.path in {f"h.{i}" for i in range(first, last + 1)}]


def test_what_a_nest_stores_goes_once_its_recompute_has_read_it(graphs):
    graph = graphs["same"]
    calls = blocks(graph, 0, 3)
    inside = graph.subtree(calls[1])
    stored = next(op.outputs[0] for op in graph.ops if op.call in inside and op.name == "aten.tanh.default")
    inner = RegionSpec(calls[0], then=tuple(calls[1:3]))
    nest = RegionSpec(calls[0], frozenset({stored}), then=tuple(calls[1:]), children=(inner,))
    assert Event(Action.DROP, -1, stored, 0) in recompute_of_all(graph, nest)
    alone = dataclasses.replace(nest, children=())
    assert Event(Action.DROP, -1, stored, 0) not in recompute_of_all(graph, alone), "backward reads it"


def test_what_does_not_link_is_stored(graphs):
    def stored(link):
        graph = graphs[link]
        return without_workspace(graph, resolve(graph, Plan((span(0, 3),))))

    assert stored("same") < stored("view")


def test_nesting_needs_less_than_one_level():
    graph = ar.trace(Chain(16, width=8), (torch.ones(2, 64, 8),), optimizer=None)
    flat = without_workspace(graph, resolve(graph, Plan(uniform(16, 4))))
    deep = without_workspace(graph, resolve(graph, Plan(nested(0, 15, 2))))
    assert deep < flat


def test_calls_that_do_not_follow_each_other_are_refused(graphs):
    with pytest.raises(PlanError, match=r"no call of 'h\.0' follows that of 'h\.1'"):
        resolve(graphs["same"], Plan((Region("h.1", then=(CallName("h.0"),)),)))
    with pytest.raises(PlanError, match=r"'h\.0\.up'"):
        resolve(graphs["same"], Plan((Region("h.0", then=(CallName("h.0.up"),)),)))
    with pytest.raises(PlanMismatch, match=r"'h\.9'"):
        resolve(graphs["same"], Plan((Region("h.9"),)))

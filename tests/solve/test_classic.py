"""Schedules by name: which blocks they find, what they make regions, and what the ledger says of them."""

from __future__ import annotations

import pytest

from autoremat._ledger import expand, peak_bytes
from autoremat._replay import RegionSpec
from autoremat._schedule import Action
from autoremat._step_graph import StepGraph
from autoremat.solve import CLASSIC_NAMES, block_stacks, classic_regions
from machine import run_schedule
from strategies import Recipe, build_step

MLP: Recipe = (("linear", 0, 8), ("gelu", 0, 8), ("linear", 0, 2))
LAYER: Recipe = (("norm", 0, 2), ("call", MLP, 0), ("attention", 0, 2), ("add", 2, 2))


def stack(num: int) -> StepGraph:
    return build_step(tuple((f"h.{i}", LAYER) for i in range(num)), loss_bytes=2)


def regions_of(graph: StepGraph, name: str) -> tuple[RegionSpec, ...]:
    found = classic_regions(graph, name)
    assert found is not None
    return found


def numbers(graph: StepGraph, spec: RegionSpec) -> list[int]:
    return [int(graph.calls[call].path.split(".")[1]) for call in spec.calls]


@pytest.mark.parametrize("name", CLASSIC_NAMES)
def test_every_schedule_is_legal(name: str) -> None:
    graph = stack(6)
    run_schedule(graph, expand(graph, regions_of(graph, name)))


def test_names_mean_what_they_say() -> None:
    graph = stack(9)
    assert regions_of(graph, "none") == ()
    assert [numbers(graph, s) for s in regions_of(graph, "every-block")] == [[i] for i in range(9)]
    assert [numbers(graph, s) for s in regions_of(graph, "every:4")] == [[0], [4], [8]]
    assert [numbers(graph, s) for s in regions_of(graph, "uniform:4")] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert [numbers(graph, s) for s in regions_of(graph, "sqrt")] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    halves = regions_of(graph, "recursive")
    assert [numbers(graph, s) for s in halves] == [[0, 1, 2, 3, 4], [5, 6, 7, 8]]
    assert [numbers(graph, s) for s in halves[1].children] == [[5, 6], [7, 8]]


def test_policies_store_outputs_by_operator() -> None:
    graph = build_step((("h.0", (("linear", 0, 8), ("gelu", 0, 8))), ("h.1", (("linear", 0, 8), ("gelu", 0, 8)))))
    assert block_stacks(graph) == []
    graph = stack(2)
    kept = {graph.ops[graph.storages[s].born].name for spec in regions_of(graph, "save:matmuls") for s in spec.kept}
    assert kept == {"aten.addmm.default"}
    again = expand(graph, regions_of(graph, "save:matmuls")).events
    assert not any(e.action is Action.RECOMPUTE and graph.ops[e.op].name == "aten.addmm.default" for e in again)


@pytest.mark.parametrize("name", ["all", "every", "every:0", "uniform:x", "save", "save:convs", "sqrt:2", ""])
def test_an_unknown_name_is_none(name: str) -> None:
    assert classic_regions(stack(2), name) is None


def test_of_stacks_in_a_stack_the_longer_is_taken() -> None:
    tower: Recipe = tuple(("call", LAYER, 0) for _ in range(4))
    graph = build_step((("h.0", tower), ("h.1", tower)))
    assert [len(calls) for calls in block_stacks(graph)] == [4, 4]


def test_memory_falls_from_segments_to_recursion_on_a_deep_stack() -> None:
    graph = stack(16)
    plain, blocks, halves = (
        peak_bytes(graph, expand(graph, regions_of(graph, name))) for name in ("none", "every-block", "recursive")
    )
    assert plain > blocks >= halves

"""The machine itself: it accepts what the ledger writes and refuses what is illegal."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoremat._ledger import expand, peak_bytes, price
from autoremat._replay import RegionSpec, obstacle
from autoremat._schedule import Action, Event, Schedule
from autoremat._step_graph import StepGraph
from machine import run_schedule
from strategies import build_step, step_graphs

BLOCK = (("linear", 0, 4), ("gelu", 0, 4), ("dropout", 0, 3), ("linear", 0, 2))


@given(step_graphs())
def test_a_plain_step_is_legal(graph: StepGraph) -> None:
    schedule = expand(graph)
    workspace = max(op.workspace_bytes for op in graph.ops)
    assert run_schedule(graph, schedule) <= peak_bytes(graph, schedule) <= run_schedule(graph, schedule) + workspace


@given(step_graphs(), st.integers(1, 4))
def test_regions_without_stored_outputs_are_legal(graph: StepGraph, every: int) -> None:
    tops = [call.index for call in graph.calls if call.parent >= 0 and graph.calls[call.parent].parent == -1]
    specs = [RegionSpec(call) for call in tops[::every] if obstacle(graph, call) is None]
    run_schedule(graph, expand(graph, specs))


def test_the_quick_sum_of_a_peak_is_that_of_the_whole_profile() -> None:
    graph, schedule = _planned()
    assert {Action.SAVE, Action.HOLD, Action.RECOMPUTE} <= {event.action for event in schedule.events}
    for steps in (schedule, expand(graph)):
        assert peak_bytes(graph, steps) == price(graph, steps, [0.0] * len(graph.ops)).peak_bytes


def _break(schedule: Schedule, action: Action, *, insert: Event | None = None) -> Schedule:
    """Leave out the first event of a kind, or put another in its place."""
    events = list(schedule.events)
    at = next(i for i, event in enumerate(events) if event.action is action)
    events[at : at + 1] = [] if insert is None else [events[at], insert]
    return dataclasses.replace(schedule, events=tuple(events))


def _planned() -> tuple[StepGraph, Schedule]:
    graph = build_step((("h.0", BLOCK), ("h.1", BLOCK)), rng_state_bytes=1)
    kept = next(op.outputs[0] for op in graph.ops if op.name == "aten.empty_like.default")
    return graph, expand(graph, [RegionSpec(1, frozenset({kept})), RegionSpec(2)])


def test_the_planned_step_that_is_broken_below_is_legal() -> None:
    run_schedule(*_planned())


@pytest.mark.parametrize("action", [a for a in Action if a is not Action.SAVE])
def test_a_missing_event_is_noticed(action: Action) -> None:
    graph, schedule = _planned()
    with pytest.raises(AssertionError):
        run_schedule(graph, _break(schedule, action))


def test_a_missing_save_is_noticed() -> None:
    graph, schedule = _planned()
    with pytest.raises(AssertionError, match=r"neither stored nor recomputed|comes back with other values"):
        run_schedule(graph, _break(schedule, Action.SAVE))


def test_dropping_a_parameter_is_noticed() -> None:
    graph, schedule = _planned()
    with pytest.raises(AssertionError, match="static"):
        run_schedule(graph, _break(schedule, Action.FORWARD, insert=Event(Action.DROP, storage=0)))


def test_running_an_op_outside_its_region_is_noticed() -> None:
    graph, schedule = _planned()
    with pytest.raises(AssertionError, match="outside its region"):
        run_schedule(graph, _break(schedule, Action.RECOMPUTE, insert=Event(Action.RECOMPUTE, op=0, region=1)))


def test_mutating_a_stored_tensor_again_is_noticed() -> None:
    graph, schedule = _planned()
    mutator = next(op.index for op in graph.ops if op.name == "aten.div_.default")
    with pytest.raises(AssertionError, match=r"a second time|neither stored"):
        run_schedule(graph, _break(schedule, Action.RECOMPUTE, insert=Event(Action.RECOMPUTE, op=mutator, region=0)))

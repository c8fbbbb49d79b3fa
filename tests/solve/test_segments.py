"""Which module calls become candidates."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given

from autoremat._step_graph import StepGraph
from autoremat.solve._facts import Facts, collect_facts
from autoremat.solve._segments import Segments, find_segments
from strategies import Recipe, build_step, step_graphs

MLP: Recipe = (("linear", 0, 8), ("gelu", 0, 8), ("linear", 0, 2))
BLOCK: Recipe = (("norm", 0, 2), ("call", MLP, 0), ("dropout", 0, 2), ("add", 2, 2))


def segments_of(graph: StepGraph) -> tuple[Facts, Segments]:
    facts = collect_facts(graph, [float(op.flops) for op in graph.ops])
    return facts, find_segments(facts)


def paths_of(graph: StepGraph) -> list[str]:
    """Paths of the single calls among the candidates."""
    single = [c.members[0].calls for c in segments_of(graph)[1].candidates if len(c.members[0].calls) == 1]
    return [graph.calls[call].path for (call,) in single]


def test_blocks_and_their_parts_are_candidates_and_equal_ones_are_of_a_kind() -> None:
    graph = build_step((("h.0", BLOCK), ("h.1", BLOCK), ("g.2", MLP)))
    assert paths_of(graph) == ["h.0", "h.0.1", "h.1", "h.1.1", "g.2"]
    kinds = [c.kind for c in segments_of(graph)[1].candidates if len(c.members[0].calls) == 1]
    assert kinds[0] == kinds[2]
    assert kinds[1] == kinds[3]
    assert len(set(kinds)) == 3


def test_spans_are_candidates_where_they_drop_more_than_their_parts() -> None:
    graph = build_step((("h.0", BLOCK), ("h.1", BLOCK), ("g.2", MLP)))
    segments = segments_of(graph)[1]
    spans = [c.members[0].calls for c in segments.candidates if len(c.members[0].calls) > 1]
    assert [[graph.calls[call].path for call in calls] for calls in spans] == [
        ["h.0", "h.1"],
        ["h.0", "h.1", "g.2"],
        ["h.1", "g.2"],
    ]
    nests = [[graph.calls[call].path for call in nest.members[0]] for nest in segments.nests]
    assert ["h.0", "h.1", "g.2"] in nests
    assert ["g.2"] not in nests


@pytest.mark.parametrize("most", [4, 8])
def test_spans_are_found_where_shorter_ones_would_start_and_stop_in_modules_too_far_apart(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr("autoremat.solve._segments.MAX_CROSSING_OPS", most)
    one: Recipe = (("call", MLP, 0),)
    graph = build_step((("h.0", one * 2), ("h.1", one), ("h.2", one), ("h.3", one)))
    assert any(len(c.members[0].written) > 1 for c in segments_of(graph)[1].candidates)


def test_nests_of_a_long_stack_end_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of the table are then equal but for their length."""
    monkeypatch.setattr("autoremat.solve._segments.MAX_CUTS", 4)
    graph = build_step(tuple((f"h.{i}", BLOCK) for i in range(10)))
    spans = [nest.members[0] for nest in segments_of(graph)[1].nests if len(nest.members[0]) > 1]
    blocks = [call.index for call in graph.calls if call.parent == 0]
    edges = {(blocks.index(calls[0]), blocks.index(calls[-1]) + 1) for calls in spans if calls[0] in blocks}
    cuts = (0, 1, 4, 7, 10)
    assert edges == {(a, b) for a in cuts for b in cuts if b - a > 1}


def test_a_span_ends_where_a_call_gets_something_else() -> None:
    graph = build_step((("h.0", BLOCK), ("h.1", BLOCK)))
    calls = tuple(dataclasses.replace(call, links=()) for call in graph.calls)
    segments = segments_of(dataclasses.replace(graph, calls=calls))[1]
    assert all(len(c.members[0].calls) == 1 for c in segments.candidates)


def test_a_stack_is_left_to_its_blocks() -> None:
    layers = tuple(("call", BLOCK, 0) for _ in range(4))
    assert "h.0" not in paths_of(build_step((("h.0", layers),)))
    assert "h.0.3" in paths_of(build_step((("h.0", layers),)))


def test_a_single_block_is_a_candidate() -> None:
    assert "h.0" in paths_of(build_step((("h.0", BLOCK),)))


def test_a_block_whose_argument_changes_in_place_is_none() -> None:
    graph = build_step((("h.0", BLOCK), ("h.1", BLOCK)))
    entering = graph.calls[3].inputs[0]
    ops = list(graph.ops)
    after = graph.calls[3].end
    ops[after] = dataclasses.replace(ops[after], mutates=(entering,))
    assert paths_of(dataclasses.replace(graph, ops=tuple(ops))) == ["h.0", "h.0.1", "h.1.1"]


def test_a_block_that_backward_never_reads_is_none() -> None:
    graph = build_step((("h.0", BLOCK), ("h.1", BLOCK)))
    inside = graph.subtree(3)
    saved = tuple(dataclasses.replace(r, unpacked=None) if r.call in inside else r for r in graph.saved)
    assert paths_of(dataclasses.replace(graph, saved=saved)) == ["h.0", "h.0.1"]


def test_of_blocks_that_backward_takes_in_another_order_the_larger_stays() -> None:
    large: Recipe = (("linear", 0, 16), ("gelu", 0, 16), ("linear", 0, 2))
    graph = build_step((("h.0", large), ("g.1", MLP)))
    # Let backward ask for the second block last.
    saved = tuple(
        dataclasses.replace(r, unpacked=(r.unpacked or 0) + len(graph.ops) // 3, released=len(graph.ops))
        if r.call == 2
        else r
        for r in graph.saved
    )
    assert paths_of(dataclasses.replace(graph, saved=saved)) == ["h.0"]


def test_a_call_that_differs_between_micro_steps_is_none() -> None:
    graph = build_step((("h.0", MLP), ("g.1", MLP)), num_micro_steps=2)
    calls = list(graph.calls)
    calls[-1] = dataclasses.replace(calls[-1], path="elsewhere")
    assert paths_of(dataclasses.replace(graph, calls=tuple(calls))) == ["h.0"]


@given(step_graphs(max_blocks=5))
def test_candidates_lie_between_their_positions(graph: StepGraph) -> None:
    facts, segments = segments_of(graph)
    for clocks in segments.clocks:
        assert list(clocks) == sorted(clocks)
    for candidate in segments.candidates:
        for clocks, member in zip(segments.clocks, candidate.members, strict=True):
            assert (clocks[candidate.start], clocks[candidate.stop]) == (member.start, member.end)
    for nest in segments.nests:
        for clocks, calls in zip(segments.clocks, nest.members, strict=True):
            assert clocks[nest.start] == facts.graph.calls[calls[0]].start
            assert clocks[nest.stop] == facts.graph.calls[calls[-1]].end


@given(step_graphs())
def test_live_bytes_are_those_of_the_ledger(graph: StepGraph) -> None:
    from autoremat._ledger import expand, peak_bytes

    facts, _ = segments_of(graph)
    assert int(facts.during.max()) == peak_bytes(graph, expand(graph))

"""What may be stored, and arguments that several regions would hold: steps written out by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

import autoremat as ar
from autoremat._ledger import expand, peak_bytes
from autoremat._replay import RegionSpec
from autoremat._step_graph import StepGraph
from autoremat.solve import Planner
from autoremat.solve._facts import collect_facts
from autoremat.solve._segments import find_segments
from autoremat.solve._units import build_units
from machine import run_schedule
from reference import is_legal
from strategies import Tape
from zoo import MODELS


def finish(tape: Tape, x: int) -> StepGraph:
    """Loss and backward behind what the model's own call returned."""
    tape.leave(x)
    tape.stack.append(0)
    (y,) = tape.op("log_softmax", (x,), (8,))
    tape.save(outputs=(y,))
    tape.stack.pop()
    tape.backward()
    return tape.graph()


def one_block(body: Callable[[Tape, int], int]) -> StepGraph:
    """A model of one block whose ops ``body`` writes; it returns what the block returns."""
    tape = Tape()
    x = tape.before(2, "input")
    tape.enter("", "Model", (x,))
    tape.enter("h.0", "Block", (x,))
    y = body(tape, x)
    tape.leave(y)
    (z,) = tape.op("addmm", (y,), (2,), flops=9)
    tape.save()
    return finish(tape, z)


def unstorable_of(graph: StepGraph) -> set[str]:
    """Ops of the block whose results the solver does not store; each must really be illegal to store."""
    facts = collect_facts(graph, [1.0] * len(graph.ops))
    inner = find_segments(facts).candidates[0].members[0]
    units = build_units(facts, inner, [1.0] * len(graph.ops))
    found = {s for unit in units for s in unit.unstorable if not unit.always_runs}
    storable = {s for unit in units for s in unit.bytes_of} - found
    assert all(is_legal(graph, [RegionSpec(1, frozenset({s}))]) for s in storable)
    return {graph.ops[graph.storages[s].born].name.split(".")[1] for s in found}


def test_a_tensor_read_before_its_last_change_is_not_stored() -> None:
    def body(tape: Tape, x: int) -> int:
        (a,) = tape.op("mul", (x,), (4,))
        (early,) = tape.op("exp", (a,), (4,))
        tape.op("relu_", (a,), same=(a,), mutates=(a,))
        tape.save(outputs=(a,))
        (y,) = tape.op("add", (a, early), (4,))
        tape.save(inputs=(early,))
        return y

    graph = one_block(body)
    assert unstorable_of(graph) == {"mul"}
    stored = next(op.outputs[0] for op in graph.ops if op.name == "aten.mul.default")
    assert not is_legal(graph, [RegionSpec(1, frozenset({stored}))])


def test_a_tensor_changed_behind_the_region_is_not_stored() -> None:
    graph = one_block(_saved)
    after = graph.calls[1].end
    ops = list(graph.ops)
    ops[after] = dataclasses.replace(ops[after], mutates=(ops[0].outputs[0],))
    assert unstorable_of(dataclasses.replace(graph, ops=tuple(ops))) == {"exp"}


def test_a_tensor_that_one_op_changes_while_it_makes_another_is_not_stored() -> None:
    def body(tape: Tape, x: int) -> int:
        (a,) = tape.op("mul", (x,), (4,))
        (b,) = tape.op("swap_", (a,), (4,), same=(a,), mutates=(a,))
        tape.save(outputs=(a, b))
        return b

    assert "mul" in unstorable_of(one_block(body))


def test_a_tensor_that_its_op_does_not_return_is_not_stored() -> None:
    graph = one_block(_saved)
    ops = list(graph.ops)
    ops[0] = dataclasses.replace(ops[0], outputs=(), mutates=ops[0].outputs)
    assert unstorable_of(dataclasses.replace(graph, ops=tuple(ops))) == {"exp"}


def test_what_hands_a_value_to_python_always_runs() -> None:
    def body(tape: Tape, x: int) -> int:
        (a,) = tape.op("sum", (x,), (1,))
        tape.op("_local_scalar_dense", (a,), reads_value=True)
        return _saved(tape, x)

    graph = one_block(body)
    facts = collect_facts(graph, [1.0] * len(graph.ops))
    units = build_units(facts, find_segments(facts).candidates[0].members[0], [1.0] * len(graph.ops))
    assert [unit.always_runs for unit in units] == [False, True, False]


def _saved(tape: Tape, x: int) -> int:
    (a,) = tape.op("exp", (x,), (4,))
    tape.save(outputs=(a,))
    (y,) = tape.op("neg", (a,), (2,))
    tape.save()
    return y


@pytest.fixture
def biased() -> StepGraph:
    """Three blocks that all take one large bias, which nobody saves and which is gone before the loss."""
    tape = Tape()
    x = tape.before(2, "input")
    tape.enter("", "Model", (x,))
    (bias,) = tape.op("embedding", (x,), (10,))
    for i in range(3):
        tape.enter(f"h.{i}", "Block", (x, bias))
        (a,) = tape.op("add", (x, bias), (20,))
        tape.save()
        (b,) = tape.op("exp", (a,), (20,))
        tape.save(outputs=(b,))
        (x,) = tape.op("addmm", (b,), (2,), flops=9)
        tape.save(inputs=(b,))
        tape.leave(x)
    return finish(tape, x)


def test_an_argument_of_several_regions_is_counted_once(biased: StepGraph) -> None:
    op_cost = [float(op.flops + op.moved_bytes) for op in biased.ops]
    facts = collect_facts(biased, op_cost)
    assert len(find_segments(facts).shared) == 1
    planner = Planner(biased, op_cost=op_cost, price=lambda specs: peak_bytes(biased, expand(biased, specs)))
    assert planner.smallest_bytes <= planner.plain_bytes - 20
    for budget in range(planner.smallest_bytes, planner.plain_bytes):
        solution = planner.plan(budget)
        run_schedule(biased, expand(biased, solution.regions))
        assert solution.peak_bytes <= budget


def test_what_the_calls_of_one_layer_take_counts_with_the_region_that_holds_it() -> None:
    """Under autocast a layer reads casts of its input, so that regions inside it hold what the plain step frees."""
    case = MODELS["bert"]()
    graph = ar.trace(case.build(), case.batch, loss=case.loss_fn, precision="amp-bf16")
    facts = collect_facts(graph, [float(op.flops) for op in graph.ops])
    segments = find_segments(facts)
    layers = [c for c in graph.calls if c.path.startswith("bert.encoder.layer.") and c.path.count(".") == 3]
    freed = {s for c in layers for s in c.inputs if facts.deaths[s] < (facts.first_unpack(c.index) or 0)}
    takers = [c for c in segments.candidates if freed & set(facts.held_inputs(*c.members[0].calls))]
    assert len(takers) > 2 * len(layers)
    assert not freed & segments.shared

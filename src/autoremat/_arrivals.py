"""When the gradients of a recorded step are there. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

from autoremat._step_graph import BEFORE_STEP, StepGraph


@dataclass(frozen=True, slots=True)
class Arrival:
    """One parameter's gradient in one micro-step.

    Attributes:
        parameter: Name of the parameter.
        gradient: Storage of the gradient as it arrives: the parameter's own, or one that is added to it.
        kept: Storage of the parameter's own gradient.
        clock: When it is complete.
        micro_step: Which backward.
        adds_at: Index of the op that adds it to the parameter's own; None if it becomes that.
    """

    parameter: str
    gradient: int
    kept: int
    clock: int
    micro_step: int
    adds_at: int | None


def micro_step_edges(graph: StepGraph) -> list[tuple[int, int]]:
    """First and last clock of each micro-step's forward and backward."""
    starts = [call.start for call in graph.calls if call.parent == -1]
    last = max((op.index + 1 for op in graph.ops if op.phase == "backward"), default=len(graph.ops))
    return list(zip([0, *starts[1:]], [*starts[1:], last], strict=True))


def arrivals(graph: StepGraph) -> list[Arrival]:
    """Every gradient of every micro-step, in the order in which they are complete."""
    found = []
    gradients = [s for s in graph.storages if s.cause == "gradient"]
    touches: dict[int, list[int]] = {s.index: [] for s in gradients}
    added: dict[int, dict[int, int]] = {s.index: {} for s in gradients}
    for op in graph.ops:
        if op.phase != "backward":
            continue
        for storage in dict.fromkeys((*op.inputs, *op.outputs, *op.mutates)):
            if storage in touches:
                touches[storage].append(op.index)
        if op.name == "aten.add_.Tensor" and len(op.inputs) == 2 and op.inputs[0] in touches:
            added[op.inputs[0]][op.index] = op.inputs[1]
    running = [(r.unpacked, r.released) for r in graph.saved if r.unpacked is not None and r.released > r.unpacked]
    for number, (start, stop) in enumerate(micro_step_edges(graph)):
        for own in gradients:
            inside = [index for index in touches[own.index] if start <= index < stop]
            if not inside:
                continue
            adds_at = None
            gradient = own.index
            if own.born == BEFORE_STEP or own.born < start:
                adds_at = inside[-1]
                gradient = added[own.index].get(adds_at, own.index)
            clock = _end_of_node(running, inside[-1])
            found.append(Arrival(own.label, gradient, own.index, clock, number, adds_at))
    return sorted(found, key=lambda arrival: arrival.clock)


def _end_of_node(running: list[tuple[int, int]], op: int) -> int:
    """When the autograd node that runs an op ends: it lets go of what it saved. One that saved nothing ends with it."""
    return min((released for unpacked, released in running if unpacked <= op < released), default=op + 1)

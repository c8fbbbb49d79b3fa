"""What recompute of one region runs, given what the region stores.

The rules are those of the runtime: ops run again in forward order up to the last tensor that autograd saved in the
region; an op is left out if its outputs are stored, or if nothing that runs or is needed reads them ("no dead
replay"); in-place ops on a stored tensor are left out too, since it is stored in its final state.

Source of the liveness rule: planner formulation 1, ``r_u >= r_o - x_u`` for each edge u -> o.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from autoremat._plan import UNCOUNTED_OPS
from autoremat._step_graph import Op, SavedTensor, StepGraph

GATHER = "fsdp.all_gather"
"""The op that gathers a unit of a sharded step (see `_gathering`)."""


@dataclass(frozen=True, slots=True)
class RegionSpec:
    """A region of a `StepGraph`.

    Attributes:
        call: Index of the module call.
        kept: Storages born in the call that are stored until its recompute.
    """

    call: int
    kept: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Replay:
    """What recompute of a region does.

    Attributes:
        ops: Ops that run a kernel, in order.
        skipped: Ops with a kernel that are left out (before or after `stop`), in order.
        stop: Clock at which recompute ends: the last saved tensor is back.
        flops: FLOPs of `ops`.
        selective: Whether the runtime has to watch ops at all (something is stored or worth skipping).
        needed: Storages born in the region that autograd saved there.
    """

    ops: tuple[int, ...]
    skipped: tuple[int, ...]
    stop: int
    flops: int
    selective: bool
    needed: frozenset[int]


def saved_in(graph: StepGraph, call: int) -> list[SavedTensor]:
    """What autograd saved during a module call, in order."""
    calls = graph.subtree(call)
    span = graph.calls[call]
    return [s for s in graph.saved if span.start <= s.packed <= span.end and s.call in calls]


def is_uncounted(graph: StepGraph, op: Op) -> bool:
    """Whether forward and recompute may run this op a different number of times (see `UNCOUNTED_OPS`)."""
    if op.name in UNCOUNTED_OPS:
        return True
    return op.name == "aten._to_copy.default" and any(graph.storages[s].cause == "parameter" for s in op.inputs)


def gathers_units(graph: StepGraph, call: int) -> bool:
    """Whether parameters are gathered inside a module call: recompute would gather all of its units and keep them."""
    span = graph.calls[call]
    return any(op.name == GATHER for op in graph.ops[span.start : span.end])


def replay(graph: StepGraph, call: int, kept: Iterable[int] = (), saved: list[SavedTensor] | None = None) -> Replay:
    """Work out what recompute of a module call runs.

    Args:
        graph: The step.
        call: Index of the module call.
        kept: Storages that the region stores; those born elsewhere are ignored.
        saved: ``saved_in(graph, call)`` if the caller has it.

    Returns:
        The ops that run, those left out, and where it stops.
    """
    span = graph.calls[call]
    storages = graph.storages
    inside = range(span.start, span.end)
    kept = frozenset(s for s in kept if storages[s].born in inside)
    saved = saved_in(graph, call) if saved is None else saved
    needed = frozenset(s.storage for s in saved if storages[s.storage].born in inside)
    stop = max((s.packed for s in saved), default=span.start)

    live = set(needed - kept)
    runs: list[int] = []
    for op in reversed(graph.ops[span.start : stop]):
        if op.is_view:
            continue
        writes = {s for s in (*op.outputs, *op.mutates) if s in live}
        if writes or op.reads_value or is_uncounted(graph, op):
            runs.append(op.index)
            live.update(s for s in op.inputs if storages[s].born in inside and s not in kept)
    runs.reverse()

    alive = set(runs)
    dead = [op for op in graph.ops[span.start : span.end] if not op.is_view and op.index not in alive]
    selective = bool(kept) or any(op.flops for op in dead if op.index < stop)
    if not selective:
        runs = [op.index for op in graph.ops[span.start : stop] if not op.is_view]
        dead = []
    return Replay(
        ops=tuple(runs),
        skipped=tuple(op.index for op in dead),
        stop=stop,
        flops=sum(graph.ops[i].flops for i in runs),
        selective=selective,
        needed=needed,
    )


def obstacle(graph: StepGraph, call: int) -> str | None:
    """Why a module call cannot be a region, or None.

    A region's arguments must still hold the same values when it is recomputed.
    """
    span = graph.calls[call]
    saved = saved_in(graph, call)
    until = min((s.unpacked for s in saved if s.unpacked is not None), default=span.end)
    inside = range(span.start, span.end)
    read = {s for op in graph.ops[span.start : span.end] for s in op.inputs if graph.storages[s].born not in inside}
    for op in graph.ops[span.start : until]:
        for s in op.mutates:
            if s in read and graph.storages[s].cause not in ("buffer", "parameter"):
                return f"{op.name} changes one of its inputs in place"
    return None


def random_states(graph: StepGraph, call: int, work: Replay) -> tuple[int, int]:
    """How many random states a region holds until its recompute, and how many more until its forward ends.

    A region that draws nothing holds the state from its start until that is known, when its forward ends. Else: one
    from its start, one where an op draws after skipped ones. The state after a skipped op is held until it is known
    whether another op draws after it; two are alive while the next skipped op's replaces it.
    """
    span = graph.calls[call]
    left_out = set(work.skipped)
    draws = [op.index in left_out for op in graph.ops[span.start : span.end] if op.is_random]
    if not draws:
        return 0, 1
    pairs = list(pairwise(draws))
    after_skipped = sum(before and not skipped for before, skipped in pairs)
    passing = 2 if any(before and skipped for before, skipped in pairs) else int(any(draws))
    return 1 + after_skipped, passing

"""What stops a budget from going lower: everything that is alive at the peak of the smallest plan, by kind.

Known limit: logits are known by the log-softmax that reads them; other losses count as work of the model itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from autoremat._ledger import alive_at, expand, moments, place, price
from autoremat._reasons import Floor, FloorPart
from autoremat._replay import RegionSpec
from autoremat._schedule import Action, Event
from autoremat._step_graph import BEFORE_STEP, StepGraph

_STATES = frozenset({"parameter", "buffer", "gradient", "optimizer_state", "ema", "communication"})
_NUM_LARGEST = 8
_LOGITS_TO_LOSS = "aten._log_softmax."


def floor(graph: StepGraph, specs: Sequence[RegionSpec], op_seconds: Sequence[float], *, least_bytes: int = 0) -> Floor:
    """What a plan's peak is made of.

    Args:
        graph: The step.
        specs: Regions of its smallest plan.
        op_seconds: Predicted time of each op.
        least_bytes: What is proved to be the least peak.
    """
    schedule = expand(graph, specs)
    points = moments(graph, schedule)
    at = max(range(len(points)), key=lambda index: (points[index][0], -index))
    num_bytes, event = points[at]
    working = _working_calls(graph, specs, event)
    loss = _loss(graph)
    kinds: Counter[str] = Counter()
    for storage, copies in alive_at(graph, schedule, at).items():
        kinds[_kind(graph, storage, event, working, loss)] += copies * graph.storages[storage].num_bytes
    rest = num_bytes - sum(kinds.values())  # workspaces, and what no hook sees
    kinds["optimizer" if event.action is Action.OPTIMIZER else "working"] += rest
    profile = price(graph, schedule, op_seconds)
    return Floor(
        smallest_bytes=num_bytes,
        least_bytes=least_bytes,
        at=place(graph, event),
        parts=tuple(FloorPart(kind, size) for kind, size in kinds.most_common() if size),
        by_cause={cause: size for cause, size in profile.peak_by_cause.items() if size},
        largest=profile.alive_at_peak[:_NUM_LARGEST],
        working=graph.calls[working[0]].path if working else "",
    )


def _working_calls(graph: StepGraph, specs: Sequence[RegionSpec], event: Event) -> tuple[int, ...]:
    """The calls of the innermost region around an op of forward or backward, or else the module call that made it."""
    call = graph.ops[event.op].call
    if event.action is Action.OPTIMIZER:
        return ()
    found: tuple[int, ...] = (call,) if call > 0 else ()
    inside = list(specs)
    while inside:
        spec = inside.pop()
        if any(call in graph.subtree(member) for member in spec.calls):
            found, inside = spec.calls, list(spec.children)
    return found


def _kind(
    graph: StepGraph,
    storage: int,
    event: Event,
    working: Sequence[int],
    loss: tuple[frozenset[int], frozenset[int]],
) -> str:
    """What kind of thing a living storage is (see `FloorPart`)."""
    found = graph.storages[storage]
    if found.cause in _STATES:
        return "states"
    if found.cause == "input":
        return "inputs"
    if found.born == BEFORE_STEP:
        return "held"
    maker, (sizes, calls) = graph.ops[found.born], loss
    if maker.phase != "optimizer" and found.num_bytes in sizes and maker.call in calls:
        return "loss"
    if event.action is Action.OPTIMIZER:
        return "optimizer" if maker.phase == "optimizer" else "held"
    call = maker.call
    return "working" if any(call in graph.subtree(member) for member in working) else "held"


def _loss(graph: StepGraph) -> tuple[frozenset[int], frozenset[int]]:
    """Sizes of logits and of what a loss makes of them, in bytes, and the calls that make them."""
    sizes: set[int] = set()
    calls: set[int] = set()
    for op in graph.ops:
        if op.phase != "forward" or not op.outputs or not op.name.startswith(_LOGITS_TO_LOSS):
            continue
        elements = graph.storages[op.outputs[0]].num_bytes // (2 if op.dtype in ("bfloat16", "float16") else 4)
        sizes |= {elements * width for width in (2, 4)}
        queue = [op.index]
        while queue:  # what makes the logits, and what is done to them on the way
            maker = graph.ops[queue.pop()]
            calls.add(maker.call)
            same = (graph.storages[s] for s in maker.inputs)
            queue += [s.born for s in same if s.num_bytes in sizes and BEFORE_STEP < s.born < maker.index]
    return frozenset(sizes), frozenset(calls)

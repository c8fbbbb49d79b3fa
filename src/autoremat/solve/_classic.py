"""Schedules that people use by name, as regions: baselines for the planner's own, and for those who want them.

*Blocks* are the repeated layers of a model: sibling calls of one class, at least two, outermost first, containers such
as ``nn.Sequential`` looked through. All blocks of a parent that follow one another form a stack; a schedule treats each
stack for itself.

Sources: uniform segments, Chen et al., Training Deep Nets with Sublinear Memory Cost (2016); policies by operator,
``torch.utils.checkpoint.create_selective_checkpoint_contexts``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from autoremat._replay import RegionSpec
from autoremat._step_graph import StepGraph

CLASSIC_NAMES = (
    "none",
    "every-block",
    "every:2",
    "uniform:2",
    "sqrt",
    "recursive",
    "save:attention",
    "save:matmuls",
    "save:attention+matmuls",
)
"""One of each kind; numbers can be others."""
_CONTAINERS = frozenset({"Sequential", "ModuleList", "ModuleDict"})
_SAVED = {
    "attention": ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "_fused_attention"),
    "matmuls": ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.", "aten.linear.", "aten.convolution."),
}
Schedule = Callable[[StepGraph, tuple[int, ...]], Iterator[RegionSpec]]


def classic_regions(
    graph: StepGraph, name: str, stacks: Sequence[tuple[int, ...]] | None = None
) -> tuple[RegionSpec, ...] | None:
    """The regions of a schedule that is known by name; None if there is none of that name.

    Args:
        graph: The step.
        name: One of `CLASSIC_NAMES`, with any positive number behind ``every:`` and ``uniform:``.
        stacks: ``block_stacks(graph)`` if the caller has it.
    """
    kind, _, argument = name.partition(":")
    if kind in ("every", "uniform"):
        if not argument.isdecimal() or int(argument) < 1:
            return None
        schedule = {"every": _every, "uniform": _uniform}[kind](int(argument))
    elif kind == "save":
        parts = argument.split("+")
        if not set(parts) <= set(_SAVED):
            return None
        schedule = _saving(tuple(prefix for part in parts for prefix in _SAVED[part]))
    elif name in _PLAIN:
        schedule = _PLAIN[name]
    else:
        return None
    stacks = block_stacks(graph) if stacks is None else stacks
    return tuple(spec for stack in stacks for spec in schedule(graph, stack))


def block_stacks(graph: StepGraph) -> list[tuple[int, ...]]:
    """The blocks of a model, as runs of sibling calls, in order of execution."""
    saving = {call for record in graph.saved for call in (record.call, *graph.ancestors(record.call))}
    return [run for call in graph.calls if call.parent == -1 for run in _stacks_in(graph, call.index, saving)]


def _stacks_in(graph: StepGraph, call: int, saving: set[int]) -> list[tuple[int, ...]]:
    """Runs of blocks in a call: those of its own, or those in them where these are longer (two stacks in a model)."""
    inside = [
        c
        for c in graph.subtree(call)
        if c in saving and graph.calls[c].parent == call and not graph.calls[c].is_function
    ]
    has_parts = {c for c in inside if len(graph.subtree(c)) > 1}
    counts = Counter(graph.calls[c].class_name for c in has_parts)
    repeated = {name for name, count in counts.items() if count > 1 and name not in _CONTAINERS}
    found = []
    for are_blocks, run in groupby(inside, key=lambda c: c in has_parts and graph.calls[c].class_name in repeated):
        calls = tuple(run)
        deeper = [stack for c in calls for stack in _stacks_in(graph, c, saving)]
        is_longest = len(calls) >= max(map(len, deeper), default=0)
        found += [calls] if are_blocks and is_longest else deeper
    return found


def _none(graph: StepGraph, stack: tuple[int, ...]) -> Iterator[RegionSpec]:
    yield from ()


def _every(step: int) -> Schedule:
    def schedule(graph: StepGraph, stack: tuple[int, ...]) -> Iterator[RegionSpec]:
        yield from (RegionSpec(call, is_whole=True) for call in stack[::step])

    return schedule


def _uniform(size: int) -> Schedule:
    def schedule(graph: StepGraph, stack: tuple[int, ...]) -> Iterator[RegionSpec]:
        for first in range(0, len(stack), size):
            calls = stack[first : first + size]
            yield RegionSpec(calls[0], then=calls[1:], is_whole=True)

    return schedule


def _sqrt(graph: StepGraph, stack: tuple[int, ...]) -> Iterator[RegionSpec]:
    yield from _uniform(max(1, math.isqrt(len(stack) - 1) + 1))(graph, stack)


def _recursive(graph: StepGraph, stack: tuple[int, ...]) -> Iterator[RegionSpec]:
    """Halves of halves: the first half is dropped as a whole, then both are treated alike."""
    for calls in _halves(stack):
        yield RegionSpec(calls[0], then=calls[1:], children=tuple(_recursive(graph, calls)), is_whole=True)


def _halves(calls: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if len(calls) > 1:
        middle = (len(calls) + 1) // 2
        yield calls[:middle]
        yield calls[middle:]


def _saving(prefixes: tuple[str, ...]) -> Schedule:
    def schedule(graph: StepGraph, stack: tuple[int, ...]) -> Iterator[RegionSpec]:
        changed = {s for op in graph.ops for s in op.mutates}
        for call in stack:
            ops = graph.ops[graph.calls[call].start : graph.calls[call].end]
            kept = {
                s
                for op in ops
                if op.name.removeprefix("aten.").startswith(prefixes) or op.name.startswith(prefixes)
                for s in op.outputs
                if graph.storages[s].born == op.index and s not in changed
            }
            yield RegionSpec(call, frozenset(kept))

    return schedule


_PLAIN: dict[str, Schedule] = {"none": _none, "every-block": _every(1), "sqrt": _sqrt, "recursive": _recursive}

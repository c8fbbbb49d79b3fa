"""A step at any batch size or sequence length, from the steps at a few.

Sizes of storages are affine in the number of samples, and at most quadratic in the number of tokens (attention scores);
so are FLOPs and bytes moved. Two or three traces of the same ops therefore give the step at any size: every number is
interpolated exactly, by Lagrange's formula in integers.

Known limits: kernels that round sizes up (to 32 rows, say) are off by as much; a model that takes another branch at
another size has no interpolation. Whoever promises a number found here traces the step at that size once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from math import lcm

from autoremat._step_graph import Op, StepGraph, Storage

Scaled = Callable[[int], StepGraph]


def interpolate_steps(steps: Sequence[tuple[int, StepGraph]]) -> Scaled | None:
    """A function from a size to the step at that size; None if the steps do not run the same ops.

    Args:
        steps: (size, step) pairs of different sizes: two for affine numbers, three for quadratic ones.
    """
    sizes = [size for size, _ in steps]
    graphs = [graph for _, graph in steps]
    if any(_structure(graph) != _structure(graphs[0]) for graph in graphs[1:]):
        return None
    known = dict(steps)

    def at(size: int) -> StepGraph:
        if size in known:
            return known[size]
        weights, divisor = _weights(sizes, size)

        def mix(values: Sequence[int]) -> int:
            if all(value == values[0] for value in values):
                return values[0]
            return max(0, round(sum(w * v for w, v in zip(weights, values, strict=True)) / divisor))

        ops = tuple(_mixed_op(same, mix) for same in zip(*(graph.ops for graph in graphs), strict=True))
        storages = tuple(_mixed_storage(same, mix) for same in zip(*(graph.storages for graph in graphs), strict=True))
        hidden = mix([graph.hidden_bytes for graph in graphs])
        return replace(graphs[0], ops=ops, storages=storages, hidden_bytes=hidden, measured_s=())

    return at


def same_ops(one: StepGraph, other: StepGraph) -> bool:
    """Whether two steps differ in sizes only, so that what names ops of one names those of the other."""
    return one is other or _structure(one) == _structure(other)


def _structure(graph: StepGraph) -> object:
    """Everything that must be the same: order, names and references, not sizes.

    Views cost nothing, whatever they are called: a slice of all there is is an alias.
    """
    ops = [
        ("" if op.is_view else op.name, op.call, op.inputs, op.outputs, op.mutates, op.is_view, len(op.shape))
        for op in graph.ops
    ]
    storages = [(s.cause, s.born, s.last_ref) for s in graph.storages]
    return ops, storages, graph.saved, graph.calls


def _weights(sizes: Sequence[int], size: int) -> tuple[list[int], int]:
    """Lagrange's weights of each size, as integers over one divisor."""
    weights = []
    for i, own in enumerate(sizes):
        weight = Fraction(1)
        for j, other in enumerate(sizes):
            if i != j:
                weight *= Fraction(size - other, own - other)
        weights.append(weight)
    divisor = lcm(*(weight.denominator for weight in weights))
    return [int(weight * divisor) for weight in weights], divisor


def _mixed_op(same: Sequence[Op], mix: Callable[[Sequence[int]], int]) -> Op:
    return replace(
        same[0],
        flops=mix([op.flops for op in same]),
        moved_bytes=mix([op.moved_bytes for op in same]),
        workspace_bytes=mix([op.workspace_bytes for op in same]),
        shape=tuple(mix(sides) for sides in zip(*(op.shape for op in same), strict=True)),
    )


def _mixed_storage(same: Sequence[Storage], mix: Callable[[Sequence[int]], int]) -> Storage:
    return replace(same[0], num_bytes=mix([storage.num_bytes for storage in same]))

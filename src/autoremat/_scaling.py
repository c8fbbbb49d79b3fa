"""A step at any batch size or sequence length, from the steps at a few.

Sizes of storages are affine in the number of samples, and at most quadratic in the number of tokens (attention scores);
so are FLOPs and bytes moved. Two or three traces of the same ops therefore give the step at any size: every number is
interpolated exactly, by Lagrange's formula in integers.

Known limits: kernels that round sizes up (to 32 rows, say) are off by as much; a model that takes another branch at
another size has no interpolation. Whoever promises a number found here makes sure that a trace agrees (`Steps.exact`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from math import lcm

from autoremat._step_graph import BEFORE_STEP, Op, StepGraph, Storage


class Interpolation:
    """The step at any size, from the steps at a few. Made by `interpolate_steps`.

    Args:
        steps: (size, step) pairs that run the same ops.
        beyond: The step at a larger size, where what is the same at all others is another (see `extended`).
    """

    def __init__(self, steps: Sequence[tuple[int, StepGraph]], beyond: tuple[int, StepGraph] | None = None) -> None:
        self.sizes = [size for size, _ in steps]
        self._steps, self._beyond = steps, beyond
        self._known = dict([*steps, *([] if beyond is None else [beyond])])

    def __call__(self, size: int) -> StepGraph:
        """The step at a size."""
        return self._known[size] if size in self._known else self._mixed(size)

    def extended(self, size: int, traced: StepGraph) -> Interpolation | None:
        """For models that are built for a length: from the first size on, what is constant grows up to another.

        Tables of positions and their states are what grows. None if the rest is not as interpolated.
        """
        if size <= max(self.sizes) or not same_ops(self._steps[0][1], traced):
            return None
        wider = Interpolation(self._steps, beyond=(size, traced))
        return wider if same_bytes(wider._mixed(size), traced) else None

    def _mixed(self, size: int) -> StepGraph:
        graphs = [graph for _, graph in self._steps]
        weights, divisor = _weights(self.sizes, size)
        grows = self._beyond is not None and size > self.sizes[0]
        if self._beyond is not None:
            graphs.append(self._beyond[1])

        def mix(values: Sequence[int]) -> int:
            nodes = values[: len(weights)]
            if any(value != values[0] for value in nodes):
                return max(0, round(sum(w * v for w, v in zip(weights, nodes, strict=True)) / divisor))
            if not grows or values[-1] == values[0]:
                return values[0]
            assert self._beyond is not None
            share = Fraction(size - self.sizes[0], self._beyond[0] - self.sizes[0])
            return round(values[0] + share * (values[-1] - values[0]))

        ops = tuple(_mixed_op(same, mix) for same in zip(*(graph.ops for graph in graphs), strict=True))
        storages = tuple(_mixed_storage(same, mix) for same in zip(*(graph.storages for graph in graphs), strict=True))
        hidden = mix([graph.hidden_bytes for graph in graphs])
        return replace(graphs[0], ops=ops, storages=storages, hidden_bytes=hidden, measured_s=())


def interpolate_steps(steps: Sequence[tuple[int, StepGraph]]) -> Interpolation | None:
    """A function from a size to the step at that size; None if the steps do not run the same ops.

    Args:
        steps: (size, step) pairs of different sizes: two for affine numbers, three for quadratic ones.
    """
    first = steps[0][1]
    return Interpolation(steps) if all(same_ops(first, graph) for _, graph in steps[1:]) else None


def multiply_steps(by_samples: StepGraph, by_tokens: StepGraph, whole: StepGraph) -> StepGraph | None:
    """The step with other samples and tokens, from the steps in which one of them is another; None if ops differ.

    Right for numbers that are proportional to the samples, and for those that do not depend on them; nearly for others.
    """
    if not (same_ops(whole, by_samples) and same_ops(whole, by_tokens)):
        return None

    def mix(values: Sequence[int]) -> int:
        samples, tokens, both = values
        return tokens if samples == both or not both else round(Fraction(tokens * samples, both))

    graphs = (by_samples, by_tokens, whole)
    ops = tuple(_mixed_op(same, mix) for same in zip(*(graph.ops for graph in graphs), strict=True))
    storages = tuple(_mixed_storage(same, mix) for same in zip(*(graph.storages for graph in graphs), strict=True))
    return replace(
        whole, ops=ops, storages=storages, hidden_bytes=mix([graph.hidden_bytes for graph in graphs]), measured_s=()
    )


def with_kept_gradients(graph: StepGraph) -> StepGraph:
    """A step that finds gradients and adds to them, from one that makes them: what each micro-step but the first is.

    Regions of one are regions of the other.
    """
    storages, kept = list(graph.storages), list[Storage]()
    for storage in graph.storages:
        if storage.cause == "gradient" and storage.born != BEFORE_STEP:
            kept.append(replace(storage, index=len(storages) + len(kept), born=BEFORE_STEP))
            storages[storage.index] = replace(storage, cause="temporary", last_ref=storage.born)
    return replace(graph, storages=(*storages, *kept))


def same_ops(one: StepGraph, other: StepGraph) -> bool:
    """Whether two steps differ in sizes only, so that what names ops of one names those of the other."""
    return one is other or _structure(one) == _structure(other)


def same_bytes(one: StepGraph, other: StepGraph) -> bool:
    """Whether two steps run the same ops and hold the same bytes at every moment, so that any regions peak alike."""
    return same_ops(one, other) and _bytes(one) == _bytes(other)


def _bytes(graph: StepGraph) -> object:
    ops = [(op.workspace_bytes, op.kept_bytes) for op in graph.ops]
    return ops, [s.num_bytes for s in graph.storages], graph.hidden_bytes


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
    first = same[0]
    numbers = (first.flops, first.moved_bytes, first.workspace_bytes, first.shape)
    if all((op.flops, op.moved_bytes, op.workspace_bytes, op.shape) == numbers for op in same[1:]):
        return first
    return replace(
        first,
        flops=mix([op.flops for op in same]),
        moved_bytes=mix([op.moved_bytes for op in same]),
        workspace_bytes=mix([op.workspace_bytes for op in same]),
        shape=tuple(mix(sides) for sides in zip(*(op.shape for op in same), strict=True)),
    )


def _mixed_storage(same: Sequence[Storage], mix: Callable[[Sequence[int]], int]) -> Storage:
    sizes = [storage.num_bytes for storage in same]
    return same[0] if min(sizes) == max(sizes) else replace(same[0], num_bytes=mix(sizes))

"""A step under `DistributedDataParallel`, made from the step of one device: the buckets in which gradients are summed.

Source: torch's ``reducer.cpp`` (2.13). A bucket is one flat tensor, there all along. A gradient that arrives is divided
by the number of devices into its place in the bucket. Without ``gradient_as_bucket_view`` it stays where it is too, and
the sum is copied back; with it, it is let go of and ``.grad`` becomes a view of the bucket.

Known limits: the first step, in which buckets are made anew, holds nothing more but splits them otherwise; what
broadcasting the buffers takes at the start of forward, and what a communication library takes, is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoremat._arrivals import Arrival, arrivals
from autoremat._errors import UsageError
from autoremat._rewrite import Rewriting
from autoremat._step_graph import BEFORE_STEP, Op, StepGraph

MIB = 2**20
_WRAPPED_NUMBER_BYTES = 8


@dataclass(frozen=True, slots=True)
class DataParallel:
    """How `torch.nn.parallel.DistributedDataParallel` wraps the model; names and defaults are its own.

    Attributes:
        bucket_cap_mb: Size of a bucket, MiB.
        first_bucket_mb: Size of the first, MiB.
        gradient_as_bucket_view: Whether gradients are views of the buckets, which saves a second copy.
        sync_every_micro_step: Whether gradients are summed over devices after every backward of an accumulated step,
            not only after the last (``no_sync`` around the others).

    Example:
        >>> DataParallel(gradient_as_bucket_view=True).describe()
        'ddp, gradients are views of buckets'
    """

    bucket_cap_mb: float = 25.0
    first_bucket_mb: float = 1.0
    gradient_as_bucket_view: bool = False
    sync_every_micro_step: bool = False

    def __post_init__(self) -> None:
        if not (self.bucket_cap_mb > 0 and self.first_bucket_mb > 0):
            raise UsageError(
                f"bucket_cap_mb={self.bucket_cap_mb}, first_bucket_mb={self.first_bucket_mb}: use MiB above 0."
            )

    def describe(self) -> str:
        """In words."""
        return "ddp, gradients are views of buckets" if self.gradient_as_bucket_view else "ddp"


def bucket_sizes(graph: StepGraph, how: DataParallel) -> tuple[int, ...]:
    """Bytes of each bucket, in the order in which they are summed.

    Args:
        graph: The step of one device.
        how: Sizes of buckets.
    """
    return tuple(sum(graph.storages[a.kept].num_bytes for a in bucket) for bucket in _buckets(graph, how))


def replicate(graph: StepGraph, how: DataParallel) -> StepGraph:
    """The step of one of many devices, each with the whole model.

    Args:
        graph: The step of one device.
        how: How buckets are made.

    Returns:
        The step with buckets (cause "communication").

    Raises:
        UsageError: If the step is spread over devices already, or has no gradients.
    """
    if graph.parallel:
        raise UsageError(f"The step is spread over devices already ({graph.parallel}); give the step of one device.")
    buckets = _buckets(graph, how)
    if not buckets:
        raise UsageError(f"{graph.model or 'The step'} has no gradients to sum over devices.")
    rewriting = Rewriting(graph)
    bucket_of: dict[int, int] = {}
    for number, bucket in enumerate(buckets):
        size = sum(graph.storages[a.kept].num_bytes for a in bucket)
        made = rewriting.keep(size, "communication", f"bucket {number}")
        bucket_of.update({a.kept: made for a in bucket})
    last = max(a.micro_step for a in arrivals(graph))
    viewed_from: dict[int, int] = {}
    for arrival in arrivals(graph):
        if not how.sync_every_micro_step and arrival.micro_step != last:
            continue
        if arrival.kept in viewed_from:  # `.grad` is a view of the bucket: what arrives is added to that
            continue
        own = graph.storages[arrival.kept]
        call = graph.ops[arrival.clock - 1].call
        copy = rewriting.insert(arrival.clock, "ddp.copy_to_bucket", "backward", call, moved_bytes=2 * own.num_bytes)
        copy.inputs = (arrival.kept, bucket_of[arrival.kept])
        if graph.device_kind == "cpu":  # the factor is wrapped into a tensor, and that one cast
            copy.workspace_bytes = _WRAPPED_NUMBER_BYTES + _itemsize(graph, arrival)
        if how.gradient_as_bucket_view:
            viewed_from[arrival.kept] = arrival.clock
            if own.born == BEFORE_STEP:  # gradients that are kept were views of the bucket before the step
                rewriting.resize(own.index, 0)
            else:
                rewriting.free(own.index, copy.after)

    def substitute(op: Op, storage: int) -> int:
        return bucket_of[storage] if op.index >= viewed_from.get(storage, len(graph.ops)) else storage

    return rewriting.finish(how.describe(), substitute)


def _buckets(graph: StepGraph, how: DataParallel) -> list[Sequence[Arrival]]:
    """Gradients in order of arrival, each bucket closed once it has reached its size, one run per size of element."""
    open_buckets: dict[int, list[Arrival]] = {}
    closed: list[Sequence[Arrival]] = []
    num_closed: dict[int, int] = {}
    for arrival in arrivals(graph):
        if arrival.micro_step:
            continue
        size = _itemsize(graph, arrival)
        bucket = open_buckets.setdefault(size, [])
        bucket.append(arrival)
        limit = how.bucket_cap_mb if num_closed.get(size, 0) else how.first_bucket_mb
        if sum(graph.storages[a.kept].num_bytes for a in bucket) >= limit * MIB:
            closed.append(open_buckets.pop(size))
            num_closed[size] = num_closed.get(size, 0) + 1
    return closed + list(open_buckets.values())


def _itemsize(graph: StepGraph, arrival: Arrival) -> int:
    storage = graph.storages[arrival.kept]
    numel = 1
    for size in storage.shape:
        numel *= size
    return storage.num_bytes // max(1, numel)

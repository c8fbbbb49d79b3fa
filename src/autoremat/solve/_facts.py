"""What the solver needs to know about a step, looked up once: who holds what, and how many bytes live when.

Known limit: what a kernel takes and gives back inside one op is the graph's estimate (`Op.workspace_bytes`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from autoremat._alike import op_kinds, uses
from autoremat._ledger import plain_bytes
from autoremat._replay import GATHER, RegionSpec, held_inputs
from autoremat._step_graph import SavedTensor, StepGraph

_TIE_SHARE = 1e-5
"""What moving every byte of the step once more counts for, as a share of the cost of the step."""
SMALL_STEP_OPS = 500
"""Steps of up to so many ops of forward are small: what nests store is tried op by op there (see `_variants`)."""
Bytes = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Facts:
    """A step, indexed.

    Attributes:
        graph: The step.
        deaths: Clock at which each storage dies in the plain step.
        records_of: What autograd saved, by storage.
        saved_at: What autograd saved, by innermost module call.
        unpacked_at: When backward first reads something saved in a module call or below it, by call.
        mutated_at: Ops that write a storage in place, by storage, in order.
        changes: Clock and storage of each in-place write in forward and backward to what is no parameter or buffer.
        changed: These storages.
        changed_reads: Ops that read one of these storages, in order, with the storage and its birth; one row each.
        during: Live bytes of the plain step while each op runs.
        between: Live bytes of the plain step just before each op, and at the end.
        spans: First and last clock of each micro-step, backward included.
        births: Birth and index of each storage, by birth.
        gathers: Ops that gather a unit of a sharded step, in order.
        op_kinds: For each op a number; equal ones do and take the same, but for the storages that they work on.
        used: Storages that ops read, make and write, one op after the other.
        first_use: Where in `used` those of each op begin.
        tie_cost: Cost of a moved byte, so small that it only tells apart what costs the same.
        held: What was asked of `held_inputs`.
    """

    graph: StepGraph
    deaths: tuple[int, ...]
    records_of: dict[int, list[SavedTensor]]
    saved_at: dict[int, list[SavedTensor]]
    unpacked_at: dict[int, int]
    mutated_at: dict[int, list[int]]
    changes: tuple[tuple[int, int], ...]
    changed: frozenset[int]
    changed_reads: Bytes
    during: Bytes
    between: Bytes
    spans: tuple[tuple[int, int], ...]
    births: tuple[tuple[int, int], ...]
    gathers: tuple[int, ...]
    op_kinds: tuple[int, ...]
    used: list[int]
    first_use: list[int]
    tie_cost: float
    held: dict[tuple[int, ...], dict[int, int]] = field(default_factory=dict)

    @property
    def is_small(self) -> bool:
        """Whether the step is small enough to try what nests store op by op; the optimizer's ops do not matter."""
        return sum(op.phase == "forward" for op in self.graph.ops) <= SMALL_STEP_OPS

    def held_inputs(self, *calls: int) -> dict[int, int]:
        """Storages of arguments that a region of these calls holds, and which of its calls first gets each."""
        if calls not in self.held:
            self.held[calls] = held_inputs(self.graph, RegionSpec(calls[0], then=calls[1:]))
        return self.held[calls]

    def born_in(self, start: int, stop: int) -> list[int]:
        """Storages that ops of ``start <= index < stop`` allocate."""
        first, last = bisect_left(self.births, (start, -1)), bisect_left(self.births, (stop, -1))
        return [storage for _, storage in self.births[first:last]]

    def saved_in(self, *calls: int) -> list[SavedTensor]:
        """What autograd saved during module calls and the calls below them."""
        return [r for call in calls for c in self.graph.subtree(call) for r in self.saved_at.get(c, ())]

    def first_unpack(self, *calls: int) -> int | None:
        """Clock at which backward first reads what was saved in module calls; None if it never does."""
        return min([self.unpacked_at[call] for call in calls if call in self.unpacked_at], default=None)

    def subtree(self, calls: Sequence[int]) -> frozenset[int]:
        """Module calls and all calls below them."""
        return frozenset(c for call in calls for c in self.graph.subtree(call))

    def reads_changed(self, start: int, stop: int, *, only_older: bool) -> list[tuple[int, int]]:
        """Ops of ``start <= index < stop`` and storages that they read and some op writes in place, as in `changes`.

        Args:
            start: First op.
            stop: Op after the last.
            only_older: Leave out storages that these ops make.
        """
        if not self.changed:
            return []
        first, last = np.searchsorted(self.changed_reads[0], (start, stop))
        ops, storages, births = self.changed_reads[:, first:last]
        some = births < start if only_older else slice(None)
        return list(zip(ops[some].tolist(), storages[some].tolist(), strict=True))

    def is_mutated(self, storage: int, start: int, stop: int) -> bool:
        """Whether a storage is written in place by an op of ``start <= index < stop``."""
        found = self.mutated_at.get(storage, ())
        first = bisect_left(found, start)
        return first < len(found) and found[first] < stop


def collect_facts(graph: StepGraph, op_cost: Sequence[float]) -> Facts:
    """Index a step.

    Args:
        graph: The step.
        op_cost: Cost of each op, FLOPs or seconds.
    """
    records_of: dict[int, list[SavedTensor]] = defaultdict(list)
    saved_at: dict[int, list[SavedTensor]] = defaultdict(list)
    mutated_at: dict[int, list[int]] = defaultdict(list)
    deaths = [storage.last_ref for storage in graph.storages]
    for record in graph.saved:
        records_of[record.storage].append(record)
        saved_at[record.call].append(record)
        deaths[record.storage] = max(deaths[record.storage], record.released)
    for op in graph.ops:
        for storage_index in op.mutates:
            mutated_at[storage_index].append(op.index)
    changes = tuple(
        (op.index, s)
        for op in graph.ops
        for s in op.mutates
        if op.phase != "optimizer" and graph.storages[s].cause not in ("buffer", "parameter")
    )
    changed = frozenset(s for _, s in changes)
    reads = [
        (op.index, s, graph.storages[s].born)
        for op in graph.ops
        if not changed.isdisjoint(op.inputs)
        for s in sorted(changed.intersection(op.inputs))
    ]
    during, between = plain_bytes(graph, deaths)
    used, first_use = uses(graph)
    return Facts(
        graph=graph,
        deaths=tuple(deaths),
        records_of=dict(records_of),
        saved_at=dict(saved_at),
        unpacked_at=_first_unpacks(graph),
        mutated_at=dict(mutated_at),
        changes=changes,
        changed=changed,
        changed_reads=np.array(reads, np.int64).reshape(-1, 3).T,
        during=during,
        between=between,
        spans=_micro_steps(graph),
        tie_cost=_TIE_SHARE * (sum(op_cost) or 1.0) / max(1, sum(op.moved_bytes for op in graph.ops)),
        gathers=tuple(op.index for op in graph.ops if op.name == GATHER),
        op_kinds=op_kinds(graph),
        used=used,
        first_use=first_use,
        births=tuple(sorted((storage.born, storage.index) for storage in graph.storages)),
    )


def _first_unpacks(graph: StepGraph) -> dict[int, int]:
    found: dict[int, int] = {}
    for record in graph.saved:
        call = record.call if record.unpacked is not None else -1
        while call >= 0:
            found[call] = min(found.get(call, len(graph.ops)), record.unpacked or 0)
            call = graph.calls[call].parent
    return found


def _micro_steps(graph: StepGraph) -> tuple[tuple[int, int], ...]:
    """Clocks between which each micro-step lies; what comes before the first belongs to it."""
    starts = [call.start for call in graph.calls if call.parent == -1]
    edges = [0, *starts[1:], len(graph.ops)]
    return tuple(pairwise(edges))

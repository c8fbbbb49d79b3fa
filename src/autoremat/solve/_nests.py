"""What dropping a whole stretch of calls frees, demands and costs.

A nest's own recompute runs everything in it up to the last tensor that is needed, and finds regions inside it on the
way. Nests of one stack are sums over its calls, so that hundreds of them cost no more than one pass.

Known limit: in the nest's first run nothing is counted as dropped before the call that runs has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autoremat._replay import RegionSpec, held_inputs, replay
from autoremat.solve._facts import Bytes, Facts
from autoremat.solve._options import RegionCost, cost_around
from autoremat.solve._segments import Calls, Nest, Segments
from autoremat.solve._table import NestEdge


@dataclass(frozen=True, slots=True)
class _Stack:
    """Sums over the calls of one parent in one micro-step.

    Attributes:
        calls: The calls, in order.
        born: Position of the call in which each droppable storage is born.
        last: Position of the last call that saved it.
        num_bytes: Its size.
        highest: Live bytes at most while each call and what follows it runs.
    """

    calls: Calls
    born: Bytes
    last: Bytes
    num_bytes: Bytes
    highest: Bytes

    def freed(self, first: int, last: int) -> Bytes:
        """Bytes freed once each call of ``first..last`` has ended, if all of them are dropped."""
        inside = (self.born >= first) & (self.last <= last)
        sums = np.bincount(self.last[inside] - first, weights=self.num_bytes[inside], minlength=last - first + 1)
        return np.cumsum(sums).astype(np.int64)


class NestDemands:
    """Writes nests as edges.

    Args:
        facts: The step.
        segments: Its candidates.
        op_cost: Cost of each op.
        during: Live bytes of the plain step while each op runs.
        region_cost: What a region costs beyond the ops that it runs again.
    """

    def __init__(
        self,
        facts: Facts,
        segments: Segments,
        op_cost: Sequence[float],
        during: Bytes,
        region_cost: RegionCost | None = None,
    ) -> None:
        self._facts = facts
        self._segments = segments
        self._op_cost = op_cost
        self._during = during
        self._region_cost = region_cost
        self._stacks: dict[tuple[int, int], _Stack] = {}
        self._full: dict[int, float] = {}
        self._tail: dict[int, float] = {}

    def edge(self, number: int, nest: Nest) -> NestEdge:
        """A nest as an edge: the highest demand and the least freed over all micro-steps."""
        forward, saved, held = [], [], []
        for calls in nest.members:
            stack = self._stack(calls)
            first, last = stack.calls.index(calls[0]), stack.calls.index(calls[-1])
            freed = stack.freed(first, last)
            kept_alive = self._held(calls)
            before = np.concatenate([[0], freed[:-1]])
            forward.append(int((stack.highest[first : last + 1] - before).max()) + kept_alive)
            saved.append(int(freed[-1]) - kept_alive)
            held.append(kept_alive)
        calls = nest.members[0]
        cost = sum(self._full_cost(call) for call in calls[:-1]) + self._tail_cost(calls[-1])
        return NestEdge(
            number=-1 - number,
            level=self._facts.graph.calls[calls[0]].parent,
            stop=nest.stop,
            forward=np.array([max(forward)]),
            saved=np.array([min(saved)]),
            held=max(held),
            cost=np.array([cost * len(nest.members)]),
        )

    def _held(self, calls: Calls) -> int:
        facts = self._facts
        at = facts.first_unpack(*calls) or 0
        held = set(held_inputs(facts.graph, RegionSpec(calls[0], then=calls[1:]))) - self._segments.shared
        return sum(facts.graph.storages[s].num_bytes for s in held if facts.deaths[s] < at)

    def _stack(self, calls: Calls) -> _Stack:
        parent, step = self._facts.graph.calls[calls[0]].parent, self._facts.graph.calls[calls[0]].micro_step
        if (parent, step) not in self._stacks:
            self._stacks[parent, step] = self._make_stack(parent)
        return self._stacks[parent, step]

    def _make_stack(self, parent: int) -> _Stack:
        facts, graph = self._facts, self._facts.graph
        calls = tuple(c for c in graph.subtree(parent) if graph.calls[c].parent == parent)
        place = {inner: position for position, call in enumerate(calls) for inner in graph.subtree(call)}
        rows = []
        for position, call in enumerate(calls):
            for s in facts.born_in(graph.calls[call].start, graph.calls[call].end):
                savers = [place.get(r.call, len(calls)) for r in facts.records_of.get(s, ())]
                last = max(savers, default=len(calls))
                if last < len(calls) and graph.storages[s].last_ref <= self._gone_by(calls, last):
                    rows.append((position, last, graph.storages[s].num_bytes))
        born, lasts, sizes = np.array(rows, np.int64).reshape(-1, 3).T
        bounds = [*(graph.calls[c].start for c in calls), graph.calls[calls[-1]].end]
        highest = [int(self._during[a : max(b, a + 1)].max()) for a, b in pairwise(bounds)]
        return _Stack(calls, born, lasts, sizes, np.array(highest, np.int64))

    def _gone_by(self, calls: Calls, last: int) -> int:
        """Clock by which a storage that a call saved last must be let go of by everybody else."""
        graph = self._facts.graph
        following = calls[last + 1] if last + 1 < len(calls) else calls[last]
        return graph.calls[following].end + 8

    def _full_cost(self, call: int) -> float:
        """Cost of running a call for what it returns and for what backward needs of it."""
        if call not in self._full:
            graph, span = self._facts.graph, self._facts.graph.calls[call]
            live = {*span.outputs, *(r.storage for r in self._facts.saved_in(call))}
            total = 0.0
            for op in reversed(graph.ops[span.start : span.end]):
                if not op.is_view and (op.reads_value or any(s in live for s in (*op.outputs, *op.mutates))):
                    total += self._op_cost[op.index]
                    live.update(op.inputs)
            self._full[call] = total
        return self._full[call]

    def _tail_cost(self, call: int) -> float:
        """Cost of running a call up to the last tensor that backward needs of it."""
        if call not in self._tail:
            work = replay(self._facts.graph, RegionSpec(call), self._facts.saved_in(call))
            around = cost_around((call,), work, self._region_cost)
            self._tail[call] = sum(self._op_cost[index] for index in work.ops) + around
        return self._tail[call]

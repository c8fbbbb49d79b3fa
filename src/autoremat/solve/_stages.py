"""The best regions over one row of calls, in small steps: by what is alive when backward comes to each call.

A *stage* begins when backward first reads what a call of the row saved, and ends when the next one begins. A plan over
a row is what is *kept* until each stage: a set of storages. What backward wants in the stage, or the next one's set
wants, and is not there runs again. As regions, each stage that runs something is a span: it ends with the stage's call,
stores what is kept, and starts where the first op lies that it, or a span inside it, runs again; those of later stages
lie inside it if they overlap. Every schedule that runs ops of the row again where backward reads is one of these, so
that the cheapest is found from the last stage on:

    V(k, K) = min over next sets N of  cost(ops that make need(k) and N from K) + V(k + 1, N)

Sets are those that cuts leave: op by op, the last first, what is wanted of its results is kept, or it runs. No set is
followed that contains another one that costs no more, and at most so many a stage (`NUM_SETS`).

Sources: Jain et al., Checkmate (2020), for the schedules; Bellman (1957). Known limits: regions inside the row's calls
are not looked at; random states and copies of buffers are not counted: the ledger has the last word.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from autoremat._replay import Extent, RegionSpec
from autoremat._step_graph import Op, SavedTensor
from autoremat.solve._facts import Bytes
from autoremat.solve._problem import Problem
from autoremat.solve._rows import Calls
from autoremat.solve._segments import is_possible
from autoremat.solve._units import can_be_stored

NUM_SETS = 4, 16, 64
"""Sets that are followed from one stage to the one before it: first few, for a cost to beat, then more."""
MAX_NODES = 20_000
"""Decisions about ops for one limit."""
_TINY = 1e-9
Regions = tuple[RegionSpec, ...]
Bits = int
"""A set of the row's storages."""


@dataclass(frozen=True, slots=True)
class _RowOp:
    """An op of the row.

    Attributes:
        index: The op.
        part: Position of its call in the row.
        results: What it makes or writes.
        made: What it makes.
        reads: What it reads.
        weight: Its cost, with the little that tells apart equal ones.
        workspace_bytes: What it takes while it runs.
        gone: What forward has let go of by then.
    """

    index: int
    part: int
    results: Bits
    made: Bits
    reads: Bits
    weight: float
    workspace_bytes: int
    gone: Bits


@dataclass(frozen=True, slots=True)
class _Stage:
    """A stage of backward.

    Attributes:
        part: Position in the row of the call whose backward it is.
        start: Clock at which it begins.
        stop: Clock at which the next one begins.
        released: What it needs, and when autograd lets go of that.
        need: The same as a set.
        storable: What may be kept until then.
    """

    part: int
    start: int
    stop: int
    released: dict[Bits, int]
    need: Bits
    storable: Bits


@dataclass(frozen=True, slots=True)
class _Way:
    """How a stage and those after it are passed.

    Attributes:
        kept: What is alive when the stage begins.
        weight: What all that runs again from then on costs.
        first: Position of the first op that the stage runs again; -1 if none does.
        then: The same for the next stage.
    """

    kept: Bits
    weight: float
    first: int = -1
    then: _Way | None = None


class Stages:
    """One row of a step.

    Args:
        problem: The step.
        calls: The row.
        allowed: Storages that may be stored.
        op_cost: Cost of each op.

    Example:
        ``Stages(problem, calls, allowed, op_cost).solve(limit_bytes)``
    """

    def __init__(self, problem: Problem, calls: Calls, allowed: frozenset[int], op_cost: Sequence[float]) -> None:
        self._facts, self._rows, self._calls = problem.facts, problem.segments.rows, calls
        facts = self._facts
        spans = [facts.graph.calls[call] for call in calls]
        self._storages = [s for span in spans for s in facts.born_in(span.start, span.end)]
        self._bit = {s: 1 << place for place, s in enumerate(self._storages)}
        self._sizes: dict[Bits, int] = {0: 0}
        self._ops = self._find_ops(op_cost)
        self._stages = self._find_stages(allowed)
        self._deaths = self._find_deaths()
        self._during, self._before = self._rest()
        self._peaks: dict[tuple[int, Bits], int] = {}
        self.is_exact = self._is_all()
        """Whether no schedule costs less: all that was asked for so far was searched to the end."""

    @staticmethod
    def of(problem: Problem, allowed: frozenset[int], op_cost: Sequence[float]) -> Stages | None:
        """The longest row of a step, if it has one."""
        calls = problem.facts.graph.calls
        rows = [tuple(part[0] for part in row) for row in problem.segments.rows.rows if max(map(len, row)) == 1]
        if not rows:
            return None
        longest = max(rows, key=lambda row: (len(row), calls[row[-1]].end - calls[row[0]].start))
        stages = Stages(problem, longest, allowed, op_cost)
        return stages if stages._stages else None

    # -- the row ----------------------------------------------------------------------------------------------

    def _bits(self, storages: Iterable[int]) -> Bits:
        return sum(self._bit[s] for s in set(storages) if s in self._bit)

    def _find_ops(self, op_cost: Sequence[float]) -> list[_RowOp]:
        graph, facts = self._facts.graph, self._facts
        linked = {s: graph.calls[call].end for call in self._calls for s, _ in graph.calls[call].links}
        gone: dict[int, int] = {}
        ops: list[tuple[int, Op]] = []
        for part, call in enumerate(self._calls):
            span = graph.calls[call]
            for s in facts.born_in(span.start, span.end):
                gone[s] = min(graph.storages[s].last_ref, max(span.end, linked.get(s, 0)))
            ops += [(part, op) for op in graph.ops[span.start : span.end] if not op.is_view]
        return [
            _RowOp(
                index=op.index,
                part=part,
                results=self._bits((*op.outputs, *op.mutates)),
                made=self._bits(s for s in op.outputs if graph.storages[s].born == op.index),
                reads=self._bits(op.inputs),
                weight=op_cost[op.index] + facts.tie_cost * op.moved_bytes,
                workspace_bytes=op.workspace_bytes,
                gone=self._bits(s for s, clock in gone.items() if clock <= op.index),
            )
            for part, op in ops
        ]

    def _find_stages(self, allowed: frozenset[int]) -> list[_Stage]:
        """The stages, in order of backward; none if it comes to the calls in another order."""
        facts, calls = self._facts, self._calls
        parts = [p for p in reversed(range(len(calls))) if is_possible(facts, calls[: p + 1])]
        parts = [p for p in parts if facts.first_unpack(calls[p]) is not None]
        starts = [facts.first_unpack(calls[p]) or 0 for p in parts]
        if not starts or starts != sorted(set(starts)):
            return []
        found = []
        following = [*parts[1:], -1], starts, [*starts[1:], len(facts.during)]
        for part, below, start, stop in zip(parts, *following, strict=True):
            records = facts.saved_in(*calls[below + 1 : part + 1])
            end = facts.graph.calls[calls[part]].end
            here = [s for s in self._storages if facts.graph.storages[s].born < end]
            storable = self._bits(s for s in here if s in allowed and can_be_stored(facts, end, s))
            found.append(
                _Stage(part, start, stop, self._released(records), self._bits(r.storage for r in records), storable)
            )
        return found

    def _released(self, records: Iterable[SavedTensor]) -> dict[Bits, int]:
        found: dict[Bits, int] = {}
        for r in records:
            if r.storage in self._bit:
                bit = self._bit[r.storage]
                found[bit] = max(r.released, found.get(bit, 0))
        return found

    def _find_deaths(self) -> dict[int, int]:
        """When each storage of the row would die if no call that has a stage had saved it."""
        facts, graph = self._facts, self._facts.graph
        inside = facts.subtree(self._calls[: self._stages[0].part + 1] if self._stages else ())
        others = (
            (s, (r.released for r in facts.records_of.get(s, ()) if r.call not in inside)) for s in self._storages
        )
        return {s: max((graph.storages[s].last_ref, *released)) for s, released in others}

    def _rest(self) -> tuple[Bytes, Bytes]:
        """Live bytes of what no choice changes: while each op runs, and just before it."""
        facts = self._facts
        during, before = facts.during.copy(), facts.between.copy()
        last = self._stages[-1].start if self._stages else 0
        held = [(facts.deaths[s], last, s, 1) for s in facts.held_inputs(*self._calls)]
        for start, stop, s, sign in [*held, *((death, facts.deaths[s], s, -1) for s, death in self._deaths.items())]:
            for level in during, before:
                level[start:stop] += sign * facts.graph.storages[s].num_bytes
        return during, before

    def _is_all(self) -> bool:
        """Whether nothing but spans of the row can be a region, and all that these take is counted here."""
        graph, calls = self._facts.graph, set(self._calls)
        ops = (graph.ops[op.index] for op in self._ops)
        return (
            all(r.call in calls or graph.calls[r.call].parent < 0 for r in graph.saved)
            and all(len(graph.subtree(call)) == 1 for call in calls)
            and not any(op.mutates or op.is_random or op.kept_bytes for op in ops)
        )

    # -- the best way -----------------------------------------------------------------------------------------

    @property
    def least_bytes(self) -> int:
        """No limit below this can be met."""
        first = int(self._during[: self._stages[0].start].max(initial=0))
        return max([first, *(self._highest(k, stage.need) for k, stage in enumerate(self._stages))])

    def solve(self, limit_bytes: int, below: float = float("inf")) -> Regions | None:
        """The cheapest regions within a limit.

        Args:
            limit_bytes: Bytes that may be alive at any moment.
            below: What they have to cost less than; the sooner nothing does, the faster.

        Returns:
            The regions; None if there are none, or none was found.
        """
        best: _Way | None = None
        for num_sets in NUM_SETS:
            found, is_all = self._search(limit_bytes, below if best is None else best.weight, num_sets)
            best = found or best
            if is_all:
                break
        self.is_exact &= is_all
        return None if best is None else self._regions(best)

    def _search(self, limit_bytes: int, below: float, num_sets: int) -> tuple[_Way | None, bool]:
        """The cheapest way with so many sets a stage, and whether it is so with more, too."""
        ways: list[_Way | None] = [None]
        nodes, is_all = MAX_NODES, True
        for k in reversed(range(len(self._stages))):
            found: dict[Bits, _Way] = {}
            for then in ways:
                nodes = self._add_ways(k, then, found, (limit_bytes, below * (1 - _TINY)), nodes)
            followed = self._followed(found.values(), num_sets)
            is_all &= len(followed) < num_sets and nodes > 0
            ways = [*followed]
        fitting = (way for way in ways if way and self._first_peak(way.kept) <= limit_bytes)
        return min(fitting, key=lambda way: way.weight, default=None), is_all

    def _add_ways(
        self, k: int, then: _Way | None, found: dict[Bits, _Way], limits: tuple[int, float], nodes: int
    ) -> int:
        """Add what may be kept until a stage, if the next one is passed like this; how many decisions are left.

        Op by op, the last first: what is wanted of its results is kept, or it runs and what it reads is wanted.
        """
        stage, (limit, below) = self._stages[k], limits
        there, weight = (then.kept, then.weight) if then else (0, 0.0)
        wanted = stage.need | there
        if self._highest(k, stage.need & ~there) + self.size(there) > limit:
            return nodes
        room, storable, ops, size = limit - int(self._before[stage.start]), stage.storable, self._ops, self.size
        queue: list[tuple[int, Bits, Bits, float, tuple[int, ...]]] = [(len(ops) - 1, wanted, 0, weight, ())]
        while queue and nodes:
            place, live, kept, cost, runs = queue.pop()
            nodes -= 1
            while place >= 0 and not live & ops[place].results:
                place -= 1
            if place < 0:
                known = found.get(kept)
                if (known is None or cost < known.weight) and self._recompute_peak(stage, kept, wanted, runs) <= limit:
                    found[kept] = _Way(kept, cost, runs[-1] if runs else -1, then)
                continue
            op = ops[place]
            mine = live & op.results
            if not mine & ~storable and size(kept | mine) <= room:
                queue.append((place - 1, live & ~mine, kept | mine, cost, runs))
            if cost + op.weight < below:
                queue.append((place - 1, live & ~mine | op.reads & ~kept, kept, cost + op.weight, (*runs, place)))
        return nodes

    def _followed(self, ways: Iterable[_Way], num_sets: int) -> list[_Way]:
        """Ways with sets that contain no other that costs no more; of many, those that cost least for their size."""
        left = sorted(ways, key=lambda way: (way.weight, self.size(way.kept), way.kept))
        chosen: list[_Way] = []
        while left and len(chosen) < num_sets:
            behind: list[_Way] = []
            smallest = float("inf")
            for way in left:
                if self.size(way.kept) >= smallest:
                    behind.append(way)
                elif all(other.kept & ~way.kept or other.weight > way.weight for other in chosen):
                    chosen.append(way)
                    smallest = self.size(way.kept)
            left = behind
        return chosen[:num_sets]

    # -- bytes ------------------------------------------------------------------------------------------------

    def size(self, bits: Bits) -> int:
        """Bytes of a set."""
        found = self._sizes.get(bits)
        if found is None:
            place = bits.bit_length() - 1
            rest = self.size(bits ^ 1 << place)
            found = self._sizes[bits] = rest + self._facts.graph.storages[self._storages[place]].num_bytes
        return found

    def _first_peak(self, kept: Bits) -> int:
        """Live bytes at most before the first stage, with a set kept until then."""
        stop = self._stages[0].start
        held = np.zeros(stop + 1, np.int64)
        for s, bit in self._bit.items():
            if bit & kept:
                held[min(self._deaths[s], stop)] += self.size(bit)
        return int((self._during[:stop] + np.cumsum(held)[:stop]).max(initial=0))

    def _highest(self, k: int, going: Bits) -> int:
        """Live bytes at most in the backward of a stage, with what goes when autograd lets go of it."""
        if (k, going) not in self._peaks:
            stage = self._stages[k]
            level = self._during[stage.start : stage.stop].copy()
            for bit, released in stage.released.items():
                if bit & going:
                    level[: max(0, released - stage.start)] += self.size(bit)
            self._peaks[k, going] = int(level.max())
        return self._peaks[k, going]

    def _recompute_peak(self, stage: _Stage, kept: Bits, wanted: Bits, runs: Sequence[int]) -> int:
        """Live bytes at most while a stage runs ops again, the last of them first in the list."""
        alive, highest = kept, 0
        for place in reversed(runs):
            op = self._ops[place]
            alive &= ~op.gone | wanted
            highest = max(highest, self.size(alive | op.made) + self.size(alive & op.made) + op.workspace_bytes)
            alive |= op.made
        return int(self._before[stage.start]) + highest

    # -- as regions -------------------------------------------------------------------------------------------

    def _regions(self, way: _Way) -> Regions:
        """A way as regions: those of later stages lie inside those of earlier ones that start before they end."""
        spans: list[tuple[int, int, Bits]] = []
        following: _Way | None = way
        for stage in self._stages:
            assert following is not None
            if following.first >= 0:
                spans.append((self._ops[following.first].part, stage.part, following.kept))
            following = following.then
        for outer in reversed(range(len(spans))):
            start, stop, kept = spans[outer]
            while (whole := self._start_of(start, stop, spans[outer + 1 :])) < start:
                start = whole
            spans[outer] = start, stop, kept
        return tuple(map(self._rows.folded, self._nested(spans)))

    def _start_of(self, start: int, stop: int, later: Iterable[tuple[int, int, Bits]]) -> int:
        """Where a span starts that can be a region and contains those of later stages that it overlaps with."""
        start = min([start, *(first for first, last, _ in later if last >= start)])
        while not is_possible(self._facts, self._calls[start : stop + 1]):
            start -= 1
        return start

    def _nested(self, spans: Sequence[tuple[int, int, Bits]]) -> Regions:
        """Spans of the row, with what they store, as regions; each is followed by those inside it."""
        found: list[RegionSpec] = []
        while spans:
            (start, stop, bits), *rest = spans
            inside = [span for span in rest if span[1] >= start]
            children, spans = self._nested(inside), rest[len(inside) :]
            calls = self._calls[start : stop + 1]
            kept = frozenset(Extent(self._facts.graph, calls).makes(s for s, bit in self._bit.items() if bit & bits))
            is_whole = bool(children) and not kept
            found.append(RegionSpec(calls[0], kept, then=calls[1:], children=children, is_whole=is_whole))
        return tuple(reversed(found))

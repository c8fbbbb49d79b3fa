"""Which regions of a step are alike: what recompute of one does is what that of another does, elsewhere.

A region is told by its *stretch* of the step, from where it starts to where it ends, and by what it stores. All of that
is written free of places: storages are numbered as they appear, clocks of forward count from the start of the stretch,
and those of backward from where the first tensor saved in it is read. Regions that are equal in these terms recompute
alike: what is known of one holds for the other with storages and clocks put in place.

Known limit: regions with others inside are not compared: few are alike.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import numpy.typing as npt

from autoremat._replay import RegionSpec, Replay, is_uncounted
from autoremat._step_graph import Op, SavedTensor, StepGraph

_Clocks = npt.NDArray[np.int64]
_BACKWARD, _AT_END, _NEVER = 1 << 40, 1 << 50, -(1 << 50)
"""What tells clocks of backward, the end of the step, and what does not happen from clocks of forward."""


@dataclass(frozen=True, slots=True)
class _Stretch:
    """A part of a step.

    Attributes:
        kind: Equal for those that are alike.
        start: Clock at which it starts.
        turn: Last clock that counts from there.
        at: Clock from which later ones count.
        numbers: Storages that it is about, each with its number.
    """

    kind: int
    start: int
    turn: int
    at: int
    numbers: dict[int, int]


class Move:
    """From a region to one that is alike.

    Args:
        source: Stretch of the one.
        target: Stretch of the other.
        num_ops: How many ops the step has.
    """

    def __init__(self, source: _Stretch, target: _Stretch, num_ops: int) -> None:
        self._turn, self._num_ops = source.turn, num_ops
        self._ahead, self._behind = target.start - source.start, target.at - source.at
        self.storages = dict(zip(source.numbers, target.numbers, strict=True))
        """Those of the other by those of the one."""

    def clock(self, clock: int) -> int:
        """The same clock."""
        if clock <= self._turn:
            return clock + self._ahead
        return clock if clock == self._num_ops else clock + self._behind

    def ops(self, ops: Iterable[int]) -> tuple[int, ...]:
        """The same ops of forward."""
        ahead = self._ahead
        return tuple([op + ahead for op in ops])

    def replay(self, work: Replay) -> Replay:
        """The same recompute."""
        needed = frozenset([self.storages[s] for s in work.needed])
        ops, skipped = self.ops(work.ops), self.ops(work.skipped)
        return Replay(ops, skipped, self.clock(work.stop), work.flops, work.selective, needed)


class Alike:
    """Finds regions that are alike.

    Args:
        graph: The step.
    """

    def __init__(self, graph: StepGraph) -> None:
        self._graph = graph
        self._op_kinds = op_kinds(graph)
        self._used, self._first_use = uses(graph)
        is_backward = [False, *(op.phase != "forward" for op in graph.ops)]
        self._turns = [i for i in range(len(graph.ops)) if is_backward[i + 1] and not is_backward[i]]
        saved = [(r.packed, r.call, _NEVER if r.unpacked is None else r.unpacked, r.released) for r in graph.saved]
        self._saved = np.array(saved, np.int64).reshape(-1, 4).T
        self._records: dict[int, list[SavedTensor]] = defaultdict(list)
        last_saved = [_NEVER] * len(graph.storages)
        for record in graph.saved:
            self._records[record.storage].append(record)
            last_saved[record.storage] = record.packed
        lives = [(s.born, s.last_ref, s.num_bytes, s.cause == "buffer") for s in graph.storages]
        rows = zip(lives, last_saved, strict=True)
        self._lives = np.array([(*life, packed) for life, packed in rows], np.int64).reshape(-1, 5).T
        self._stretches: dict[tuple[int, ...], _Stretch | None] = {}
        self._kinds: dict[Hashable, int] = {}
        self._firsts: dict[Hashable, tuple[RegionSpec, _Stretch]] = {}

    def first(self, spec: RegionSpec) -> tuple[RegionSpec, Move | None]:
        """The first region asked for that is alike, and how to get from it to this one; None if that is this one."""
        stretch = None if spec.children else self._stretch(spec.calls)
        if stretch is None or not stretch.numbers.keys() >= spec.kept:
            return spec, None
        key = stretch.kind, spec.is_whole, frozenset([stretch.numbers[s] for s in spec.kept])
        first, source = self._firsts.setdefault(key, (spec, stretch))
        return first, None if first == spec else Move(source, stretch, len(self._graph.ops))

    def _stretch(self, calls: tuple[int, ...]) -> _Stretch | None:
        """The stretch from the first of these calls to the last; None if nothing saved there is ever read."""
        if calls not in self._stretches:
            self._stretches[calls] = self._describe(calls)
        return self._stretches[calls]

    def _describe(self, calls: tuple[int, ...]) -> _Stretch | None:
        graph, inside = self._graph, range(calls[0], self._graph.subtree(calls[-1]).stop)
        start, end = graph.calls[calls[0]].start, graph.calls[calls[-1]].end
        turn = next(iter(self._turns[bisect_right(self._turns, start) :]), len(graph.ops) - 1)
        records = slice(*np.searchsorted(self._saved[0], (start, end + 1)).tolist())
        packed, call, unpacked, _ = self._saved[:, records]
        is_inside = (call >= inside.start) & (call < inside.stop)
        read = unpacked[is_inside & (unpacked != _NEVER)]
        if not len(read):
            return None
        at = int(read.min())

        def free(clocks: _Clocks) -> _Clocks:
            """Clocks free of where the stretch is."""
            later = np.where(clocks == len(graph.ops), _AT_END, clocks - at + _BACKWARD)
            return np.where(clocks > turn, later, np.where(clocks == _NEVER, _NEVER, clocks - start))

        numbers: dict[int, int] = {}
        places = [numbers.setdefault(s, len(numbers)) for s in self._used_in(start, end, inside, records)]
        born, last_ref, num_bytes, is_buffer, last_saved = self._lives[:, list(numbers)]
        is_made = (born >= start) & (born < end)
        kept_until = np.full(len(born), _NEVER)
        for place in np.flatnonzero(is_made & (last_saved > end)).tolist():
            kept_until[place] = self._kept_until(list(numbers)[place], end)
        lives = np.where(is_made, (born - start, *free(np.stack((last_ref, kept_until)))), -1)
        saved = packed - start, np.where(is_inside, call - inside.start, -1), *free(self._saved[2:, records])
        key = (
            self._op_kinds[start:end],
            tuple(places),
            tuple([call - inside.start for call in calls]),
            tuple([self._call(call, inside, start, numbers) for call in inside]),
            np.stack(saved).tobytes(),
            np.stack((*lives, num_bytes, is_buffer)).tobytes(),
        )
        return _Stretch(self._kinds.setdefault(key, len(self._kinds)), start, turn, at, numbers)

    def _used_in(self, start: int, end: int, calls: Iterable[int], records: slice) -> Iterator[int]:
        """Storages of ops, arguments and saved tensors of a stretch."""
        ops = self._used[self._first_use[start] : self._first_use[end]]
        arguments = chain.from_iterable([self._graph.calls[call].inputs for call in calls])
        return chain(ops, arguments, [record.storage for record in self._graph.saved[records]])

    def _kept_until(self, storage: int, end: int) -> int:
        """When what was saved of a storage after a clock is let go of."""
        return max([record.released for record in self._records[storage] if record.packed > end])

    def _call(self, index: int, inside: range, start: int, numbers: dict[int, int]) -> Hashable:
        call = self._graph.calls[index]
        links = [(numbers[s], source - inside.start) for s, source in call.links if source in inside]
        return (
            call.parent - inside.start if call.parent in inside else -1,
            call.start - start,
            call.end - start,
            len(call.inputs),
            *links,
        )


def uses(graph: StepGraph) -> tuple[list[int], list[int]]:
    """Storages that ops read, make and write, one op after the other, and where those of each op begin."""
    counts = (len(op.inputs) + len(op.outputs) + len(op.mutates) for op in graph.ops)
    return [s for op in graph.ops for s in (*op.inputs, *op.outputs, *op.mutates)], [0, *accumulate(counts)]


def op_kinds(graph: StepGraph) -> tuple[int, ...]:
    """For each op a number; equal ones do and take the same, but for the storages that they work on."""
    numbers: dict[Hashable, int] = {}
    return tuple([numbers.setdefault(_kind(graph, op), len(numbers)) for op in graph.ops])


def _kind(graph: StepGraph, op: Op) -> Hashable:
    """Equal for ops that do and take the same, but for the storages that they work on."""
    takes = op.flops, op.moved_bytes, op.workspace_bytes, op.kept_bytes
    flags = op.phase, op.is_random, op.is_view, op.reads_value, is_uncounted(graph, op)
    return op.name, *takes, *flags, len(op.inputs), len(op.outputs), len(op.mutates)

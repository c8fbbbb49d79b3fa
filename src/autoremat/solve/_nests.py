"""What dropping a whole stretch of calls, but for a store set, frees, demands and costs.

A nest's own recompute runs everything in it that makes what is not stored, up to the last tensor that is needed, and
finds regions inside it on the way. Nests of one stack are sums over its calls, so that hundreds of them cost no more
than one pass.

*Store sets* are sets of forward's results that nests may store: of the largest candidates, what their options store at
one price of a byte, from a price at which all that is costly to make is stored, to one at which only the best is. The
first set is empty.

Known limits: in the nest's first run what several of its calls saved is not counted as dropped before the last of
these has ended; inside another nest, what that one stores of a call counts as alive until the call has ended; nests
of more than half of a long row store nothing (see `LONG_ROW`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from autoremat._replay import RegionSpec, replay
from autoremat.solve._chain import NestEdge
from autoremat.solve._facts import Bytes, Facts
from autoremat.solve._options import Option, RegionCost, cost_around
from autoremat.solve._rows import Calls
from autoremat.solve._segments import LONG_ROW, SLACK_OPS, Candidate, Nest, Segments
from autoremat.solve._units import Inner, moved

SET_SHARES = (0.02, 0.4)
"""Store sets: which share of what recomputing all costs is left to recompute."""
StoreSets = tuple[tuple[frozenset[int], ...], ...]
"""Storages, by micro-step and set."""


def store_sets(facts: Facts, segments: Segments, options: Sequence[Sequence[Option]]) -> StoreSets:
    """What nests may store, the empty set first."""
    hulls: dict[int, tuple[Inner, list[tuple[int, Option]]]] = {}
    cover = _cover(segments)
    for number in cover:
        candidate = segments.candidates[number]
        if candidate.kind not in hulls:
            hulls[candidate.kind] = candidate.members[0], _hull(facts, candidate, options[number])
    kinds = [segments.candidates[number].kind for number in cover]
    steps = sorted(
        ((b.weight - a.weight) / max(1, size_a - size_b), b.weight - a.weight)
        for kind in kinds
        for (size_a, a), (size_b, b) in pairwise(hulls[kind][1])
    )
    total = sum(cost for _, cost in steps)
    num_steps = len(facts.spans)
    found: dict[tuple[frozenset[int], ...], None] = {(frozenset(),) * num_steps: None}
    for share in SET_SHARES if total > 0 else ():
        sums = np.cumsum([cost for _, cost in steps])
        price = steps[int(np.searchsorted(sums, share * total))][0]
        chosen = {kind: (source, _at_price(hull, price).kept) for kind, (source, hull) in hulls.items()}
        targets = [(*chosen[kind], segments.candidates[n].members) for n, kind in zip(cover, kinds, strict=True)]
        by_step = (
            frozenset(s for source, kept, members in targets for s in moved(facts, source, members[step], kept))
            for step in range(num_steps)
        )
        found[tuple(by_step)] = None
    return tuple(zip(*found, strict=True))


def _cover(segments: Segments) -> list[int]:
    """Single calls that lie in no other such candidate."""
    found, end = [], -1
    for number, candidate in enumerate(segments.candidates):
        inner = candidate.members[0]
        if len(inner.written) == 1 and inner.start >= end:
            found.append(number)
            end = inner.end
    return found


def _hull(facts: Facts, candidate: Candidate, options: Sequence[Option]) -> list[tuple[int, Option]]:
    """Stored bytes and options on the lower convex hull, most bytes first."""
    inner = candidate.members[0]

    def size(option: Option) -> int:
        return sum(facts.graph.storages[s].num_bytes for s in option.kept if not inner.is_free(s))

    hull: list[tuple[int, Option]] = []
    for num_bytes, option in sorted(((size(o), o) for o in options), key=lambda row: (-row[0], row[1].weight)):
        while hull and (hull[-1][1].weight >= option.weight or hull[-1][0] == num_bytes):
            hull.pop()
        while len(hull) > 1:
            (size_a, a), (size_b, b) = hull[-2:]
            if (b.weight - a.weight) * (size_b - num_bytes) < (option.weight - b.weight) * (size_a - size_b):
                break
            hull.pop()
        hull.append((num_bytes, option))
    return hull


def _at_price(hull: Sequence[tuple[int, Option]], price: float) -> Option:
    """The option with least weight plus bytes at a price; of equals the one with fewer bytes."""
    return min(hull, key=lambda row: (row[1].weight + price * row[0] * (1 + 1e-9), row[0]))[1]


@dataclass(frozen=True, slots=True)
class _Stack:
    """Sums over the calls of a row in one micro-step.

    Attributes:
        number: Its number among the rows.
        calls: The calls, in order.
        born: Position of the call in which each droppable storage is born.
        last: Position of the last call that saved it or took it as an argument.
        gone: Position of the call that ends when nobody else refers to it either.
        num_bytes: Its size.
        is_stored: For each store set, which of them it has.
        highest: For each set, live bytes at most while each call and what follows it runs, with what it alone saved
            dropped as soon as it can be.
        extra: For each set, bytes that each call and those before it store although the plain step frees them.
        ready: For each set, its bytes that are born before each call.
    """

    number: int
    calls: Calls
    born: Bytes
    last: Bytes
    gone: Bytes
    num_bytes: Bytes
    is_stored: npt.NDArray[np.bool_]
    highest: Bytes
    extra: Bytes
    ready: Bytes

    def spans(self, first: int, stores: int) -> _Spans:
        """What spans from a call to each later one do, if all that is saved in them is dropped but for a set."""
        inside = (self.born >= first) & ~self.is_stored[stores]
        last, num_bytes, num = self.last[inside] - first, self.num_bytes[inside], len(self.calls) - first

        def up_to(calls: Bytes, sizes: Bytes) -> Bytes:
            return np.cumsum(np.bincount(calls, weights=sizes, minlength=num)).astype(np.int64)

        freed, gone = up_to(last, num_bytes), up_to(self.gone[inside] - first, num_bytes)
        extra = self.extra[stores, first + 1 :] - self.extra[stores, first]
        forward = self.highest[stores, first:] - np.concatenate([[0], gone[:-1]]) + extra
        born = np.bincount(self.born[self.is_stored[stores]], minlength=len(self.calls))[first:]
        forward = np.maximum.accumulate(forward - self.ready[:, first:], axis=1)
        return _Spans(forward, (freed - extra).tolist(), np.cumsum(born).tolist())


@dataclass(frozen=True, slots=True)
class _Spans:
    """Spans of a row's calls from one to each later one, by their last call.

    Attributes:
        forward: For each set, memory that the first run demands, without arguments, less what of it is born by then.
        saved: Bytes freed once the last call has ended, less those stored although the plain step frees them.
        num_stored: How many storages of the set are born inside.
    """

    forward: Bytes
    saved: list[int]
    num_stored: list[int]


class NestDemands:
    """Writes nests as edges.

    Args:
        facts: The step.
        segments: Its candidates.
        sets: What nests may store.
        op_cost: Cost of each op.
        bytes_of: Live bytes of the plain step while each op runs; for each micro-step and store set, its bytes that are
            born before each clock.
        region_cost: What a region costs beyond the ops that it runs again.
    """

    def __init__(
        self,
        facts: Facts,
        segments: Segments,
        sets: StoreSets,
        op_cost: Sequence[float],
        bytes_of: tuple[Bytes, Sequence[Bytes]],
        region_cost: RegionCost | None = None,
    ) -> None:
        self._facts = facts
        self._segments = segments
        self._sets = sets
        self._op_cost = op_cost
        self._during, self._born = bytes_of
        self._region_cost = region_cost
        self._takers: dict[int, list[int]] = defaultdict(list)
        replaced = {module for found in segments.rows.modules.values() for module, _ in found}
        for call in facts.graph.calls:
            for s in call.inputs if call.index not in replaced else ():
                self._takers[s].append(call.index)
        self._stacks: dict[Calls, _Stack] = {}
        self._spans: dict[tuple[int, int, int], _Spans] = {}
        self._sums: dict[tuple[int, int, int], list[float]] = {}
        self._costs: dict[tuple[int, int], tuple[float, float]] = {}
        self._known: dict[Hashable, tuple[float, float]] = {}
        single = (c for c in segments.candidates if len(c.members[0].calls) == 1)
        self._kinds = {candidate.members[0].calls[0]: candidate.kind for candidate in single}

    def edges(self, number: int, nest: Nest, *, ready: tuple[float, float]) -> Iterator[NestEdge]:
        """A nest as edges, one for each set: the highest demand and the least freed over all micro-steps.

        Args:
            number: Which nest.
            nest: The nest.
            ready: Cost of all that forward runs before its last call starts, and before it ends.
        """
        stacks = [self._stack(row) for row in nest.rows]
        first, last = (stacks[0].calls.index(nest.members[0][place]) for place in (0, -1))
        held = [self._held_bytes(calls) for calls in nest.members]
        num, at = len(stacks[0].calls), last - first
        may_store = num <= LONG_ROW or at < num // 2
        for stores in range(len(self._sets[0]) if may_store else 1):
            spans = [self._spans_from(stack, first, stores) for stack in stacks]
            if stores and not any(span.num_stored[at] for span in spans):
                continue
            forward = [span.forward[:, at] + kept_alive for span, kept_alive in zip(spans, held, strict=True)]
            saved = [span.saved[at] - kept_alive for span, kept_alive in zip(spans, held, strict=True)]
            full = self._sums_from(stacks[0], first, stores)[at] if at else 0.0
            yield NestEdge(
                number=-1 - number,
                stores=stores,
                stop=nest.stop,
                forward=reduce(np.maximum, forward),
                saved=min(saved),
                held=max(held),
                cost=(full + self._cost(nest.members[0][-1], stores)[1]) * len(nest.members),
                ready=ready[stores > 0],
            )

    def _spans_from(self, stack: _Stack, first: int, stores: int) -> _Spans:
        key = stack.number, first, stores
        if key not in self._spans:
            self._spans[key] = stack.spans(first, stores)
        return self._spans[key]

    def _sums_from(self, stack: _Stack, first: int, stores: int) -> list[float]:
        """Cost of running the calls of a row from one to just before each later one."""
        key = stack.number, first, stores
        if key not in self._sums:
            self._sums[key] = [0.0, *accumulate([self._cost(call, stores)[0] for call in stack.calls[first:]])]
        return self._sums[key]

    def _held_bytes(self, calls: Calls) -> int:
        """Bytes of arguments that only the nest keeps alive."""
        facts = self._facts
        at = facts.first_unpack(*calls) or 0
        held = set(facts.held_inputs(*calls)) - self._segments.shared
        return sum(facts.graph.storages[s].num_bytes for s in held if facts.deaths[s] < at)

    def _stack(self, calls: Calls) -> _Stack:
        if calls not in self._stacks:
            step = self._facts.graph.calls[calls[0]].micro_step
            self._stacks[calls] = self._make_stack(calls, self._sets[step], self._born[step])
        return self._stacks[calls]

    def _make_stack(self, calls: Calls, sets: Sequence[frozenset[int]], ready: Bytes) -> _Stack:
        facts, graph = self._facts, self._facts.graph
        place = {inner: position for position, call in enumerate(calls) for inner in graph.subtree(call)}
        bounds = [*(graph.calls[c].start for c in calls), graph.calls[calls[-1]].end]
        ends, rows = bounds[1:], []
        extra = np.zeros((len(sets), len(calls) + 1), np.int64)
        for position, call in enumerate(calls):
            at = facts.first_unpack(call) or 0
            for s in facts.born_in(graph.calls[call].start, graph.calls[call].end):
                savers = [r.call for r in facts.records_of.get(s, ())]
                # What takes it as an argument may be a region that holds it.
                users = (*savers, *self._takers.get(s, ())) if savers else ()
                last = max((place.get(user, len(calls)) for user in users), default=len(calls))
                if last < len(calls) and graph.storages[s].last_ref <= self._gone_by(calls, last):
                    until = max(last, min(bisect_left(ends, graph.storages[s].last_ref), len(calls) - 1))
                    rows.append((position, last, until, graph.storages[s].num_bytes, s))
                if facts.deaths[s] < at:
                    extra[:, position + 1] += [graph.storages[s].num_bytes * (s in found) for found in sets]
        born, lasts, gone, sizes, names = np.array(rows, np.int64).reshape(-1, 5).T
        is_stored = np.array([[s in found for s in names.tolist()] for found in sets], bool).reshape(len(sets), -1)
        highest = np.array(
            [
                [self._highest(a, max(b, a + 1), names[(born == p) & (lasts == p) & ~stored]) for stored in is_stored]
                for p, (a, b) in enumerate(pairwise(bounds))
            ]
        )
        sums = np.cumsum(extra, axis=1)
        return _Stack(
            len(self._stacks), calls, born, lasts, gone, sizes, is_stored, highest.T, sums, ready[:, bounds[:-1]]
        )

    def _highest(self, start: int, stop: int, dropped: Bytes) -> int:
        """Live bytes at most between two clocks, with storages dropped when only autograd would hold them."""
        change = np.zeros(stop - start + 1, np.int64)
        for s in dropped.tolist():
            storage = self._facts.graph.storages[s]
            change[min(max(storage.last_ref, start), stop) - start] -= storage.num_bytes
        return int((self._during[start:stop] + np.cumsum(change)[:-1]).max())

    def _gone_by(self, calls: Calls, last: int) -> int:
        """Clock by which a storage that a call saved last must be let go of by everybody else."""
        graph = self._facts.graph
        following = calls[last + 1] if last + 1 < len(calls) else graph.subtree(calls[last]).stop
        if following >= len(graph.calls) or graph.calls[following].parent < 0:
            following = calls[last]
        return graph.calls[following].end + SLACK_OPS

    def _cost(self, call: int, stores: int) -> tuple[float, float]:
        """Cost of running a call for what it returns and for what backward needs, and for the latter alone."""
        if (call, stores) not in self._costs:
            span = self._facts.graph.calls[call]
            kept = frozenset(self._facts.born_in(span.start, span.end)) & self._sets[span.micro_step][stores]
            alike = self._alike(call, kept)
            if alike not in self._known:
                self._known[alike] = self._work_out_cost(call, kept)
            self._costs[call, stores] = self._known[alike]
        return self._costs[call, stores]

    def _alike(self, call: int, kept: frozenset[int]) -> Hashable:
        """Equal for calls that cost the same."""
        if call not in self._kinds:
            return call, kept
        graph, span = self._facts.graph, self._facts.graph.calls[call]

        def places(storages: Iterable[int]) -> frozenset[tuple[int, int]]:
            births = ((s, graph.storages[s].born) for s in storages)
            inside = ((s, born) for s, born in births if span.start <= born < span.end)
            return frozenset((born - span.start, (*graph.ops[born].outputs, s).index(s)) for s, born in inside)

        return self._kinds[call], places(kept), places(span.outputs)

    def _work_out_cost(self, call: int, kept: frozenset[int]) -> tuple[float, float]:
        work = replay(self._facts.graph, RegionSpec(call, kept, is_whole=not kept), self._facts.saved_in(call))
        around = cost_around((call,), work, self._region_cost)
        tail = sum(self._op_cost[index] for index in work.ops)
        return self._full_cost(call, kept) + around, tail + around

    def _full_cost(self, call: int, kept: frozenset[int]) -> float:
        graph, span = self._facts.graph, self._facts.graph.calls[call]
        live = {*span.outputs, *(r.storage for r in self._facts.saved_in(call))} - kept
        total = 0.0
        for op in reversed(graph.ops[span.start : span.end]):
            if not op.is_view and (op.reads_value or any(s in live for s in (*op.outputs, *op.mutates))):
                total += self._op_cost[op.index]
                live.update(s for s in op.inputs if s not in kept)
        return total

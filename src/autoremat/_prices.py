"""Peaks of many plans for one step: what a region does by itself is worked out once, and added up for each plan.

Regions of a plan share no ops, so their recomputes, with all that comes back and goes again, do not depend on each
other. What they share is forward's results: one region may drop what another holds as an argument. A result dies when
nobody wants it any more; that is the latest of what is left without the regions that drop it, and of what each region
asks for.

The rules are those of `_expand`, whose parts are asked for one region at a time; the peak is that of `peak_bytes` of
the whole schedule.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from autoremat._alike import Alike, Move
from autoremat._expand import FIRST, LAST, Expansion, Moment, expand, no_garbage_collection
from autoremat._ledger import Bytes, Tally, bytes_at_start, peak_bytes, plain_bytes
from autoremat._replay import RegionSpec, Replay, replay
from autoremat._schedule import Action, Event
from autoremat._step_graph import StepGraph


@dataclass(slots=True)
class _Changes:
    """Changes of live bytes against the plain step: at a clock, by so many bytes."""

    clocks: list[int] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)

    def add(self, clock: int, num_bytes: int) -> None:
        self.clocks.append(clock)
        self.num_bytes.append(num_bytes)

    def add_all(self, other: _Changes) -> None:
        self.clocks += other.clocks
        self.num_bytes += other.num_bytes

    def by_clock(self, num: int) -> Bytes:
        """The sum at each of so many clocks."""
        found = np.zeros(num, np.int64)
        np.add.at(found, np.array(self.clocks, np.int64), np.array(self.num_bytes, np.int64))
        return found


@dataclass(frozen=True, slots=True)
class _Recompute:
    """One recompute.

    Attributes:
        moment: Its clock, and its place among those of the clock.
        highest: Bytes at its highest moment above those before it: before and after each of `passing`.
        passing: Forward's results that go during it, in order, if no other region wants them longer.
        left: Bytes that it leaves alive, those included.
        ops: What it runs.
    """

    moment: Moment
    highest: tuple[int, ...]
    passing: tuple[int, ...]
    left: int
    ops: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Alone:
    """What one region does, with the regions inside it.

    Attributes:
        recomputes: In order.
        early: Changes before the recomputes of the same clock.
        late: Changes after them, their own included.
        remaining: When forward's results that it drops would die without it.
        wanted: Until when it asks for forward's results.
    """

    recomputes: tuple[_Recompute, ...]
    early: _Changes
    late: _Changes
    remaining: dict[int, Moment]
    wanted: dict[int, Moment]

    def moved(self, move: Move) -> _Alone:
        """What a region does that is alike."""
        clock, there = move.clock, move.storages
        recomputes = [
            _Recompute(
                moment=(clock(recompute.moment[0]), recompute.moment[1]),
                highest=recompute.highest,
                passing=tuple([there[s] for s in recompute.passing]),
                left=recompute.left,
                ops=move.ops(recompute.ops),
            )
            for recompute in self.recomputes
        ]
        early, late = (_Changes(list(map(clock, some.clocks)), some.num_bytes) for some in (self.early, self.late))
        remaining, wanted = (
            {there[s]: (clock(at), rank) for s, (at, rank) in some.items()} for some in (self.remaining, self.wanted)
        )
        return _Alone(tuple(recomputes), early, late, remaining, wanted)


class Prices:
    """Prices plans of one step.

    Args:
        graph: The step.

    Example:
        ``Prices(graph).peak_bytes(specs) == peak_bytes(graph, expand(graph, specs))``
    """

    @no_garbage_collection()
    def __init__(self, graph: StepGraph) -> None:
        self._graph = graph
        self._tally = Tally(graph)
        self._alike = Alike(graph)
        self._known: dict[RegionSpec, _Alone] = {}
        self._works: dict[RegionSpec, Replay] = {}
        self._releases: dict[int, list[tuple[int, int]]] = {}
        """For each storage: calls in which it was saved, and when that was let go of."""
        deaths = [storage.last_ref for storage in graph.storages]
        for record in graph.saved:
            self._releases.setdefault(record.storage, []).append((record.call, record.released))
            deaths[record.storage] = max(deaths[record.storage], record.released)
        self._deaths, self._sizes = deaths, [storage.num_bytes for storage in graph.storages]
        self._during, self._before = plain_bytes(graph, deaths)
        self._start = bytes_at_start(graph)

    def peak_bytes(self, specs: Iterable[RegionSpec]) -> int:
        """Largest live bytes of the step with these regions.

        Args:
            specs: Disjoint regions, each with the regions inside it.
        """
        specs = tuple(specs)
        with no_garbage_collection():
            regions = [self._alone(spec) for spec in specs]
        clocks = [{recompute.moment[0] for recompute in region.recomputes} for region in regions]
        if len(set().union(*clocks)) < sum(map(len, clocks)):
            return peak_bytes(self._graph, expand(self._graph, specs))  # regions take turns
        early, late, ends = self._changes(regions)
        size, between = self._sizes, defaultdict[Moment, int](int)
        for s, moment in ends.items():
            if FIRST < moment[1] < LAST:
                between[moment] += size[s]
        first, num = early.by_clock(len(self._before)), len(self._before)
        change = np.cumsum(first + late.by_clock(num))
        peak = max(self._start, int((self._during + change[:-1]).max(initial=0)))
        before = self._before + first
        before[1:] += change[:-1]
        for region in regions:
            level, clock = 0, -1
            for recompute in region.recomputes:
                if recompute.moment[0] != clock:
                    clock = recompute.moment[0]
                    level = int(before[clock])
                peak, gone = max(peak, level + recompute.highest[0]), 0
                for s, highest in zip(recompute.passing, recompute.highest[1:], strict=True):
                    gone += size[s] if ends.get(s) == recompute.moment else 0
                    peak = max(peak, level + highest - gone)
                level += recompute.left - between.get(recompute.moment, 0)
        return peak

    def work(self, spec: RegionSpec) -> Replay:
        """What recompute of a region does."""
        work = self._works.get(spec)
        if work is None:
            first, move = self._alike.first(spec)
            work = self._works[spec] = move.replay(self.work(first)) if move else replay(self._graph, spec)
        return work

    def recomputed(self, specs: Iterable[RegionSpec]) -> list[int]:
        """Ops that run again, in order."""
        found = (recompute for spec in specs for recompute in self._alone(spec).recomputes)
        return [index for recompute in sorted(found, key=lambda r: r.moment) for index in recompute.ops]

    def _changes(self, regions: Sequence[_Alone]) -> tuple[_Changes, _Changes, dict[int, Moment]]:
        """Changes before and after the recomputes of each clock, and when results of forward that regions want die."""
        early, late = _Changes(), _Changes()
        ends: dict[int, Moment] = {}
        for region in regions:
            early.add_all(region.early)
            late.add_all(region.late)
            ends.update(region.remaining)
        for region in regions:
            for s, moment in region.wanted.items():
                if moment > ends.get(s, (self._deaths[s], FIRST)):
                    ends[s] = moment
        last = len(self._graph.ops)
        for s, (clock, rank) in ends.items():
            size, death = self._sizes[s], self._deaths[s]
            if death < last:
                early.add(death, size)
            if rank > FIRST:
                late.add(clock, -size)
            elif clock < last:
                early.add(clock, -size)
        return early, late, ends

    def _alone(self, spec: RegionSpec) -> _Alone:
        if spec not in self._known:
            first, move = self._alike.first(spec)
            if move:
                self._known[spec] = self._alone(first).moved(move)
            else:
                self._known[spec] = self._work_out(Expansion(self._graph, (spec,), is_alone=True, find_work=self.work))
        return self._known[spec]

    def _work_out(self, expansion: Expansion) -> _Alone:
        early, late = _Changes(), _Changes()
        opening, closing = expansion.boundaries(expansion.regions)
        for clock in opening.keys() | closing.keys():
            events: list[Event] = []
            expansion.cross(clock, opening, closing, events)
            late.add(clock, self._tally.run(events, 0, set())[1])
        recomputes = tuple(self._recomputes(expansion, late))
        size = self._graph.storages
        for clock, released in expansion.releases.items():
            early.add(clock, self._tally.run(released, 0, set())[1])
        for (clock, rank), lives in expansion.drops.items():
            (early if rank == FIRST else late).add(clock, -sum(size[s].num_bytes for s, _ in lives))
        return _Alone(
            recomputes=recomputes,
            early=early,
            late=late,
            remaining={s: self._remaining(expansion, s) for s in expansion.dropped},
            wanted={s: moment for (s, generation), moment in expansion.ends.items() if not generation},
        )

    def _recomputes(self, expansion: Expansion, late: _Changes) -> list[_Recompute]:
        """The recomputes, with what dies right after each of them."""
        found, again = [], Action.RECOMPUTE
        saved = {(s, region.position) for region in expansion.regions[:1] for s in region.spec.kept}
        ending: dict[Moment, list[tuple[int, int]]] = defaultdict(list)
        for (s, generation), moment in expansion.ends.items():
            if not generation:
                ending[moment].append((s, generation))
        for clock in sorted(expansion.recomputes):
            for rank, region in enumerate(expansion.recomputes[clock], start=1):
                events: list[Event] = []
                passing = expansion.passing(region, ending[clock, rank])
                expansion.recompute(region, events, passing)
                highest, order, left = self._in_parts(events, {s for s, _ in passing}, saved)
                gone = expansion.drops.pop((clock, rank), ())
                left -= sum(self._graph.storages[s].num_bytes for s, _ in gone)
                late.add(clock, left)
                ops = tuple([event.op for event in events if event.action is again])
                found.append(_Recompute((clock, rank), highest, order, left, ops))
        return found

    def _in_parts(
        self, events: Sequence[Event], passing: set[int], saved: set[tuple[int, int]]
    ) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Bytes at the highest moments before and after storages pass, which ones in which order, and bytes left.

        Those that pass are not taken off.
        """
        drop, numbered = Action.DROP, enumerate(events) if passing else ()
        cuts = [i for i, e in numbered if e.action is drop and not e.generation and e.storage in passing]
        total, highest = 0, []
        for start, stop in pairwise((-1, *cuts, len(events))):
            most, total = self._tally.run(events[start + 1 : stop], total, saved)
            highest.append(most)
        return tuple(highest), tuple(events[i].storage for i in cuts), total

    def _remaining(self, expansion: Expansion, storage: int) -> Moment:
        """When a result of forward would die if nothing saved in the region held it."""
        others = (released for call, released in self._releases[storage] if call not in expansion.innermost)
        return max(self._graph.storages[storage].last_ref, *others, -1), FIRST

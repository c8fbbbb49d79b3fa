"""What every choice of a region does to the bytes that are alive, at every moment of a step.

A *moment* is a clock and a place in it: ``2 t`` is just before op ``t``, when regions are recomputed, and ``2 t + 1``
is while it runs. A choice (a candidate with one of its options) frees storages over stretches of moments and holds
others; what several choices do adds up, but for *contested* storages: those that one region may free while another
holds them as an argument. They live as long as any of them wants, which is no sum, and are kept apart.

The rules are those of `_expand`, for regions without regions inside. Known limit: copies of buffers in recompute are
not counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from autoremat._replay import Extent, held_inputs, random_states, replay
from autoremat.solve._facts import Bytes, Facts
from autoremat.solve._options import Option
from autoremat.solve._segments import Candidate
from autoremat.solve._units import Inner

Shares = npt.NDArray[np.float64]
"""How much of each column is chosen: 0 or 1 in a plan, anything between in a relaxation."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A candidate, and where the columns of its options are.

    Attributes:
        candidate: The candidate.
        options: Those of its options that can be chosen.
        kept: For each option, the storages that it keeps in each micro-step.
        column: Column of the first option; those of the others follow.
    """

    candidate: Candidate
    options: tuple[Option, ...]
    kept: tuple[tuple[frozenset[int], ...], ...]
    column: int

    @property
    def columns(self) -> range:
        """Columns of its options."""
        return range(self.column, self.column + len(self.options))


@dataclass(frozen=True, slots=True)
class Wish:
    """Who wants a contested storage over a segment of its life.

    It is alive if ``constant`` plus the sum over the columns, each times its sign, is positive.
    """

    constant: float
    columns: tuple[int, ...]
    sign: float


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of the life of a contested storage over which the same choices hold it.

    Attributes:
        start: First moment.
        stop: Moment after the last.
        num_bytes: Size of the storage.
        wishes: It is alive if any of them wants it.
    """

    start: int
    stop: int
    num_bytes: int
    wishes: tuple[Wish, ...]


@dataclass(slots=True)
class _Parts:
    """Changes of live bytes: at a moment, by a column, by so many bytes."""

    moments: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    changes: list[int] = field(default_factory=list)

    def add(self, column: int, start: int, stop: int, num_bytes: int) -> None:
        if start < stop and num_bytes:
            self.moments += (start, stop)
            self.columns += (column, column)
            self.changes += (num_bytes, -num_bytes)


class Effects:
    """Live bytes of a step as a function of what is chosen.

    Args:
        facts: The step.
        choices: What can be chosen.

    Attributes:
        plain: Live bytes of the plain step at each moment, without the contested part of contested storages.
        segments: Contested storages, piece by piece.
        recomputes: Extra bytes of the recompute of each column, by moment: pairs of column and bytes.
    """

    def __init__(self, facts: Facts, choices: Sequence[Choice]) -> None:
        self._facts = facts
        self.choices = choices
        self.num_columns = sum(len(choice.options) for choice in choices)
        self.plain = np.empty(2 * len(facts.between), np.int64)
        self.plain[0::2] = facts.between
        self.plain[1::2] = [*facts.during, facts.between[-1]]
        self.segments: list[Segment] = []
        self.recomputes: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self._parts = _Parts()
        for step in range(len(facts.spans)):
            self._add_step(step)
        self._moments, self._columns, self._changes = (
            np.array(part, np.int64) for part in (self._parts.moments, self._parts.columns, self._parts.changes)
        )

    # -- answers ----------------------------------------------------------------------------------------------

    def changes_at(self, moment: int) -> Bytes:
        """How each column changes live bytes at a moment, its own recompute included, contested storages left out."""
        there = self._moments <= moment
        changes = np.bincount(self._columns[there], weights=self._changes[there], minlength=self.num_columns)
        for column, num_bytes in self.recomputes.get(moment, ()):
            changes[column] += num_bytes
        return changes.astype(np.int64)

    def profile(self, values: Shares) -> Shares:
        """Live bytes at every moment for shares of columns (0 or 1 in a plan)."""
        change = np.bincount(
            self._moments, weights=self._changes * values[self._columns], minlength=len(self.plain) + 1
        )
        for segment in self.segments:
            share = segment.num_bytes * wanted(segment, values)
            change[segment.start] += share
            change[segment.stop] -= share
        live: Shares = self.plain + np.cumsum(change).astype(np.float64)[: len(self.plain)]
        for moment, parts in self.recomputes.items():
            live[moment] += sum(num_bytes * values[column] for column, num_bytes in parts)
        return live

    # -- one micro-step ---------------------------------------------------------------------------------------

    def _add_step(self, step: int) -> None:
        homes: dict[int, list[tuple[Choice, Inner]]] = defaultdict(list)
        holders: dict[int, list[tuple[Choice, Inner, int]]] = defaultdict(list)
        for choice in self.choices:
            member = choice.candidate.members[step]
            for s in member.deaths:
                homes[s].append((choice, member))
            for s, part in held_inputs(self._facts.graph, member.spec()).items():
                if s not in member.deaths:
                    holders[s].append((choice, member, member.calls[part]))
            self._add_own(choice, member, step)
        for s in homes.keys() | holders.keys():
            self._add_storage(s, homes.get(s, ()), holders.get(s, ()), step)

    def _add_own(self, choice: Choice, member: Inner, step: int) -> None:
        """What comes back in recompute, and the random states that the region holds."""
        facts, graph = self._facts, self._facts.graph
        inside = facts.subtree(member.calls)
        back = {s: max(r.released for r in facts.records_of[s] if r.call in inside) for s in member.needed}
        for column, option, kept in zip(choice.columns, choice.options, choice.kept, strict=True):
            self.recomputes[2 * member.at].append((column, option.recompute_bytes))
            for s, released in back.items():
                if s not in kept[step]:
                    self._parts.add(column, 2 * member.at + 1, 2 * released, graph.storages[s].num_bytes)
            if not graph.rng_state_bytes:
                continue
            work = replay(graph, member.spec(kept[step]), facts.saved_in(*member.calls))
            for call in member.written:
                held, passing = random_states(graph, graph.calls[call], work)
                start, end = 2 * graph.calls[call].start + 1, 2 * graph.calls[call].end + 1
                self._parts.add(column, start, 2 * member.at + 1, held * graph.rng_state_bytes)
                self._parts.add(column, start, end, passing * graph.rng_state_bytes)

    def _add_storage(
        self,
        s: int,
        homes: Sequence[tuple[Choice, Inner]],
        holders: Sequence[tuple[Choice, Inner, int]],
        step: int,
    ) -> None:
        num_bytes, death = self._facts.graph.storages[s].num_bytes, 2 * self._facts.deaths[s]
        dropped, kept_until = [], []
        for choice, member in homes:
            for column, kept in zip(choice.columns, choice.kept, strict=True):
                if s in kept[step]:
                    kept_until.append((column, 2 * member.at + 1))
                else:
                    dropped.append((column, 2 * member.deaths[s]))
        earliest = min([death, *(end for _, end in dropped)])
        entries: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for choice, member, entry in holders:
            if 2 * member.at + 1 > earliest:
                entries[entry] += [(column, 2 * member.at + 1) for column in choice.columns]
        if not entries:
            for column, end in dropped:
                self._parts.add(column, end, death, -num_bytes)
            for column, end in kept_until:
                self._parts.add(column, death, end, num_bytes)
            return
        self._contest(s, earliest, dropped, [kept_until, *entries.values()])

    def _contest(
        self, s: int, earliest: int, dropped: Sequence[tuple[int, int]], holds: Sequence[Sequence[tuple[int, int]]]
    ) -> None:
        """Cut the life of a storage, from where it may be gone on, into segments; pairs are of column and moment."""
        num_bytes, death = self._facts.graph.storages[s].num_bytes, 2 * self._facts.deaths[s]
        self.plain[earliest:death] -= num_bytes
        ends = {earliest, death, *(end for _, end in dropped), *(end for group in holds for _, end in group)}
        for start, stop in pairwise(sorted(end for end in ends if end >= earliest)):
            wishes = []
            if stop <= death:
                wishes.append(Wish(1.0, tuple(column for column, end in dropped if end <= start), -1.0))
            for group in holds:
                columns = tuple(column for column, end in group if end >= stop)
                if columns:
                    wishes.append(Wish(0.0, columns, 1.0))
            self.segments.append(Segment(start, stop, num_bytes, tuple(wishes)))


def wanted(segment: Segment, values: Shares) -> float:
    """Whether a contested storage is alive over a segment: a share if the values are shares."""
    return max(0.0, *(wish.constant + wish.sign * float(values[list(wish.columns)].sum()) for wish in segment.wishes))


def cliques(facts: Facts, choices: Sequence[Choice]) -> Iterator[tuple[int, ...]]:
    """Groups of choices of which any two have ops in common: at most one of a group can be a region."""
    edges: dict[int, list[tuple[bool, int]]] = defaultdict(list)
    for number, choice in enumerate(choices):
        for ops in Extent(facts.graph, choice.candidate.members[0].calls).ranges:
            if len(ops):
                edges[ops.start].append((True, number))
                edges[ops.stop].append((False, number))
    active: set[int] = set()
    found: set[frozenset[int]] = set()
    for clock in sorted(edges):
        if any(not is_start for is_start, _ in edges[clock]):
            found.add(frozenset(active))  # the fullest group before somebody leaves
        active -= {number for is_start, number in edges[clock] if not is_start}
        active |= {number for is_start, number in edges[clock] if is_start}
    for group in sorted(map(sorted, found)):
        if group and not any(set(group) < other for other in found):
            yield tuple(group)

"""Across regions: what the rest of a step costs from every position, for every amount of memory, in one table.

With ``m`` the limit plus what regions behind a position have freed, a way on from it (see `_chain`) demands that ``m``
is at least what live bytes would be if nothing before it were freed; so one table over ``m`` holds the answer for all
limits at once:

    V(p, m) = min over ways p -> q of cost + V(q, m + saved), where the demand of the way is at most m

and a nest ``p -> q`` costs its own forward, plus the table of the part that ends at ``q``, whose forward happens at the
moment of backward, with what the nest stores alive until that has come to it.

The tables of a part count memory from what it needs there, so those of equal stretches are equal: they are found by
content, filled once and shared. Stretches of equal layers thus differ by length only.

Tables round sums of bytes down. When a plan is read off they are carried exactly, and so is the least memory from which
each position can reach the end: slots can hide a cheaper plan, never admit one that does not fit, and hide none where
there is only one.

Sources: planner formulations 2 and 3 (Beaumont et al., rotor), with intervals that overlap, options in each, and the
limit as a dimension of the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from autoremat.solve._chain import PLAIN, Chain, Costs, Ways
from autoremat.solve._facts import Bytes

NUM_SLOTS = 16384
_TOLERANCE = 1e-9
"""By how much sums of costs may differ that were added in another order."""
_ANY = -(1 << 60)
"""Memory needed where nothing is."""
Pick = tuple[int, int, tuple["Pick", ...]]
"""A region: candidate (or -1 - nest), option (or store set), and the regions inside it."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A stretch of positions that is run forward and backward: the whole step, or a nest when it comes back.

    What a nest ends with is not dropped again: it is needed at once. Nothing is needed there.

    Attributes:
        end: Position at which it ends.
        first: Position at which the longest of its nests starts.
        stores: Its store set; None for the whole step.
        row: Its row in the states of `Table`.
        extra: What is alive besides in its forward, with all of the store set that is born before its end, bytes.
    """

    end: int
    first: int
    stores: int | None
    row: int
    extra: int


_DEMAND, _GAIN, _COST, _LENGTH, _INSIDE, _INNER_GAIN = range(6)
"""Columns: memory that a way itself demands, or what is inside a nest; memory at the position reached less memory
before; cost; how many positions it goes on; state at the start of the part inside a nest, and memory there less memory
before."""
_REGION, _NO_REGION = -1, -2
"""In place of the state inside."""


class _Moves(NamedTuple):
    """Ways on from a position of one part, as columns. Memory counts from the level of a part at a position.

    Attributes:
        demand: Least memory with which each can be taken and the end be reached.
        top: Memory that leaves nothing to be wanted.
        least: What it costs at least, with all that follows.
        cost: Its own cost.
        gain: Memory at the position reached less memory here.
        behind: State there.
        inside: State at the start of the part inside a nest; negative for others.
        inner_gain: Memory there less memory here.
    """

    demand: Bytes
    top: Bytes
    least: Costs
    cost: Costs
    gain: Bytes
    behind: Bytes
    inside: Bytes
    inner_gain: Bytes


class Table:
    """Least costs for every position and amount of memory.

    Args:
        chain: The problem.
        num_slots: How finely memory is divided.
    """

    def __init__(self, chain: Chain, *, num_slots: int = NUM_SLOTS) -> None:
        self.chain = chain
        self._ways = ways = Ways(chain)
        starts: dict[tuple[int, int], int] = {}
        for position in range(chain.last - 1, -1, -1):
            starts |= {(nest.stop, nest.stores): position for nest in chain.nests[position]}
        self._parts = [self._part(key, first, row) for row, (key, first) in enumerate(sorted(starts.items()))]
        self._whole = _Part(chain.last, 0, None, len(self._parts), 0)
        self._row_of = {(part.end, part.stores): part.row for part in self._parts}
        self._state = np.zeros((len(self._parts) + 1, chain.last + 1), np.int64)
        lowest = (
            int(np.maximum(ways.forward[0], ways.backward)[: ways.first[1]].min()) if chain.last else chain.required
        )
        self.width = max(1, -(-(chain.highest() + 1 - lowest) // (num_slots - 1)))
        self._rows = {stores: self._any_part(stores) for stores in (None, *range(len(chain.stored)))}
        self._room = np.empty((len(ways.stop), 6), np.int64)
        """For the ways of the part at hand."""
        self._values: list[Costs] = []
        self._from: list[tuple[Bytes, Bytes] | None] = []
        """For each state: the ways on, and the states behind them."""
        self._needs: Bytes = np.zeros(1024, np.int64)
        self._tops: Bytes = np.zeros(1024, np.int64)
        self._leasts: Costs = np.zeros(1024)
        """For each state: least memory, memory that leaves nothing to be wanted, and what is left to pay then."""
        self._read: dict[int, list[tuple[Any, ...]]] = {}
        """For states that plans came by: the ways on, those that may cost least first."""
        self._known: dict[tuple[bytes, ...], int] = {}
        self._longest: dict[int | None, tuple[_Part, Bytes]] = {}
        """For each store set, the longest of the parts that are filled, and its ways."""
        self._nothing = self._add(np.zeros(1), _ANY, _ANY)
        for part in (*self._parts, self._whole):
            self._fill(part)
        self._level = int(chain.forward[0, 0]) if chain.last else 0
        self.smallest_limit = int(self._needs[self._state[-1, 0]]) + self._level

    def _part(self, key: tuple[int, int], first: int, row: int) -> _Part:
        end, stores = key
        return _Part(end, first, stores, row, int(self.chain.shift[end] + self.chain.stored[stores, end]))

    # -- filling ----------------------------------------------------------------------------------------------

    def _any_part(self, stores: int | None) -> tuple[Bytes, Bytes]:
        """The ways of a part with a store set, but for what depends on where it ends, and their demand in backward.

        Memory counts from a level: what the plain step demands in forward of the part.
        """
        chain, ways, number = self.chain, self._ways, stores or 0
        level = np.append(chain.forward[number], 0)
        rows = np.empty((len(ways.stop), 6), np.int64)
        rows[:, _DEMAND] = ways.forward[number] - level[ways.start]
        rows[:, _GAIN] = ways.saved + level[ways.start] - level[ways.stop]
        rows[:, _COST] = ways.cost.view(np.int64)
        rows[:, _LENGTH] = ways.stop - ways.start
        rows[:, _INSIDE] = _REGION
        rows[ways.first[:-1], _INSIDE] = _NO_REGION
        rows[:, _INNER_GAIN] = 0
        if len(ways.nests):
            start, inner = ways.start[ways.nests], ways.option[ways.nests]
            inner_level = chain.forward[inner, start] + np.array([self._parts[row].extra for row in self._inner])
            rows[ways.nests, _INNER_GAIN] = level[start] - inner_level - ways.held[ways.nests]
            rows[ways.nests, _INSIDE] = 0
        return rows, ways.backward - level[ways.start]

    @cached_property
    def _inner(self) -> Bytes:
        """For each nest: the row of the part inside."""
        ways = self._ways
        keys = zip(ways.stop[ways.nests].tolist(), ways.option[ways.nests].tolist(), strict=True)
        return np.array([self._row_of[key] for key in keys], int)

    def _ways_of(self, part: _Part) -> Bytes:
        """The ways of a part, by column."""
        ways = self._ways
        some = slice(int(ways.first[part.first]), int(ways.first[part.end]))
        # Nothing that stops where a nest does is a region inside it. The plain step always goes on.
        is_inside = ways.stop[some] < part.end
        if part is self._whole:
            is_inside[:] = True
        is_inside[int(ways.first[part.end - 1]) - some.start] = True
        chosen = some.start + np.flatnonzero(is_inside)
        any_rows, backward = self._rows[part.stores]
        rows = np.take(any_rows, chosen, axis=0, out=self._room[: len(chosen)], mode="clip")
        rows[:, _DEMAND] = np.maximum(rows[:, _DEMAND], backward[chosen] - part.extra)
        if part is not self._whole:
            rows[-1, _GAIN] = 0
        if part.stores == 0:
            late = self.chain.late(ways.stop[chosen], ways.ready[chosen], part.end)
            rows[:, _COST] = (rows[:, _COST].copy().view(np.float64) + late).view(np.int64)
        nests = np.flatnonzero(rows[:, _INSIDE] >= 0)
        inner = self._inner[np.searchsorted(ways.nests, chosen[nests])]
        inside = self._state[inner, ways.start[chosen[nests]]]
        rows[nests, _INSIDE] = inside
        rows[nests, _INNER_GAIN] += part.extra
        rows[nests, _DEMAND] = np.maximum(rows[nests, _DEMAND], self._needs[inside] - rows[nests, _INNER_GAIN])
        return rows

    def _fill(self, part: _Part) -> None:
        """Find the states of a part from its end, each that is new by content."""
        state = self._state[part.row]
        state[part.end] = self._nothing
        if part is self._whole:
            state[part.end] = self._add(np.zeros(1), self.chain.required, self.chain.required)
        if part.first == part.end:
            return
        rows = self._ways_of(part)
        first = [*np.flatnonzero(rows[:, _INSIDE] == _NO_REGION).tolist(), len(rows)]
        done = self._copy_states(part, rows)
        for position in range(part.end - 1 - done, part.first - 1, -1):
            place = position - part.first
            own = rows[first[place] : first[place + 1]]
            behind = state[position + own[:, _LENGTH]]
            key = own.tobytes(), behind.tobytes()
            if key not in self._known:
                self._known[key] = self._solve(own.copy(), behind)
            state[position] = self._known[key]

    def _copy_states(self, part: _Part, rows: Bytes) -> int:
        """Take over states from the end of a part that ends alike; how many."""
        other, others = self._longest.get(part.stores, (part, rows[:0]))
        if len(rows) > len(others):
            self._longest[part.stores] = part, rows.copy()
        most = min(len(rows), len(others))
        differs = np.flatnonzero(rows[len(rows) - most :] != others[len(others) - most :]) // rows.shape[1]
        first = len(rows) - most + int(differs[-1]) + 1 if len(differs) else len(rows) - most
        done = int((rows[first:, _INSIDE] == _NO_REGION).sum())
        self._state[part.row, part.end - done : part.end] = self._state[other.row, other.end - done : other.end]
        return done

    def _moves_of(self, rows: Bytes, behind: Bytes) -> _Moves:
        demands, gains, _, _, insides, inner_gains = rows.T
        costs = rows[:, _COST].copy().view(np.float64)
        needs, tops, leasts = self._needs[behind], self._tops[behind] - gains, costs + self._leasts[behind]
        nests = np.flatnonzero(insides >= 0)
        if len(nests):
            inner = insides[nests]
            tops[nests] = np.maximum(tops[nests], self._tops[inner] - inner_gains[nests])
            leasts[nests] += self._leasts[inner]
        demands = np.maximum(demands, needs - gains)
        return _Moves(demands, np.maximum(tops, demands), leasts, costs, gains, behind, insides, inner_gains)

    def _add(self, values: Costs, need: int, top: int, ways: tuple[Bytes, Bytes] | None = None) -> int:
        """Add a state: costs by slot from the least memory needed on, and memory that leaves nothing to be wanted."""
        number = len(self._values)
        if number == len(self._needs):
            self._needs, self._tops = (np.concatenate([a, np.zeros_like(a)]) for a in (self._needs, self._tops))
            self._leasts = np.concatenate([self._leasts, np.zeros_like(self._leasts)])
        self._needs[number], self._tops[number], self._leasts[number] = need, top, values[-1]
        self._values.append(values)
        self._from.append(ways)
        return number

    def _solve(self, rows: Bytes, behind: Bytes) -> int:
        """Least cost by slot over all ways on."""
        moves, width, all_values = self._moves_of(rows, behind), self.width, self._values
        need = int(moves.demand.min())
        # Nothing is wanted of ways that never cost less than the plain step, the first.
        top = int(moves.top[moves.least < moves.least[0]].max(initial=moves.top[0]))
        num_slots = -(-(top - need) // width) + 1
        firsts = -((need - moves.demand) // width)
        aheads = (need + moves.gain - self._needs[behind]) // width
        if len(rows) == 1:
            values = _from_slot(all_values[behind[0]], int(aheads[0]), num_slots)
            return self._add(values, need, top, (rows, behind))
        inners = (need + moves.inner_gain - self._needs[moves.inside]) // width  # means nothing where none is inside
        best, scratch = np.full(num_slots, np.inf), np.empty(num_slots)
        search = best[::-1].searchsorted
        better = -1, 0, 0, 0.0
        columns = firsts, aheads, inners, moves.least, moves.cost, behind, moves.inside
        for first, ahead, inner, least, cost, state, inside in zip(*(c.tolist() for c in columns), strict=True):
            if state == better[0] and first >= better[1] and ahead <= better[2] and cost >= better[3]:
                continue
            # Costs fall from slot to slot: nothing is gained where the least is not more than what is left at the end.
            end = num_slots - int(search(least, "right"))
            if first >= end:
                continue
            at, values = first + ahead, all_values[state]
            values = values[at : at + end - first] if at < len(values) else values[-1:]
            sums = np.add(values, cost, out=scratch[: len(values)])
            if inside >= 0:
                sums = _plus(_from_slot(all_values[inside], first + inner, end - first), sums, scratch[: end - first])
            else:
                better = state, first, ahead, cost
            stop = first + len(sums)
            lowered = best[first:stop]
            np.minimum(lowered, sums, out=lowered)
            if stop < end:
                best[stop:end] = least
        return self._add(best, need, top, (rows, behind))

    # -- reading ----------------------------------------------------------------------------------------------

    def picks(self, limit_bytes: int) -> tuple[Pick, ...] | None:
        """The regions of the plan for a limit, in order of execution; None if there is none."""
        if limit_bytes < self.smallest_limit:
            return None
        return tuple(self._walk(self._whole, 0, limit_bytes - self._level))

    def _walk(self, part: _Part, position: int, memory: int) -> Iterator[Pick]:
        """Regions from a position on, with so much memory above the level there."""
        ways = self._ways
        while position < part.end:
            way, gain, inner_gain = self._best(int(self._state[part.row, position]), memory)
            way += int(ways.first[position])
            number, stop, option = (int(found[way]) for found in (ways.number, ways.stop, ways.option))
            if number >= 0:
                yield number, option, ()
            elif number != PLAIN:
                inner = self._parts[self._row_of[stop, option]]
                yield number, option, tuple(self._walk(inner, position, memory + inner_gain))
            position, memory = stop, memory + gain

    def _best(self, state: int, memory: int) -> tuple[int, int, int]:
        """The cheapest way on with so much memory, and how much more there is where it leads, and inside it."""
        if state not in self._read:
            ways = self._from[state]
            assert ways is not None
            moves = zip(*(column.tolist() for column in self._moves_of(*ways)), strict=True)
            numbered = ((way, *move) for way, move in enumerate(moves))
            self._read[state] = sorted(numbered, key=lambda move: move[3])
        need_of, all_values, width = self._needs.item, self._values, self.width
        found, best = None, (np.inf, 0.0, False, 0, 0)
        for way, demand, _, least, cost, gain, behind, inside, inner_gain in self._read[state]:
            if least - _TOLERANCE * abs(least) > best[0]:
                break
            if demand <= memory:
                own = cost
                if inside >= 0:
                    values = all_values[inside]
                    own += values.item(min((memory + inner_gain - need_of(inside)) // width, len(values) - 1))
                left, values = memory + gain - need_of(behind), all_values[behind]
                # Of equals the plain step, which comes first: no region that gains nothing. Then what leaves most.
                rank = own + values.item(min(left // width, len(values) - 1)), own, way > 0, -left, way
                if found is None or rank < best:
                    found, best = (way, gain, inner_gain), rank
        assert found is not None
        return found


def _from_slot(values: Costs, at: int, num_slots: int) -> Costs:
    """Costs from a slot on; the last stands for all that follow."""
    return values[at : at + num_slots] if at < len(values) else values[-1:]


def _plus(values: Costs, others: Costs, sums: Costs) -> Costs:
    """Add costs, as far as there are any; the last of each stands for all that follow."""
    both, found = min(len(values), len(others)), sums[: max(len(values), len(others))]
    if len(values) > both:
        np.add(values[both:], others[-1], out=found[both:])
    elif len(others) > both:
        np.add(others[both:], values[-1], out=found[both:])
    np.add(values[:both], others[:both], out=found[:both])
    return found

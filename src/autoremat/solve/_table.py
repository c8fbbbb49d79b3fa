"""Across regions: what the rest of a step costs from every position, for every amount of memory, in one table.

With ``m`` the limit plus what regions behind a position have freed, a way on from it (see `_chain`) demands that ``m``
is at least what live bytes would be if nothing before it were freed; so one table over ``m`` holds the answer for all
limits at once:

    V(p, m) = min over ways p -> q of cost + V(q, m + saved), where the demand of the way is at most m

and a nest ``p -> q`` costs its own forward, plus the table of the part that ends at ``q``, whose forward happens at the
moment of backward, with all that the nest stores alive from its start to its end.

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

import numpy as np

from autoremat.solve._chain import PLAIN, Chain, Costs, Ways
from autoremat.solve._facts import Bytes

NUM_SLOTS = 16384
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
        extra: What is alive besides in its forward, less what the nest stores before each position, bytes.
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


@dataclass(frozen=True, slots=True)
class _Moves:
    """The ways on from a position of one part; memory counts from the level of a part at a position.

    Attributes:
        cost: Cost of each, of nests without what is inside.
        demand: Least memory with which each can be taken and the end be reached.
        gain: Memory at the position reached less memory here.
        behind: State at the position reached.
        nests: Which of them are nests.
        inner_gain: Memory at the start of the part inside less memory here, for each nest.
        inside: State at the start of the part inside, for each nest.
    """

    cost: Costs
    demand: Bytes
    gain: Bytes
    behind: Bytes
    nests: Bytes
    inner_gain: Bytes
    inside: Bytes


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
        lowest = int(np.maximum(ways.forward, ways.backward)[: ways.first[1]].min()) if chain.last else chain.required
        self.width = max(1, -(-(chain.highest() + 1 - lowest) // (num_slots - 1)))
        self._rows = {stores: self._any_part(stores) for stores in (None, *range(len(chain.stored)))}
        self._values: list[Costs] = []
        self._moves: list[_Moves | None] = []
        """For each state."""
        self._needs: Bytes = np.zeros(1024, np.int64)
        self._top: Bytes = np.zeros(1024, np.int64)
        self._last: Bytes = np.zeros(1024, np.int64)
        self._final: Costs = np.zeros(1024, np.float64)
        """For each state: least memory, memory that leaves nothing to be wanted, the last slot, and what is in it."""
        self._known: dict[tuple[bytes, ...], int] = {}
        self._longest: dict[int | None, tuple[_Part, Bytes]] = {}
        """For each store set, the longest of the parts that are filled, and its ways."""
        self._nothing = self._add(np.zeros(1), _ANY, _ANY)
        for part in (*self._parts, self._whole):
            self._fill(part)
        self._level = int(chain.forward[0]) if chain.last else 0
        self.smallest_limit = int(self._needs[self._state[-1, 0]]) + self._level

    def _part(self, key: tuple[int, int], first: int, row: int) -> _Part:
        end, stores = key
        return _Part(end, first, stores, row, int(self.chain.shift[end] + self.chain.stored[stores, end]))

    # -- filling ----------------------------------------------------------------------------------------------

    def _any_part(self, stores: int | None) -> tuple[Bytes, Bytes]:
        """The ways of a part with a store set, but for what depends on where it ends, and their demand in backward.

        Memory counts from a level: what the plain step demands in forward of the part.
        """
        chain, ways = self.chain, self._ways
        level, saved = np.append(chain.forward, 0), ways.saved
        if stores is not None:
            level, saved = level - chain.stored[stores], saved - ways.stuck[stores]
        rows = np.empty((len(ways.stop), 6), np.int64)
        rows[:, _DEMAND] = ways.forward - chain.forward[ways.start]
        rows[:, _GAIN] = saved + level[ways.start] - level[ways.stop]
        rows[:, _COST] = ways.cost.view(np.int64)
        rows[:, _LENGTH] = ways.stop - ways.start
        rows[:, _INSIDE] = _REGION
        rows[ways.first[:-1], _INSIDE] = _NO_REGION
        rows[:, _INNER_GAIN] = 0
        if len(ways.nests):
            start, inner = ways.start[ways.nests], ways.option[ways.nests]
            inner_level = chain.forward[start] - chain.stored[inner, start]
            inner_level += np.array([self._parts[row].extra for row in self._inner])
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
        rows = any_rows[chosen]
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
                self._known[key] = self._solve(self._moves_of(own, behind))
            state[position] = self._known[key]

    def _copy_states(self, part: _Part, rows: Bytes) -> int:
        """Take over states from the end of a part that ends alike; how many."""
        other, others = self._longest.get(part.stores, (part, rows[:0]))
        if len(rows) > len(others):
            self._longest[part.stores] = part, rows
        most = min(len(rows), len(others))
        differs = np.flatnonzero((rows[len(rows) - most :] != others[len(others) - most :]).any(axis=1))
        first = len(rows) - most + int(differs[-1]) + 1 if len(differs) else len(rows) - most
        done = int((rows[first:, _INSIDE] == _NO_REGION).sum())
        self._state[part.row, part.end - done : part.end] = self._state[other.row, other.end - done : other.end]
        return done

    def _moves_of(self, rows: Bytes, behind: Bytes) -> _Moves:
        nests = np.flatnonzero(rows[:, _INSIDE] >= 0)
        return _Moves(
            cost=rows[:, _COST].copy().view(np.float64),
            demand=np.maximum(rows[:, _DEMAND], self._needs[behind] - rows[:, _GAIN]),
            gain=rows[:, _GAIN].copy(),
            behind=behind,
            nests=nests,
            inner_gain=rows[nests, _INNER_GAIN],
            inside=rows[nests, _INSIDE],
        )

    def _add(self, values: Costs, need: int, top: int, moves: _Moves | None = None) -> int:
        """Add a state: costs by slot from the least memory needed on, and memory that leaves nothing to be wanted."""
        number = len(self._values)
        if number == len(self._needs):
            self._needs, self._top, self._last = (
                np.concatenate([found, np.zeros_like(found)]) for found in (self._needs, self._top, self._last)
            )
            self._final = np.concatenate([self._final, np.zeros_like(self._final)])
        self._needs[number], self._top[number], self._last[number] = need, top, len(values) - 1
        self._final[number] = values[-1]
        self._values.append(values)
        self._moves.append(moves)
        return number

    def _solve(self, moves: _Moves) -> int:
        """Least cost by slot over all ways on."""
        need = int(moves.demand.min())
        least, top = self._most_wanted(moves)
        num_slots = -(-(top - need) // self.width) + 1
        first = -((need - moves.demand) // self.width)
        shift = first + (need + moves.gain - self._needs[moves.behind]) // self.width
        inner_shift = first[moves.nests] + (need + moves.inner_gain - self._needs[moves.inside]) // self.width
        pairs = zip(inner_shift.tolist(), moves.inside.tolist(), strict=True)
        inner = dict(zip(moves.nests.tolist(), pairs, strict=True))
        best, scratch = np.full(num_slots, np.inf), np.empty(num_slots)
        rising = best[::-1]
        lists = (numbers.tolist() for numbers in (first, shift, moves.behind, moves.cost, least))
        for way, (start, at, behind, cost, final) in enumerate(zip(*lists, strict=True)):
            # Costs fall from slot to slot: nothing is gained where the least is not more than what is left at the end.
            end = num_slots - int(rising.searchsorted(final, "right"))
            if start >= end:
                continue
            sums = _plus(self._values[behind], at, cost, scratch[start:end])
            if way in inner:
                inner_at, inside = inner[way]
                sums = _plus(self._values[inside], inner_at, sums, scratch[start:end])
            stop = start + len(sums)
            lowered = best[start:stop]
            np.minimum(lowered, sums, out=lowered)
            if stop < end:
                best[stop:end] = final
        return self._add(best, need, top, moves)

    def _most_wanted(self, moves: _Moves) -> tuple[Costs, int]:
        """What each way costs at least, and memory that leaves nothing to be wanted.

        That is the plain step's, or that of regions by which nests stop early.
        """
        least = moves.cost + self._final[moves.behind]
        least[moves.nests] += self._final[moves.inside]
        top = np.maximum(moves.demand, self._top[moves.behind] - moves.gain)
        inner_top = self._top[moves.inside] - moves.inner_gain
        top[moves.nests] = np.maximum(top[moves.nests], inner_top)
        wanted = least < least[0]
        wanted[0] = True
        return least, int(top[wanted].max())

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
            first, moves = int(ways.first[position]), self._moves[self._state[part.row, position]]
            assert moves is not None
            way = self._best(moves, memory)
            number, stop, option = (int(found[first + way]) for found in (ways.number, ways.stop, ways.option))
            if number >= 0:
                yield number, option, ()
            elif number != PLAIN:
                inner = self._parts[self._row_of[stop, option]]
                inner_gain = int(moves.inner_gain[np.searchsorted(moves.nests, way)])
                yield number, option, tuple(self._walk(inner, position, memory + inner_gain))
            position, memory = stop, memory + int(moves.gain[way])

    def _best(self, moves: _Moves, memory: int) -> int:
        """The cheapest way on with so much memory."""
        fits = np.flatnonzero(moves.demand <= memory)
        own = moves.cost.copy()
        own[moves.nests] += self._cost(moves.inside, memory + moves.inner_gain)
        own, left = own[fits], memory + moves.gain[fits]
        cost = own + self._cost(moves.behind[fits], left)
        # Of equals the plain step, which comes first: no region that gains nothing. Then the one that leaves most.
        left -= self._needs[moves.behind[fits]]
        return int(fits[np.lexsort((-left, fits > 0, own, cost))[0]])

    def _cost(self, states: Bytes, memory: Bytes) -> Costs:
        slots = np.maximum((memory - self._needs[states]) // self.width, 0)
        pairs = zip(states.tolist(), np.minimum(slots, self._last[states]).tolist(), strict=True)
        return np.array([self._values[state][slot] for state, slot in pairs])


def _plus(values: Costs, at: int, others: Costs | float, sums: Costs) -> Costs:
    """Add costs from a slot on to others, as far as there is room; the last of each stands for all that follow."""
    values = values[at : at + len(sums)] if at < len(values) else values[-1:]
    if isinstance(others, float):
        return np.add(values, others, out=sums[: len(values)])
    both = min(len(values), len(others))
    found = sums[: max(len(values), len(others))]
    if len(values) > both:
        np.add(values[both:], others[-1], out=found[both:])
    elif len(others) > both:
        np.add(others[both:], values[-1], out=found[both:])
    np.add(values[:both], others[:both], out=found[:both])
    return found

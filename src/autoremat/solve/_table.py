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

    What a nest ends with is not dropped again: it is needed at once.

    Attributes:
        end: Position at which it ends.
        first: Position at which the longest of its nests starts.
        stores: Its store set; None for the whole step.
        row: Its row in the arrays of `Table`.
        extra: What is alive besides in its forward, by position, bytes: what lives when it runs again, and what the
            nest stores from here on.
    """

    end: int
    first: int
    stores: int | None
    row: int
    extra: Bytes


@dataclass(frozen=True, slots=True)
class _Rows:
    """The ways on from several positions of one part, but for what the positions reached demand.

    Attributes:
        cost: Cost of each way.
        demand: Memory that each demands itself, or what is inside a nest.
        gain: Memory at the position reached less memory before.
        nests: Which of them are nests.
        inner_gain: For each nest, memory at the start of the part inside less memory before.
        inside: State at the start of the part inside, for each nest.
    """

    cost: Costs
    demand: Bytes
    gain: Bytes
    nests: Bytes
    inner_gain: Bytes
    inside: Bytes


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

    def key(self) -> tuple[bytes, ...]:
        """Equal for states that are equal."""
        numbers = self.demand, self.gain, self.behind, self.nests, self.inner_gain, self.inside, self.cost
        return tuple(found.tobytes() for found in numbers)


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
        self._whole = _Part(chain.last, 0, None, len(self._parts), np.zeros(chain.last + 1, np.int64))
        self._row_of = {(part.end, part.stores): part.row for part in self._parts}
        shape = (len(self._parts) + 1, chain.last + 1)
        self._level, self._state = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        lowest = int(np.maximum(ways.forward, ways.backward)[: ways.first[1]].min()) if chain.last else chain.required
        self.width = max(1, -(-(chain.highest() + 1 - lowest) // (num_slots - 1)))
        inner = zip(ways.stop[ways.nests].tolist(), ways.option[ways.nests].tolist(), strict=True)
        self._inner = np.array([self._row_of[key] for key in inner], int)
        """For each nest: the row of the part inside."""
        self._values: list[Costs] = []
        self._moves: list[_Moves | None] = []
        """For each state."""
        self._needs: Bytes = np.zeros(1024, np.int64)
        self._top: Bytes = np.zeros(1024, np.int64)
        self._last: Bytes = np.zeros(1024, np.int64)
        self._final: Costs = np.zeros(1024, np.float64)
        """For each state: least memory, memory that leaves nothing to be wanted, the last slot, and what is in it."""
        self._known: dict[tuple[bytes, ...], int] = {}
        self._nothing = self._add(np.zeros(1), _ANY, _ANY)
        for part in (*self._parts, self._whole):
            self._fill(part)
        self.smallest_limit = int(self._needs[self._state[-1, 0]] + self._level[-1, 0])

    def _part(self, key: tuple[int, int], first: int, row: int) -> _Part:
        chain, (end, stores) = self.chain, key
        extra = chain.shift[end] + chain.stored[stores, end] - chain.stored[stores, : end + 1]
        return _Part(end, first, stores, row, extra)

    # -- filling ----------------------------------------------------------------------------------------------

    def _fill(self, part: _Part) -> None:
        """Find the states of a part from its end, each that is new by content."""
        level, state, ways = self._level[part.row], self._state[part.row], self._ways
        level[: part.end + 1] = part.extra
        level[: part.end] += self.chain.forward[: part.end]
        if part is self._whole:
            state[part.end] = self._add(np.zeros(1), self.chain.required, self.chain.required)
        else:
            # Nothing is needed there: with its level, too, a part's states depend on what is between, not on where.
            level[part.end] = level[part.end - 1]
            state[part.end] = self._nothing
        rows = self._rows(part)
        offset = int(ways.first[part.first])
        first = (ways.first[part.first : part.end] - offset).tolist()
        num = self._num_inside(part).tolist()
        nests = np.searchsorted(rows.nests, first).tolist()
        last_nests = np.searchsorted(rows.nests, [a + n for a, n in zip(first, num, strict=True)]).tolist()
        alike = np.column_stack([rows.demand, rows.gain, rows.cost.view(np.int64)])
        inside = np.column_stack([rows.inner_gain, rows.inside])
        stops = ways.stop[offset:]
        for place in range(part.end - part.first - 1, -1, -1):
            low, high = first[place], first[place] + num[place]
            behind = state[stops[low:high]]
            own = slice(nests[place], last_nests[place])
            key = (
                alike[low:high].tobytes(),
                inside[own].tobytes(),
                (rows.nests[own] - low).tobytes(),
                behind.tobytes(),
            )
            found = self._known.get(key)
            if found is None:
                demand = np.maximum(rows.demand[low:high], self._needs[behind] - rows.gain[low:high])
                found = self._known[key] = self._find(
                    _Moves(
                        rows.cost[low:high].copy(),
                        demand,
                        rows.gain[low:high].copy(),
                        behind,
                        rows.nests[own] - low,
                        rows.inner_gain[own].copy(),
                        rows.inside[own].copy(),
                    )
                )
            state[part.first + place] = found

    def _num_inside(self, part: _Part) -> Bytes:
        """How many of the ways from each of its positions belong to a part."""
        ways = self._ways
        first = ways.first[part.first : part.end + 1]
        if part is self._whole:
            return np.diff(first)
        # Nothing that stops where a nest does is a region inside it. The plain step always goes on.
        sizes = np.cumsum(np.concatenate([[0], ways.stop[first[0] : first[-1]] < part.end]))
        inside: Bytes = np.maximum(np.diff(sizes[first - first[0]]), 1)
        return inside

    def _rows(self, part: _Part) -> _Rows:
        """What the ways of a part demand and cost whatever comes behind them."""
        ways, row = self._ways, part.row
        some = slice(int(ways.first[part.first]), int(ways.first[part.end]))
        start, stop, level = ways.start[some], ways.stop[some], self._level[row]
        saved, cost = ways.saved[some], ways.cost[some]
        if part.stores is not None:
            saved = saved - ways.stuck[part.stores, some]
        if part.stores == 0:
            cost = cost + self.chain.late(stop, ways.ready[some], part.end)
        here = level[start]
        demand = np.maximum(ways.forward[some] + part.extra[start], ways.backward[some]) - here
        low, high = np.searchsorted(ways.nests, [some.start, some.stop]).tolist()
        nests = ways.nests[low:high] - some.start
        inner, at = self._inner[low:high], start[nests]
        inner_gain = level[at] - self._level[inner, at] - ways.held[some][nests]
        inside = self._state[inner, at]
        demand[nests] = np.maximum(demand[nests], self._needs[inside] - inner_gain)
        return _Rows(cost, demand, saved + here - level[stop], nests, inner_gain, inside)

    def _find(self, moves: _Moves) -> int:
        """The state from which there are these ways, a new one if there is none like it."""
        key = moves.key()
        if key not in self._known:
            self._known[key] = self._solve(moves)
        return self._known[key]

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
        inner = dict(
            zip(moves.nests.tolist(), zip(inner_shift.tolist(), moves.inside.tolist(), strict=True), strict=True)
        )
        best, scratch = np.full(num_slots, np.inf), np.empty(num_slots)
        lists = (numbers.tolist() for numbers in (first, shift, moves.behind, moves.cost, least))
        for way, (start, at, behind, cost, final) in enumerate(zip(*lists, strict=True)):
            # Costs fall from slot to slot: nothing is gained where what is left at the end is not less.
            if start >= num_slots or final >= best[start]:
                continue
            sums = _plus(self._values[behind], at, cost, scratch[start:])
            if way in inner:
                inner_at, inside = inner[way]
                sums = _plus(self._values[inside], inner_at, sums, scratch[start:])
            stop = start + len(sums)
            np.minimum(best[start:stop], sums, out=best[start:stop])
            if stop < num_slots and final < best[stop]:
                np.minimum(best[stop:], final, out=best[stop:])
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
        return tuple(self._walk(self._whole, 0, limit_bytes - int(self._level[-1, 0])))

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

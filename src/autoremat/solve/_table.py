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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

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
class _Moves:
    """The ways on from a position of one part; memory counts from the level of a part at a position.

    Attributes:
        ways: The ways; a part takes as many of them as are listed here.
        cost: Cost of each, of nests without what is inside.
        demand: Least memory with which each can be taken and the end be reached.
        gain: Memory at the position reached less memory here.
        behind: State at the position reached.
        nests: Which of them are nests.
        inner_gain: Memory at the start of the part inside less memory here, for each nest.
        inside: State at the start of the part inside, for each nest.
    """

    ways: Ways
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
        self._ways = [Ways(chain, position) for position in range(chain.last)]
        starts: dict[tuple[int, int], int] = {}
        for position in range(chain.last - 1, -1, -1):
            starts |= {(nest.stop, nest.stores): position for nest in chain.nests[position]}
        self._parts = [self._part(key, first, row) for row, (key, first) in enumerate(sorted(starts.items()))]
        self._whole = _Part(chain.last, 0, None, len(self._parts), np.zeros(chain.last + 1, np.int64))
        self._row_of = {(part.end, part.stores): part.row for part in self._parts}
        shape = (len(self._parts) + 1, chain.last + 1)
        self._level, self._state = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        lowest = min((int(np.maximum(w.forward, w.backward).min()) for w in self._ways[:1]), default=chain.required)
        self.width = max(1, -(-(chain.highest() + 1 - lowest) // (num_slots - 1)))
        self._inner = [
            np.array(
                [self._row_of[key] for key in zip(w.stop[w.nests].tolist(), w.option[w.nests].tolist(), strict=True)],
                int,
            )
            for w in self._ways
        ]
        """For the nests that start at each position: the row of the part inside."""
        self._values: list[Costs] = []
        self._top: list[int] = []
        self._needs = np.zeros(1024, np.int64)
        self._known: dict[tuple[bytes, ...], int] = {}
        self._nothing = self._add(np.zeros(1), _ANY, _ANY)
        for part in (*self._parts, self._whole):
            self._fill(part)
        self.smallest_limit = int(self._needs[self._state[-1, 0]] + self._level[-1, 0])
        self._flat = np.concatenate(self._values)
        self._last = np.cumsum([len(values) for values in self._values]) - 1
        self._start = np.concatenate([[0], self._last[:-1] + 1])

    def _part(self, key: tuple[int, int], first: int, row: int) -> _Part:
        chain, (end, stores) = self.chain, key
        extra = chain.shift[end] + chain.stored[stores, end] - chain.stored[stores, : end + 1]
        return _Part(end, first, stores, row, extra)

    # -- filling ----------------------------------------------------------------------------------------------

    def _fill(self, part: _Part) -> None:
        """Find the states of a part from its end, each that is new by content."""
        self._level[part.row, : part.end + 1] = part.extra
        self._level[part.row, : part.end] += self.chain.forward[: part.end]
        if part is self._whole:
            self._state[part.row, part.end] = self._add(np.zeros(1), self.chain.required, self.chain.required)
        else:
            # Nothing is needed there: with its level, too, a part's states depend on what is between, not on where.
            self._level[part.row, part.end] = self._level[part.row, part.end - 1]
            self._state[part.row, part.end] = self._nothing
        for position in range(part.end - 1, part.first - 1, -1):
            moves = self._moves(part, position)
            key = (
                *(numbers.tobytes() for numbers in (moves.demand, moves.gain, moves.behind)),
                *(numbers.tobytes() for numbers in (moves.nests, moves.inner_gain, moves.inside)),
                moves.cost.tobytes(),
            )
            if key not in self._known:
                self._known[key] = self._solve(moves)
            self._state[part.row, position] = self._known[key]

    def _add(self, values: Costs, need: int, top: int) -> int:
        """Add a state: costs by slot from the least memory needed on, and memory that leaves nothing to be wanted."""
        number = len(self._values)
        if number == len(self._needs):
            self._needs = np.concatenate([self._needs, np.zeros_like(self._needs)])
        self._needs[number] = need
        self._values.append(values)
        self._top.append(top)
        return number

    def _moves(self, part: _Part, position: int) -> _Moves:
        ways = self._ways[position]
        # Nothing that stops where a nest does is a region inside it. The plain step always goes on.
        num = len(ways.stop) if part is self._whole else max(1, int(np.searchsorted(ways.stop, part.end)))
        stop, saved, level = ways.stop[:num], ways.saved[:num], self._level[part.row]
        cost = ways.cost[:num].copy()
        if part.stores is not None:
            saved = saved - ways.stuck[part.stores, :num]
        if part.stores == 0:
            cost[1:] += self.chain.late(stop[1:], ways.ready[1:num], part.end)
        gain = saved + level[position] - level[stop]
        behind = self._state[part.row, stop]
        demand = np.maximum(ways.forward[:num] + part.extra[position], ways.backward[:num]) - level[position]
        demand = np.maximum(demand, self._needs[behind] - gain)
        nests = ways.nests[: np.searchsorted(ways.nests, num)]
        rows = self._inner[position][: len(nests)]
        inner_gain = level[position] - self._level[rows, position] - ways.held[nests]
        inside = self._state[rows, position]
        demand[nests] = np.maximum(demand[nests], self._needs[inside] - inner_gain)
        return _Moves(ways, cost, demand, gain, behind, nests, inner_gain, inside)

    def _solve(self, moves: _Moves) -> int:
        """Least cost by slot over all ways on."""
        need = int(moves.demand.min())
        top = self._most_wanted(moves)
        num_slots = -(-(top - need) // self.width) + 1
        first = -((need - moves.demand) // self.width)
        shift = (need + moves.gain - self._needs[moves.behind]) // self.width
        inner_shift = (need + moves.inner_gain - self._needs[moves.inside]) // self.width
        nests = dict(
            zip(moves.nests.tolist(), zip(inner_shift.tolist(), moves.inside.tolist(), strict=True), strict=True)
        )
        best = np.full(num_slots, np.inf)
        lists = (first.tolist(), shift.tolist(), moves.behind.tolist(), moves.cost.tolist())
        for way, (start, move, behind, cost) in enumerate(zip(*lists, strict=True)):
            if start >= num_slots:
                continue
            parts = [(self._values[behind], start + move)]
            if way in nests:
                inner_move, inside = nests[way]
                parts.append((self._values[inside], start + inner_move))
            _lower(best, start, cost, parts)
        return self._add(best, need, top)

    def _most_wanted(self, moves: _Moves) -> int:
        """Memory that leaves nothing to be wanted: the plain step's, or that of regions by which nests stop early."""
        behind, inside = moves.behind.tolist(), moves.inside.tolist()
        least = moves.cost + [self._values[state][-1] for state in behind]
        least[moves.nests] += [self._values[state][-1] for state in inside]
        top = np.maximum(moves.demand, [self._top[state] for state in behind] - moves.gain)
        inner_top = np.array([self._top[state] for state in inside], np.int64) - moves.inner_gain
        top[moves.nests] = np.maximum(top[moves.nests], inner_top)
        wanted = least < least[0]
        wanted[0] = True
        return int(top[wanted].max())

    # -- reading ----------------------------------------------------------------------------------------------

    def picks(self, limit_bytes: int) -> tuple[Pick, ...] | None:
        """The regions of the plan for a limit, in order of execution; None if there is none."""
        if limit_bytes < self.smallest_limit:
            return None
        return tuple(self._walk(self._whole, 0, limit_bytes - int(self._level[-1, 0])))

    def _walk(self, part: _Part, position: int, memory: int) -> Iterator[Pick]:
        """Regions from a position on, with so much memory above the level there."""
        while position < part.end:
            moves = self._moves(part, position)
            fits = np.flatnonzero(moves.demand <= memory)
            own = moves.cost.copy()
            own[moves.nests] += self._cost(moves.inside, memory + moves.inner_gain)
            own, left = own[fits], memory + moves.gain[fits] - self._needs[moves.behind[fits]]
            cost = own + self._cost(moves.behind[fits], memory + moves.gain[fits])
            # Of equals the plain step, which comes first: no region that gains nothing.
            way = int(fits[np.lexsort((moves.ways.stop[fits], -left, fits > 0, own, cost))[0]])
            number, stop, option = (
                int(found[way]) for found in (moves.ways.number, moves.ways.stop, moves.ways.option)
            )
            if number >= 0:
                yield number, option, ()
            elif number != PLAIN:
                inner = self._parts[self._row_of[stop, option]]
                inner_gain = int(moves.inner_gain[np.searchsorted(moves.nests, way)])
                yield number, option, tuple(self._walk(inner, position, memory + inner_gain))
            position, memory = stop, memory + int(moves.gain[way])

    def _cost(self, states: Bytes, memory: Bytes) -> Costs:
        slot = np.maximum((memory - self._needs[states]) // self.width, 0)
        found: Costs = self._flat[np.minimum(self._start[states] + slot, self._last[states])]
        return found


def _lower(best: Costs, start: int, cost: float, parts: Sequence[tuple[Costs, int]]) -> None:
    """Take sums of costs from a slot on where they are lower; each part from its own slot, its last stands for more.

    Costs fall from slot to slot, so nothing is gained where what is left at the end of the parts is not less.
    """
    if cost + sum(values[-1] for values, _ in parts) >= best[start]:
        return
    edges = sorted({start, *(min(max(start + len(v) - 1 - at, start), len(best)) for v, at in parts), len(best)})
    for low, high in pairwise(edges):
        total: Costs | float = cost
        for values, at in parts:
            slot = at + low - start
            total = total + (values[slot : slot + high - low] if slot < len(values) - 1 else values[-1])
        np.minimum(best[low:high], total, out=best[low:high])

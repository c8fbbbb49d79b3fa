"""Across regions: what the rest of a step costs from every position, for every amount of memory, in one table.

A plan is a path through the positions of forward: an edge leads over an interval that is a region with one option, or
over one that is none (*plain*), or over a *nest*, which is dropped as a whole and, when backward comes to it, is run
again and then treated as a step of its own. With ``m`` the limit plus what regions behind a position have freed, an
edge demands that ``m`` is at least what live bytes would be if nothing before it were freed; so one table over ``m``
holds the answer for all limits at once:

    V(p, m) = min over edges p -> q of cost + V(q, m + saved), where the edge's demand is at most m

and a nest ``p -> q`` costs its own forward, plus the table of the part that ends at ``q``, whose forward happens at the
moment of backward. The table rounds sums of bytes down. When a plan is read off they are carried exactly, and so is the
least memory from which each position can reach the end: slots can hide a cheaper plan, never admit one that does not
fit, and hide none where there is only one.

Sources: planner formulations 2 and 3 (Beaumont et al., rotor), with intervals that overlap, options in each, and the
limit as a dimension of the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from autoremat.solve._facts import Bytes

NUM_SLOTS = 1024
Costs = npt.NDArray[np.float64]
Pick = tuple[int, int, tuple["Pick", ...]]
"""A region: candidate (or -1 - nest), option, and the regions inside it."""


@dataclass(frozen=True, slots=True)
class Edge:
    """A candidate as a way from one position to a later one.

    Attributes:
        candidate: Which candidate it makes a region.
        level: Calls of one parent are of one level.
        stop: Position that it reaches.
        forward: Memory that each option demands in forward if nothing is freed before, bytes.
        backward: The same in backward, its recompute included.
        saved: Bytes that each option frees; negative if it holds more than the plain step.
        cost: Cost of each option.
    """

    candidate: int
    level: int
    stop: int
    forward: Bytes
    backward: Bytes
    saved: Bytes
    cost: Costs


@dataclass(frozen=True, slots=True)
class NestEdge:
    """An interval that is dropped as a whole, with regions inside.

    Attributes:
        number: -1 - n for the n-th nest.
        level: Calls of one parent are of one level.
        stop: Position that it reaches.
        forward: Memory that its first run demands with each option, bytes.
        saved: Bytes that each option frees.
        held: Bytes that it holds until its recompute although the plain step frees them.
        cost: Cost of running it again with each option, without what is recomputed inside.
    """

    number: int
    level: int
    stop: int
    forward: Bytes
    saved: Bytes
    held: int
    cost: Costs


@dataclass(frozen=True, slots=True)
class Chain:
    """The problem, by position.

    Attributes:
        edges: Candidates that start at each position.
        nests: Nests that start at each position.
        forward: What the plain step demands from each position to the next in forward, bytes.
        backward: The same in backward.
        shift: How much more is alive when backward reaches a position than when forward did, in the plain step.
        required: What the turn from forward to backward demands.
    """

    edges: tuple[tuple[Edge, ...], ...]
    nests: tuple[tuple[NestEdge, ...], ...]
    forward: Bytes
    backward: Bytes
    shift: Bytes
    required: int

    @property
    def last(self) -> int:
        """The last position."""
        return len(self.forward)

    def highest(self) -> int:
        """Memory with which nothing is demanded in vain."""
        shift = max(0, int(self.shift.max(initial=0)))
        demands = [self.required, int(self.forward.max(initial=0)) + shift, int(self.backward.max(initial=0))]
        for edge in (edge for edges in self.edges for edge in edges):
            demands += [int(edge.forward.max()) + shift, int(edge.backward.max())]
        return max(demands)


class _Part:
    """A stretch of positions that is run forward and backward: the whole step, or a nest when it comes back.

    What a nest ends with is not dropped again: it is needed at once.

    Attributes:
        end: Position at which it ends.
        level: Level of the regions inside a nest; None for the whole step, which has regions of all levels.
        shift: What is alive besides, when it runs again, bytes.
        values: Least cost to the end, by position and slot.
        needs: Least memory from which the end can be reached, by position; exact.
    """

    __slots__ = ("end", "level", "needs", "shift", "values")

    def __init__(self, end: int, shift: int, level: int | None) -> None:
        self.end = end
        self.shift = shift
        self.level = level
        self.values: dict[int, Costs] = {}
        self.needs: dict[int, int] = {}


class Table:
    """Least costs for every position and amount of memory.

    Args:
        chain: The problem.
        num_slots: How finely memory is divided.
    """

    def __init__(self, chain: Chain, *, num_slots: int = NUM_SLOTS) -> None:
        self.chain = chain
        self.num_slots = num_slots
        self._slots = np.arange(num_slots)
        starts = {
            (nest.stop, nest.level): position
            for position in range(chain.last, -1, -1)
            for nest in chain.nests[position]
        }
        self._parts = {key: _Part(key[0], int(chain.shift[key[0]]), key[1]) for key in sorted(starts)}
        self._whole = _Part(chain.last, 0, None)
        stretches = [*((part, starts[key]) for key, part in self._parts.items()), (self._whole, 0)]
        for part, first in stretches:
            self._find_needs(part, first)
        self.smallest_limit = self._whole.needs[0]
        self.low = min(part.needs[first] for part, first in stretches)
        self.width = max(1, -(-(chain.highest() + 1 - self.low) // (num_slots - 1)))
        for part, first in stretches:
            self._fill(part, first)

    # -- filling ----------------------------------------------------------------------------------------------

    def _find_needs(self, part: _Part, first: int) -> None:
        """Least memory from each position: of every edge, what it demands or what is to be left behind it."""
        chain = self.chain
        part.needs[part.end] = chain.required if part.level is None else 0
        for position in range(part.end - 1, first - 1, -1):
            demand = max(int(chain.forward[position]) + part.shift, int(chain.backward[position]))
            needs = [max(demand, part.needs[position + 1])]
            for edge in chain.edges[position]:
                if self._is_inside(part, edge):
                    demands = np.maximum(edge.forward + part.shift, edge.backward)
                    needs.append(int(np.maximum(demands, part.needs[edge.stop] - edge.saved).min()))
            for nest in chain.nests[position]:
                if self._is_inside(part, nest):
                    inside = self._parts[nest.stop, nest.level].needs[position] + nest.held
                    demands = np.maximum(nest.forward + part.shift, inside)
                    needs.append(int(np.maximum(demands, part.needs[nest.stop] - nest.saved).min()))
            part.needs[position] = min(needs)

    def _slot(self, memory: int | Bytes) -> Any:
        """The last slot with at most this much memory."""
        return (memory - self.low) // self.width

    def _first_slot(self, demand: int | Bytes) -> Any:
        """The first slot with at least this much memory."""
        return -((self.low - demand) // self.width)

    def _fill(self, part: _Part, first: int) -> None:
        chain = self.chain
        end = np.zeros(self.num_slots)
        end[: max(0, self._first_slot(part.needs[part.end]))] = np.inf
        part.values[part.end] = end
        for position in range(part.end - 1, first - 1, -1):
            demand = max(int(chain.forward[position]) + part.shift, int(chain.backward[position]))
            best = part.values[position + 1].copy()
            best[: max(0, self._first_slot(demand))] = np.inf
            for edge in chain.edges[position]:
                if self._is_inside(part, edge):
                    demands = np.maximum(edge.forward + part.shift, edge.backward)
                    np.minimum(best, self._behind(part, edge, self._first_slot(demands)), out=best)
            for nest in chain.nests[position]:
                if self._is_inside(part, nest):
                    np.minimum(best, self._over_nest(part, position, nest), out=best)
            part.values[position] = best

    def _behind(self, part: _Part, edge: Edge | NestEdge, first: Bytes) -> Costs:
        """Least cost to the end over an edge, by slot; each option from its first slot on."""
        moves = edge.saved // self.width
        index = np.clip(self._slots[None, :] + moves[:, None], 0, self.num_slots - 1)
        values = part.values[edge.stop][index] + edge.cost[:, None]
        values[self._slots[None, :] < np.maximum(first, -moves)[:, None]] = np.inf
        best: Costs = values.min(axis=0)
        return best

    def _over_nest(self, part: _Part, position: int, nest: NestEdge) -> Costs:
        behind = self._behind(part, nest, self._first_slot(nest.forward + part.shift))
        inside = self._parts[nest.stop, nest.level].values[position]
        back = -(-nest.held // self.width)
        values: Costs = behind + inside[np.clip(self._slots - back, 0, self.num_slots - 1)]
        values[:back] = np.inf
        return values

    @staticmethod
    def _is_inside(part: _Part, edge: Edge | NestEdge) -> bool:
        """Whether an interval may be a region of a part."""
        return part.level is None or (edge.level == part.level and edge.stop < part.end)

    # -- reading ----------------------------------------------------------------------------------------------

    def picks(self, limit_bytes: int) -> tuple[Pick, ...] | None:
        """The regions of the plan for a limit, in order of execution; None if there is none."""
        if limit_bytes < self.smallest_limit:
            return None
        return tuple(self._walk(self._whole, 0, limit_bytes))

    def _walk(self, part: _Part, position: int, memory: int) -> Iterator[Pick]:
        while position < part.end:
            way = min(self._ways(part, position, memory), key=lambda way: (way.cost, way.own_cost, -way.left, way.stop))
            if way.number is not None:
                inner = () if way.nest is None else self._walk(self._parts[way.stop, way.nest], position, way.inside)
                yield way.number, way.option, tuple(inner)
            position, memory = way.stop, memory + way.saved

    def _ways(self, part: _Part, position: int, memory: int) -> Iterator[_Way]:
        """Every edge that fits and from which the end can be reached."""
        chain = self.chain
        demand = max(int(chain.forward[position]) + part.shift, int(chain.backward[position]))
        left = memory - part.needs[position + 1]
        if demand <= memory and left >= 0:
            yield _Way(float(self._at(part, position + 1, memory)), 0.0, left, position + 1)
        for edge in chain.edges[position]:
            if self._is_inside(part, edge):
                demands = np.maximum(edge.forward + part.shift, edge.backward)
                yield from self._way(part, edge, edge.candidate, demands <= memory, memory)
        for nest in chain.nests[position]:
            inside, nested = memory - nest.held, self._parts[nest.stop, nest.level]
            if self._is_inside(part, nest) and inside >= nested.needs[position]:
                extra, fits = float(self._at(nested, position, inside)), nest.forward + part.shift <= memory
                for way in self._way(part, nest, nest.number, fits, memory, extra=extra):
                    yield way._replace(inside=inside, nest=nest.level)

    def _at(self, part: _Part, position: int, memory: int | Bytes) -> Any:
        return part.values[position][self._clipped(memory)]

    def _clipped(self, memory: int | Bytes) -> Any:
        return np.clip(self._slot(memory), 0, self.num_slots - 1)

    def _way(
        self,
        part: _Part,
        edge: Edge | NestEdge,
        number: int,
        fits: npt.NDArray[np.bool_],
        memory: int,
        *,
        extra: float = 0.0,
    ) -> Iterator[_Way]:
        """The option of an edge from which the end costs least, if there is one."""
        left = memory + edge.saved - part.needs[edge.stop]
        possible = np.flatnonzero(fits & (left >= 0))
        if len(possible):
            own = edge.cost[possible] + extra
            costs = own + self._at(part, edge.stop, memory + edge.saved[possible])
            best = int(np.lexsort((-left[possible], own, costs))[0])
            option = int(possible[best])
            saved, left_over = int(edge.saved[option]), int(left[option])
            yield _Way(float(costs[best]), float(own[best]), left_over, edge.stop, saved, number, option)


class _Way(NamedTuple):
    """One step of a plan: cost to the end and by itself, memory to spare, where it leads, and the level of a nest."""

    cost: float
    own_cost: float
    left: int
    stop: int
    saved: int = 0
    number: int | None = None
    option: int = 0
    inside: int = 0
    nest: int | None = None

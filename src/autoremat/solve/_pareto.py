"""Planner formulation 1 without a solver: all best choices of what a region stores, by dynamic programming.

Going through the units against the order in which they read each other, all that matters of the choices made so far is
which storages of earlier units they ask for. In the graphs of models these are few at any point (one residual stream,
the inputs of one attention), and their sizes are multiples of few numbers, so the choices that are best for a set of
asked storages and some bytes stay few, too. One pass gives the whole curve of cost against bytes, for which the integer
program of `_program` has to be solved once a point.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from autoremat.solve._units import Unit

Ints = NDArray[np.int64]

MAX_CHOICES = 32768
"""Choices looked at for one unit before giving up: graphs that branch widely are for the integer program."""
_RESOLUTION = float(2**40)
"""Costs are counted in so many parts of the cost of everything: sums of integers do not depend on their order."""


@dataclass(frozen=True, slots=True)
class _Partial:
    """Choices for the units gone through that ask the rest for the same storages, by rising bytes and falling cost."""

    num_bytes: Ints
    cost: Ints
    origin: Ints
    """Twice the position of each among the choices before the unit, all of them in a row; one more if the choice stores
    what the unit is asked for."""


class Choices:
    """All best choices: none costs less with as few bytes.

    Attributes:
        num_bytes: What each stores, rising.
        cost: What each costs, falling, in parts of the cost of everything.
    """

    def __init__(self) -> None:
        self.num_bytes: list[int] = [0]
        self.cost: list[int] = [0]
        self._units: list[Unit] = []
        self._asked: list[list[frozenset[int]]] = []
        self._stops: list[list[int]] = []
        """For each unit: behind the last choice that asks for each of these."""
        self._origin: list[Ints] = []

    def stored(self, position: int) -> frozenset[int]:
        """What a choice stores."""
        found: set[int] = set()
        for step in range(len(self._units) - 1, -1, -1):
            origin, is_stored = divmod(int(self._origin[step][position]), 2)
            if is_stored:
                asked = self._asked[step - 1][bisect_right(self._stops[step - 1], origin)] if step else frozenset[int]()
                found |= _asked_of(self._units[step], asked)
            position = origin
        return frozenset(found)

    def add(self, unit: Unit, partials: dict[frozenset[int], _Partial]) -> None:
        """Go on to the choices after one more unit."""
        self._units.append(unit)
        self._asked.append(list(partials))
        self._stops.append(list(accumulate([len(partial.cost) for partial in partials.values()])))
        self._origin.append(np.concatenate([partial.origin for partial in partials.values()]))
        last = next(reversed(partials.values()))
        self.num_bytes, self.cost = last.num_bytes.tolist(), last.cost.tolist()


def best_choices(units: Sequence[Unit], *, tie_break: float) -> Choices | None:
    """Find all best choices of what to store.

    Args:
        units: What can be stored and run.
        tie_break: Weight of moved and of stored bytes against the cost of everything.

    Returns:
        The choices; None where units read each other in a circle or too many choices would have to be looked at.
    """
    order = _against_reads(units)
    if order is None:
        return None
    weights = _weights(units, tie_break)
    zero = np.zeros(1, np.int64)
    partials = {frozenset[int](): _Partial(zero, zero, zero)}
    choices = Choices()
    for position in order:
        branches: dict[frozenset[int], list[_Partial]] = {}
        start = 0
        for asked, partial in partials.items():
            for rest, branch in _branch(units[position], weights[position], asked, partial, start):
                branches.setdefault(rest, []).append(branch)
            start += len(partial.cost)
        partials = {rest: _undominated(found) for rest, found in branches.items()}
        if sum(len(partial.cost) for partial in partials.values()) > MAX_CHOICES:
            return None
        choices.add(units[position], partials)
    return choices


def _against_reads(units: Sequence[Unit]) -> list[int] | None:
    """Readers before what they read; None if there is no such order."""
    home = {s: position for position, unit in enumerate(units) for s in unit.storages}
    read = [{home[s] for s in unit.reads} for unit in units]
    waiting = [0] * len(units)
    for found in read:
        for position in found:
            waiting[position] += 1
    ready = [position for position, count in enumerate(waiting) if not count]
    order: list[int] = []
    while ready:
        ready.sort()
        order.append(ready.pop())  # the latest in forward: what is asked for is then nearest to being made
        for position in sorted(read[order[-1]]):
            waiting[position] -= 1
            if not waiting[position]:
                ready.append(position)
    return order if len(order) == len(units) else None


def _weights(units: Sequence[Unit], tie_break: float) -> list[tuple[int, float]]:
    """For each unit, what running it costs and what each stored byte costs, in parts of `_RESOLUTION`."""
    cost = max(sum(unit.cost for unit in units), 1e-300)
    moved = max(sum(unit.moved_bytes for unit in units), 1)
    total_bytes = max(1, sum(sum(unit.bytes_of.values()) for unit in units))
    a_byte = _RESOLUTION * tie_break / 10 / total_bytes
    return [(round(_RESOLUTION * (u.cost / cost + tie_break * u.moved_bytes / moved)), a_byte) for u in units]


def _asked_of(unit: Unit, asked: frozenset[int]) -> set[int]:
    return {s for s in unit.bytes_of if s in asked or s in unit.needed}


def _branch(
    unit: Unit, weight: tuple[int, float], asked: frozenset[int], partial: _Partial, start: int
) -> Iterator[tuple[frozenset[int], _Partial]]:
    """Go on from choices by running a unit, by storing what is asked of it, or by neither where nothing is."""
    running, a_byte = weight
    origin = np.arange(2 * start, 2 * (start + len(partial.cost)), 2)
    wanted = _asked_of(unit, asked)
    rest = asked.difference(unit.storages)
    if wanted or unit.always_runs:
        yield rest | unit.reads, _Partial(partial.num_bytes, partial.cost + running, origin)
    else:
        yield rest, _Partial(partial.num_bytes, partial.cost, origin)
    if wanted and not unit.always_runs and not wanted & unit.unstorable:
        size = sum(unit.bytes_of[s] for s in wanted)
        yield rest, _Partial(partial.num_bytes + size, partial.cost + round(size * a_byte), origin + 1)


def _undominated(found: Sequence[_Partial]) -> _Partial:
    """One after the other by rising bytes, without those that cost no less than one with fewer bytes."""
    if len(found) == 1:
        return found[0]
    num_bytes, cost, origin = map(np.concatenate, zip(*((p.num_bytes, p.cost, p.origin) for p in found), strict=True))
    order = np.lexsort((cost, num_bytes))
    least = np.minimum.accumulate(cost[order])
    is_less = np.ones(len(order), np.bool_)
    np.less(least[1:], least[:-1], out=is_less[1:])
    order = order[is_less]
    return _Partial(num_bytes[order], cost[order], origin[order])

"""Across regions: which candidates become regions, with which option each, under one limit on bytes.

The leaves of the candidates lie behind one another in forward; backward takes them in reverse order. A plan is a path
through the positions between leaves: an edge leads over one leaf that is not a region, or over all leaves of a
candidate that is one. With P the bytes freed by the regions behind a position, each edge ``a -> b`` and each position
demands ``required - P <= limit``, where ``required`` is the highest that live bytes would be if nothing before ``a``
were freed. This holds at every event, forward and backward, since whatever an event sees freed is a prefix of the path.

The search keeps, at each position, the cheapest way for each bucket of freed bytes. Sums of bytes are carried exactly:
buckets can hide a cheaper path, never admit one that does not fit.

Sources: planner formulations 2 and 3 without nesting; the laminar choice between a block and its parts is our own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autoremat.solve._facts import Bytes

NUM_BUCKETS = 1024
_PRICE_STEPS = 40
_MAX_PRICE = 1e300
_ROUNDING = 1e-9
"""Sums of costs in another order differ by less than this share."""
Costs = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Edge:
    """A way from one position to a later one.

    Attributes:
        start: Position it leaves.
        stop: Position it reaches.
        candidate: Which candidate it makes a region; -1 for none.
        required: Limit that each option demands if nothing is freed before, bytes.
        saved: Bytes that each option frees; negative if it holds more than the plain step.
        cost: Cost of each option.
    """

    start: int
    stop: int
    candidate: int
    required: Bytes
    saved: Bytes
    cost: Costs


@dataclass(frozen=True, slots=True)
class Chain:
    """The problem: positions ``0 .. num_leaves``, edges by the position that they reach, demands of positions.

    Attributes:
        edges: ``edges[b]`` reach position b; ``edges[0]`` is empty.
        required: Limit that each position demands if nothing is freed before.
    """

    edges: tuple[tuple[Edge, ...], ...]
    required: Bytes


@dataclass(frozen=True, slots=True)
class Choice:
    """A path: candidates made regions, each with the index of its option.

    Attributes:
        options: Candidate and option of each region, in order of execution.
        cost: Sum of costs.
        saved_bytes: Bytes freed at the end of forward.
    """

    options: tuple[tuple[int, int], ...]
    cost: float
    saved_bytes: int


@dataclass(slots=True)
class _States:
    """The best partial paths to one position, by falling cost and falling bytes freed."""

    saved: Bytes
    cost: Costs
    edge: npt.NDArray[np.int64]
    option: npt.NDArray[np.int64]
    previous: npt.NDArray[np.int64]


def _origin() -> _States:
    zero = np.zeros(1, np.int64)
    return _States(saved=zero, cost=np.zeros(1), edge=zero - 1, option=zero - 1, previous=zero - 1)


def solve_chain(chain: Chain, limit_bytes: int, *, num_buckets: int = NUM_BUCKETS) -> Choice | None:
    """Find the cheapest path that meets every demand.

    A coarse search gives a path; a fine one then leaves out what cannot end cheaper than that path.

    Args:
        chain: The problem.
        limit_bytes: Limit on live bytes of the whole step.
        num_buckets: How many partial paths to keep at each position.

    Returns:
        The path, or None if there is none.
    """
    if farthest_saved(chain, limit_bytes) is None:
        return None
    guide = find_guide(chain, limit_bytes)
    coarse = _search(chain, limit_bytes, guide, max(2, num_buckets // 8), math.inf)
    assert coarse is not None, "the path that frees most is never left out"
    return _search(chain, limit_bytes, guide, num_buckets, coarse.cost) or coarse


@dataclass(frozen=True, slots=True)
class Guide:
    """The Lagrangian relaxation of the demand at the end: every other demand is left out.

    Attributes:
        price: Cost that a freed byte is worth.
        to_go: Least cost, freed bytes paid at that price, from each position to the end.
        need_bytes: Bytes that a path must have freed at the end.
    """

    price: float
    to_go: Costs
    need_bytes: int

    def bound(self) -> float:
        """No path costs less than this."""
        return float(self.to_go[0]) + self.price * self.need_bytes

    def least(self, states: _States, position: int) -> Costs:
        """No continuation of a partial path costs less than this."""
        least: Costs = states.cost + self.to_go[position] + self.price * (self.need_bytes - states.saved)
        return least


def find_guide(chain: Chain, limit_bytes: int) -> Guide:
    """Find the price of a byte at which the relaxed path frees just enough, by bisection."""
    need = max(0, int(chain.required[-1]) - limit_bytes)
    low, high = 0.0, 0.0
    if need > 0:
        edges = [edge for reaching in chain.edges for edge in reaching if edge.candidate >= 0]
        high = sum(float(edge.cost.max()) for edge in edges) / need + 1e-300
        while _relaxed(chain, high)[1] < need and high < _MAX_PRICE:
            high *= 8
        for _ in range(_PRICE_STEPS):
            middle = (low + high) / 2
            low, high = (low, middle) if _relaxed(chain, middle)[1] >= need else (middle, high)
    return Guide(price=high, to_go=_relaxed(chain, high)[0], need_bytes=need)


def _relaxed(chain: Chain, price: float) -> tuple[Costs, int]:
    """Least cost to go from each position if freed bytes earn this price, and the bytes that such a path frees."""
    num = len(chain.edges)
    to_go = np.full(num, np.inf)
    freed = np.zeros(num, np.int64)
    to_go[-1] = 0.0
    for position in range(num - 1, 0, -1):
        for edge in chain.edges[position]:
            value = edge.cost - price * edge.saved
            best = int(np.argmin(value))
            if value[best] + to_go[position] < to_go[edge.start]:
                to_go[edge.start] = value[best] + to_go[position]
                freed[edge.start] = edge.saved[best] + freed[position]
    return to_go, int(freed[0])


def _search(chain: Chain, limit_bytes: int, guide: Guide, num_buckets: int, at_most: float) -> Choice | None:
    """Walk through the positions, keeping the best partial paths; None if none is as cheap as ``at_most``."""
    table: list[_States | None] = []
    for position, edges in enumerate(chain.edges):
        states = _extend(table, edges, limit_bytes) if position else _origin()
        if states is not None:
            fits = states.saved >= int(chain.required[position]) - limit_bytes
            fits &= guide.least(states, position) <= at_most + _ROUNDING * abs(at_most)
            states = _thin(_select(states, np.flatnonzero(fits)), guide.price, num_buckets)
        table.append(states)
    return _trace(chain, table)


def _extend(table: Sequence[_States | None], edges: Sequence[Edge], limit_bytes: int) -> _States | None:
    """Every continuation of the partial paths by every edge that reaches a position."""
    parts: list[_States] = []
    for number, edge in enumerate(edges):
        before = table[edge.start]
        if before is None:
            continue
        state, option = np.nonzero(before.saved[:, None] >= edge.required[None, :] - limit_bytes)
        parts.append(
            _States(
                saved=before.saved[state] + edge.saved[option],
                cost=before.cost[state] + edge.cost[option],
                edge=np.full(len(state), number),
                option=option,
                previous=state,
            )
        )
    return _concatenate(parts) if parts else None


def _concatenate(parts: Sequence[_States]) -> _States:
    return _States(
        saved=np.concatenate([p.saved for p in parts]),
        cost=np.concatenate([p.cost for p in parts]),
        edge=np.concatenate([p.edge for p in parts]),
        option=np.concatenate([p.option for p in parts]),
        previous=np.concatenate([p.previous for p in parts]),
    )


def _select(states: _States, index: npt.NDArray[np.int64]) -> _States:
    return _States(
        saved=states.saved[index],
        cost=states.cost[index],
        edge=states.edge[index],
        option=states.option[index],
        previous=states.previous[index],
    )


def _thin(states: _States, price: float, num_buckets: int) -> _States | None:
    """Keep undominated paths, by rising cost; at most one for each bucket of freed bytes."""
    if not len(states.saved):
        return None
    order = np.lexsort((states.edge, -states.saved, states.cost))
    saved = states.saved[order]
    best = np.maximum.accumulate(saved)
    order = order[np.concatenate([[True], saved[1:] > best[:-1]])]
    if len(order) > num_buckets:
        order = order[_one_per_bucket(states.saved[order], states.cost[order], price, num_buckets)]
    return _select(states, order)


def _one_per_bucket(saved: Bytes, cost: Costs, price: float, num_buckets: int) -> npt.NDArray[np.int64]:
    """The best of each bucket, freed bytes paid at their price, and the one that frees most; ``saved`` rises."""
    low, high = int(saved[0]), int(saved[-1])
    bucket = ((saved - low) * (num_buckets - 1)) // (high - low + 1)
    order = np.lexsort((cost - price * saved, bucket))
    is_first = np.concatenate([[True], bucket[order][1:] > bucket[order][:-1]])
    return np.union1d(order[is_first], [len(saved) - 1])


def _trace(chain: Chain, table: Sequence[_States | None]) -> Choice | None:
    """Walk back from the cheapest path that reaches the end."""
    position = len(table) - 1
    final = table[position]
    if final is None:
        return None
    state = 0
    chosen: list[tuple[int, int]] = []
    while position > 0:
        states = table[position]
        assert states is not None, "a path leads through positions that were reached"
        edge = chain.edges[position][states.edge[state]]
        if edge.candidate >= 0:
            chosen.append((edge.candidate, int(states.option[state])))
        state, position = int(states.previous[state]), edge.start
    return Choice(options=tuple(reversed(chosen)), cost=float(final.cost[0]), saved_bytes=int(final.saved[0]))


def farthest_saved(chain: Chain, limit_bytes: int) -> int | None:
    """Most bytes that a path can free within a limit; None if no path meets the demands.

    Freeing more never hurts later, so one number for each position is enough: this is exact.
    """
    best: list[int | None] = [0]
    for position, edges in enumerate(chain.edges):
        if position:
            reached = [_most(edge, best[edge.start], limit_bytes) for edge in edges]
            best.append(max((r for r in reached if r is not None), default=None))
        here = best[position]
        if here is not None and chain.required[position] - here > limit_bytes:
            best[position] = None
    return best[-1]


def _most(edge: Edge, before: int | None, limit_bytes: int) -> int | None:
    if before is None:
        return None
    fitting = edge.saved[edge.required - before <= limit_bytes]
    return before + int(fitting.max()) if len(fitting) else None


def smallest_limit(chain: Chain) -> int:
    """The smallest limit for which there is a path, by bisection (exact)."""
    low, high = 0, int(max(chain.required.max(), *(e.required.max() for edges in chain.edges for e in edges), 1))
    while low < high:
        middle = (low + high) // 2
        if farthest_saved(chain, middle) is None:
            low = middle + 1
        else:
            high = middle
    return low

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

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autoremat.solve._facts import Bytes

NUM_BUCKETS = 1024
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

    Args:
        chain: The problem.
        limit_bytes: Limit on live bytes of the whole step.
        num_buckets: How many partial paths to keep at each position.

    Returns:
        The path, or None if there is none.
    """
    farthest = farthest_saved(chain, limit_bytes)
    if farthest is None:
        return None
    table: list[_States | None] = []
    for position, edges in enumerate(chain.edges):
        states = _extend(table, edges, limit_bytes) if position else _origin()
        need = int(chain.required[position]) - limit_bytes
        table.append(None if states is None else _thin(states, need, num_buckets))
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


def _thin(states: _States, need_bytes: int, num_buckets: int) -> _States | None:
    """Keep undominated paths, at most one for each bucket of freed bytes."""
    order = np.lexsort((states.edge, -states.saved, states.cost))
    order = order[states.saved[order] >= need_bytes]
    if not len(order):
        return None
    saved = states.saved[order]
    best = np.maximum.accumulate(saved)
    is_new = np.concatenate([[True], saved[1:] > best[:-1]])
    order, saved = order[is_new], saved[is_new]
    if len(order) > num_buckets:
        order = order[_one_per_bucket(saved, num_buckets)]
    return _States(
        saved=states.saved[order],
        cost=states.cost[order],
        edge=states.edge[order],
        option=states.option[order],
        previous=states.previous[order],
    )


def _one_per_bucket(saved: Bytes, num_buckets: int) -> npt.NDArray[np.int64]:
    """Indices of the cheapest (first) of each bucket and of the last one; ``saved`` rises."""
    low, high = int(saved[0]), int(saved[-1])
    bucket = ((saved - low) * (num_buckets - 2)) // (high - low)
    chosen = np.flatnonzero(np.concatenate([[True], bucket[1:] > bucket[:-1]]))
    last = len(saved) - 1
    return chosen if chosen[-1] == last else np.concatenate([chosen, [last]])


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

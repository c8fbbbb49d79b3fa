"""The chain search against every path."""

from __future__ import annotations

import math
import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from autoremat.solve._chain import Chain, Choice, Edge, farthest_saved, find_guide, smallest_limit, solve_chain

SECONDS_FOR_126_BLOCKS = 4.0
"""One second is the aim; the rest is for machines that run other things too."""


@st.composite
def chains(draw: st.DrawFn, max_leaves: int = 4) -> Chain:
    num = draw(st.integers(1, max_leaves))
    number = st.integers(0, 20)
    edges: list[list[Edge]] = [[] for _ in range(num + 1)]
    candidates = 0
    for start in range(num):
        zero = np.zeros(1, np.int64)
        edges[start + 1].append(Edge(start, start + 1, -1, np.array([draw(number)]), zero, np.zeros(1)))
    for start in range(num):
        for stop in range(start + 1, num + 1):
            count = draw(st.integers(0, 3))
            if count:
                lists = [draw(st.lists(number, min_size=count, max_size=count)) for _ in range(3)]
                saved = np.array(lists[1]) - draw(st.integers(0, 3))
                required, cost = np.array(lists[0]), np.array(lists[2], float)
                edges[stop].append(Edge(start, stop, candidates, required, saved, cost))
                candidates += 1
    gaps = np.array(draw(st.lists(st.integers(0, 40), min_size=num + 1, max_size=num + 1)))
    return Chain(edges=tuple(map(tuple, edges)), required=gaps)


def every_path(chain: Chain, position: int = -1) -> list[tuple[tuple[tuple[int, int], ...], float, int, int]]:
    """Options, cost, bytes freed and limit demanded of each path to a position."""
    position = position % len(chain.edges)
    if position == 0:
        return [((), 0.0, 0, int(chain.required[0]))]
    found = []
    for edge in chain.edges[position]:
        for options, cost, saved, limit in every_path(chain, edge.start):
            for k in range(len(edge.cost)):
                after = saved + int(edge.saved[k])
                demand = max(limit, int(edge.required[k]) - saved, int(chain.required[position]) - after)
                taken = ((edge.candidate, k),) if edge.candidate >= 0 else ()
                found.append(((*options, *taken), cost + float(edge.cost[k]), after, demand))
    return found


@settings(deadline=None)
@given(chains(), st.integers(-5, 50))
def test_the_cheapest_path_is_found(chain: Chain, limit: int) -> None:
    paths = every_path(chain)
    best = min((cost for _, cost, _, demand in paths if demand <= limit), default=None)
    choice = solve_chain(chain, limit)
    assert (None if choice is None else choice.cost) == best
    if choice is not None:
        matching = [p for p in paths if p[0] == choice.options and p[3] <= limit]
        assert (choice.cost, choice.saved_bytes) in [(p[1], p[2]) for p in matching]


@settings(deadline=None)
@given(chains(), st.integers(-5, 50))
def test_the_guide_is_a_lower_limit_from_every_position(chain: Chain, limit: int) -> None:
    guide = find_guide(chain, limit)
    costs = [cost for _, cost, _, demand in every_path(chain) if demand <= limit]
    assert guide.bound() <= min(costs, default=math.inf) + 1e-6


@settings(deadline=None)
@given(chains(), st.integers(-5, 50))
def test_most_bytes_freed_and_smallest_limit_are_exact(chain: Chain, limit: int) -> None:
    paths = every_path(chain)
    assert farthest_saved(chain, limit) == max((p[2] for p in paths if p[3] <= limit), default=None)
    assert smallest_limit(chain) == max(0, min(p[3] for p in paths))


@settings(deadline=None)
@given(chains(max_leaves=6), st.integers(0, 50), st.integers(2, 5))
def test_few_buckets_lose_little_and_never_admit_what_does_not_fit(chain: Chain, limit: int, buckets: int) -> None:
    choice = solve_chain(chain, limit, num_buckets=buckets)
    exact = solve_chain(chain, limit)
    assert (choice is None) == (exact is None)
    if choice is not None and exact is not None:
        assert exact.cost <= choice.cost < math.inf
        demands = [p[3] for p in every_path(chain) if p[0] == choice.options and p[1] == choice.cost]
        assert min(demands) <= limit


def test_equal_blocks_are_recomputed_first_and_kept_last() -> None:
    zero = np.zeros(1, np.int64)
    edges: list[tuple[Edge, ...]] = [()]
    for i in range(6):
        plain = Edge(i, i + 1, -1, np.array([10 * i + 12]), zero, np.zeros(1))
        region = Edge(i, i + 1, i, np.array([10 * i + 14]), np.array([8]), np.ones(1))
        edges.append((plain, region))
    chain = Chain(edges=tuple(edges), required=np.array([0, 0, 0, 0, 0, 0, 60]))
    choice = solve_chain(chain, 46)
    assert choice == Choice(options=((0, 0), (1, 0)), cost=2.0, saved_bytes=16)


def test_126_equal_blocks_with_60_options_each() -> None:
    saved = np.arange(60, dtype=np.int64) * 997_001
    cost = np.cumsum(np.linspace(0, 1, 60))
    zero = np.zeros(1, np.int64)
    edges: list[tuple[Edge, ...]] = [()]
    for i in range(126):
        base = i * 60_000_000
        plain = Edge(i, i + 1, -1, np.array([base + 60_000_000]), zero, np.zeros(1))
        edges.append((plain, Edge(i, i + 1, i, base + 60_000_000 + saved // 2, saved, cost)))
    chain = Chain(edges=tuple(edges), required=np.full(127, 126 * 60_000_000) * (np.arange(127) == 126))
    limit = 126 * 30_000_000
    start = time.perf_counter()
    choice = solve_chain(chain, limit)
    assert time.perf_counter() - start < SECONDS_FOR_126_BLOCKS
    assert choice is not None
    assert choice.saved_bytes >= 126 * 30_000_000
    # The last block may not be a region at this limit: the others share what has to be freed.
    assert choice.cost <= 125 * np.interp(126 / 125 * 30_000_000, saved, cost) * 1.0005

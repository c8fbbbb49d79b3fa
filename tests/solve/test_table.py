"""The table against every path through small chains, nests included."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoremat.solve._table import Chain, Edge, NestEdge, Pick, Table

Row = tuple[float, int]
"""Cost of a path, and the memory that it demands."""


def array(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@st.composite
def chains(draw: st.DrawFn, max_positions: int = 4, max_nests: int = 3) -> Chain:
    num = draw(st.integers(1, max_positions))
    number = st.integers(0, 20)
    edges: list[list[Edge]] = [[] for _ in range(num + 1)]
    nests: list[list[NestEdge]] = [[] for _ in range(num + 1)]
    count = 0
    for start in range(num):
        for stop in range(start + 1, num + 1):
            options = draw(st.integers(0, 2))
            if options:
                forward, backward, saved, cost = (
                    draw(st.lists(number, min_size=options, max_size=options)) for _ in range(4)
                )
                freed = array(*saved) - draw(st.integers(0, 3))
                costs = np.array(cost, float)
                level = draw(st.integers(0, 1))
                edges[start].append(Edge(count, level, stop, array(*forward), array(*backward), freed, costs))
                count += 1
    for n in range(draw(st.integers(0, max_nests))):
        start = draw(st.integers(0, num - 1))
        stop = draw(st.integers(start + 1, num))
        forward, saved, held, cost = (draw(number) for _ in range(4))
        costs = np.array([float(cost)])
        nests[start].append(NestEdge(-1 - n, n % 2, stop, array(forward), array(saved), held % 3, costs))
    lists = [draw(st.lists(number, min_size=num, max_size=num)) for _ in range(2)]
    shift = draw(st.lists(st.integers(-5, 5), min_size=num + 1, max_size=num + 1))
    return Chain(
        edges=tuple(map(tuple, edges)),
        nests=tuple(map(tuple, nests)),
        forward=array(*lists[0]),
        backward=array(*lists[1]),
        shift=array(*shift),
        required=draw(st.integers(0, 40)),
    )


def paths(chain: Chain, start: int, end: int, shift: int, level: int | None) -> dict[tuple[Pick, ...], Row]:
    """Every way through a stretch: regions, with cost and least memory at its start."""
    if start == end:
        return {(): (0.0, chain.required if level is None else 0)}

    def is_inside(edge: Edge | NestEdge) -> bool:
        return edge.stop <= end if level is None else edge.stop < end and edge.level == level

    found: dict[tuple[Pick, ...], Row] = {}
    demand = max(int(chain.forward[start]) + shift, int(chain.backward[start]))
    for picks, (cost, need) in paths(chain, start + 1, end, shift, level).items():
        found[picks] = (cost, max(demand, need))
    for edge in filter(is_inside, chain.edges[start]):
        for k in range(len(edge.cost)):
            demand = max(int(edge.forward[k]) + shift, int(edge.backward[k]))
            for picks, (cost, need) in paths(chain, edge.stop, end, shift, level).items():
                row = (cost + float(edge.cost[k]), max(demand, need - int(edge.saved[k])))
                found[((edge.candidate, k, ()), *picks)] = row
    for nest in filter(is_inside, chain.nests[start]):
        inside = paths(chain, start, nest.stop, int(chain.shift[nest.stop]), nest.level)
        behind = paths(chain, nest.stop, end, shift, level)
        for inner, (inner_cost, inner_need) in inside.items():
            for picks, (cost, need) in behind.items():
                demand = max(int(nest.forward[0]) + shift, inner_need + nest.held, need - int(nest.saved[0]))
                total = cost + inner_cost + float(nest.cost[0])
                found[((nest.number, 0, inner), *picks)] = (total, demand)
    return found


def all_paths(chain: Chain) -> dict[tuple[Pick, ...], Row]:
    return paths(chain, 0, chain.last, 0, None)


@settings(deadline=None)
@given(chains(), st.integers(0, 60))
def test_the_cheapest_path_is_found_where_slots_are_bytes(chain: Chain, limit: int) -> None:
    rows = all_paths(chain)
    table = Table(chain, num_slots=512)
    assert table.width == 1
    assert table.smallest_limit == min(need for _, need in rows.values())
    picks = table.picks(limit)
    best = min((cost for cost, need in rows.values() if need <= limit), default=None)
    if picks is None:
        assert best is None
    else:
        cost, need = rows[picks]
        assert need <= limit
        assert cost == best


@settings(deadline=None)
@given(chains(), st.integers(0, 60), st.integers(2, 6))
def test_few_slots_never_admit_what_does_not_fit_and_find_what_there_is(
    chain: Chain, limit: int, num_slots: int
) -> None:
    rows = all_paths(chain)
    picks = Table(chain, num_slots=num_slots).picks(limit)
    possible = [cost for cost, need in rows.values() if need <= limit]
    assert (picks is None) == (not possible)
    if picks is not None:
        assert rows[picks][1] <= limit
        assert min(possible) <= rows[picks][0] < math.inf


def stack(num: int, saved: np.ndarray, cost: np.ndarray, size: int, *, nests: bool = False) -> Chain:
    """Equal blocks of a size, each with the same options."""
    edges = tuple(
        (Edge(i, 0, i + 1, i * size + np.full(len(saved), size), i * size + np.full(len(saved), size), saved, cost),)
        for i in range(num)
    )
    spans = [[] for _ in range(num + 1)]
    for i in range(num if nests else 0):
        for j in range(i + 1, num + 1):
            held = (j - i - 1) * size + int(saved[-1])
            spans[i].append(NestEdge(-1, 0, j, array((i + 1) * size), array(held), 0, np.array([float(j - i)])))
    base = np.arange(num, dtype=np.int64) * size + size
    return Chain((*edges, ()), tuple(map(tuple, spans)), base, base, np.zeros(num + 1, np.int64), num * size)


def test_the_last_of_equal_blocks_is_kept() -> None:
    picks = Table(stack(6, array(8), np.ones(1), 10)).picks(44)
    assert picks is not None
    assert len(picks) == 2
    assert 5 not in [number for number, _, _ in picks]


@pytest.mark.parametrize("num", [12, 126])
def test_slots_cost_little_on_equal_blocks(num: int) -> None:
    saved = np.arange(60, dtype=np.int64) * 997_001
    cost = np.cumsum(np.linspace(0, 1, 60))
    chain = stack(num, saved, cost, 60_000_000)
    picks = Table(chain).picks(num * 30_000_000)
    assert picks is not None
    assert sum(saved[option] for _, option, _ in picks) >= num * 30_000_000
    # The last block may not be a region at this limit: the others share what has to be freed.
    least = (num - 1) * np.interp(num / (num - 1) * 30_000_000, saved, cost)
    assert sum(cost[option] for _, option, _ in picks) <= least * 1.01


def test_nests_reach_below_what_single_blocks_reach() -> None:
    """Of 16 blocks of 10 bytes that keep 2 each, single regions need 10 + 2 * 15; a stack of stacks needs less."""
    flat = Table(stack(16, array(8), np.ones(1), 10))
    nested = Table(stack(16, array(8), np.ones(1), 10, nests=True))
    assert flat.smallest_limit == 40
    assert nested.smallest_limit < 24
    assert nested.picks(39) is not None

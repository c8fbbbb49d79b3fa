"""The table against every path through small chains, nests included."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoremat.solve._chain import Chain, Edge, NestEdge
from autoremat.solve._table import Pick, Table

Row = tuple[float, int]
"""Cost of a path, and the memory that it demands."""


def array(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


NUM_SETS = 2


@st.composite
def chains(draw: st.DrawFn, max_positions: int = 4, max_nests: int = 4) -> Chain:
    num = draw(st.integers(1, max_positions))
    number = st.integers(0, 20)
    small = st.integers(0, 4)
    edges: list[list[Edge]] = [[] for _ in range(num + 1)]
    nests: list[list[NestEdge]] = [[] for _ in range(num + 1)]
    count = 0
    for start in range(num):
        for stop in range(start + 1, num + 1):
            options = draw(st.integers(0, 2))
            if options:
                *forward, backward, saved, cost = (
                    draw(st.lists(number, min_size=options, max_size=options)) for _ in range(NUM_SETS + 3)
                )
                freed = array(*saved) - draw(st.integers(0, 3))
                costs = np.array(cost, float)
                ready = np.array(draw(st.lists(small, min_size=options, max_size=options)), float)
                demands = np.array(forward, np.int64), array(*backward)
                edges[start].append(Edge(count, stop, *demands, freed, costs, ready))
                count += 1
    for n in range(draw(st.integers(0, max_nests))):
        start = draw(st.integers(0, num - 1))
        stop = draw(st.integers(start + 1, num))
        stores = draw(st.integers(0, NUM_SETS - 1))
        forward = array(*(draw(number) for _ in range(NUM_SETS)))
        saved, held, cost = (draw(number) for _ in range(3))
        nests[start].append(NestEdge(-1 - n, stores, stop, forward, saved, held % 3, float(cost), float(draw(small))))
    *demanded, backward = (draw(st.lists(number, min_size=num, max_size=num)) for _ in range(NUM_SETS + 1))
    shift = draw(st.lists(st.integers(-5, 5), min_size=num + 1, max_size=num + 1))
    stored = draw(st.lists(st.lists(small, min_size=num, max_size=num), min_size=NUM_SETS, max_size=NUM_SETS))
    work = np.cumsum([0, *draw(st.lists(small, min_size=num, max_size=num))]).astype(float)
    tail = work - np.array(draw(st.lists(small, min_size=num + 1, max_size=num + 1)))
    return Chain(
        edges=tuple(map(tuple, edges)),
        nests=tuple(map(tuple, nests)),
        forward=np.array(demanded, np.int64),
        backward=array(*backward),
        shift=array(*shift),
        required=draw(st.integers(0, 40)),
        stored=np.array([np.cumsum([0, *sizes]) for sizes in stored]),
        work=work,
        tail=tail,
        reach=array(*draw(st.lists(st.integers(0, num), min_size=num + 1, max_size=num + 1))),
    )


def paths(chain: Chain, start: int, end: int, stores: int | None) -> dict[tuple[Pick, ...], Row]:
    """Every way through a stretch: regions, with cost and least memory at its start."""
    if start == end:
        return {(): (0.0, chain.required if stores is None else -1000)}
    extra, number = 0, stores or 0
    if stores is not None:
        extra = int(chain.shift[end] + chain.stored[stores, end])

    def is_inside(edge: Edge | NestEdge) -> bool:
        return edge.stop <= end if stores is None else edge.stop < end

    def late(edge: Edge | NestEdge, ready: float) -> float:
        """What a nest costs more or less because a region inside reaches its tail."""
        reaches = stores == 0 and edge.stop >= chain.reach[end]
        return ready - float(chain.tail[end]) if reaches else 0.0

    found: dict[tuple[Pick, ...], Row] = {}
    demand = max(int(chain.forward[number, start]) + extra, int(chain.backward[start]))
    for picks, (cost, need) in paths(chain, start + 1, end, stores).items():
        found[picks] = (cost, max(demand, need))
    for edge in filter(is_inside, chain.edges[start]):
        for k in range(len(edge.cost)):
            demand = max(int(edge.forward[number, k]) + extra, int(edge.backward[k]))
            saved = int(edge.saved[k])
            for picks, (cost, need) in paths(chain, edge.stop, end, stores).items():
                own = float(edge.cost[k]) + late(edge, float(edge.ready[k]))
                found[((edge.candidate, k, ()), *picks)] = (cost + own, max(demand, need - saved))
    for nest in filter(is_inside, chain.nests[start]):
        inside = paths(chain, start, nest.stop, nest.stores)
        behind = paths(chain, nest.stop, end, stores)
        for inner, (inner_cost, inner_need) in inside.items():
            for picks, (cost, need) in behind.items():
                demand = max(int(nest.forward[number]) + extra, inner_need + nest.held, need - nest.saved)
                own = nest.cost + late(nest, nest.ready)
                found[((nest.number, nest.stores, inner), *picks)] = (cost + inner_cost + own, demand)
    return found


def all_paths(chain: Chain) -> dict[tuple[Pick, ...], Row]:
    return paths(chain, 0, chain.last, None)


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
    full, never = np.full(len(saved), size), np.zeros(len(saved))
    edges = tuple((Edge(i, i + 1, i * size + full[None], i * size + full, saved, cost, never),) for i in range(num))
    spans: list[list[NestEdge]] = [[] for _ in range(num + 1)]
    for i in range(num if nests else 0):
        for j in range(i + 1, num + 1):
            freed = (j - i - 1) * size + int(saved[-1])
            spans[i].append(NestEdge(-1, 0, j, array((i + 1) * size), freed, 0, float(j - i), 0.0))
    base = np.arange(num, dtype=np.int64) * size + size
    nothing = np.zeros((1, num + 1), int)
    work, shift = np.zeros(num + 1), np.zeros(num + 1, int)
    never = np.full(num + 1, num + 1)
    return Chain(
        (*edges, ()), tuple(map(tuple, spans)), base[None], base, shift, num * size, nothing, work, work, never
    )


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


def test_tables_of_equal_stretches_are_filled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    num, taken, copy_states = 30, [], Table._copy_states

    def counted(*args: Any) -> int:
        taken.append(copy_states(*args))
        return taken[-1]

    monkeypatch.setattr(Table, "_copy_states", counted)
    table = Table(stack(num, array(8), np.ones(1), 10, nests=True))
    by_length, whole, ends = num, num, 2
    assert len(table._values) <= by_length + whole + ends
    assert sum(taken) >= sum(part.end - part.first for part in table._parts) - by_length


def test_nests_reach_below_what_single_blocks_reach() -> None:
    """Of 16 blocks of 10 bytes that keep 2 each, single regions need 10 + 2 * 15; a stack of stacks needs less."""
    flat = Table(stack(16, array(8), np.ones(1), 10))
    nested = Table(stack(16, array(8), np.ones(1), 10, nests=True))
    assert flat.smallest_limit == 40
    assert nested.smallest_limit < 24
    assert nested.picks(39) is not None


def test_a_region_that_lets_a_nest_stop_early_is_taken_where_it_needs_more_than_the_plain_step() -> None:
    zero, both = array(0, 0), np.zeros((NUM_SETS, 2), np.int64)
    inner = Edge(0, 1, np.ones((NUM_SETS, 1), np.int64), array(0), array(0), np.zeros(1), np.zeros(1))
    nest = NestEdge(-1, 0, 2, zero, 0, 0, 0.0, 0.0)
    work = np.array([0.0, 0.0, 1.0])
    chain = Chain(
        edges=((inner,), (), ()), nests=((nest,), (), ()), forward=both, backward=zero, shift=array(0, 0, 0),
        required=0, stored=np.zeros((NUM_SETS, 3), np.int64), work=work, tail=work, reach=array(0, 0, 0),
    )  # fmt: skip
    assert Table(chain, num_slots=512).picks(1) == ((-1, 0, ((0, 0, ()),)),)

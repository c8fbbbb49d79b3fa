"""A proved lower limit on the cost of recomputation at a budget.

While an op of backward runs, memory holds some set X of forward's results. Whatever backward still needs and X does
not hold runs again, and so does what that needs and X does not hold, and so on: planner formulation 1 over the whole
forward, with everything that is alive for other reasons for free. The optimum of its linear relaxation is a limit for
*every* schedule that runs the same forward and backward ops in the same order and may recompute any op alone, whatever
regions, nesting or stored outputs it uses. It is computed at the turn from forward to backward and at the events of
backward where least can be freed; the highest counts.

The optimum is a convex function of the budget. It is computed at the budgets of a fixed grid, with its slopes there,
which are limits everywhere: what is said of a budget does not depend on which others were asked for. Small programs are
solved in integers instead, for each budget.

Known limits: one event is looked at at a time, so the memory that recomputes themselves take is not counted, nor are
second recomputes. Offloading and casting are outside the claim.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np

from autoremat._step_graph import SavedTensor
from autoremat.solve._facts import Facts
from autoremat.solve._program import Program
from autoremat.solve._units import Inner, Unit, build_units

_TURN_OPS = 12
"""How many ops of backward the turn takes in: the loss has its largest tensors there."""
MAX_EVENTS = 24
_MAX_UNITS = 24_000
"""Events of backward that are looked at, fewer where each is a large program."""
_SMALL = 40
"""Programs of at most this many units are solved in integers: where there is little to choose, relaxing is weak."""
GRID = 48
"""Budgets between the smallest and the plain peak at which programs are solved."""
_COARSE = 8
"""At every so many of them all events are: at larger budgets an event asks for no more, so most need no second look."""
_SAFETY = 1e-6
"""Share of the cost of forward by which a computed limit is lowered: the solver's tolerances."""


class Bound:
    """Lower limits on cost for one step, at any number of budgets.

    Args:
        facts: The step.
        op_cost: Cost of each op.
        low: Smallest budget of interest, bytes.
        high: Largest; beyond it nothing needs to be recomputed.
    """

    def __init__(self, facts: Facts, op_cost: Sequence[float], low: int, high: int) -> None:
        self._facts, self._op_cost = facts, op_cost
        self._roots = [call.index for call in facts.graph.calls if call.parent == -1]
        self._low, self._width = low, max(1, -(-(high - low) // GRID))

    @cached_property
    def least_bytes(self) -> int:
        """No schedule of the same ops in the same order has a smaller peak."""
        return max((_least_bytes(self._facts, root) for root in self._roots), default=0)

    @cached_property
    def _steps(self) -> list[list[_Event]]:
        return [_events(self._facts, root, self._op_cost) for root in self._roots]

    def at(self, budget_bytes: int) -> float:
        """Least cost of the recomputes of any schedule within a budget; infinite if there is none."""
        cell = min(max(0, (budget_bytes - self._low) // self._width), GRID - 1)
        coarse, *grid = [self._low + position * self._width for position in (cell - cell % _COARSE, cell, cell + 1)]
        total = 0.0
        for events in self._steps:
            rows = [(e.most_cost(coarse) if coarse <= budget_bytes else float("inf"), e) for e in events]
            highest = 0.0
            for most, event in sorted(rows, key=lambda row: -row[0]):
                if most <= highest:
                    break
                highest = max(highest, event.least_cost(budget_bytes, grid))
            total += highest
        return total


class _Event:
    """The linear program at one op of backward."""

    def __init__(self, units: list[Unit], fixed_bytes: int) -> None:
        self._fixed_bytes = fixed_bytes
        self._total_bytes = sum(sum(unit.bytes_of.values()) for unit in units)
        self._total_cost = sum(unit.cost for unit in units)
        self._is_small = len(units) <= _SMALL
        self._program = Program(units, tie_break=0.0, is_integer=self._is_small)
        self._lines: dict[int, tuple[int, float, float]] = {}

    def least_cost(self, budget_bytes: int, grid: Sequence[int]) -> float:
        """A limit from the optima of the relaxation at other budgets, lowered by the solver's tolerance."""
        free_bytes = budget_bytes - self._fixed_bytes
        if free_bytes < 0:
            return float("inf")
        if free_bytes >= self._total_bytes:
            return 0.0
        lines = [self._line(free_bytes if self._is_small else budget - self._fixed_bytes) for budget in grid]
        least = max(value + slope * (free_bytes - at) for at, value, slope in lines)
        return max(0.0, least - _SAFETY) * self._total_cost

    def most_cost(self, budget_bytes: int) -> float:
        """What the limit cannot be above at this budget and at larger ones."""
        free_bytes = budget_bytes - self._fixed_bytes
        if free_bytes < 0:
            return float("inf")
        return 0.0 if free_bytes >= self._total_bytes else (self._line(free_bytes)[1] + _SAFETY) * self._total_cost

    def _line(self, free_bytes: int) -> tuple[int, float, float]:
        """Free bytes, optimum there and its slope (none for the integer program, which is solved for each budget)."""
        free_bytes = max(0, free_bytes)
        if free_bytes not in self._lines:
            self._lines[free_bytes] = (free_bytes, *self._program.optimum(free_bytes))
        return self._lines[free_bytes]


def _events(facts: Facts, root: int, op_cost: Sequence[float]) -> list[_Event]:
    """The turn of a micro-step and the fullest events of its backward; none without a backward."""
    graph = facts.graph
    span = graph.calls[root]
    records = _read_records(facts, root)
    unpacked = [r.unpacked for found in records.values() for r in found if r.unpacked is not None]
    first = min((clock for clock in unpacked if clock >= span.end), default=None)
    if first is None:
        return []
    end_of_step = next(end for start, end in facts.spans if start <= span.start < end)
    last = min(max(unpacked), end_of_step - 1)
    num_parts = max(1, min(MAX_EVENTS, _MAX_UNITS // max(1, len(records))))
    step = -(-(last + 1 - span.end) // num_parts)
    turn = min(first + _TURN_OPS, last) if step > 1 else span.end
    parts = [range(span.end - 1, turn), *(range(at, min(at + step, last + 1)) for at in range(turn, last + 1, step))]
    fixed = _FixedBytes(facts, records)
    return [_event(facts, root, records, fixed.highest(part), op_cost) for part in parts]


def _read_records(facts: Facts, root: int) -> dict[int, list[SavedTensor]]:
    """What backward reads of each storage that is born in a forward."""
    span = facts.graph.calls[root]
    inside = facts.born_in(span.start, span.end)
    return {s: [r for r in facts.records_of.get(s, ()) if r.unpacked is not None] for s in inside}


def _least_bytes(facts: Facts, root: int) -> int:
    """The most that any op of a micro-step demands, if everything that can be freed is."""
    start, end = next((a, b) for a, b in facts.spans if a <= facts.graph.calls[root].start < b)
    return _FixedBytes(facts, _read_records(facts, root)).highest(range(start, end))[1]


def _event(
    facts: Facts,
    root: int,
    records: dict[int, list[SavedTensor]],
    highest: tuple[int, int],
    op_cost: Sequence[float],
) -> _Event:
    clock, fixed_bytes = highest
    span = facts.graph.calls[root]
    needed = frozenset(s for s, found in records.items() if any((r.unpacked or 0) > clock for r in found))
    alive = frozenset(s for s in records if not _is_freeable(facts, records[s], s, clock))
    never, always = -1, len(facts.graph.ops)
    inner = Inner(
        calls=(root,),
        written=(root,),
        start=span.start,
        end=span.end,
        at=always,
        needed=needed,
        deaths={s: always if s in alive else never for s in records},
        pinned=alive,
    )
    units = build_units(facts, inner, op_cost)
    for unit in units:
        _relax(facts, unit, op_cost)
    return _Event(_reached(units), fixed_bytes)


def _reached(units: Sequence[Unit]) -> list[Unit]:
    """The units that backward needs from here on, and those that they need."""
    home = {s: unit for unit in units for s in unit.bytes_of}
    queue = [unit for unit in units if unit.needed]
    found = {id(unit) for unit in queue}
    while queue:
        for s in queue.pop().reads:
            if s in home and id(home[s]) not in found:
                found.add(id(home[s]))
                queue.append(home[s])
    return [unit for unit in units if id(unit) in found]


class _FixedBytes:
    """Bytes alive while an op of backward runs that no schedule can free."""

    def __init__(self, facts: Facts, records: dict[int, list[SavedTensor]]) -> None:
        num_ops = len(facts.graph.ops)
        change = np.zeros(num_ops + 1, np.int64)
        for s, found in records.items():
            size = facts.graph.storages[s].num_bytes
            edges = [facts.graph.storages[s].last_ref, facts.deaths[s]]
            edges += [clock for r in found if r.unpacked is not None for clock in (r.unpacked, r.released)]
            for start, stop in pairwise(sorted(edges)):
                if start < min(stop, num_ops) and facts.deaths[s] > start and _is_freeable(facts, found, s, start):
                    change[start] += size
                    change[min(stop, num_ops)] -= size
        self._fixed = facts.during - np.cumsum(change)[:num_ops]

    def highest(self, clocks: range) -> tuple[int, int]:
        """The clock at which most bytes cannot be freed, and how many."""
        at = clocks.start + int(np.argmax(self._fixed[clocks.start : clocks.stop]))
        return at, int(self._fixed[at])


def _is_freeable(facts: Facts, records: Sequence[SavedTensor], storage: int, clock: int) -> bool:
    """Whether only autograd holds a storage while an op runs, for later."""
    if facts.graph.storages[storage].last_ref > clock or facts.graph.storages[storage].born >= clock:
        return False
    return not any(r.unpacked is not None and r.unpacked <= clock < r.released for r in records)


def _relax(facts: Facts, unit: Unit, op_cost: Sequence[float]) -> None:
    """See a unit as the freest schedule does: all can be stored, and any one of its allocations can run alone.

    A schedule may hold a storage as it was before an in-place op, or want only one of several allocations: the unit
    counts for the cheapest op that allocates, and for the reads that all of those have.
    """
    unit.always_runs = False
    unit.unstorable = set()
    makers = sorted({facts.graph.storages[s].born for s in unit.storages})
    if makers:
        unit.cost = min(op_cost[index] for index in makers)
        for index in makers:
            unit.reads &= set(facts.graph.ops[index].inputs)

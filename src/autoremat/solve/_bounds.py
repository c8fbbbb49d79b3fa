"""A proved lower limit on the cost of recomputation at a budget.

At the turn from forward to backward, memory holds some set X of forward's results. Whatever backward still needs and X
does not hold runs again, and so does what that needs and X does not hold, and so on: planner formulation 1 over the
whole forward, with everything that is alive for other reasons for free. The optimum of its linear relaxation is a
limit for *every* schedule that runs the same forward and backward ops in the same order and may recompute any op
alone, whatever regions, nesting or stored outputs it uses.

Known limits: one event is looked at in each micro-step, so budgets that bind elsewhere (in the backward of a huge
block, in the optimizer) get a limit that is true but low. Offloading and casting are outside the claim.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoremat._step_graph import SavedTensor
from autoremat.solve._facts import Facts
from autoremat.solve._program import Program
from autoremat.solve._units import Inner, Unit, build_units

_TURN_OPS = 12
"""How many ops of backward the turn takes in: the loss has its largest tensors there."""
_SAFETY = 1e-6
"""Share of the cost of forward by which a computed limit is lowered: the solver's tolerances."""


class Bound:
    """Lower limits on cost for one step, at any number of budgets.

    Args:
        facts: The step.
        op_cost: Cost of each op.
    """

    def __init__(self, facts: Facts, op_cost: Sequence[float]) -> None:
        roots = [call.index for call in facts.graph.calls if call.parent == -1]
        turns = [_turn(facts, root, op_cost) for root in roots]
        self._turns = [turn for turn in turns if turn is not None]

    def at(self, budget_bytes: int) -> float:
        """Least cost of the recomputes of any schedule within a budget; infinite if there is none."""
        return sum(turn.least_cost(budget_bytes) for turn in self._turns)


class _Turn:
    """The linear program at the turn of one micro-step."""

    def __init__(self, units: list[Unit], fixed_bytes: int) -> None:
        self._fixed_bytes = fixed_bytes
        self._total_bytes = sum(sum(unit.bytes_of.values()) for unit in units)
        self._total_cost = sum(unit.cost for unit in units)
        self._program = Program(units, tie_break=0.0, is_integer=False)

    def least_cost(self, budget_bytes: int) -> float:
        """Optimum of the relaxation, lowered by the solver's tolerance."""
        free_bytes = budget_bytes - self._fixed_bytes
        if free_bytes < 0:
            return float("inf")
        if free_bytes >= self._total_bytes:
            return 0.0
        return max(0.0, self._program.optimum(free_bytes) - _SAFETY) * self._total_cost


def _turn(facts: Facts, root: int, op_cost: Sequence[float]) -> _Turn | None:
    """Set up the turn of a micro-step, at the event where most bytes cannot be freed; None without a backward."""
    graph = facts.graph
    span = graph.calls[root]
    inside = facts.born_in(span.start, span.end)
    records = {s: [r for r in facts.records_of.get(s, ()) if r.unpacked is not None] for s in inside}
    unpacked = [r.unpacked for found in records.values() for r in found if r.unpacked is not None]
    first = min((clock for clock in unpacked if clock >= span.end), default=None)
    if first is None:
        return None
    end_of_step = next(end for start, end in facts.spans if start <= span.start < end)
    stop = min(first + _TURN_OPS, end_of_step)
    fixed = {c: _fixed_bytes(facts, records, c) for c in range(span.end - 1, stop)}
    clock = max(fixed, key=lambda c: fixed[c])
    needed = frozenset(s for s, found in records.items() if any((r.unpacked or 0) > clock for r in found))
    alive = frozenset(s for s in inside if not _is_freeable(facts, records[s], s, clock))
    never, always = -1, len(graph.ops)
    inner = Inner(
        call=root,
        at=always,
        needed=needed,
        deaths={s: always if s in alive else never for s in inside},
        pinned=alive,
    )
    units = build_units(facts, inner, op_cost)
    for unit in units:
        _relax(facts, unit, op_cost)
    return _Turn(units, fixed[clock])


def _is_freeable(facts: Facts, records: Sequence[SavedTensor], storage: int, clock: int) -> bool:
    """Whether only autograd holds a storage while an op runs, for later."""
    if facts.graph.storages[storage].last_ref > clock or facts.graph.storages[storage].born >= clock:
        return False
    return not any(r.unpacked is not None and r.unpacked <= clock < r.released for r in records)


def _fixed_bytes(facts: Facts, records: dict[int, list[SavedTensor]], clock: int) -> int:
    """Bytes alive while an op runs that no schedule can free."""
    freeable = (s for s, found in records.items() if facts.deaths[s] > clock and _is_freeable(facts, found, s, clock))
    return int(facts.during[clock]) - sum(facts.graph.storages[s].num_bytes for s in freeable)


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

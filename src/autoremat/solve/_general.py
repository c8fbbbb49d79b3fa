"""Which regions, exactly: an integer program over all candidates at once, for any shape of graph.

The table (`_table`) sees a step as a chain of positions and takes what one region does to another at its worst. Here
every candidate ``c`` with an option ``k`` is a column, and nothing is assumed about where it lies:

    min  sum cost_ck z_ck       subject to
         sum z_ck <= 1                        over candidates that have an op in common
         live bytes at every moment <= limit  (linear in z and h, see `_effects`; loss and optimizer included)
         h >= each wish                       for each contested storage over each stretch of its life

Of thousands of moments a few dozen matter: they become rows when a solution breaks them, first of the relaxation, then
of the integer program. HiGHS runs on one thread and is limited by nodes, not by time, so the same step has the same
answer everywhere; ``Answer.bound`` says how far the search came.

Sources: planner formulation 4. Known limits: no regions inside regions (the table has those), and at most
`MAX_COLUMNS` columns: options in between are left out of steps with more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import highspy
import numpy as np
from highspy._core import _Highs

from autoremat._replay import RegionSpec
from autoremat._step_graph import ModuleCall, StepGraph
from autoremat.solve._effects import Choice, Effects, Shares, cliques
from autoremat.solve._facts import Facts
from autoremat.solve._problem import Problem
from autoremat.solve._units import moved

MAX_COLUMNS = 1200
MAX_NODES = 20
MAX_ROUNDS = 20
"""How often moments are added; a solution that breaks others even then is none."""
_MOMENTS_A_ROUND = 12
_LARGE_SHARE = 0.05
"""Sibling calls that save more than this share of the step make it branch, if the first does not feed the second."""
_SCALE = 1000.0
"""Bytes and costs are scaled to this: the solver's tolerances are absolute."""
_MIP_GAP = 1e-4
_TOLERANCE = 1e-7
"""Share of the limit by which a moment may break it: the solver rounds, and the ledger has the last word."""
_INFINITY = highspy.kHighsInf


@dataclass(frozen=True, slots=True)
class Answer:
    """What the program says of a limit.

    Attributes:
        regions: The regions that it chooses; None if there are none, or none that cost less than was asked for.
        cost: Their cost (with the little that tells apart equal ones).
        bound: No flat choice among the columns costs less.
    """

    regions: tuple[RegionSpec, ...] | None
    cost: float
    bound: float


_NONE = float("inf")


def branches(facts: Facts) -> bool:
    """Whether a step is more than a chain: a large call takes nothing that comes from the large sibling before it."""
    graph = facts.graph
    sizes: dict[int, int] = defaultdict(int)
    for record in graph.saved:
        around = record.call
        while around >= 0 and graph.storages[record.storage].born >= 0:
            sizes[around] += graph.storages[record.storage].num_bytes
            around = graph.calls[around].parent
    least = _LARGE_SHARE * sum(sizes[call.index] for call in graph.calls if call.parent == -1)
    last: dict[int, ModuleCall] = {}
    for call in graph.calls:
        if call.parent >= 0 and sizes[call.index] > least:
            if call.parent in last and not _feeds(graph, last[call.parent], call):
                return True
            last[call.parent] = call
    return False


def _feeds(graph: StepGraph, before: ModuleCall, after: ModuleCall) -> bool:
    """Whether an argument of one call depends on what an earlier call returned."""
    reached = set(before.outputs)
    for op in graph.ops[before.end : after.start]:
        if not reached.isdisjoint(op.inputs):
            reached.update(op.outputs, op.mutates)
    return not reached.isdisjoint(after.inputs)


class General:
    """The program of one step, for any limit.

    Args:
        problem: The step with its candidates and options.
    """

    def __init__(self, problem: Problem) -> None:
        self._facts = problem.facts
        self._rows = problem.segments.rows
        self.choices = tuple(_choices(problem))
        self.effects = Effects(problem.facts, self.choices)
        costs = [option.weight * len(c.candidate.members) for c in self.choices for option in c.options]
        self.costs = np.array(costs, np.float64)
        self.cliques = tuple(
            tuple(column for number in group for column in self.choices[number].columns)
            for group in cliques(problem.facts, self.choices)
        )

    def solve(self, limit_bytes: int, *, below: float = _NONE, max_nodes: int = MAX_NODES) -> Answer:
        """The cheapest choice within a limit.

        Args:
            limit_bytes: Bytes that may be alive at any moment.
            below: Cost that an answer must be below; the sooner nothing is, the faster.
            max_nodes: How many nodes of the search tree are looked at.
        """
        if not self.choices:
            return Answer(None, _NONE, 0.0)
        model = _Model(self, limit_bytes, below, max_nodes)
        if not model.settle():
            return Answer(None, _NONE, below)
        bound = model.bound()
        model.make_integer()
        if not model.settle():
            return Answer(None, _NONE, max(bound, model.bound()))
        chosen = np.flatnonzero(model.values > 0.5)
        return Answer(self._regions(set(chosen.tolist())), float(self.costs[chosen].sum()), max(bound, model.bound()))

    def _regions(self, columns: set[int]) -> tuple[RegionSpec, ...]:
        specs = [
            self._rows.folded(member.spec(kept))
            for choice in self.choices
            for column, stored in zip(choice.columns, choice.kept, strict=True)
            if column in columns
            for member, kept in zip(choice.candidate.members, stored, strict=True)
        ]
        return tuple(sorted(specs, key=lambda spec: self._facts.graph.calls[spec.call].start))


def _choices(problem: Problem) -> list[Choice]:
    """Candidates with their options, evenly thinned out where there are too many."""
    most = max(2, MAX_COLUMNS // max(1, len(problem.options)))
    found: list[Choice] = []
    for candidate, options in zip(problem.segments.candidates, problem.options, strict=True):
        chosen = tuple(options)
        if len(options) > most:
            chosen = tuple(options[round(p * (len(options) - 1) / (most - 1))] for p in range(most))
        first = candidate.members[0]
        kept = tuple(tuple(moved(problem.facts, first, m, o.kept) for m in candidate.members) for o in chosen)
        found.append(Choice(candidate, chosen, kept, found[-1].columns.stop if found else 0))
    return found


class _Model:
    """The program for one limit: rows come as they are found to matter."""

    def __init__(self, general: General, limit_bytes: int, below: float, max_nodes: int) -> None:
        self._effects = general.effects
        self._limit = limit_bytes
        self._num = general.effects.num_columns
        self._is_integer = False
        self._moments: set[int] = set()
        self._alive: dict[int, int] = {}
        """Column that says whether a contested storage is alive, by segment."""
        self._starts = np.array([segment.start for segment in general.effects.segments], np.int64)
        self._stops = np.array([segment.stop for segment in general.effects.segments], np.int64)
        self._byte = _SCALE / max(1.0, float(general.effects.plain.max()))
        self._cost = _SCALE / max(float(general.costs.max(initial=0.0)), 1e-300)
        self.values: Shares = np.zeros(self._num)
        self._highs = _Highs()  # `highspy.Highs` prints a banner before it can be told not to
        self._highs.setOptionValue("output_flag", False)
        self._highs.setOptionValue("threads", 1)
        self._highs.setOptionValue("mip_rel_gap", _MIP_GAP)
        self._highs.setOptionValue("mip_max_nodes", max_nodes)
        for _ in range(self._num):
            self._highs.addVar(0.0, 1.0)
        index = np.arange(self._num, dtype=np.int32)
        self._costs = general.costs * self._cost
        self._highs.changeColsCost(self._num, index, self._costs)
        for columns in general.cliques:
            self._add_row(-_INFINITY, 1.0, columns, [1.0] * len(columns))
        if below < _NONE:
            self._add_row(-_INFINITY, below * self._cost, range(self._num), self._costs.tolist())
        self._add_broken()

    def settle(self) -> bool:
        """Solve and add moments until none is broken; False if there is no solution."""
        for _ in range(MAX_ROUNDS):
            self._highs.run()
            if self._is_integer and not self._agrees():
                self._highs.setOptionValue("presolve", "off")
                self._highs.clearSolver()
                self._highs.run()
            status = self._highs.getInfo().primal_solution_status
            if status != int(highspy.SolutionStatus.kSolutionStatusFeasible):
                return False
            values = np.array(self._highs.getSolution().col_value)[: self._num]
            self.values = np.round(values) if self._is_integer else values
            if not self._add_broken():
                return True
        return False

    def _agrees(self) -> bool:
        """Whether the optimum is what the solution costs: HiGHS 1.16 presolves a few small programs to another one."""
        found = self._highs.getSolution().col_value[: self._num]
        cost = float(np.dot(self._costs, found)) if len(found) == self._num else 0.0
        return abs(self._highs.getInfo().objective_function_value - cost) <= _MIP_GAP * _SCALE

    def bound(self) -> float:
        """No solution costs less."""
        info = self._highs.getInfo()
        return float(info.mip_dual_bound if self._is_integer else info.objective_function_value) / self._cost

    def make_integer(self) -> None:
        """From the relaxation to the program itself."""
        self._is_integer = True
        kinds = np.full(self._num, highspy.HighsVarType.kInteger)
        self._highs.changeColsIntegrality(self._num, np.arange(self._num, dtype=np.int32), kinds)

    def _add_broken(self) -> int:
        """Add the worst moments at which more than the limit is alive: one of each stretch of them."""
        over = self._effects.profile(self.values) - self._limit
        broken = np.flatnonzero(over > max(0.5, _TOLERANCE * self._limit))
        worst = [
            int(part[np.argmax(over[part])])
            for part in np.array_split(broken, min(_MOMENTS_A_ROUND, max(1, len(broken))))
            if len(part)
        ]
        fresh = [moment for moment in worst if moment not in self._moments]
        for moment in fresh:
            self._add_moment(moment)
        return len(fresh)

    def _add_moment(self, moment: int) -> None:
        self._moments.add(moment)
        changes = self._effects.changes_at(moment)
        columns = np.flatnonzero(changes).tolist()
        values = (changes[columns] * self._byte).tolist()
        for position in np.flatnonzero((self._starts <= moment) & (moment < self._stops)).tolist():
            columns.append(self._alive_column(position))
            values.append(self._effects.segments[position].num_bytes * self._byte)
        self._add_row(-_INFINITY, (self._limit - int(self._effects.plain[moment])) * self._byte, columns, values)

    def _alive_column(self, position: int) -> int:
        if position not in self._alive:
            column = self._alive[position] = int(self._highs.getNumCol())
            self._highs.addVar(0.0, 1.0)
            for wish in self._effects.segments[position].wishes:
                self._add_row(
                    wish.constant, _INFINITY, [column, *wish.columns], [1.0, *[-wish.sign] * len(wish.columns)]
                )
        return self._alive[position]

    def _add_row(self, lower: float, upper: float, columns: Sequence[int], values: Sequence[float]) -> None:
        self._highs.addRow(lower, upper, len(columns), np.array(columns, np.int32), np.array(values, np.float64))

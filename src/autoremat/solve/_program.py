"""Planner formulation 1 as a HiGHS model: stored storages and rerun units under a falling limit on stored bytes.

With ``x`` (storage stored) and ``r`` (unit runs again):

    min  sum c r    subject to    r_u >= 1 - x_s             for storages s of u that autograd needs
                                  r_u >= r_o - x_s           where unit o reads storage s of u
                                  sum b x <= limit

Costs and bytes are scaled to sums of `_SCALE`, so that the solver's absolute tolerances mean the same for a toy and
for a model of 100 GB.
"""

from __future__ import annotations

from collections.abc import Sequence

import highspy
import numpy as np
from highspy._core import _Highs

from autoremat.solve._units import Unit

RESOLUTION = 10**6
"""Limits that differ by a smaller share than one in this many are the same to the solver's tolerance."""
_SCALE = 1000.0
_MIP_GAP = 1e-6
_INTEGRALITY = 1e-6


class Program:
    """The program of one region; only the limit changes between solves.

    Args:
        units: What can be stored and run.
        tie_break: Weight of moved and of stored bytes against the cost of everything.
        is_integer: False for the linear relaxation.
    """

    def __init__(self, units: Sequence[Unit], *, tie_break: float, is_integer: bool = True) -> None:
        self._num_units = len(units)
        self._is_integer = is_integer
        self._storages = [s for unit in units for s in unit.bytes_of]
        self._stored_bytes = np.array([size for unit in units for size in unit.bytes_of.values()], np.int64)
        self.total_bytes = max(1, int(self._stored_bytes.sum()))
        # `highspy.Highs` prints a banner before it can be told not to; its base class does not.
        self._highs = _Highs()
        self._highs.setOptionValue("output_flag", False)
        self._highs.setOptionValue("threads", 1)
        self._highs.setOptionValue("mip_rel_gap", _MIP_GAP)
        self._add_columns(units, tie_break)
        self._limit_row = self._add_rows(units)
        if is_integer:
            num_columns = self._num_units + len(self._storages)
            kinds = np.full(num_columns, highspy.HighsVarType.kInteger)
            self._highs.changeColsIntegrality(num_columns, np.arange(num_columns, dtype=np.int32), kinds)

    def _add_columns(self, units: Sequence[Unit], tie_break: float) -> None:
        moved = np.array([u.moved_bytes for u in units], float)
        cost = np.array([u.cost for u in units], float)
        running = cost / max(cost.sum(), 1e-300) + tie_break * moved / max(moved.sum(), 1.0)
        storing = tie_break / 10 * self._stored_bytes / self.total_bytes
        for unit in units:
            self._highs.addVar(1.0 if unit.always_runs else 0.0, 1.0)
        for unit in units:
            for s in unit.bytes_of:
                self._highs.addVar(0.0, 0.0 if s in unit.unstorable else 1.0)
        index = np.arange(len(running) + len(storing), dtype=np.int32)
        self._highs.changeColsCost(len(index), index, _SCALE * np.concatenate([running, storing]))

    def _add_rows(self, units: Sequence[Unit]) -> int:
        num, infinity = self._num_units, highspy.kHighsInf
        column = {s: num + position for position, s in enumerate(self._storages)}
        maker = {s: position for position, unit in enumerate(units) for s in unit.bytes_of}
        for position, unit in enumerate(units):
            for s in unit.needed:
                self._highs.addRow(1.0, infinity, 2, np.array([position, column[s]]), np.ones(2))
            for s in sorted(unit.reads):
                columns = np.array([maker[s], column[s], position])
                self._highs.addRow(0.0, infinity, 3, columns, np.array([1.0, 1.0, -1.0]))
        limit_row = int(self._highs.getNumRow())
        columns = np.arange(num, num + len(self._storages))
        self._highs.addRow(-infinity, infinity, len(columns), columns, _SCALE * self._stored_bytes / self.total_bytes)
        return limit_row

    def solve(self, limit_bytes: int | None) -> tuple[frozenset[int], int]:
        """Best storages to store within a limit, and their bytes."""
        self._run(limit_bytes)
        values = np.array(self._highs.getSolution().col_value)
        stored = np.flatnonzero(values[self._num_units :] > 0.5)
        return frozenset(self._storages[position] for position in stored), int(self._stored_bytes[stored].sum())

    def rounded(self, limit_bytes: int) -> tuple[frozenset[int], frozenset[int]]:
        """What the relaxation stores at least in part, and what it stores whole."""
        self._run(limit_bytes)
        values = np.array(self._highs.getSolution().col_value)[self._num_units :]
        return tuple(  # type: ignore[return-value]
            frozenset(self._storages[position] for position in np.flatnonzero(values > least))
            for least in (_INTEGRALITY, 1 - _INTEGRALITY)
        )

    def optimum(self, limit_bytes: int) -> tuple[float, float]:
        """Least cost within a limit, as a share of the cost of all units, and its change for each byte more.

        The change is 0 for the integer program.
        """
        self._highs.clearSolver()  # so that the last digits do not depend on what was solved before
        self._run(limit_bytes)
        duals = self._highs.getSolution().row_dual
        slope = 0.0 if self._is_integer else float(duals[self._limit_row])
        return float(self._highs.getObjectiveValue()) / _SCALE, slope / self.total_bytes

    def _run(self, limit_bytes: int | None) -> None:
        limit = highspy.kHighsInf if limit_bytes is None else _SCALE * limit_bytes / self.total_bytes
        self._highs.changeRowBounds(self._limit_row, -highspy.kHighsInf, limit)
        self._highs.run()
        if self._highs.getModelStatus() == highspy.HighsModelStatus.kUnknown:  # lost on its way from the limit before
            self._highs.clearSolver()
            self._highs.run()
        status = self._highs.getModelStatus()
        assert status == highspy.HighsModelStatus.kOptimal, f"running everything again is always possible: {status}"

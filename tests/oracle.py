"""The exact optimum over all schedules of one small step: Checkmate's integer program, solved by HiGHS.

Stage ``t`` runs op ``t`` of the plain step; before it, ops of forward may run again. ``R[t, i]`` says that op ``i``
does, ``S[t, s]`` that storage ``s`` is alive when the stage begins, ``F[t, s, i]`` that it dies after op ``i``. Ops of
backward run once, and what they make lives as in the plain step; nothing runs again during forward.

With ``where_read``, ops run again only before ops of backward that read what autograd saved: where a saved-tensor hook
can run something, which is all that a runtime in eager mode has. One autograd node may run several ops.

Only for steps without in-place ops, and for one micro-step. Source: Jain et al., Checkmate (MLSys 2020).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import highspy
import numpy as np
from highspy._core import _Highs

from autoremat._step_graph import StepGraph

Term = tuple[int, float]


class Checkmate:
    """The program of one step; only the budget changes between solves.

    Args:
        graph: The step.
        op_cost: Cost of each op.
        where_read: Run nothing again but where backward reads a saved tensor.
    """

    def __init__(self, graph: StepGraph, op_cost: Sequence[float], *, where_read: bool = False) -> None:
        assert not any(op.mutates and op.phase != "optimizer" and _changes(graph, op.mutates) for op in graph.ops)
        self.graph = graph
        self.hooks = {record.unpacked for record in graph.saved} if where_read else None
        self.cost: list[float] = []
        self.rows: list[tuple[list[Term], float]] = []
        """Terms and what they sum to at least."""
        self.memory: list[tuple[list[Term], float]] = []
        """Terms of forward's storages and bytes of the rest, one for each moment."""
        self.columns: dict[tuple[str, int, int, int], int] = {}
        self.fixed: dict[int, float] = {}
        self.stages = [op.index for op in graph.ops if op.phase != "optimizer" and not op.is_view]
        self.forward = [i for i in self.stages if graph.ops[i].phase == "forward"]
        self.storages = [s.index for s in graph.storages if s.born in set(self.forward)]
        self.reads = self._reads()
        self.rest = self._rest()
        self.op_cost = op_cost
        for stage, following in zip(self.stages, [*self.stages[1:], None], strict=True):
            self._stage(stage, following)

    def _reads(self) -> dict[int, set[int]]:
        """Storages of forward that each op needs."""
        made = set(self.storages)
        reads = {i: {s for s in self.graph.ops[i].inputs if s in made} for i in self.stages}
        for record in self.graph.saved:
            if record.unpacked is not None and record.storage in made:
                stage = min(i for i in self.stages if i >= record.unpacked)
                reads[stage].add(record.storage)
        return reads

    def _rest(self) -> dict[int, tuple[int, int]]:
        """Bytes of all other storages just before each op and while it runs."""
        others = [s for s in self.graph.storages if s.index not in set(self.storages)]
        before = {t: sum(s.num_bytes for s in others if s.born < t < max(s.last_ref, s.born + 1)) for t in self.stages}
        during = {t: sum(s.num_bytes for s in others if s.born <= t < max(s.last_ref, s.born + 1)) for t in self.stages}
        return {t: (before[t], during[t] + self.graph.ops[t].workspace_bytes) for t in self.stages}

    def _column(self, kind: str, *key: int) -> int:
        name = (kind, *key, *(-1,) * (3 - len(key)))
        if name not in self.columns:
            self.columns[name] = len(self.cost)
            self.cost.append(self.op_cost[key[1]] if kind == "R" else 0.0)
        return self.columns[name]

    def _again(self, stage: int, op: int) -> list[Term] | float:
        """Whether an op runs in a stage: a column, or a constant."""
        if op == stage:
            return 1.0
        if op > stage or self.graph.ops[stage].phase == "forward" or op not in self.forward:
            return 0.0
        if self.hooks is not None and stage not in self.hooks:
            return 0.0
        return [(self._column("R", stage, op), 1.0)]

    def _at_least(self, parts: Sequence[tuple[list[Term] | float, float]], least: float) -> None:
        """Sum of factor times part is at least a number."""
        terms: dict[int, float] = defaultdict(float)
        for part, factor in parts:
            if isinstance(part, float):
                least -= factor * part
            else:
                for column, value in part:
                    terms[column] += factor * value
        if terms:
            self.rows.append((list(terms.items()), least))
        else:
            assert least <= 0, "impossible"

    def _alive(self, stage: int | None, storage: int) -> list[Term] | float:
        born, last_ref = self.graph.storages[storage].born, self.graph.storages[storage].last_ref
        if stage is None or born >= stage:
            return 0.0
        return 1.0 if stage < last_ref else [(self._column("S", stage, storage), 1.0)]

    def _stage(self, stage: int, following: int | None) -> None:
        graph = self.graph
        runs = [i for i in self.forward if i < stage] if graph.ops[stage].phase == "backward" else []
        runs.append(stage)
        for op in runs:
            for s in self.reads[op]:
                born = graph.storages[s].born
                made = self._again(stage, born) if born < op else 0.0
                self._at_least([(self._alive(stage, s), 1), (made, 1), (self._again(stage, op), -1)], 0)
        for s in self.storages:
            if following is not None and graph.storages[s].born <= stage:
                made = self._again(stage, graph.storages[s].born)
                self._at_least([(self._alive(stage, s), 1), (made, 1), (self._alive(following, s), -1)], 0)
        self._memory(stage, following, runs)

    def _memory(self, stage: int, following: int | None, runs: Sequence[int]) -> None:
        graph = self.graph
        before, during = self.rest[stage]
        parts = [(self._alive(stage, s), graph.storages[s].num_bytes) for s in self.storages]
        for op in runs:
            parts += [(self._again(stage, op), graph.storages[s].num_bytes) for s in self._made(op)]
            workspace = 0 if op == stage else graph.ops[op].workspace_bytes
            self._limit(parts, (self._again(stage, op), workspace), during if op == stage else before)
            if op != stage:
                for s in {*self.reads[op], *self._made(op)}:
                    parts.append((self._freed(stage, following, runs, s, op), -graph.storages[s].num_bytes))

    def _made(self, op: int) -> list[int]:
        return [
            s
            for s in dict.fromkeys(self.graph.ops[op].outputs)
            if self.graph.storages[s].born == op and op in self.forward
        ]

    def _limit(
        self, parts: Sequence[tuple[list[Term] | float, int]], extra: tuple[list[Term] | float, int], rest: int
    ) -> None:
        terms: dict[int, float] = defaultdict(float)
        constant = float(rest)
        for part, size in (*parts, extra):
            if isinstance(part, float):
                constant += part * size
            else:
                for column, value in part:
                    terms[column] += value * size
        self.memory.append((list(terms.items()), constant))

    def _freed(self, stage: int, following: int | None, runs: Sequence[int], s: int, op: int) -> list[Term] | float:
        """A column that is one only if the op runs, nothing later in the stage reads the storage and it is not kept."""
        free = [(self._column("F", stage, s, op), 1.0)]
        hazards = [(self._alive(following, s), 1.0), (self._again(stage, op), -1.0)]
        hazards += [(self._again(stage, later), 1.0) for later in runs if later > op and s in self.reads[later]]
        for part, sign in hazards:
            # free <= 1 - hazard, and free <= whether the op runs
            self._at_least([(free, -1.0), (part, -sign)], -1.0 if sign > 0 else 0.0)
        return free

    def optimum(self, budget_bytes: int, *, time_limit_s: float = 60.0) -> float | None:
        """Least cost within a budget; infinite if nothing fits, None if time is up before it is proved."""
        rows, infinity = [*self.rows, *self.memory], highspy.kHighsInf
        if any(not terms and rest > budget_bytes for terms, rest in self.memory):
            return float("inf")
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(self.cost), len(rows)
        lp.col_cost_ = np.array(self.cost)
        lp.col_lower_, lp.col_upper_ = np.zeros(len(self.cost)), np.ones(len(self.cost))
        lp.row_lower_ = np.array([least for _, least in self.rows] + [-infinity] * len(self.memory))
        lp.row_upper_ = np.array([infinity] * len(self.rows) + [budget_bytes - rest for _, rest in self.memory])
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.cumsum([0] + [len(terms) for terms, _ in rows])
        lp.a_matrix_.index_ = np.array([column for terms, _ in rows for column, _ in terms])
        lp.a_matrix_.value_ = np.array([value for terms, _ in rows for _, value in terms], float)
        lp.integrality_ = [highspy.HighsVarType.kInteger] * len(self.cost)
        highs = _Highs()
        highs.setOptionValue("output_flag", False)
        highs.setOptionValue("threads", 1)
        highs.setOptionValue("mip_rel_gap", 1e-6)
        highs.setOptionValue("time_limit", time_limit_s)
        highs.passModel(lp)
        highs.run()
        if highs.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
            # HiGHS 1.16 presolves a few programs that have solutions to ones that have none.
            highs.setOptionValue("presolve", "off")
            highs.clearSolver()
            highs.run()
        status = highs.getModelStatus()
        if status == highspy.HighsModelStatus.kInfeasible:
            return float("inf")
        return float(highs.getObjectiveValue()) if status == highspy.HighsModelStatus.kOptimal else None


def _changes(graph: StepGraph, storages: Sequence[int]) -> bool:
    return any(graph.storages[s].cause not in ("buffer", "parameter") for s in storages)

"""From a traced step to finished plans: the planner, what the ledger says of its regions, and errors that explain.

A `Planning` is made once for a step, a target and an objective, and then answers for any budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import torch
from torch import nn

from autoremat._cost import step_seconds
from autoremat._errors import BudgetInfeasible, UsageError
from autoremat._frontier import Frontier, FrontierPoint
from autoremat._ledger import expand, peak_bytes, price
from autoremat._plan import Plan, Prediction
from autoremat._regions import describe_all
from autoremat._replay import RegionSpec
from autoremat._results import MemoryProfile
from autoremat._schedule import Action
from autoremat._step_graph import StepGraph
from autoremat._targets import Target, find_by_title, get_target
from autoremat._units import format_bytes
from autoremat.solve import Planner, Solution

Objective = Literal["time", "flops"]


class Planning:
    """All plans of one step, for one target and objective.

    Args:
        graph: The step.
        target: Device that times are predicted for.
        objective: What is minimised.
    """

    def __init__(self, graph: StepGraph, target: Target, objective: Objective) -> None:
        self.graph = graph
        self.target = target
        self.objective = objective
        self.op_seconds = step_seconds(graph, target)
        self.op_cost = self.op_seconds if objective == "time" else tuple(float(op.flops) for op in graph.ops)
        self.total_cost = max(sum(self.op_cost), 1e-30)
        self._recomputed: dict[tuple[RegionSpec, ...], tuple[int, float]] = {}
        self.planner = Planner(graph, op_cost=self.op_cost, price=self._price)

    def _price(self, specs: Sequence[RegionSpec]) -> int:
        """Peak of the step with these regions; what they recompute is written down on the way."""
        schedule = expand(self.graph, specs)
        again = [event.op for event in schedule.events if event.action is Action.RECOMPUTE]
        flops, seconds = sum(self.graph.ops[i].flops for i in again), sum(self.op_seconds[i] for i in again)
        self._recomputed[tuple(specs)] = flops, seconds
        return peak_bytes(self.graph, schedule)

    def plan(self, budget_bytes: int) -> Plan:
        """The plan for a budget.

        Raises:
            BudgetInfeasible: If no plan fits; carries the smallest budget that does.
        """
        solution = self.planner.plan(budget_bytes)
        if solution.peak_bytes > budget_bytes:
            raise self._infeasible(budget_bytes)
        return self.make_plan(solution.regions, budget_bytes, solution.bound / self.total_cost)

    def frontier(self, num_points: int) -> Frontier:
        """Plans for all budgets."""
        curve = self.planner.frontier(num_points)
        return Frontier(
            points=tuple(self._point(solution) for solution in curve),
            plain_bytes=self.planner.plain_bytes,
            smallest_bytes=self.planner.smallest_bytes,
            static_bytes=self.graph.static_bytes,
            model=self.graph.model,
            target=self.target.name,
            objective=self.objective,
            make_plan=self.plan,
        )

    def _point(self, solution: Solution) -> FrontierPoint:
        flops, seconds = self._recomputed[solution.regions]
        return FrontierPoint(
            peak_bytes=solution.peak_bytes,
            overhead_flops=(self.graph.flops + flops) / max(1, self.graph.flops) - 1,  # as `Plan.overhead_flops`
            overhead_s=seconds / max(1e-30, sum(self.op_seconds)),
            bound=solution.bound / self.total_cost,
            num_regions=len(solution.regions),
        )

    def _infeasible(self, budget_bytes: int) -> BudgetInfeasible:
        """Say what the smallest peak is made of."""
        smallest = self.planner.smallest_bytes
        tightest = self.planner.plan(smallest)
        found = price(self.graph, expand(self.graph, tightest.regions), self.op_seconds)
        causes = sorted(found.peak_by_cause.items(), key=lambda item: -item[1])[:3]
        parts = ", ".join(f"{cause.replace('_', ' ')} {format_bytes(size)}" for cause, size in causes)
        return BudgetInfeasible(
            f"No plan for {self.graph.model} fits into {format_bytes(budget_bytes)} ({budget_bytes} bytes). The "
            f"smallest budget that does is {format_bytes(smallest)} ({smallest} bytes): {parts} at {found.peak_at}. "
            "Raise the budget, or use a smaller batch, a lower precision or an optimizer with less state.",
            budget_bytes=budget_bytes,
            smallest_bytes=smallest,
        )

    def make_plan(self, specs: Sequence[RegionSpec], budget_bytes: int | None, bound: float | None) -> Plan:
        """Write regions as a plan.

        Args:
            specs: Regions of the step.
            budget_bytes: What they are for, if anything.
            bound: Least overhead of any plan within it.
        """
        graph = self.graph
        plain = price(graph, expand(graph), self.op_seconds)
        planned = price(graph, expand(graph, specs), self.op_seconds)
        return Plan(
            regions=describe_all(graph, specs),
            budget_bytes=budget_bytes,
            plain=_prediction(plain),
            planned=_prediction(planned),
            smallest_bytes=self.planner.smallest_bytes,
            static_bytes=graph.static_bytes,
            model=graph.model,
            model_signature=graph.model_signature,
            input_signature=graph.input_signature,
            optimizer=graph.optimizer,
            precision=graph.precision,
            accumulate=graph.accumulate,
            target=self.target.name,
            objective=self.objective,
            bound=bound,
            versions={"autoremat": _version(), "torch": torch.__version__},
        )


def find_target(model: nn.Module | StepGraph | None, target: str | Target | None, device_kind: str = "cpu") -> Target:
    """The target that was named, or the one of the device at hand.

    Args:
        model: Where it runs; None or a step leaves only the kind of device.
        target: A target, its name, or None.
        device_kind: "cpu" or "cuda".

    Raises:
        UsageError: If the name is unknown, or the GPU here is one that no target describes.
    """
    if isinstance(target, Target):
        return target
    if target is not None:
        return get_target(target)
    device = next((p.device for p in model.parameters()), None) if isinstance(model, nn.Module) else None
    if device is None or device.type != "cuda":
        return get_target("cpu" if device_kind == "cpu" else "a100-80g")
    name = torch.cuda.get_device_name(device)
    found = find_by_title(name)
    if found is None:
        raise UsageError(f"No target describes this GPU ({name}). Give target= one that is like it.")
    return found


def choose_objective(graph: StepGraph, target: str | Target | None, objective: Objective | None) -> Objective:
    """What was asked for; else time where the device is known, FLOPs where it is not."""
    return objective or ("time" if target is not None or graph.device_kind == "cuda" else "flops")


def _prediction(found: MemoryProfile) -> Prediction:
    return Prediction(
        peak_bytes=found.peak_bytes,
        peak_by_cause=dict(found.peak_by_cause),
        peak_at=found.peak_at,
        flops=found.flops,
        seconds=found.step_s,
    )


def _version() -> str:
    try:
        return version("autoremat")
    except PackageNotFoundError:
        return "0"

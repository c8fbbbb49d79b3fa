"""From a traced step to finished plans: the planner, what the ledger says of its regions, and errors that explain.

A `Planning` is made once for a step, a target and an objective, and then answers for any budget.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import torch
from torch import nn

from autoremat._allocator_settings import DEFAULT_SETTINGS, AllocatorSettings
from autoremat._cost import RegionCost, relative_error, step_seconds
from autoremat._errors import BudgetInfeasible, UsageError
from autoremat._floor import floor
from autoremat._frontier import Frontier, FrontierPoint, NamedPoint
from autoremat._ledger import expand, price
from autoremat._plan import Plan, Prediction
from autoremat._prices import Prices
from autoremat._reasons import Floor
from autoremat._regions import describe_all
from autoremat._replay import RegionSpec
from autoremat._reserved import reserved
from autoremat._results import AllocatorUsage, MemoryProfile
from autoremat._step_graph import StepGraph
from autoremat._targets import HERE, Target, find_by_title, get_target, this_machine
from autoremat._units import format_bytes
from autoremat.solve import CLASSIC_NAMES, Planner, Solution, classic_regions

Objective = Literal["time", "flops"]
BudgetKind = Literal["allocated", "reserved"]
_RESERVED_ROUNDS = 4
"""How often a plan whose reserved bytes exceed the budget is made again with less."""
_FLAT = " That is without regions inside regions (for_compile=True): without torch.compile, less may do."


class Planning:
    """All plans of one step, for one target and objective.

    Args:
        graph: The step.
        target: Device that times are predicted for.
        objective: What is minimised.
        settings: Of the caching allocator, on a CUDA target.
        for_compile: Whether plans are for compiled code, which can express less.
    """

    def __init__(
        self,
        graph: StepGraph,
        target: Target,
        objective: Objective,
        settings: AllocatorSettings = DEFAULT_SETTINGS,
        *,
        for_compile: bool = False,
    ) -> None:
        self.graph = graph
        self.for_compile = for_compile
        self.settings = settings
        self.target = target
        self.objective = objective
        self.op_seconds = step_seconds(graph, target)
        self.op_cost = self.op_seconds if objective == "time" else tuple(float(op.flops) for op in graph.ops)
        self.total_cost = max(sum(self.op_cost), 1e-30)
        self._prices = Prices(graph)
        self.region_cost = RegionCost(graph, target)
        self._planner: Planner | None = None

    @property
    def planner(self) -> Planner:
        """The planner; its setup is the work."""
        if self._planner is None:
            around = self.region_cost if self.objective == "time" else None
            self._planner = Planner(
                self.graph,
                op_cost=self.op_cost,
                price=self._prices.peak_bytes,
                region_cost=around,
                flat=self.for_compile,
            )
        return self._planner

    def plan(self, budget_bytes: int) -> Plan:
        """The plan for a budget.

        Raises:
            BudgetInfeasible: If no plan fits; carries the smallest budget that does.
        """
        solution = self.planner.plan(budget_bytes)
        if solution.peak_bytes > budget_bytes:
            raise self._infeasible(budget_bytes)
        return self.make_plan(solution.regions, budget_bytes, solution.bound / self.total_cost)

    def plan_reserved(self, budget_bytes: int) -> Plan:
        """The plan for a budget of reserved bytes: the limit on allocated ones is tightened until those are within it.

        The bound is that of the budget itself: whoever reserves no more than it allocates no more than it.

        Raises:
            BudgetInfeasible: If even the plan with the least allocated bytes reserves too much.
        """
        smallest, limit = self.planner.smallest_bytes, budget_bytes
        solution = self.planner.plan(limit)
        bound = solution.bound / self.total_cost
        for rounds_left in range(_RESERVED_ROUNDS, -1, -1):
            usage = reserve_step(self.graph, solution.regions, self.target, self.settings)
            excess = usage.reserved_bytes - budget_bytes
            if excess <= 0:
                return self.make_plan(solution.regions, budget_bytes, bound, budget_is="reserved")
            if limit <= smallest:
                break
            limit = max(smallest, min(limit, solution.peak_bytes) - excess) if rounds_left > 1 else smallest
            solution = self.planner.plan(limit)
        raise BudgetInfeasible(
            f"No plan for {self.graph.model} was found that reserves at most {format_bytes(budget_bytes)} "
            f"({budget_bytes} bytes): the smallest allocates {format_bytes(usage.allocated_bytes)} and reserves "
            f"{format_bytes(usage.reserved_bytes)} ({usage.reserved_bytes} bytes). Raise the budget, or try "
            "allocator='expandable_segments:True', which fragments less.",
            budget_bytes=budget_bytes,
            smallest_bytes=usage.reserved_bytes,
        )

    def classic(self, name: str) -> Plan:
        """A schedule that is known by name, as a plan without a budget.

        Raises:
            UsageError: If there is none of that name.
        """
        specs = classic_regions(self.graph, name)
        if specs is None:
            raise UsageError(
                f"No schedule {name!r}. There are {', '.join(CLASSIC_NAMES)}, with any positive number after a colon; "
                "what follows save: is joined by +."
            )
        return self.make_plan(specs)

    def _named_point(self, name: str) -> NamedPoint:
        specs = classic_regions(self.graph, name)
        assert specs is not None, "every name in the list is known"
        found = price(self.graph, expand(self.graph, specs), self.op_seconds)
        around_s = self.region_cost.total(specs)
        return NamedPoint(
            name=name,
            peak_bytes=found.peak_bytes,
            overhead_flops=found.flops / max(1, self.graph.flops) - 1,
            overhead_s=(found.step_s + around_s) / max(1e-30, sum(self.op_seconds)) - 1,
        )

    def frontier(self, num_points: int, *, with_classics: bool = False) -> Frontier:
        """Plans for all budgets, with schedules known by name beside them if they are asked for."""
        curve = self.planner.frontier(num_points)
        return Frontier(
            points=tuple(self._point(solution) for solution in curve),
            plain_bytes=self.planner.plain_bytes,
            smallest_bytes=self.planner.smallest_bytes,
            static_bytes=self.graph.static_bytes,
            model=self.graph.model,
            target=self.target.name,
            objective=self.objective,
            classics=tuple(map(self._named_point, CLASSIC_NAMES)) if with_classics else (),
            make_plan=self.plan,
        )

    def _point(self, solution: Solution) -> FrontierPoint:
        again = self._prices.recomputed(solution.regions)
        flops, seconds = sum(self.graph.ops[i].flops for i in again), sum(self.op_seconds[i] for i in again)
        plain_s = max(1e-30, sum(self.op_seconds))
        seconds += self.region_cost.total(solution.regions)
        return FrontierPoint(
            peak_bytes=solution.peak_bytes,
            overhead_flops=(self.graph.flops + flops) / max(1, self.graph.flops) - 1,  # as `Plan.overhead_flops`
            overhead_s=seconds / plain_s,
            bound=solution.bound / self.total_cost,
            num_regions=len(solution.regions),
        )

    def floor(self) -> Floor:
        """What stops a budget from going lower."""
        tightest = self.planner.plan(self.planner.smallest_bytes)
        return floor(self.graph, tightest.regions, self.op_seconds, least_bytes=self.planner.least_bytes)

    def _infeasible(self, budget_bytes: int) -> BudgetInfeasible:
        """Say what the smallest peak is made of."""
        smallest = self.planner.smallest_bytes
        found = self.floor()
        causes = sorted(found.by_cause.items(), key=lambda item: -item[1])[:3]
        parts = ", ".join(f"{cause.replace('_', ' ')} {format_bytes(size)}" for cause, size in causes)
        return BudgetInfeasible(
            f"No plan for {self.graph.model} fits into {format_bytes(budget_bytes)} ({budget_bytes} bytes). The "
            f"smallest budget that does is {format_bytes(smallest)} ({smallest} bytes): {parts} at {found.at}. "
            f"{found.advice} Or raise the budget, or use a smaller batch, a lower precision or an optimizer with less "
            f"state.{_FLAT if self.for_compile else ''}",
            budget_bytes=budget_bytes,
            smallest_bytes=smallest,
        )

    def make_plan(
        self,
        specs: Sequence[RegionSpec],
        budget_bytes: int | None = None,
        bound: float | None = None,
        *,
        budget_is: BudgetKind = "allocated",
    ) -> Plan:
        """Write regions as a plan.

        Args:
            specs: Regions of the step.
            budget_bytes: What they are for, if anything.
            bound: Least overhead of any plan within it.
            budget_is: Which bytes the budget is for.
        """
        graph = self.graph
        plain, planned = (
            price_step(graph, chosen, self.op_seconds, self.target, self.settings) for chosen in ((), specs)
        )
        planned = dataclasses.replace(planned, step_s=planned.step_s + self.region_cost.total(specs))
        return Plan(
            regions=describe_all(graph, specs),
            budget_bytes=budget_bytes,
            plain=_prediction(plain),
            planned=_prediction(planned),
            smallest_bytes=None if self._planner is None else self._planner.smallest_bytes,
            static_bytes=graph.static_bytes,
            model=graph.model,
            model_signature=graph.model_signature,
            input_signature=graph.input_signature,
            optimizer=graph.optimizer,
            precision=graph.precision,
            around=graph.around,
            parallel=graph.parallel,
            accumulate=graph.accumulate,
            target=self.target.name,
            objective=self.objective,
            bound=bound,
            time_error=relative_error(graph, self.target),
            budget_is=budget_is,
            allocator=self.settings.to_text(),
            versions={"autoremat": _version(), "torch": torch.__version__},
        )


def price_step(
    graph: StepGraph,
    specs: Sequence[RegionSpec],
    op_seconds: Sequence[float],
    target: Target,
    settings: AllocatorSettings,
) -> MemoryProfile:
    """The profile of a step with these regions; on a CUDA target with what the caching allocator reserves for it."""
    found = price(graph, expand(graph, specs), op_seconds)
    if target.device_kind != "cuda":
        return found
    return dataclasses.replace(found, allocator=reserve_step(graph, specs, target, settings))


def reserve_step(
    graph: StepGraph, specs: Sequence[RegionSpec], target: Target, settings: AllocatorSettings
) -> AllocatorUsage:
    """What the caching allocator takes for a step with these regions."""
    return reserved(graph, expand(graph, specs), settings, blas_workspace_bytes=target.blas_workspace_bytes)


def read_allocator(allocator: str | AllocatorSettings | None) -> AllocatorSettings:
    """Settings as given, or read from text; torch's defaults for None."""
    if allocator is None:
        return DEFAULT_SETTINGS
    return AllocatorSettings.parse(allocator) if isinstance(allocator, str) else allocator


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
    if target is not None and target.strip().lower() == HERE:
        return this_machine(torch.get_num_threads())
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


def blas_workspace_bytes(model: nn.Module, target: str | Target | None) -> int:
    """Workspace of each thread's cuBLAS handle on the target, or on the GPU that the model is on; else 0."""
    device = next((p.device for p in model.parameters()), None)
    if target is not None or device is None or device.type != "cuda":
        return find_target(model, target).blas_workspace_bytes
    found = find_by_title(torch.cuda.get_device_name(device))
    return get_target("a100-80g").blas_workspace_bytes if found is None else found.blas_workspace_bytes


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
        reserved_bytes=None if found.allocator is None else found.allocator.reserved_bytes,
    )


def _version() -> str:
    try:
        return version("autoremat")
    except PackageNotFoundError:
        return "0"

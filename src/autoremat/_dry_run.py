"""Run a plan without memory: the planned model's step on fake tensors, recorded op by op.

The ledger works out from the plain step what a plan would do. Here the runtime does it: the plan is applied to a fake
copy of the model, its step runs, and what lives when is written down by the same recorder that traces plain steps.
The two must agree, and nothing of the schedule's logic is used for it.

Known limits: random states are counted on CPU only (those of a CUDA generator lie in host memory). The values of
fake activations are not compared: that is what `verify` does on real ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from autoremat._build_graph import trace
from autoremat._capture import Recorder
from autoremat._errors import BudgetInfeasible, PlanError
from autoremat._ledger import expand, price
from autoremat._plan import Plan
from autoremat._planning import blas_workspace_bytes, find_target
from autoremat._reserved import with_blas_workspaces
from autoremat._results import MemoryProfile
from autoremat._step import Batch
from autoremat._step_graph import StepGraph
from autoremat._targets import Target
from autoremat._units import format_bytes
from autoremat.runtime import apply
from autoremat.runtime._ambient import state_watchers
from autoremat.runtime._stand_in import StandIn

RANDOM_STATE = "autoremat.random_state"
"""Name of the op that stands for reading a random state."""
MAX_ROUNDS = 3
"""How often a plan is made again with less because its dry run was over the budget."""


def dry_run(
    model: nn.Module, batch: Batch, plan: Plan, *, target: str | Target | None = None, **trace_options: Any
) -> MemoryProfile:
    """Live bytes by cause over a planned step, as the runtime executes it on fake tensors.

    Args:
        model: As for `trace`; it is not changed.
        batch: As for `trace`.
        plan: The plan to run.
        target: As for `trace`.
        **trace_options: As for `trace`: what the plan was made with, except ``parallel`` and ``cost``.

    Returns:
        The profile; its times are not predicted (0).

    Raises:
        PlanMismatch: If the plan was made for another model.
        RecomputeError: If the runtime refuses to recompute a region, as it would in training.

    Example:
        >>> from autoremat import Plan, Region
        >>> model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4)])
        >>> x, options = torch.ones(512, 8), {"loss": lambda y: y.sum(), "optimizer": None}
        >>> blocks = Plan(tuple(Region(str(i)) for i in range(4)))
        >>> plain, planned = (dry_run(model, x, plan, **options) for plan in (Plan(()), blocks))
        >>> planned.peak_bytes < plain.peak_bytes
        True
    """
    device_kind = None if target is None else find_target(model, target).device_kind
    graph = trace_planned(model, batch, plan, device_kind=device_kind, **trace_options)
    graph = with_blas_workspaces(graph, blas_workspace_bytes(model, target))
    return price(graph, expand(graph), [0.0] * len(graph.ops))


def trace_planned(model: nn.Module, batch: Batch, plan: Plan, **trace_options: Any) -> StepGraph:
    """A planned step as it runs: recompute is part of its backward.

    Args:
        model: As for `dry_run`.
        batch: As for `dry_run`.
        plan: As for `dry_run`.
        **trace_options: As for `autoremat._build_graph.trace`.
    """

    @contextlib.contextmanager
    def attach(twin: nn.Module, recorder: Recorder) -> Iterator[None]:
        def watch(state: torch.Tensor) -> None:
            recorder.adopt(state, RANDOM_STATE)

        recorder.without_memory = (StandIn,)
        state_watchers.append(watch)
        try:
            with apply(twin, plan, check="never"):
                yield
        finally:
            state_watchers.remove(watch)

    return trace(model, batch, attach=attach, **trace_options)


def keep_budget(make: Callable[[int], Plan], budget_bytes: int, run: Callable[[Plan], MemoryProfile]) -> Plan:
    """Make a plan whose dry run is within a budget, and promise the peak of that run.

    If a run is over, the plan is made again for a budget that is smaller by the excess, at most `MAX_ROUNDS` times.

    Args:
        make: Makes a plan for a budget, bytes.
        budget_bytes: The budget.
        run: Runs a plan dry.

    Raises:
        BudgetInfeasible: If no smaller plan is left.
        PlanError: If the last round is still over.
    """
    limit = budget_bytes
    bound, excess = None, 0
    for _ in range(MAX_ROUNDS):
        try:
            made = make(limit)
        except BudgetInfeasible as error:
            if not excess:
                raise
            raise BudgetInfeasible(
                f"The plan for {format_bytes(budget_bytes)} ({budget_bytes} bytes) is over it by {excess} bytes when "
                "it runs on fake tensors, and no smaller one is left. Raise the budget.",
                budget_bytes=budget_bytes,
                smallest_bytes=error.smallest_bytes + excess,
            ) from error
        bound = made.bound if bound is None else bound  # that of the budget which was asked for
        made = dataclasses.replace(made, budget_bytes=budget_bytes, bound=bound)
        if not made.regions or made.planned is None:
            return made
        found = run(made)
        excess = found.peak_bytes - budget_bytes
        if excess <= 0:
            return _promise(made, found)
        limit = max(1, min(limit, made.planned.peak_bytes) - excess)
    raise PlanError(
        f"After {MAX_ROUNDS} rounds the plan's dry run is still over the budget of {budget_bytes} bytes by {excess}. "
        "Raise the budget by that, or plan without the dry run (dry_run=False)."
    )


def _promise(made: Plan, found: MemoryProfile) -> Plan:
    """The plan with the peak that its dry run had."""
    assert made.planned is not None
    if found.peak_bytes == made.planned.peak_bytes:
        return made
    planned = dataclasses.replace(
        made.planned, peak_bytes=found.peak_bytes, peak_by_cause=dict(found.peak_by_cause), peak_at=found.peak_at
    )
    return dataclasses.replace(made, planned=planned)

"""Run a plan without memory: the planned model's step on fake tensors, recorded op by op.

The ledger works out from the plain step what a plan would do. Here the runtime does it: the plan is applied to a fake
copy of the model, its step runs, and what lives when is written down by the same recorder that traces plain steps.
The two must agree, and nothing of the schedule's logic is used for it.

Known limits: random states are counted on CPU only (those of a CUDA generator lie in host memory). The values of
fake activations are not compared: that is what `verify` does on real ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from autoremat._build_graph import trace
from autoremat._capture import Recorder
from autoremat._ledger import expand, price
from autoremat._plan import Plan
from autoremat._results import MemoryProfile
from autoremat._step import Batch
from autoremat._step_graph import StepGraph
from autoremat.runtime import apply
from autoremat.runtime._ambient import state_watchers

RANDOM_STATE = "autoremat.random_state"
"""Name of the op that stands for reading a random state."""


def dry_run(model: nn.Module, batch: Batch, plan: Plan, **trace_options: Any) -> MemoryProfile:
    """Live bytes by cause over a planned step, as the runtime executes it on fake tensors.

    Args:
        model: As for `trace`; it is not changed.
        batch: As for `trace`.
        plan: The plan to run.
        **trace_options: As for `autoremat._build_graph.trace`: what the plan was made with.

    Returns:
        The profile; its times are not predicted (0).

    Raises:
        PlanMismatch: If the plan was made for another model.
        RecomputeError: If the runtime refuses to recompute a region, as it would in training.

    Example:
        >>> from autoremat import Plan, Region
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))
        >>> x, options = torch.ones(4, 8), {"loss": lambda y: y.sum(), "optimizer": None}
        >>> plain, planned = (dry_run(model, x, plan, **options) for plan in (Plan(), Plan(regions=(Region("1"),))))
        >>> planned.peak_bytes < plain.peak_bytes
        True
    """
    graph = trace_planned(model, batch, plan, **trace_options)
    return price(graph, expand(graph), [0.0] * len(graph.ops))


def trace_planned(model: nn.Module, batch: Batch, plan: Plan, **trace_options: Any) -> StepGraph:
    """A planned step as it runs: recompute is part of its backward.

    Args:
        model: As for `dry_run`.
        batch: As for `dry_run`.
        plan: As for `dry_run`.
        **trace_options: As for `dry_run`.
    """

    @contextlib.contextmanager
    def attach(twin: nn.Module, recorder: Recorder) -> Iterator[None]:
        def watch(state: torch.Tensor) -> None:
            recorder.adopt(state, RANDOM_STATE)

        state_watchers.append(watch)
        try:
            with apply(twin, plan, check="never"):
                yield
        finally:
            state_watchers.remove(watch)

    return trace(model, batch, attach=attach, **trace_options)

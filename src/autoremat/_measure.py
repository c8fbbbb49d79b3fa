"""Measure a real step: peak of live bytes by an independent judge, and wall time, beside the prediction.

On CPU the judge is torch's profiler: its raw memory events, which the allocator itself emits. They are read from
``kineto_results.events()``; ``prof.events()`` shows only a few of them. On CUDA it is the caching allocator.

Known limit: what was alive before the step is counted from tensors (parameters, buffers, optimizer state, batch), since
neither judge says what it was.
"""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_iter

from autoremat._errors import TraceError, UsageError
from autoremat._fake import is_fake
from autoremat._memory_meter import make_way, unique_bytes
from autoremat._model_states import EmaFactory, OptimizerFactory, States, StatesFactory
from autoremat._plan import Plan
from autoremat._results import MeasuredStep, UsageReport
from autoremat._state import preserved
from autoremat._step import Batch, LossFunction, Precision, check_batch, check_step, own_batch, run_step
from autoremat.runtime import apply

Progress = Callable[[str, float], None]


def measure(
    model: nn.Module,
    batch: Batch,
    plan: Plan | None = None,
    *,
    loss: LossFunction | None = None,
    optimizer: str | OptimizerFactory | None = "adamw",
    precision: str | None = None,
    gradients: str = "fresh",
    accumulate: int = 1,
    scaler: bool | GradScaler = False,
    ema: bool | EmaFactory = False,
    clip_grad_norm: float | None = None,
    num_steps: int = 3,
    plain: bool = True,
    progress: Progress | None = None,
) -> UsageReport:
    """Run real training steps, plain and planned in turn, and measure peak and time. The model is left as it was.

    Args:
        model: With real parameters, on the device to measure.
        batch: As for `trace`.
        plan: The plan to measure; None measures the plain step alone.
        loss: As for `trace`.
        optimizer: As for `trace`; its state exists before the measured steps.
        precision: As for `trace`; casts are the caller's business, autocast is applied.
        gradients: As for `trace`.
        accumulate: Micro-steps in an optimizer step.
        scaler: As for `trace`; True starts at a scale of 1, so that no step is left out.
        ema: As for `trace`.
        clip_grad_norm: As for `trace`.
        num_steps: Timed steps of each kind; their median counts.
        plain: Whether to measure the plain step too.
        progress: Called with a label and a fraction done.

    Returns:
        Measured and predicted peaks (bytes) and step times (seconds).

    Raises:
        TraceError: If the model's parameters are fake.
        PlanMismatch: If the plan was made for another model.
        UsageError: If the plan was made for one of several devices.
    """
    if is_fake(model):
        raise TraceError(
            f"{type(model).__name__} has no weights in memory, so it cannot run. Build it without fake_weights()."
        )
    if plan is not None and plan.parallel:
        raise UsageError(
            f"The plan is for one of several devices ({plan.parallel}), and this would measure a device alone. "
            "Apply the plan in the job that runs on all of them, or measure one that was made without parallel=."
        )
    check_batch(model, batch)
    check_step(gradients=gradients, accumulate=accumulate, clip_grad_norm=clip_grad_norm)
    step = _Step(
        model, own_batch(batch), loss, Precision.parse(precision), accumulate, clip_grad_norm, gradients == "kept"
    )
    factory = StatesFactory.parse(optimizer, scaler=scaler, ema=ema, precision=precision, device_kind=step.device.type)
    kinds: list[Plan | None] = [None] if plain or plan is None else []
    kinds += [plan] if plan is not None else []
    report = progress or (lambda label, fraction: None)
    with preserved(model):
        model.train()
        step.other_bytes = _other_bytes(step)
        step.states = factory.build(model)
        step.clear()
        results = _run(step, kinds, num_steps, report)
    measured_plain = results[0] if kinds[0] is None else None
    return UsageReport(
        plain=measured_plain,
        planned=results[-1],
        predicted_plain_bytes=plan.plain.peak_bytes if plan and plan.plain else None,
        predicted_planned_bytes=plan.planned.peak_bytes if plan and plan.planned else None,
        budget_bytes=plan.budget_bytes if plan else None,
        judge="CUDA caching allocator" if step.device.type == "cuda" else "profiler memory events",
    )


@dataclass(slots=True)
class _Step:
    """Everything needed to run the step again."""

    model: nn.Module
    batch: Batch
    loss: LossFunction | None
    precision: Precision
    accumulate: int
    clip_grad_norm: float | None
    keeps_gradients: bool
    states: States = field(default_factory=States)
    other_bytes: int = 0

    @property
    def device(self) -> torch.device:
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    def run(self) -> Tensor:
        return run_step(
            self.model,
            self.batch,
            loss=self.loss,
            states=self.states,
            precision=self.precision,
            accumulate=self.accumulate,
            clip_grad_norm=self.clip_grad_norm,
        )

    def clear(self) -> None:
        """Gradients as they are between two steps."""
        for parameter in self.model.parameters():
            if not self.keeps_gradients or not parameter.requires_grad:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad.zero_()
        for value in tree_iter(self.batch):
            if isinstance(value, Tensor):
                value.grad = None

    def static_tensors(self) -> Iterable[Tensor]:
        yield from self.model.parameters()
        yield from self.model.buffers()
        yield from (p.grad for p in self.model.parameters() if p.grad is not None)
        yield from (x for x in tree_iter(self.batch) if isinstance(x, Tensor))
        yield from (tensor for _, _, tensor in self.states.tensors(self.model))


def _run(step: _Step, kinds: list[Plan | None], num_steps: int, report: Progress) -> list[MeasuredStep]:
    """Warm up, then time the kinds in turn (so that a machine that drifts drifts for both), then take the peaks."""
    total = len(kinds) * (num_steps + 2)
    done = 0
    seconds: list[list[float]] = [[] for _ in kinds]
    for turn in range(num_steps + 1):
        for plan, times in zip(kinds, seconds, strict=True):
            report("warming up" if turn == 0 else "timing steps", done / total)
            with _applied(step.model, plan):
                took_s = _timed(step)
            if turn > 0:
                times.append(took_s)
            done += 1
    results = []
    for plan, times in zip(kinds, seconds, strict=True):
        report("measuring the peak", done / total)
        with _applied(step.model, plan):
            results.append(_peak(step, times))
        done += 1
    report("done", 1.0)
    return results


def _applied(model: nn.Module, plan: Plan | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if plan is None else apply(model, plan, check="never")


def _timed(step: _Step) -> float:
    _synchronize(step.device)
    start = time.perf_counter()
    step.run()
    _synchronize(step.device)
    took = time.perf_counter() - start
    step.clear()
    return took


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _other_bytes(step: _Step) -> int:
    """What is on a GPU and not the step's: the values that are put back at the end, and whatever the caller holds."""
    if step.device.type != "cuda":
        return 0
    return torch.cuda.memory_allocated(step.device) - unique_bytes(step.static_tensors())


def _peak(step: _Step, times: list[float]) -> MeasuredStep:
    static = unique_bytes(step.static_tensors())
    curve_s: list[float] = [0.0]
    curve_bytes: list[int] = []
    if step.device.type == "cuda":
        _synchronize(step.device)
        torch.cuda.reset_peak_memory_stats(step.device)
        loss = step.run()
        peak = torch.cuda.max_memory_allocated(step.device) - step.other_bytes
    else:
        loss, events = record_memory(step.run)
        curve_s += [at_s for at_s, _ in events]
        curve_bytes += accumulate((change for _, change in events), initial=static)
        peak = max(curve_bytes)
    value = float(loss)
    step.clear()
    return MeasuredStep(
        peak_bytes=peak,
        static_bytes=static,
        step_s=statistics.median(times) if times else float("nan"),
        all_step_s=tuple(times),
        loss=value,
        curve_s=tuple(curve_s[: len(curve_bytes)]),
        curve_bytes=tuple(curve_bytes),
    )


def record_memory(function: Callable[[], Tensor]) -> tuple[Tensor, list[tuple[float, int]]]:
    """Run a function under the profiler.

    Args:
        function: What to run.

    Returns:
        What it returned, and every allocation (positive) and release (negative) of CPU tensors: seconds since the
        start, bytes.
    """
    make_way()
    gc.collect()  # what lies in cycles from an earlier run would count as freed in this one
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler reports to stderr otherwise ("USDT: ...")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            out = function()
    raw = profiler.profiler.kineto_results.events()
    memory = sorted(((e.start_ns(), e.nbytes()) for e in raw if e.name() == "[memory]"), key=lambda event: event[0])
    if not memory:
        return out, []
    first = memory[0][0]
    return out, [((at - first) * 1e-9, num_bytes) for at, num_bytes in memory]

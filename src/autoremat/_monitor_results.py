"""What watching a training yields: a record for each step, checks of gradients, warnings; as JSON and as a table."""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from autoremat._results import JsonResult
from autoremat._units import format_bytes, format_percent, format_seconds

UNATTRIBUTED = "activation, gradient, temporary"
"""Cause of what a step adds to what is there before it, where no plan says how that is made up."""


@dataclass(frozen=True, slots=True)
class StepRecord(JsonResult):
    """One optimizer step of a training that is watched.

    Attributes:
        step: Its number, from 1.
        step_s: Wall time from the first forward to the end of the optimizer step, less waits between micro-steps.
        wait_s: Wall time before the first forward and between micro-steps: data loading, evaluation, logging.
        recompute_s: Of `step_s`, what recomputing regions took.
        num_recomputes: Regions recomputed.
        recomputed_flops_share: Recomputed FLOPs as a share of the step's, by the plan, where every region call of the
            step was recomputed; else None.
        num_micro_steps: Backwards in the step.
        is_skipped: Whether a gradient scaler left the optimizer step out.
        gradient_norm: Norm of all gradients as the optimizer got them (of this rank's shards, where they are
            sharded); None where the step was skipped.
        peak_bytes: Largest allocated bytes; None where the step was not metered.
        peak_by_cause: The same by cause. What is there before the step is counted; the rest is split as the plan
            predicts it, and without a plan it is one cause.
        predicted_peak_bytes: The plan's; None without one.
        predicted_s: The plan's step time, where it was made for the device that runs; else None.
        num_alloc_retries: On CUDA, how often the allocator gave back its cache to serve a request.
        has_planned_shapes: Whether the batch has the shapes that the plan was made for; None if that is not known.
        cpu_share: CPU time of this process over wall time and threads.
    """

    step: int
    step_s: float
    wait_s: float
    recompute_s: float = 0.0
    num_recomputes: int = 0
    recomputed_flops_share: float | None = None
    num_micro_steps: int = 1
    is_skipped: bool = False
    gradient_norm: float | None = None
    peak_bytes: int | None = None
    peak_by_cause: dict[str, int] | None = None
    predicted_peak_bytes: int | None = None
    predicted_s: float | None = None
    num_alloc_retries: int | None = None
    has_planned_shapes: bool | None = None
    cpu_share: float | None = None

    @property
    def recompute_share(self) -> float:
        """Time spent recomputing as a share of the step's."""
        return self.recompute_s / self.step_s if self.step_s > 0 else 0.0

    @property
    def peak_drift(self) -> float | None:
        """Measured over predicted peak, minus 1."""
        if self.peak_bytes is None or not self.predicted_peak_bytes:
            return None
        return self.peak_bytes / self.predicted_peak_bytes - 1

    @property
    def time_drift(self) -> float | None:
        """Measured over predicted step time, minus 1."""
        return self.step_s / self.predicted_s - 1 if self.predicted_s else None

    def to_dict(self) -> dict[str, Any]:
        """The record and what follows from it; numbers that are not finite are None, as JSON has none."""
        found = dataclasses.asdict(self)
        found |= {name: getattr(self, name) for name in ("recompute_share", "peak_drift", "time_drift")}
        return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in found.items()}


@dataclass(frozen=True, slots=True)
class GradientCheck(JsonResult):
    """Gradients of one forward of the training, with checkpointing and without, from the same state.

    Attributes:
        step: Number of the step.
        equal: Whether all are the same bits; None if it could not be checked.
        norm: Norm of the gradients with checkpointing.
        plain_norm: Norm without.
        num_compared: Gradients compared: of parameters, and of inputs that require one.
        differences: Names of those that differ.
        num_recomputes: Regions that were recomputed for it.
        note: Why it could not be checked; "" if it was.
    """

    step: int
    equal: bool | None
    norm: float = math.nan
    plain_norm: float = math.nan
    num_compared: int = 0
    differences: tuple[str, ...] = ()
    num_recomputes: int = 0
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The check as plain data; numbers that are not finite are None, as JSON has none."""
        found = dataclasses.asdict(self)
        return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in found.items()}

    def __repr__(self) -> str:
        verdict = "not checked: " + self.note if self.equal is None else "equal" if self.equal else "DIFFERENT"
        return f"<GradientCheck of step {self.step}: {verdict}>"


@dataclass(frozen=True, slots=True)
class ThroughputWarning(JsonResult):
    """The training is slower than expected.

    Attributes:
        step: Number of the step at which it was noticed.
        seconds: Median wall time of the last steps, waits included.
        expected_s: What was expected.
        expected_from: "the plan's prediction", or "the first steps".
        reasons: Likely ones, the likeliest first.
    """

    step: int
    seconds: float
    expected_s: float
    expected_from: str
    reasons: tuple[str, ...]

    @property
    def kinds(self) -> frozenset[str]:
        """The reasons without their numbers: two warnings with the same say the same."""
        return frozenset(re.sub(r"\d[\d.]*( [a-zA-Z%]+)?", "", reason) for reason in self.reasons)

    @property
    def message(self) -> str:
        """All of it in words."""
        more = format_percent(self.seconds / self.expected_s - 1)
        return (
            f"Steps take {format_seconds(self.seconds)}, {more} more than "
            f"{format_seconds(self.expected_s)} by {self.expected_from}. Likely because {'; '.join(self.reasons)}."
        )


@dataclass(frozen=True, slots=True)
class MonitorResults(JsonResult):
    """A training that was watched.

    Attributes:
        model: Class name of the model.
        device: Where it ran.
        budget_bytes: The plan's budget, None without one.
        records: One for each step, in order.
        checks: Gradients with checkpointing against those without.
        warnings: Where throughput fell short.
        num_warm_up: Steps at the start that no median and no warning counts.

    Example:
        >>> records = tuple(StepRecord(i, step_s=0.1, wait_s=0.0, peak_bytes=2**30) for i in range(1, 7))
        >>> MonitorResults("GPT", "cpu", None, records)
        <MonitorResults: 6 steps of GPT, median 100.0 ms; peak 1.00 GiB>
    """

    model: str
    device: str
    budget_bytes: int | None
    records: tuple[StepRecord, ...]
    checks: tuple[GradientCheck, ...] = ()
    warnings: tuple[ThroughputWarning, ...] = ()
    num_warm_up: int = 3

    @property
    def steady(self) -> tuple[StepRecord, ...]:
        """The steps after the warm-up; all of them if there are no others."""
        return self.records[self.num_warm_up :] or self.records

    @property
    def peak_bytes(self) -> int | None:
        """Largest measured peak; None if no step was metered."""
        return max((r.peak_bytes for r in self.records if r.peak_bytes is not None), default=None)

    @property
    def within_budget(self) -> bool | None:
        """Whether that is at most the budget; None without a budget or a measured peak."""
        if self.budget_bytes is None or self.peak_bytes is None:
            return None
        return self.peak_bytes <= self.budget_bytes

    @property
    def step_s(self) -> float:
        """Median wall time of a step, without waits."""
        return median(r.step_s for r in self.steady)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain dicts, lists and numbers."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        lists = {name: [item.to_dict() for item in found[name]] for name in ("records", "checks", "warnings")}
        return found | lists | {"peak_bytes": self.peak_bytes, "within_budget": self.within_budget}

    def __repr__(self) -> str:
        if not self.records:
            return f"<MonitorResults: no steps of {self.model}>"
        peak = "" if self.peak_bytes is None else f"; peak {format_bytes(self.peak_bytes)}"
        over = "" if self.within_budget is not False else ", OVER the budget"
        differing = sum(check.equal is False for check in self.checks)
        wrong = f"; gradients differ in {differing} checks" if differing else ""
        steps = f"{len(self.records)} steps of {self.model}, median {format_seconds(self.step_s)}"
        return f"<MonitorResults: {steps}{peak}{over}{wrong}>"

    def __rich__(self) -> Table:
        """What terminals and notebooks show."""
        return results_table(self)


def median(values: Iterable[float]) -> float:
    """The median; not a number of nothing."""
    found = list(values)
    return statistics.median(found) if found else math.nan


def results_table(results: MonitorResults) -> Table:
    """A training that was watched, in a few rows."""
    title = f"{results.model} on {results.device}: {len(results.records)} steps"
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right", overflow="fold")
    metered = [r for r in results.records if r.peak_bytes is not None]
    if metered:
        top = max(metered, key=lambda r: r.peak_bytes or 0)
        table.add_row(
            f"peak allocated, step {top.step}", _with_drift(format_bytes(top.peak_bytes or 0), top.peak_drift)
        )
        for cause, num_bytes in (top.peak_by_cause or {}).items():
            if num_bytes:
                table.add_row(f"  {cause.replace('_', ' ')}", format_bytes(num_bytes), style="dim")
    if results.budget_bytes is not None:
        word = {True: "within", False: "OVER", None: ""}[results.within_budget]
        table.add_row(f"budget {format_bytes(results.budget_bytes)}", word)
    steady = results.steady
    if steady:
        drifts = [r.time_drift for r in steady if r.time_drift is not None]
        drift = median(drifts) if drifts else None
        table.add_row("step time, median", _with_drift(format_seconds(results.step_s), drift))
        table.add_row("  of it recomputation", format_percent(median(r.recompute_share for r in steady)), style="dim")
        table.add_row("waiting between steps, median", format_seconds(median(r.wait_s for r in steady)))
        norms = [r.gradient_norm for r in steady if r.gradient_norm is not None]
        if norms:
            table.add_row("gradient norm, last", f"{norms[-1]:.4g}")
    num_skipped = sum(r.is_skipped for r in results.records)
    if num_skipped:
        table.add_row("steps that the gradient scaler left out", str(num_skipped))
    for check in results.checks:
        verdict = {True: "equal to the bit", False: f"{len(check.differences)} differ", None: check.note}[check.equal]
        table.add_row(f"gradients of step {check.step}, plain and checkpointed", verdict)
    for warning in results.warnings:
        table.add_row(f"slow at step {warning.step}", "; ".join(warning.reasons), style="yellow")
    return table


def record_line(record: StepRecord) -> str:
    """One step in one line.

    Example:
        >>> record_line(StepRecord(7, step_s=0.25, wait_s=0.01, gradient_norm=1.5, peak_bytes=2**20))
        'step 7  peak 1.00 MiB  250.0 ms  wait 10.0 ms  recompute 0.0 %  gradient norm 1.5'
    """
    parts = [f"step {record.step}"]
    if record.peak_bytes is not None:
        parts.append(f"peak {_with_drift(format_bytes(record.peak_bytes), record.peak_drift)}")
    parts.append(_with_drift(format_seconds(record.step_s), record.time_drift))
    parts += [f"wait {format_seconds(record.wait_s)}", f"recompute {format_percent(record.recompute_share)}"]
    if record.gradient_norm is not None:
        parts.append(f"gradient norm {record.gradient_norm:.4g}")
    if record.is_skipped:
        parts.append("skipped by the gradient scaler")
    return "  ".join(parts)


def _with_drift(text: str, drift: float | None) -> str:
    if drift is None:
        return text
    sign = "-" if drift < 0 else "+"
    return f"{text} ({sign}{format_percent(abs(drift))} of predicted)"

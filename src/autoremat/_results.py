"""What tracing, verifying and measuring return: plain data for tables, JSON and reports.

Renderers (`_report.py`, the CLI) read these and compute nothing themselves.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, NamedTuple

from autoremat._shown import Shown
from autoremat._units import format_bytes, format_percent, format_seconds


class JsonResult(Shown):
    """Gives a result dataclass `to_json`, and a table in terminals and notebooks."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """The result as plain dicts, lists and numbers; bytes are ints, times are seconds."""
        return dataclasses.asdict(self)  # type: ignore[call-overload, no-any-return]

    def to_json(self) -> str:
        """The result as JSON."""
        return json.dumps(self.to_dict(), indent=1)


@dataclass(frozen=True, slots=True)
class LiveItem(JsonResult):
    """Storages alive at the peak, summed by where they were made.

    Attributes:
        cause: What they are.
        module: Path of the module or function call that made them, "" for the model's own forward or the loss.
        name: Op that made them, or the parameter's name for what is there before the step.
        num_bytes: Their bytes, once per storage.
        num_storages: How many there are.
        line: File and line of the model's code that made them, "" for what backward or the optimizer made.
    """

    cause: str
    module: str
    name: str
    num_bytes: int
    num_storages: int
    line: str = ""


@dataclass(frozen=True, slots=True)
class OutOfMemory(JsonResult):
    """The request that an allocator could not serve.

    Attributes:
        event: Which of the allocations and releases it was, counted from 0.
        requested_bytes: What was asked for.
        allocated_bytes: Allocated at that moment.
        reserved_bytes: Reserved at that moment, after everything that could be given back was.
    """

    event: int
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True)
class AllocatorUsage(JsonResult):
    """What a caching allocator takes from the device, as its model predicts.

    Attributes:
        requested_bytes: Peak of the bytes that were asked for.
        allocated_bytes: Peak of allocated bytes: blocks in use, rounded up. ``torch.cuda.max_memory_allocated``.
        reserved_bytes: Peak of reserved bytes: all segments, in use or not. ``torch.cuda.max_memory_reserved``.
        unused_bytes: Reserved less allocated, when reserved bytes reached their peak.
        largest_free_bytes: The largest free block at that moment.
        num_segments: Segments at that moment.
        num_device_allocs: Calls that took memory from the device (``cudaMalloc``, or mapping pages).
        num_device_frees: Calls that returned some.
        num_retries: How often all cached memory was returned to serve a request.
        out_of_memory: Where it ran out of memory; None if it did not. Nothing after it is counted.
    """

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    unused_bytes: int
    largest_free_bytes: int
    num_segments: int
    num_device_allocs: int
    num_device_frees: int
    num_retries: int
    out_of_memory: OutOfMemory | None = None

    @property
    def fragmentation_bytes(self) -> int:
        """Peak of reserved bytes less the peak of allocated ones: what rounding, splitting and caching cost."""
        return self.reserved_bytes - self.allocated_bytes

    def __repr__(self) -> str:
        reserved, allocated = format_bytes(self.reserved_bytes), format_bytes(self.allocated_bytes)
        failed = "" if self.out_of_memory is None else "; out of memory"
        return f"<AllocatorUsage: reserved {reserved} for {allocated} allocated{failed}>"


@dataclass(frozen=True, slots=True)
class HighMoment(JsonResult):
    """A moment at which more is alive than just before and just after it.

    Attributes:
        at: Where that is, in words: phase, module and op.
        num_bytes: Live bytes.
        second: Predicted time since the start of the step.
    """

    at: str
    num_bytes: int
    second: float


class PointEvent(NamedTuple):
    """What happens at a point of a profile.

    Attributes:
        action: "forward", "recompute", "backward" or "optimizer".
        module: Path of the module whose op it is (in backward: of the forward op); "" for the model's own and the loss.
        op: Operator with overload.
    """

    action: str
    module: str
    op: str


@dataclass(frozen=True, slots=True)
class MemoryProfile(JsonResult):
    """Live bytes over one step, as a schedule predicts them: allocated, and on a CUDA device what that makes reserved.

    Points are taken where memory is highest: while an op runs, after its outputs are allocated.

    Attributes:
        peak_bytes: Largest live bytes.
        peak_by_cause: The same by cause; sums to `peak_bytes`.
        peak_point: Index of the peak among the points.
        peak_at: Where that is, in words: phase, module and op.
        static_bytes: Bytes that are there before the step and stay through it.
        seconds: Predicted time of each point since the start of the step.
        by_cause: Live bytes by cause at each point.
        phases: Name of each phase and the index of its first point.
        alive_at_peak: What is alive at the peak, largest first.
        recomputed_flops: FLOPs of recomputation.
        flops: FLOPs of the step, recomputation included.
        step_s: Predicted step time.
        allocator: What the caching allocator reserves for it; None on a CPU, which has none.
        high_moments: The peak and the next highest moments, each place once, highest first: what a plan has to get
            below next.
        events: What happens at each point.
    """

    peak_bytes: int
    peak_by_cause: dict[str, int]
    peak_point: int
    peak_at: str
    static_bytes: int
    seconds: tuple[float, ...]
    by_cause: dict[str, tuple[int, ...]]
    phases: tuple[tuple[str, int], ...]
    alive_at_peak: tuple[LiveItem, ...]
    recomputed_flops: int
    flops: int
    step_s: float
    allocator: AllocatorUsage | None = None
    high_moments: tuple[HighMoment, ...] = ()
    events: tuple[PointEvent, ...] = ()

    def __repr__(self) -> str:
        reserved = "" if self.allocator is None else f", reserved {format_bytes(self.allocator.reserved_bytes)}"
        return f"<MemoryProfile: peak allocated {format_bytes(self.peak_bytes)} at {self.peak_at}{reserved}>"


@dataclass(frozen=True, slots=True)
class Difference(JsonResult):
    """One thing that differs between the plain and the planned run.

    Attributes:
        kind: "loss", "gradient", "input gradient", "buffer", "random state", "attribute" or "error".
        name: Parameter, buffer or source.
        plain: Its value in words in the plain run.
        planned: Its value in the planned run.
    """

    kind: str
    name: str
    plain: str
    planned: str


LARGE_DIFFERENCE = 0.1
"""A layer's gradient that is off by more than this share of its norm is named."""


@dataclass(frozen=True, slots=True)
class LayerPrecision(JsonResult):
    """The gradient of one module's own parameters in low precision, beside the one in fp32.

    Attributes:
        path: Module path.
        norm: Norm of the gradient in the step's precision.
        fp32_norm: Norm of the gradient in fp32.
        difference: Norm of the difference of the two, as a share of `fp32_norm`; infinite where that is 0 and the other
            is not, or where the gradient in low precision is not finite.
    """

    path: str
    norm: float
    fp32_norm: float
    difference: float

    @property
    def is_large(self) -> bool:
        """Whether the difference is more than `LARGE_DIFFERENCE`."""
        return not self.difference <= LARGE_DIFFERENCE


@dataclass(frozen=True, slots=True)
class VerifyReport(JsonResult):
    """Whether a planned step equals the plain one, bit for bit.

    Attributes:
        equal: True if nothing differs.
        num_compared: How many values were compared, by kind.
        differences: What differs, by name.
        loss: Loss of the plain run.
        planned_loss: Loss of the planned run.
        num_recomputed_regions: How many regions were recomputed in the planned run.
        num_skipped_steps: Optimizer steps that the gradient scaler left out after an overflow, in either run.
        layers: With ``against_fp32``: how far gradients are from those in fp32, the farthest first.
    """

    equal: bool
    num_compared: dict[str, int]
    differences: tuple[Difference, ...]
    loss: float
    planned_loss: float
    num_recomputed_regions: int
    num_skipped_steps: int = 0
    layers: tuple[LayerPrecision, ...] = ()

    def __repr__(self) -> str:
        compared = ", ".join(f"{count} {kind}" for kind, count in self.num_compared.items())
        if self.equal:
            return f"<VerifyReport: equal to the bit ({compared})>"
        names = ", ".join(f"{d.kind} {d.name}" for d in self.differences[:3])
        return f"<VerifyReport: {len(self.differences)} differ: {names}>"


@dataclass(frozen=True, slots=True)
class MeasuredStep(JsonResult):
    """One measured training step.

    Attributes:
        peak_bytes: Largest live bytes of tensors, static ones included.
        static_bytes: Live bytes before the step.
        step_s: Median wall time of a step.
        all_step_s: Wall time of each timed step.
        loss: Loss of the step.
        curve_s: Times of the samples of the live bytes, from the start of the step.
        curve_bytes: Live bytes at those times.
    """

    peak_bytes: int
    static_bytes: int
    step_s: float
    all_step_s: tuple[float, ...]
    loss: float
    curve_s: tuple[float, ...] = ()
    curve_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class UsageReport(JsonResult):
    """Measured against predicted, plain and planned.

    Attributes:
        plain: The step without the plan; None if it was not asked for.
        planned: The step with the plan.
        predicted_plain_bytes: Predicted peak without the plan.
        predicted_planned_bytes: Predicted peak with it.
        budget_bytes: The plan's budget, if it has one.
        judge: What measured the peak: "profiler memory events" or "CUDA caching allocator".
    """

    plain: MeasuredStep | None
    planned: MeasuredStep
    predicted_plain_bytes: int | None
    predicted_planned_bytes: int | None
    budget_bytes: int | None
    judge: str

    @property
    def within_budget(self) -> bool | None:
        """Whether the measured peak is at most the budget; None without a budget."""
        return None if self.budget_bytes is None else self.planned.peak_bytes <= self.budget_bytes

    def __repr__(self) -> str:
        parts = [f"peak {format_bytes(self.planned.peak_bytes)}", f"step {format_seconds(self.planned.step_s)}"]
        if self.plain is not None:
            parts.append(f"plain {format_bytes(self.plain.peak_bytes)}, {format_seconds(self.plain.step_s)}")
        if self.predicted_planned_bytes:
            error = self.planned.peak_bytes / self.predicted_planned_bytes - 1
            parts.append(f"{format_percent(error)} off the prediction")
        return f"<UsageReport: {'; '.join(parts)}>"


@dataclass(frozen=True, slots=True)
class TrainedRuns(JsonResult):
    """The same training twice, plain and planned, from the same seeds.

    Attributes:
        plain_losses: Loss of each step of the plain run.
        planned_losses: The same of the planned run.
        plain_step_s: Median wall time of a plain step.
        planned_step_s: Median wall time of a planned step.
    """

    plain_losses: tuple[float, ...]
    planned_losses: tuple[float, ...]
    plain_step_s: float
    planned_step_s: float

    @property
    def num_equal(self) -> int:
        """How many losses are equal to the bit."""
        return sum(a == b for a, b in zip(self.plain_losses, self.planned_losses, strict=True))

    @property
    def equal(self) -> bool:
        """Whether all are."""
        return self.num_equal == len(self.plain_losses)

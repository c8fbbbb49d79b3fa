"""What an op costs on a target: a roofline, described or calibrated, or the time that was measured for that very call.

Described (vendor's figures): seconds = max(FLOPs / rate of the dtype, bytes moved / memory bandwidth) + random numbers;
on a GPU at least the launch, which overlaps with the kernel; on a CPU plus the launch.

Calibrated (`_calibration`): rates over the size of the op, by family and dtype; seconds for each byte moved, by
operator where it computes more than it moves; the cost of fresh pages; what Python, autograd and dispatch add to an op
in each phase. Measured ops (``trace(..., cost="measured")``) replace the kernel's part of that.

Regions cost something beyond the ops that they run again: `RegionCost`.

Known limits: ops are priced alone; what the previous op left in a cache is not modelled. Fresh pages are counted for
storages that the C library returns to the system at once (32 MiB and more); smaller ones are reused, or not, depending
on the history of the process.

Source of the roofline: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", CACM 2009.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable

from autoremat._calibration import Calibration, interpolate
from autoremat._replay import RegionSpec, Replay, replay, saved_in
from autoremat._step_graph import Op, StepGraph
from autoremat._targets import Target

REGION_S = 150e-6
"""What a region costs on a target that was not calibrated: one CPU core, plain regions, `benchmarks/overhead.py`."""
WATCHED_OP_S = 9e-6
"""The same for each op in a region that stores single outputs."""
DESCRIBED_ERROR = 0.3
"""Half-width of the range around times from vendors' figures: nobody has measured these; an assumption."""
CALIBRATED_ERROR = 0.1
"""The same after calibration: the largest error of 24 steps in `benchmarks/cost_accuracy.py` was 10.0 %."""
MEASURED_ERROR = 0.06
"""The same for measured ops: the largest error there was 5.8 %."""

_READS_ROWS = frozenset({"aten.embedding.default", "aten.gather.default", "aten.index_select.default"})
_BATCHED = ("aten.bmm.", "aten.baddbmm.")
_ALLOCATES_ONLY = ("aten.empty", "aten.new_empty")


def op_seconds(op: Op, target: Target, new_bytes: Iterable[int] = (), measured_s: float | None = None) -> float:
    """Predicted time of one op, seconds.

    Args:
        op: The op.
        target: The device it runs on.
        new_bytes: Sizes of the storages that it allocates, bytes.
        measured_s: What the call takes by itself on this device, if it was measured.
    """
    if target.calibration is not None:
        return _calibrated_seconds(op, target.calibration, tuple(new_bytes), measured_s)
    if op.is_view:
        return 0.0
    kernel_s = _described_kernel_s(op, target)
    return max(kernel_s, target.launch_s) if target.device_kind == "cuda" else kernel_s + target.launch_s


def step_seconds(graph: StepGraph, target: Target) -> tuple[float, ...]:
    """Predicted time of each op of a step, in the order of ``graph.ops``."""
    born: dict[int, list[int]] = {}
    for storage in graph.storages:
        born.setdefault(storage.born, []).append(storage.num_bytes)
    measured = graph.measured_s or (None,) * len(graph.ops)
    return tuple(
        op_seconds(op, target, born.get(op.index, ()), seconds) for op, seconds in zip(graph.ops, measured, strict=True)
    )


class RegionCost:
    """What a region adds to a step beyond the ops that it runs again, seconds.

    Each of its calls costs something, in forward and recompute together; so does each tensor that autograd saves in it;
    each op that recompute passes without running a kernel, views among them, which Python and autograd handle all the
    same; and each op of a region that stores single outputs, which is watched. On a target that was not calibrated the
    first stands for the first three.

    On a GPU the host runs ahead of the kernels: only that share counts in which the device waits for launches anyway.

    Args:
        graph: The step.
        target: The device.
    """

    def __init__(self, graph: StepGraph, target: Target) -> None:
        self._graph = graph
        self._region_s, self._watched_op_s, self._saved_s, self._passed_op_s = REGION_S, WATCHED_OP_S, 0.0, 0.0
        if (found := target.calibration) is not None:
            self._region_s, self._watched_op_s, self._saved_s = found.region_s, found.watched_op_s, found.saved_s
            self._passed_op_s = found.op_s.get("forward", found.launch_s)
        self._share = 1.0 if target.device_kind == "cpu" else launch_bound_share(graph, target)
        self._num_saved: dict[int, int] = {}

    def __call__(self, call: int, work: Replay) -> float:
        """Seconds for the region of a module call that does this work."""
        span = self._graph.calls[call]
        num_ops = span.end - span.start
        num_again = max(0, min(span.end, work.stop) - span.start)
        num_passed = num_again - (bisect_left(work.ops, span.end) - bisect_left(work.ops, span.start))
        seconds = self._region_s + self._saved_s * self._saved(call) + self._passed_op_s * num_passed
        return self._share * (seconds + (self._watched_op_s * num_ops if work.selective else 0.0))

    def _saved(self, call: int) -> int:
        """How many tensors autograd saves in a module call."""
        if call not in self._num_saved:
            self._num_saved[call] = len(saved_in(self._graph, call))
        return self._num_saved[call]

    def total(self, specs: Iterable[RegionSpec]) -> float:
        """Seconds for all regions of a step."""
        return sum(self._of(spec) + self.total(spec.children) for spec in specs)

    def _of(self, spec: RegionSpec) -> float:
        work = replay(self._graph, spec)
        return sum(self(call, work) for call in spec.calls)


def relative_error(graph: StepGraph, target: Target) -> float:
    """Half-width of the range around a predicted step time, as a share of it."""
    if target.calibration is None:
        return DESCRIBED_ERROR
    return max(MEASURED_ERROR if graph.measured_s else CALIBRATED_ERROR, target.calibration.error)


def launch_bound_share(graph: StepGraph, target: Target) -> float:
    """Share of a step in which the device waits for launches (on a CPU: that Python and dispatch take)."""
    op_s = step_seconds(graph, target)
    if target.calibration is not None:
        waits = sum(min(target.calibration.op_s.get(op.phase, 0.0), s) for op, s in zip(graph.ops, op_s, strict=True))
    else:
        waits = sum(_waits_s(op, target) for op in graph.ops if not op.is_view)
    return waits / max(sum(op_s), 1e-30)


def _waits_s(op: Op, target: Target) -> float:
    if target.device_kind == "cpu":
        return target.launch_s
    return max(0.0, target.launch_s - _described_kernel_s(op, target))


def _described_kernel_s(op: Op, target: Target) -> float:
    compute_s = op.flops / target.rate(op.dtype)
    random_s = target.random_number_s * math.prod(op.shape) if op.is_random else 0.0
    return max(compute_s, op.moved_bytes / target.bandwidth) + random_s


def _calibrated_seconds(
    op: Op, calibration: Calibration, new_bytes: tuple[int, ...], measured_s: float | None
) -> float:
    around_s = calibration.op_s.get(op.phase, calibration.launch_s)
    if op.is_view:
        return around_s
    if measured_s is not None:
        return max(0.0, measured_s - calibration.launch_s) + around_s
    fresh = sum(size for size in new_bytes if size >= calibration.fault_from_bytes)
    return _kernel_s(op, calibration, sum(new_bytes)) + fresh * calibration.fault_s_per_byte + around_s


def _kernel_s(op: Op, calibration: Calibration, new_bytes: int) -> float:
    if op.name.startswith(_ALLOCATES_ONLY):
        return 0.0
    moved = 2 * new_bytes if op.name in _READS_ROWS else op.moved_bytes
    traffic_s = moved * interpolate(calibration.traffic_s_per_byte, moved)
    if op.flops:
        if fits := calibration.fitted_s.get(_family(op.name)):
            s_per_flop, s_per_byte = fits.get(op.dtype) or fits["float32"]
            return op.flops * s_per_flop + moved * s_per_byte
        curves = calibration.flops_per_s.get(_family(op.name)) or calibration.flops_per_s["matmul"]
        curve = curves.get(op.dtype) or curves["float32"]
        return max(op.flops / interpolate(curve, op.flops / _num_products(op, calibration)), traffic_s)
    own = calibration.op_s_per_byte.get(op.name, {})
    return max(moved * own.get(op.dtype, own.get("float32", 0.0)), traffic_s)


def _num_products(op: Op, calibration: Calibration) -> int:
    """How many matrix products an op is that run one after the other: on a CPU each is as slow as if it were alone."""
    is_batched = op.name.startswith(_BATCHED) and calibration.device_kind == "cpu"
    return max(1, op.shape[0]) if is_batched and op.shape else 1


def _family(name: str) -> str:
    for family in ("attention", "convolution"):
        if family in name:
            return f"{family}_backward" if "backward" in name else family
    return "matmul"

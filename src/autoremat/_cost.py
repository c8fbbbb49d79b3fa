"""What an op costs on a target: a roofline.

seconds = max(FLOPs / rate of the dtype, bytes moved / memory bandwidth) + random numbers + launch cost

Known limit: described rates are a vendor's peak times one efficiency; a calibrated model belongs to the targets issue.
Overheads are ratios of two sums of these and depend on it less.
"""

from __future__ import annotations

import math

from autoremat._step_graph import Op, StepGraph
from autoremat._targets import Target


def op_seconds(op: Op, target: Target) -> float:
    """Predicted time of one op, seconds; a view costs nothing.

    Args:
        op: The op.
        target: The device it runs on.
    """
    if op.is_view:
        return 0.0
    compute_s = op.flops / target.rate(op.dtype)
    random_s = target.random_number_s * math.prod(op.shape) if op.is_random else 0.0
    return max(compute_s, op.moved_bytes / target.bandwidth) + random_s + target.launch_s


def step_seconds(graph: StepGraph, target: Target) -> tuple[float, ...]:
    """Predicted time of each op of a step, in the order of ``graph.ops``."""
    return tuple(op_seconds(op, target) for op in graph.ops)

"""Why a training is slower than expected: what its records say. Pure; no torch.

Known limits: what leaves no trace in the records (a device that throttles because it is hot, a kernel that is slower
than the prediction holds) cannot be told apart, and is what remains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoremat._monitor_results import StepRecord, ThroughputWarning, median
from autoremat._units import format_bytes, format_percent, format_seconds

WINDOW = 10
"""How many of the last steps a judgement is based on, by their medians: a single slow step is nobody's business."""
TOLERANCE = 0.2
"""By how much steps may be slower than expected, beyond the error that a prediction states."""
NOTABLE_WAIT = 0.1
"""Share of the wall time that waiting must take to be a reason."""
NOTABLE_RECOMPUTE = 0.05
"""By how much the share of recomputation must be above the predicted one."""
BUSY_SHARE = 0.75
"""A CPU step that gets less than this share of its threads has to share the machine."""
UNEXPLAINED = (
    "nothing in the records explains it: the prediction may be off, or the device runs slower than usual (a hot one "
    "lowers its clock, which is not seen from here)"
)
NEAR_CAPACITY = 0.95
"""Share of a device's memory from which on its allocator works at its limit."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What steps should be like.

    Attributes:
        seconds: Of a step.
        source: Where that comes from, in words.
        error: Half-width of the range around it, as a share.
        recompute_share: Share of the time that recomputation is predicted to take; None if not known.
        capacity_bytes: Memory of the device; None where that is no limit of an allocator.
        is_cpu: Whether the model runs on a CPU.
    """

    seconds: float
    source: str
    error: float = 0.0
    recompute_share: float | None = None
    capacity_bytes: int | None = None
    is_cpu: bool = False


def find_slow(records: Sequence[StepRecord], expected: Expected) -> ThroughputWarning | None:
    """A warning if the last steps are slower than expected, with the likely reasons.

    Args:
        records: Steps after the warm-up, in order.
        expected: What they should be like.

    Example:
        >>> records = [StepRecord(i, step_s=1.0, wait_s=1.0) for i in range(WINDOW)]
        >>> find_slow(records, Expected(1.0, "the first steps")).reasons[0]
        'waiting between steps takes 50.0 % of the time (1.0 s a step): data loading, evaluation or logging'
    """
    last = records[-WINDOW:]
    if len(last) < WINDOW:
        return None
    seconds = median(r.step_s + r.wait_s for r in last)
    if not seconds > expected.seconds * (1 + expected.error + TOLERANCE):
        return None
    return ThroughputWarning(
        step=last[-1].step,
        seconds=seconds,
        expected_s=expected.seconds,
        expected_from=expected.source,
        reasons=tuple(_reasons(last, seconds, expected)),
    )


def _reasons(last: Sequence[StepRecord], seconds: float, expected: Expected) -> list[str]:
    found: list[tuple[float, str]] = []  # the share of the time that each explains, as far as that is known
    wait_s = median(r.wait_s for r in last)
    if wait_s > NOTABLE_WAIT * seconds:
        part, each = format_percent(wait_s / seconds), format_seconds(wait_s)
        what = "data loading, evaluation or logging"
        found.append((wait_s / seconds, f"waiting between steps takes {part} of the time ({each} a step): {what}"))
    share = median(r.recompute_share for r in last)
    predicted = expected.recompute_share
    if predicted is not None and share > predicted + NOTABLE_RECOMPUTE:
        words = f"recomputation takes {format_percent(share)} of a step, predicted were {format_percent(predicted)}"
        found.append((share - predicted, words))
    if any(r.has_planned_shapes is False for r in last):
        found.append((0.0, "the batch has other shapes than the one that the plan was made for"))
    found += [(0.0, reason) for reason in _memory_reasons(last, expected)]
    cpu = [r.cpu_share for r in last if r.cpu_share is not None]
    if expected.is_cpu and cpu and median(cpu) < BUSY_SHARE:
        part = format_percent(median(cpu))
        words = f"the process gets {part} of the CPU time of its threads: other processes use this machine"
        found.append((1 - median(cpu), words))
    found.sort(key=lambda pair: -pair[0])
    return [reason for _, reason in found] or [UNEXPLAINED]


def _memory_reasons(last: Sequence[StepRecord], expected: Expected) -> list[str]:
    retries = [r.num_alloc_retries for r in last if r.num_alloc_retries is not None]
    if retries and sum(retries):
        return [f"the caching allocator gave back its cache {sum(retries)} times in the last {len(last)} steps"]
    peak = max((r.peak_bytes or 0 for r in last), default=0)
    if expected.capacity_bytes and peak > NEAR_CAPACITY * expected.capacity_bytes:
        return [f"memory is nearly full: {format_bytes(peak)} of {format_bytes(expected.capacity_bytes)}"]
    return []

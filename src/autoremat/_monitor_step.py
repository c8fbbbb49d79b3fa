"""A step of a training while it goes on, and the record that it becomes."""

from __future__ import annotations

import time

from torch import Tensor

from autoremat._monitor_check import ForwardCopy
from autoremat._monitor_clock import Taken
from autoremat._monitor_peak import by_cause
from autoremat._monitor_results import StepRecord
from autoremat._plan import Plan

CPU_EVERY = 4
"""Steps from one reading of the process's CPU time to the next."""


class Step:
    """A step that is going on.

    Attributes:
        number: From 1.
        started: When its first forward did, on the clock.
        wait_s: As in `StepRecord`.
        away_s: Time to leave out: what the monitor itself did.
        num_micro_steps: Backwards that are over.
        backward_ended: When the last of them was; None while there is none.
        ended: When its optimizer step was over; None before.
    """

    __slots__ = (
        "already", "away_s", "backward_ended", "cpu_share", "cpu_started", "ended", "forward", "is_metered",
        "is_skipped", "norm", "num_calls", "num_micro_steps", "num_recomputes", "number", "peak_bytes", "plan",
        "retries", "shapes", "started", "taken", "wait_s",
    )  # fmt: skip

    def __init__(self, number: int, started: float, wait_s: float) -> None:
        self.number = number
        self.started = started
        # Not in every step: asking for it is a call into the operating system.
        self.cpu_started = time.process_time() if number % CPU_EVERY == 0 else None
        self.wait_s = wait_s
        self.away_s = 0.0
        self.num_micro_steps = 0
        self.backward_ended: float | None = None
        self.ended: float | None = None
        self.is_skipped = self.is_metered = False
        self.already: dict[str, int] = {}
        self.norm: Tensor | float | None = None
        self.peak_bytes: int | None = None
        self.retries: int | None = None
        self.shapes: str | None = None
        self.cpu_share: float | None = None
        self.plan: Plan | None = None
        self.forward: ForwardCopy | None = None
        self.num_recomputes = self.num_calls = 0
        self.taken: Taken | None = None

    def record(self, predicted_s: float | None) -> StepRecord:
        """What there is to tell of it, once it is over.

        Args:
            predicted_s: The plan's step time, where that is for this device.
        """
        plan, ended = self.plan, self.ended if self.ended is not None else self.started
        planned = plan.planned if plan is not None else None
        signature = plan.input_signature if plan is not None else ""
        share = None
        if planned is not None and plan is not None and plan.plain is not None and self.num_calls:
            is_whole = self.num_recomputes >= self.num_calls
            share = 1 - plan.plain.flops / max(1, planned.flops) if is_whole else None
        return StepRecord(
            step=self.number,
            step_s=max(0.0, ended - self.started - self.away_s),
            wait_s=max(0.0, self.wait_s),
            recompute_s=0.0 if self.taken is None else self.taken.seconds(),
            num_recomputes=self.num_recomputes,
            recomputed_flops_share=share,
            num_micro_steps=max(1, self.num_micro_steps),
            is_skipped=self.is_skipped,
            gradient_norm=None if self.norm is None or self.is_skipped else float(self.norm),
            peak_bytes=self.peak_bytes,
            peak_by_cause=None if self.peak_bytes is None else by_cause(self.peak_bytes, self.already, plan),
            predicted_peak_bytes=None if planned is None else planned.peak_bytes,
            predicted_s=predicted_s,
            num_alloc_retries=self.retries,
            has_planned_shapes=self.shapes == signature if self.shapes and signature else None,
            cpu_share=self.cpu_share,
        )

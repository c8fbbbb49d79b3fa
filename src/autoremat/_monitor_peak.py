"""The peak of steps of a training, by cause: when it is metered, and what was there before.

Known limits: by cause, only what is there before a step is measured. The rest is split in the proportions that the
plan predicts.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from autoremat._memory_meter import MemoryMeter, unique_bytes
from autoremat._monitor_results import UNATTRIBUTED
from autoremat._plan import Plan

When = Literal["auto", "always", "never"]
METER_SHARE = 0.01
"""Share of the time that metering may take on a CPU; how often it runs follows from it."""
IN_STEP = ("activation", "temporary", "gradient", "communication")
"""Causes of what a step makes itself."""


class PeakReader:
    """Meters the peak of those steps for which it is worth it.

    On a CPU two steps in a row are metered, and the second is read (see `_memory_meter.py`).

    Args:
        model: The model.
        device: Where it is.
        when: As `Monitor`'s ``peak``.
    """

    def __init__(self, model: nn.Module, device: torch.device, when: When) -> None:
        self._model = model
        self._device = device
        self._when = when
        self._meter = MemoryMeter(device)
        self._due = 1
        self._last = -1
        self._held: list[weakref.ref[Tensor]] = []
        self._retries = 0
        self._number = 0
        self.already: dict[str, int] = {}

    def hold(self, outputs: Iterable[Tensor]) -> None:
        """Note what the model returned: the loop may keep it while the next step runs."""
        self._held = [weakref.ref(tensor) for tensor in outputs]

    def start(self, number: int, inputs: Any, optimizers: Iterable[Any]) -> None:
        """A step starts.

        Args:
            number: Which.
            inputs: What the model is called with.
            optimizers: Those that keep states for its parameters.
        """
        if self._when == "never" or self._meter.is_running:
            return
        if self._when == "auto" and self._meter.needs_two_steps and number < self._due:
            return
        self._number = number
        self.already = self._count(inputs, optimizers)
        if self._meter.start() and self._device.type == "cuda":
            self._retries = self._num_retries()

    def stop(self, number: int, step_s: float) -> tuple[int | None, int | None]:
        """A step is over: its peak in bytes and the allocator's retries, where they are known."""
        needs_two = self._meter.needs_two_steps
        if needs_two and number > self._due:
            self._due = number + 1  # if the second of the two is void, try again
        if not self._meter.is_running or self._number != number:
            self.cancel()
            return None, None
        started = time.perf_counter()
        peak = self._meter.stop(already_bytes=sum(self.already.values()))
        took_s = time.perf_counter() - started
        if not needs_two:
            return peak, self._num_retries() - self._retries if self._device.type == "cuda" else None
        is_second = self._last == number - 1
        self._last = number
        if not is_second:
            return None, None
        self._due = number + max(1, math.ceil(2 * took_s / METER_SHARE / max(step_s, 1e-9)))
        return peak, None

    def cancel(self) -> None:
        """Stop without reading."""
        self._meter.cancel()

    def _num_retries(self) -> int:
        return int(torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0))

    def _count(self, inputs: Any, optimizers: Iterable[Any]) -> dict[str, int]:
        """Bytes that are there before the step, by cause."""
        model, kind = self._model, self._device.type
        given = [x for x in tree_iter(inputs) if isinstance(x, Tensor) and x.device.type == kind]
        found = {
            "parameter": unique_bytes(model.parameters()),
            "buffer": unique_bytes(model.buffers()),
            "optimizer_state": unique_bytes(s for o in optimizers for s in _states(o) if s.device.type == kind),
            "gradient": unique_bytes(p.grad for p in model.parameters() if p.grad is not None),
            "input": unique_bytes(given),
        }
        if self._meter.needs_two_steps:
            found["output"] = unique_bytes([t for ref in self._held if (t := ref()) is not None])
        return found


def _states(optimizer: Any) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in (state.values() if isinstance(state, dict) else ()) if isinstance(value, Tensor))


def by_cause(peak_bytes: int, already: dict[str, int], plan: Plan | None) -> dict[str, int]:
    """A measured peak by cause: what was counted before the step, and the rest as the plan divides it.

    Example:
        >>> by_cause(100, {"parameter": 40, "buffer": 0}, None)
        {'parameter': 40, 'activation, gradient, temporary': 60}
    """
    found = {cause: num_bytes for cause, num_bytes in already.items() if num_bytes}
    rest = peak_bytes - sum(found.values())
    predicted: dict[str, int] = {}
    if plan is not None and plan.planned is not None:
        predicted = {c: b for c, b in plan.planned.peak_by_cause.items() if c in IN_STEP}
        predicted["gradient"] = max(0, predicted.get("gradient", 0) - found.get("gradient", 0))
    total = sum(predicted.values())
    if not total or rest <= 0:
        return found | ({UNATTRIBUTED: rest} if rest else {})
    parts = {cause: rest * num_bytes // total for cause, num_bytes in predicted.items()}
    parts[max(predicted, key=lambda cause: predicted[cause])] += rest - sum(parts.values())
    for cause, num_bytes in parts.items():
        found[cause] = found.get(cause, 0) + num_bytes
    return {cause: num_bytes for cause, num_bytes in found.items() if num_bytes}

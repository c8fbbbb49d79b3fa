"""The highest live bytes of a stretch of training, at a small cost.

On CUDA the caching allocator keeps count; its peak is reset when the meter starts, so a reading of
``max_memory_allocated`` of one's own is then since that moment. On CPU the meter is torch's profiler, told to record
no ops: the allocator then reports each allocation and release, which costs next to nothing while the step runs, and
some microseconds each when they are read. Peaks are what was there at the start, counted from tensors, and the highest
sum of the changes.

Known limits, on CPU: one thread, the one that starts it. The allocator does not report the release of what was
allocated while no meter ran, so a reading is exact only if a meter ran in the step before, too. No other profiler can
start on the thread while the meter runs; where one runs already, the meter does not start. The interface is private
(torch 2.13); without it there is no reading.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_autograd: Any = torch.autograd


def unique_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, once per storage."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


class MemoryMeter:
    """Reads a device's peak between `start` and `stop`.

    Args:
        device: Where the model is.

    Example:
        >>> meter = MemoryMeter(torch.device("cpu"))
        >>> _ = meter.start()
        >>> held, gone = torch.ones(100), torch.ones(50)
        >>> del gone
        >>> meter.stop(already_bytes=1000)
        1600
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_running = False

    @property
    def needs_two_steps(self) -> bool:
        """Whether only the second of two readings in a row is exact."""
        return self._device.type == "cpu"

    def start(self) -> bool:
        """Start, unless something is in the way; whether it runs now."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self.is_running = True
        elif self._device.type == "cpu" and not _autograd._profiler_enabled():
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler reports to stderr otherwise
            self.is_running = _start_profiler()
            _running.meter = self if self.is_running else None
        return self.is_running

    def stop(self, *, already_bytes: int = 0) -> int | None:
        """Stop and read.

        Args:
            already_bytes: On CPU, bytes that were alive at the start.

        Returns:
            The peak, bytes; None if the meter did not run to here.
        """
        if not self.is_running:
            return None
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return already_bytes + _highest(self._end())

    def cancel(self) -> None:
        """Stop without reading."""
        if self.is_running and self._device.type == "cpu":
            self._end()
        self.is_running = False

    def _end(self) -> Any:
        self.is_running = False
        _running.meter = None
        return _autograd._disable_profiler()


class _Running(threading.local):
    """The meter that runs on the CPU, if one does: profilers are a thread's own."""

    meter: MemoryMeter | None = None


_running = _Running()


def make_way() -> None:
    """Cancel the meter that runs on this thread: a profiler is to start."""
    if _running.meter is not None:
        _running.meter.cancel()


def _start_profiler() -> bool:
    """Start a profiler that records allocations alone."""
    parts: Any = torch._C._profiler
    try:
        options = parts._ExperimentalConfig()
        config = parts.ProfilerConfig(parts.ProfilerState.KINETO, False, True, False, False, False, options)
        activities, scopes = {parts.ProfilerActivity.CPU}, {parts.RecordScope.USER_SCOPE}
        _autograd._prepare_profiler(config, activities)
        _autograd._enable_profiler(config, activities, scopes)
    except (AttributeError, RuntimeError, TypeError):
        return False
    return True


def _highest(result: Any) -> int:
    changes = sorted(
        ((e.start_ns(), e.nbytes()) for e in result.events() if e.name() == "[memory]"), key=lambda event: event[0]
    )
    live = highest = 0
    for _, change in changes:
        live += change
        highest = max(highest, live)
    return highest

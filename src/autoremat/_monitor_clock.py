"""Time spent recomputing, on a CPU by the wall clock, on a GPU by events on its stream."""

from __future__ import annotations

import time

import torch


class RecomputeClock:
    """Adds up the time from `start` to `stop`; those inside another count once.

    Args:
        device: Where the model runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._depth = 0
        self._started = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds = 0.0

    def start(self) -> None:
        """A region starts to run again."""
        self._depth += 1
        if self._depth > 1:
            return
        self._started = time.perf_counter()
        if self._on_gpu:
            pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            pair[0].record()
            self._events.append(pair)

    def stop(self) -> None:
        """It is over."""
        self._depth -= 1
        if self._depth:
            return
        if self._on_gpu:
            self._events[-1][1].record()
        else:
            self._seconds += time.perf_counter() - self._started

    def take(self) -> Taken:
        """What has been added up since this was last called."""
        taken = Taken(self._seconds, self._events)
        self._seconds, self._events = 0.0, []
        return taken


class Taken:
    """A time that may still be passing on a GPU.

    Args:
        seconds: What is known.
        events: What is to be added once the GPU has come to it.
    """

    def __init__(self, seconds: float, events: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> None:
        self._seconds = seconds
        self._events = events

    def is_known(self) -> bool:
        """Whether reading it makes nobody wait."""
        return not self._events or self._events[-1][1].query()

    def seconds(self) -> float:
        """Read it."""
        return self._seconds + 1e-3 * sum(float(start.elapsed_time(end)) for start, end in self._events)

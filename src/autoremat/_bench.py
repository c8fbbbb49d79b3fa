"""Times calls on a device: the fastest of many, with inputs that rotate.

With one CPU thread the clock is the CPU time of this process: what other processes do to a shared machine then counts
only as far as they take caches and memory bandwidth. Otherwise it is the wall clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

CALL_S = 0.05
MIN_CALLS = 5


@dataclass(slots=True)
class Bench:
    """Times calls on one device.

    Attributes:
        device: Where the calls run.
        call_s: How long one kind of call is repeated, seconds; at least `MIN_CALLS` times.
        launch_s: What any call takes by itself, seconds; `kernel_s` leaves it out.
    """

    device: torch.device
    call_s: float = CALL_S
    launch_s: float = 0.0

    def clock(self) -> float:
        """Seconds since some moment."""
        if self.device.type == "cpu" and torch.get_num_threads() == 1:
            return time.process_time()
        return time.perf_counter()

    def sync(self) -> None:
        """Wait until the device has nothing left to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def taken_s(self, call: Callable[[], object]) -> float:
        """Seconds that one call takes."""
        self.sync()
        start = self.clock()
        kept = call()
        self.sync()
        taken = self.clock() - start
        del kept  # after the clock: freeing a large tensor takes time too, in a step at another moment
        return taken

    def best_s(self, calls: list[Callable[[], object]]) -> float:
        """The fastest call of those given, in turn, seconds."""
        for call in calls:
            call()
        taken: list[float] = []
        end = time.perf_counter() + self.call_s
        while len(taken) < MIN_CALLS or time.perf_counter() < end:
            taken.append(self.taken_s(calls[len(taken) % len(calls)]))
        return min(taken)

    def kernel_s(self, calls: list[Callable[[], object]]) -> float:
        """The same, less what any call takes."""
        best = self.best_s(calls)
        return max(best - self.launch_s, 0.05 * best)

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Normal random numbers on the device."""
        return torch.randn(*shape, device=self.device).to(dtype)

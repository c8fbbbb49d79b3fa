"""Times calls on a device: each kind in turn, as in a step, so that a call finds the caches as others leave them.

One call repeated finds its code, its buffers and its inputs where it left them: convolutions and matrix products were a
tenth faster so than in a step. So calls take turns, and each keeps what it returned until its next turn: memory is new
then, as for a tensor that is saved. The lower quartile of a call's times is what it takes: not the fastest, which no
step is made of, and little moved by what other processes do now and then.

With one CPU thread the clock is the CPU time of this process: what other processes do to a shared machine then counts
only as far as they take caches and memory bandwidth. Otherwise it is the wall clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDS = 9
"""How often each call has its turn."""


@dataclass(slots=True)
class Bench:
    """Times calls on one device.

    Attributes:
        device: Where the calls run.
        rounds: How often each call has its turn.
        launch_s: What any call takes by itself, seconds; `kernels_s` leaves it out.
    """

    device: torch.device
    rounds: int = ROUNDS
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
        return self._timed(call)[0]

    def calls_s(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        """Seconds that each call takes where they take turns."""
        turns = Turns(self, calls)
        for _ in range(self.rounds):
            turns.round()
        return turns.seconds()

    def kernels_s(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        """The same, less what any call takes."""
        return [max(seconds - self.launch_s, 0.05 * seconds) for seconds in self.calls_s(calls)]

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Normal random numbers on the device."""
        return torch.randn(*shape, device=self.device).to(dtype)

    def _timed(self, call: Callable[[], object]) -> tuple[float, object]:
        self.sync()
        start = self.clock()
        made = call()
        self.sync()
        return self.clock() - start, made


class Turns:
    """Calls that take turns, round by round. Making it runs each of them once.

    Args:
        bench: Of the device.
        calls: What to time.
    """

    def __init__(self, bench: Bench, calls: Sequence[Callable[[], object]]) -> None:
        self._bench, self._calls = bench, calls
        self._kept = [call() for call in calls]
        self._taken: list[list[float]] = [[] for _ in calls]

    def round(self) -> None:
        """One turn of each call."""
        for number, call in enumerate(self._calls):
            # what was kept is freed after the clock has stopped: in a step that is at another moment
            seconds, self._kept[number] = self._bench._timed(call)
            self._taken[number].append(seconds)

    def seconds(self) -> list[float]:
        """What each call takes, seconds."""
        return [low_quartile(taken) for taken in self._taken]


def low_quartile(values: Sequence[float]) -> float:
    """The value that a quarter of the others lies below.

    Example:
        >>> low_quartile([5.0, 1.0, 2.0, 9.0, 3.0])
        2.0
    """
    return sorted(values)[(len(values) - 1) // 4]

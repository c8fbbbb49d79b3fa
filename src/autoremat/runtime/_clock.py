"""Clocks that run while a region is recomputed: how the time of recomputation is told from that of backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol


class Clock(Protocol):
    """Wants to know when a recompute starts and ends. Recomputes may lie inside one another."""

    def start(self) -> None:
        """A region starts to run again."""

    def stop(self) -> None:
        """It has, or has failed to."""


clocks: list[Clock] = []
"""Who is told; empty in a run that nobody watches."""


@contextlib.contextmanager
def timed_recompute() -> Iterator[None]:
    """Tell the clocks of a recompute."""
    running = list(clocks)
    for clock in running:
        clock.start()
    try:
        yield
    finally:
        for clock in running:
            clock.stop()

"""Clocks that run while a region is recomputed: how the time of recomputation is told from that of backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
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
def timed_recompute(on_error: Callable[[BaseException], None] | None) -> Iterator[None]:
    """Tell the clocks of a recompute, and another of the error that it ends in."""
    running = list(clocks)
    for clock in running:
        clock.start()
    try:
        yield
    except Exception as error:
        if on_error is not None:
            on_error(error)
        raise
    finally:
        for clock in running:
            clock.stop()

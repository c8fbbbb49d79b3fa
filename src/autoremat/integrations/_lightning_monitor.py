"""Watching a training by Lightning."""

from __future__ import annotations

from typing import Any

from autoremat._monitor import Monitor
from autoremat._monitor_results import MonitorResults
from autoremat.integrations._lightning import Callback


class MonitorCallback(Callback):
    """Watches a training by Lightning's Trainer, as `autoremat.Monitor` does.

    Args:
        **options: As for `autoremat.Monitor`; ``console_every`` is None here, where there is a progress bar.

    Example:
        >>> from autoremat.integrations.lightning import MonitorCallback
        >>> watch = MonitorCallback(jsonl="steps.jsonl")  # Trainer(..., callbacks=[watch]), then watch.results
    """

    def __init__(self, **options: Any) -> None:
        self._options = {"console_every": None} | options
        self._monitor: Monitor | None = None

    @property
    def results(self) -> MonitorResults | None:
        """What has been seen; None before the training."""
        return None if self._monitor is None else self._monitor.results

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start watching."""
        self._close()
        self._monitor = Monitor(pl_module, **self._options).__enter__()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Lightning runs forward and backward inside the optimizer's step: this is where gradients are complete."""
        if self._monitor is not None:
            self._monitor.before_update()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop watching."""
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stop watching: the training has failed."""
        self._close()

    def _close(self) -> None:
        if self._monitor is not None:
            self._monitor.close()

"""Watching a training by Transformers' Trainer."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from autoremat._monitor import Monitor
from autoremat._monitor_results import MonitorResults


class MonitorCallback(TrainerCallback):  # type: ignore[misc]
    """Watches a training by the Trainer, or a trainer made from it (TRL), as `autoremat.Monitor` does.

    What the Trainer logs (to the console, TensorBoard, Weights & Biases, ...) gets ``autoremat_step_s`` and
    ``autoremat_recompute_share`` of the last step and, where it was metered, ``autoremat_peak_bytes``.

    Args:
        **options: As for `autoremat.Monitor`; ``console_every`` is None here, where there is a progress bar.

    Example:
        >>> from autoremat.integrations.transformers import MonitorCallback
        >>> watch = MonitorCallback(check_every=100)  # Trainer(..., callbacks=[watch]), then watch.results
    """

    def __init__(self, **options: Any) -> None:
        self._options = {"console_every": None} | options
        self._monitor: Monitor | None = None

    @property
    def results(self) -> MonitorResults | None:
        """What has been seen; None before the training."""
        return None if self._monitor is None else self._monitor.results

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_kwargs: Any) -> None:
        """Start watching."""
        self._close()
        self._monitor = Monitor(model, **self._options).__enter__()

    def on_train_end(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        """Stop watching."""
        self._close()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_kwargs: Any) -> None:
        """Add to what is logged of the training."""
        if logs is None or "loss" not in logs or self._monitor is None or not self._monitor.results.records:
            return
        last = self._monitor.results.records[-1]
        logs["autoremat_step_s"] = last.step_s
        logs["autoremat_recompute_share"] = last.recompute_share
        if last.peak_bytes is not None:
            logs["autoremat_peak_bytes"] = last.peak_bytes

    def _close(self) -> None:
        if self._monitor is not None:
            self._monitor.close()

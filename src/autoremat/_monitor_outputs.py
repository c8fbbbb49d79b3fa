"""Where the records of a training go while it runs: a line on the console, a file of JSON lines, TensorBoard."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from autoremat._errors import UsageError
from autoremat._monitor_results import GradientCheck, MonitorResults, StepRecord, ThroughputWarning, record_line

FLUSH_S = 1.0
"""Seconds after which what is written goes to the disk, so that it can be read while the training runs."""


class Output(Protocol):
    """Takes what a monitor has to tell."""

    def record(self, record: StepRecord) -> None:
        """A step is over."""

    def check(self, check: GradientCheck) -> None:
        """Gradients have been checked."""

    def warn(self, warning: ThroughputWarning) -> None:
        """Steps are slow."""

    def close(self, results: MonitorResults) -> None:
        """The training is over."""


class ConsoleOutput:
    """A line on stderr every so many steps.

    Args:
        every: Steps from one line to the next.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)

    def record(self, record: StepRecord) -> None:
        """Print a line, if it is time."""
        if record.step == 1 or record.step % self._every == 0:
            self._console.print(record_line(record))

    def check(self, check: GradientCheck) -> None:
        """Print how it came out."""
        if check.equal is False:
            names = ", ".join(check.differences[:3])
            self._console.print(f"[bold red]step {check.step}  gradients DIFFER with checkpointing:[/] {names}")
        else:
            verdict = "equal with and without checkpointing" if check.equal else f"not checked: {check.note}"
            self._console.print(f"step {check.step}  gradients {verdict}")

    def warn(self, warning: ThroughputWarning) -> None:
        """Print it."""
        self._console.print(f"[yellow]step {warning.step}  {warning.message}[/]")

    def close(self, results: MonitorResults) -> None:
        """Print the summary."""
        if results.records:
            self._console.print(results)


class JsonLinesOutput:
    """A file with one JSON object a line: ``{"kind": "step", ...}``, ``"check"``, ``"warning"``, at last ``"end"``.

    Args:
        path: The file; what is in it is replaced.

    Raises:
        UsageError: If it cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 - open as long as the training runs
        except OSError as error:
            raise UsageError(f"Cannot write records to {path}: {error.strerror}. Name a file that can be.") from error
        self._flushed = 0.0

    def _write(self, kind: str, content: dict[str, Any]) -> None:
        self._file.write(json.dumps({"kind": kind} | content, allow_nan=False) + "\n")
        now = time.monotonic()
        if now > self._flushed + FLUSH_S:
            self._flushed = now
            self._file.flush()

    def record(self, record: StepRecord) -> None:
        """Write it."""
        self._write("step", record.to_dict())

    def check(self, check: GradientCheck) -> None:
        """Write it."""
        self._write("check", check.to_dict())

    def warn(self, warning: ThroughputWarning) -> None:
        """Write it."""
        self._write("warning", warning.to_dict() | {"message": warning.message})

    def close(self, results: MonitorResults) -> None:
        """Write a last line and close the file."""
        summary = {"num_steps": len(results.records), "peak_bytes": results.peak_bytes, "model": results.model}
        self._write("end", summary | {"budget_bytes": results.budget_bytes, "within_budget": results.within_budget})
        self._file.close()


class TensorBoardOutput:
    """Scalars under ``autoremat/`` in a directory of TensorBoard's.

    Args:
        directory: Log directory.

    Raises:
        UsageError: If TensorBoard is not installed.
    """

    def __init__(self, directory: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - only where it is asked for
        except ImportError as error:
            raise UsageError("TensorBoard is not installed: pip install 'autoremat[tensorboard]'.") from error
        self._writer: Any = SummaryWriter(str(directory))

    def record(self, record: StepRecord) -> None:
        """Write its numbers."""
        numbers = record.to_dict()
        causes = numbers.pop("peak_by_cause") or {}
        numbers |= {f"peak_by_cause/{cause}": num_bytes for cause, num_bytes in causes.items()}
        for name, value in numbers.items():
            if value is not None and name != "step":
                self._writer.add_scalar(f"autoremat/{name}", float(value), record.step)

    def check(self, check: GradientCheck) -> None:
        """Write whether gradients differ."""
        if check.equal is not None:
            self._writer.add_scalar("autoremat/gradients_differ", len(check.differences), check.step)

    def warn(self, warning: ThroughputWarning) -> None:
        """Write it as text."""
        self._writer.add_text("autoremat/warning", warning.message, warning.step)

    def close(self, results: MonitorResults) -> None:
        """Write what is left."""
        self._writer.close()

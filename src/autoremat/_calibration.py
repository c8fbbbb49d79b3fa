"""What ``autoremat calibrate`` measured on a machine, as data, and the file that keeps it. No torch here.

One file for each device and number of threads, in ``$XDG_CACHE_HOME/autoremat`` (``~/.cache/autoremat`` without it).
Rates are curves over size: a small product does not reach what a large one does.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pydantic
from pydantic.dataclasses import dataclass

from autoremat._errors import UsageError
from autoremat._shown import Shown

CALIBRATION_VERSION: Literal[2] = 2
Curve = tuple[tuple[float, float], ...]
"""(size, value) pairs, sizes rising."""


@dataclass(frozen=True, slots=True, config=pydantic.ConfigDict(extra="forbid"))
class Calibration(Shown):
    """Speeds of one machine.

    Attributes:
        device: Its name.
        device_kind: "cpu" or "cuda".
        num_threads: Threads that torch computed with.
        memory_bytes: Its memory.
        torch_version: Version of torch that was measured.
        made_at: Day on which it was measured.
        flops_per_s: FLOPs per second over the FLOPs of one op, by family ("matmul", "attention",
            "attention_backward") and dtype.
        fitted_s: Seconds for each FLOP and for each byte moved, both counted, of "convolution" and
            "convolution_backward", by dtype.
        traffic_s_per_byte: Seconds for each byte moved by a simple elementwise op, over the bytes that it moves.
        op_s_per_byte: Seconds for each byte moved by an op that costs more than its traffic, by operator and dtype.
        fault_s_per_byte: What a fresh page costs, for each byte of a new storage of at least `fault_from_bytes`.
        fault_from_bytes: Storages from this size on are returned to the system when they are freed, so that each new
            one pays for its pages again.
        launch_s: What calling an op on tiny tensors takes by itself, dispatch included.
        op_s: What an op costs on top of its kernel in a training step, by phase: Python, autograd and dispatch.
        region_s: What a call of a region costs in forward and backward together, beyond the ops that it runs again.
        saved_s: What each tensor that autograd saves in a region costs on top: what drops it and brings it back.
        watched_op_s: What each op of a region that stores single outputs costs on top, forward and recompute together.
        error: Relative error on the step that the calibration checks itself with.
        version: Of this file format.
    """

    device: str
    device_kind: Literal["cpu", "cuda"]
    num_threads: int
    memory_bytes: int
    torch_version: str
    made_at: str
    flops_per_s: dict[str, dict[str, Curve]]
    fitted_s: dict[str, dict[str, tuple[float, float]]]
    traffic_s_per_byte: Curve
    op_s_per_byte: dict[str, dict[str, float]]
    fault_s_per_byte: float
    fault_from_bytes: int
    launch_s: float
    op_s: dict[str, float]
    region_s: float
    saved_s: float
    watched_op_s: float
    error: float
    version: Literal[2] = CALIBRATION_VERSION

    @property
    def best_rates(self) -> dict[str, float]:
        """FLOPs per second of the best matrix product, by dtype."""
        return {dtype: max(rate for _, rate in curve) for dtype, curve in self.flops_per_s["matmul"].items()}

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Bytes per second of the largest elementwise op."""
        return 1 / self.traffic_s_per_byte[-1][1]

    def to_dict(self) -> dict[str, Any]:
        """The calibration as plain data."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """The calibration as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    def save(self) -> Path:
        """Write it to the cache directory; returns the file."""
        path = calibration_path(self)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.to_json() + "\n", encoding="utf-8")
        return path


def calibration_path(calibration: Calibration) -> Path:
    """The file that keeps a calibration."""
    words = re.sub(r"[^a-z0-9]+", "-", calibration.device.lower()).strip("-")
    name = f"calibration-{calibration.device_kind}-{words}-{calibration.num_threads}.json"
    return cache_directory() / name


def load_calibration(path: Path) -> Calibration:
    """Read a calibration.

    Raises:
        UsageError: If the file is not one, or of another version.
    """
    try:
        return pydantic.TypeAdapter(Calibration).validate_json(path.read_bytes())
    except (OSError, pydantic.ValidationError) as error:
        raise UsageError(f"{path} is not a calibration that this version reads. Run `autoremat calibrate`.") from error


def find_calibration(num_threads: int | None = None) -> Calibration | None:
    """The latest calibration of this machine.

    Args:
        num_threads: Only one of a CPU with so many threads; None takes any.
    """
    files = sorted(cache_directory().glob("calibration-*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    found = (load_calibration(path) for path in files)
    return next((c for c in found if num_threads in (None, c.num_threads) or c.device_kind == "cuda"), None)


def cache_directory() -> Path:
    """Where measurements of this machine are kept (the XDG base directory specification)."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "autoremat"


def interpolate(curve: Sequence[tuple[float, float]], size: float) -> float:
    """The value at a size: linear over the logarithm of size, constant beyond the ends.

    Example:
        >>> interpolate(((1.0, 10.0), (100.0, 30.0)), 10.0)
        20.0
    """
    sizes = [s for s, _ in curve]
    right = bisect_left(sizes, size)
    if right == 0 or right == len(curve):
        return curve[min(right, len(curve) - 1)][1]
    (low, a), (high, b) = curve[right - 1], curve[right]
    return a + (b - a) * math.log(size / low) / math.log(high / low)

"""Targets: the devices that a plan can be made for, as data. No torch here.

The table is ``targets.toml``: vendors' dense peaks, memory as the driver offers it, and for each figure where it is
published and where it was checked, if it was. A user's own device is a file of the same form (`load_target`).

Known limits: nobody reaches a peak. `Target.rate` and `Target.bandwidth` scale all of them by one factor each, so that
compute and memory traffic weigh about right against each other; the times that come out are estimates, their ratios
better ones. "cpu" stands for a small machine with two cores, measured once; "here" is the machine at hand as
``autoremat calibrate`` measured it (`_calibration`).
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import tomllib
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from autoremat._calibration import Calibration, find_calibration
from autoremat._errors import BudgetError, UsageError
from autoremat._units import parse_bytes

COMPUTE_EFFICIENCY = 0.7
"""Share of its peak that a large matrix product reaches: an assumption."""
BANDWIDTH_EFFICIENCY = 0.85
"""Share of its bandwidth that a large elementwise op reaches: an assumption."""
CONTEXT_BYTES = 600 * 2**20
"""Device memory that driver, context and libraries keep for themselves: an assumption."""
GPU_LAUNCH_S = 5e-6
"""From one kernel's launch to the next, eager and asynchronous: an assumption."""
BLAS_WORKSPACE_BYTES = 8_519_680
"""``:4096:2:16:8``, torch's default; what differs from it is in the table (``parseChosenWorkspaceSize`` in torch 2.13's
``CublasHandlePool.cpp``)."""
HERE = "here"
"""The machine at hand, calibrated."""
_ASSUMED = "an assumption, the same for all GPUs"
_FILE_SUFFIXES = (".toml", ".json")


@dataclass(frozen=True, slots=True)
class Target:
    """A device that a plan is made for.

    Attributes:
        name: As given to `get_target`.
        title: The vendor's name for it.
        memory_bytes: Device memory that the driver offers, bytes.
        flops_per_s: Peak floating point operations per second by dtype; a dtype it lacks runs at float32's rate.
        bandwidth_bytes_per_s: Peak bandwidth of device memory, read plus written.
        host_link_bytes_per_s: Peak bandwidth to host memory, one way.
        launch_s: Least time that an op takes, seconds.
        device_kind: Whose kernels run: "cuda" (also for AMD, as in torch) or "cpu".
        source: Where the vendor publishes the figures.
        blas_workspace_bytes: Workspace that torch gives each thread's cuBLAS handle by default, for good.
        random_number_s: Time that drawing a random number takes beyond its op's memory traffic, seconds; a CPU's
            generator is serial.
        reserved_bytes: What driver and context take of the memory.
        sources: Where each figure is from.
        checked: Where a figure was compared with the one here; figures that are missing were not checked.
        calibration: What was measured on this device, if it is the machine at hand.
    """

    name: str
    title: str
    memory_bytes: int
    flops_per_s: dict[str, float]
    bandwidth_bytes_per_s: float
    host_link_bytes_per_s: float
    launch_s: float
    device_kind: Literal["cuda", "cpu"]
    source: str
    blas_workspace_bytes: int = 0
    random_number_s: float = 0.0
    reserved_bytes: int = 0
    sources: dict[str, str] = field(default_factory=dict)
    checked: dict[str, str] = field(default_factory=dict)
    calibration: Calibration | None = None

    @property
    def usable_bytes(self) -> int:
        """What a training step can have: memory less what driver and context take, bytes."""
        return self.memory_bytes - self.reserved_bytes

    @property
    def bandwidth(self) -> float:
        """Bytes per second that large ops reach."""
        return self.bandwidth_bytes_per_s * BANDWIDTH_EFFICIENCY

    def rate(self, dtype: str) -> float:
        """Floating point operations per second that large ops reach.

        Args:
            dtype: Name as torch prints it, with or without its prefix: ``"bfloat16"``, ``"torch.float32"``.

        Example:
            >>> get_target("v100-32g").rate("bfloat16") == get_target("v100-32g").rate("float32")
            True
        """
        peak = self.flops_per_s.get(dtype.removeprefix("torch."), self.flops_per_s["float32"])
        return peak * COMPUTE_EFFICIENCY

    def to_dict(self) -> dict[str, Any]:
        """The target as plain data, usable memory included, its calibration left out."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "calibration"}
        return found | {"usable_bytes": self.usable_bytes, "calibrated": self.calibration is not None}


def get_target(name: str) -> Target:
    """Look a target up.

    Args:
        name: One of `target_names`, in any case; or the path of a file that describes one (``.toml`` or ``.json``).

    Raises:
        UsageError: If there is none of that name (lists the nearest), or the file cannot be read.

    Example:
        >>> get_target("rtx3090-24g").memory_bytes == 24 * 2**30
        True
    """
    key = name.strip().lower()
    if key == HERE:
        return this_machine()
    found = _table().get(key)
    if found is not None:
        return found
    if key.endswith(_FILE_SUFFIXES):
        return load_target(name)
    near = difflib.get_close_matches(key, target_names(), n=4, cutoff=0.4) or list(target_names())
    raise UsageError(
        f"No target {name!r}. Near it: {', '.join(near)}. `autoremat targets` lists all; the path of a .toml or .json "
        "file describes one of your own."
    )


def find_by_title(title: str) -> Target | None:
    """The target for a device name as its driver states it, or None.

    Args:
        title: For example ``torch.cuda.get_device_name()``.

    Example:
        >>> find_by_title("NVIDIA GeForce RTX 3090").name
        'rtx3090-24g'
    """
    words = set(title.replace("-", " ").lower().split()) - {"nvidia", "geforce", "amd", "instinct", "tesla"}
    matches = [t for t in _table().values() if words <= set(t.title.replace("-", " ").lower().split())]
    return max(matches, key=lambda target: target.memory_bytes, default=None)


def target_names() -> tuple[str, ...]:
    """Names of all targets: smallest memory first, then "cpu" and "here", the machine at hand."""
    return (*_table(), HERE)


def this_machine(num_threads: int | None = None, *, calibration: Calibration | None = None) -> Target:
    """The machine at hand: as it was calibrated, else the rough constants of "cpu" with its own memory.

    Args:
        num_threads: Threads that torch computes with, on a CPU; None takes the latest calibration.
        calibration: The calibration to use, instead of the one that was kept.

    Example:
        >>> this_machine().name
        'here'
    """
    calibration = calibration or find_calibration(num_threads)
    if calibration is None:
        title = "This machine, not calibrated (autoremat calibrate)"
        return dataclasses.replace(_table()["cpu"], name=HERE, title=title)
    memory = calibration.memory_bytes
    rates = {dtype: rate / COMPUTE_EFFICIENCY for dtype, rate in calibration.best_rates.items()}
    bandwidth = calibration.bandwidth_bytes_per_s / BANDWIDTH_EFFICIENCY
    measured = f"measured by autoremat calibrate, {calibration.made_at}"
    return Target(
        name=HERE,
        title=f"This machine: {calibration.device}, {calibration.num_threads} threads",
        memory_bytes=memory,
        flops_per_s=rates,
        bandwidth_bytes_per_s=bandwidth,
        host_link_bytes_per_s=bandwidth,
        launch_s=calibration.launch_s,
        device_kind=calibration.device_kind,
        source=measured,
        reserved_bytes=CONTEXT_BYTES if calibration.device_kind == "cuda" else 0,
        sources=dict.fromkeys((*rates, "memory", "bandwidth", "launch"), measured),
        checked=dict.fromkeys((*rates, "memory", "bandwidth", "launch"), measured),
        calibration=calibration,
    )


def load_target(path: str | Path) -> Target:
    """Read a device of your own from a small file.

    Args:
        path: A ``.toml`` or ``.json`` file with title, memory, tflops by dtype, bandwidth_gb_per_s, and if you like
            name, usable, host_link_gb_per_s, launch_us, kind and source.

    Raises:
        UsageError: If it cannot be read, or a figure is missing or wrong; names the figure.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix.lower() == ".json" else tomllib.loads(text)
    except OSError as error:
        raise UsageError(f"Cannot read the target file {path}: {error.strerror}.") from error
    except ValueError as error:
        raise UsageError(f"{path} is not valid {path.suffix[1:].upper()}: {error}.") from error
    try:
        entry = _Entry.model_validate(values)
    except pydantic.ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'the file'}: {e['msg']}" for e in error.errors())
        raise UsageError(
            f"{path} does not describe a target: {problems}. It needs title, memory (such as '24GiB'), tflops (with "
            "float32) and bandwidth_gb_per_s."
        ) from error
    return entry.target(entry.name or path.stem, {})


_Positive = Annotated[float, pydantic.Field(gt=0)]


class _Entry(pydantic.BaseModel):
    """One device as it is written in a file."""

    model_config = pydantic.ConfigDict(extra="forbid")

    name: str = ""
    title: str
    memory: str | int
    usable: str | int | None = None
    tflops: dict[str, _Positive]
    bandwidth_gb_per_s: _Positive
    host_link_gb_per_s: _Positive = 32.0
    launch_us: Annotated[float, pydantic.Field(ge=0)] = GPU_LAUNCH_S * 1e6
    kind: Literal["cuda", "cpu"] = "cuda"
    blas_workspace: str | int | None = None
    source: str = "your own file"
    checked: dict[str, str] = {}

    @pydantic.field_validator("memory", "usable", "blas_workspace")
    @classmethod
    def _check_bytes(cls, value: str | int | None) -> int | None:
        try:
            return None if value is None else parse_bytes(value)
        except BudgetError as error:
            raise ValueError(str(error)) from error

    @pydantic.field_validator("tflops")
    @classmethod
    def _check_rates(cls, value: dict[str, float]) -> dict[str, float]:
        if "float32" not in value:
            raise ValueError("give at least float32")
        return value

    @pydantic.model_validator(mode="after")
    def _check_usable(self) -> _Entry:
        if self.usable is not None and int(self.usable) > int(self.memory):
            raise ValueError("usable is more than memory")
        return self

    def target(self, name: str, places: dict[str, str]) -> Target:
        """The device, with the places that its sources are short for."""
        memory = int(self.memory)
        source = places.get(self.source, self.source)
        driver = places.get("smi", source) if "memory" in self.checked or not places else "the driver, not looked up"
        default, workspace = (CONTEXT_BYTES, BLAS_WORKSPACE_BYTES) if self.kind == "cuda" else (0, 0)
        return Target(
            name=name,
            title=self.title,
            memory_bytes=memory,
            flops_per_s={dtype: rate * 1e12 for dtype, rate in self.tflops.items()},
            bandwidth_bytes_per_s=self.bandwidth_gb_per_s * 1e9,
            host_link_bytes_per_s=self.host_link_gb_per_s * 1e9,
            launch_s=self.launch_us * 1e-6,
            device_kind=self.kind,
            source=source,
            blas_workspace_bytes=workspace if self.blas_workspace is None else int(self.blas_workspace),
            reserved_bytes=default if self.usable is None else memory - int(self.usable),
            sources=dict.fromkeys((*self.tflops, "bandwidth", "host_link"), source)
            | {"memory": driver, "launch": _ASSUMED if places else source},
            checked={figure: places.get(place, place) for figure, place in self.checked.items()},
        )


@cache
def _table() -> dict[str, Target]:
    """The targets of ``targets.toml``, smallest memory first, and "cpu"."""
    values = tomllib.loads((files("autoremat") / "targets.toml").read_text(encoding="utf-8"))
    places = values.pop("sources")
    found = [_Entry.model_validate(entry).target(name, places) for name, entry in values.items()]
    return {target.name: target for target in sorted(found, key=lambda target: target.memory_bytes)} | {"cpu": _cpu()}


def _cpu() -> Target:
    """Two cores with AVX-512 and AMX, measured once: matmul of 2,048 squared, copies of 256 MiB, dropout masks."""
    source = "rough constants; memory is that of the machine at hand"
    rates = {"float32": 250e9, "bfloat16": 1000e9, "float16": 290e9}
    return Target(
        name="cpu",
        title="Two CPU cores",
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        flops_per_s=rates,
        bandwidth_bytes_per_s=23e9,
        host_link_bytes_per_s=23e9,
        launch_s=2e-6,
        device_kind="cpu",
        source=source,
        random_number_s=9e-9,
        sources=dict.fromkeys((*rates, "memory", "bandwidth", "host_link", "launch"), source),
    )

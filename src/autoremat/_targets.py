"""Targets: the devices that a plan can be made for, as data. No torch here.

Figures are the vendors' own peaks: dense (no structured sparsity), tensor cores accumulating in float32, float32
without TF32 (torch's default for matmul), boost clock. Memory is what the driver offers after ECC, in MiB as
``nvidia-smi`` states it. `Target.source` says where to look a figure up; most have not been checked against it yet.

Known limits: nobody reaches a peak. `Target.rate` and `Target.bandwidth` scale all of them by one factor each, so that
compute and memory traffic weigh about right against each other; the times that come out are estimates, their ratios
better ones. "cpu" stands for a small machine with two cores, measured once, not for the machine at hand.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from typing import Literal

from autoremat._errors import UsageError

COMPUTE_EFFICIENCY = 0.7
"""Share of its peak that a large matrix product reaches: an assumption."""
BANDWIDTH_EFFICIENCY = 0.85
"""Share of its bandwidth that a large elementwise op reaches."""
CONTEXT_BYTES = 600 * 2**20
"""Device memory that driver, context and libraries keep for themselves: an assumption."""
GPU_LAUNCH_S = 5e-6
"""From one kernel's launch to the next, eager and asynchronous."""


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
        source: Where the figures are from.
        blas_workspace_bytes: Workspace that torch gives each thread's cuBLAS handle by default, for good.
        random_number_s: Time that drawing a random number takes beyond its op's memory traffic, seconds; a CPU's
            generator is serial.
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

    @property
    def usable_bytes(self) -> int:
        """What a training step can have: memory less what driver and context take, bytes."""
        return self.memory_bytes - (CONTEXT_BYTES if self.device_kind == "cuda" else 0)

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


def get_target(name: str) -> Target:
    """Look a target up.

    Args:
        name: One of `target_names`, in any case.

    Raises:
        UsageError: If there is none of that name; lists the nearest.

    Example:
        >>> get_target("rtx3090-24g").memory_bytes == 24 * 2**30
        True
    """
    found = _TARGETS.get(name.strip().lower())
    if found is None:
        near = difflib.get_close_matches(name.strip().lower(), _TARGETS, n=4, cutoff=0.4) or list(_TARGETS)
        raise UsageError(f"No target {name!r}. Near it: {', '.join(near)}. `autoremat targets` lists all.")
    return found


def find_by_title(title: str) -> Target | None:
    """The target for a device name as its driver states it, or None.

    Args:
        title: For example ``torch.cuda.get_device_name()``.

    Example:
        >>> find_by_title("NVIDIA GeForce RTX 3090").name
        'rtx3090-24g'
    """
    words = set(title.replace("-", " ").lower().split()) - {"nvidia", "geforce", "amd", "instinct", "tesla"}
    matches = [t for t in _TARGETS.values() if words <= set(t.title.replace("-", " ").lower().split())]
    return max(matches, key=lambda target: target.memory_bytes, default=None)


def target_names() -> tuple[str, ...]:
    """Names of all targets, smallest memory first, "cpu" last."""
    return tuple(_TARGETS)


def _gpu(name: str, title: str, mib: int, tera: tuple[float, float, float], gb_per_s: tuple[float, float]) -> Target:
    """A GPU from its datasheet: MiB, TFLOP/s in (float32, float16, bfloat16; 0 for none), GB/s (device, host)."""
    rates = {"float32": tera[0], "float16": tera[1], "bfloat16": tera[2]}
    return Target(
        name=name,
        title=title,
        memory_bytes=mib * 2**20,
        flops_per_s={dtype: rate * 1e12 for dtype, rate in rates.items() if rate},
        bandwidth_bytes_per_s=gb_per_s[0] * 1e9,
        host_link_bytes_per_s=gb_per_s[1] * 1e9,
        launch_s=GPU_LAUNCH_S,
        device_kind="cuda",
        source=_SOURCES[name],
        blas_workspace_bytes=_BLAS_WORKSPACE_BYTES.get(name, 8_519_680),
    )


def _cpu() -> Target:
    """Two cores with AVX-512 and AMX, measured once: matmul of 2,048 squared, copies of 256 MiB, dropout masks."""
    return Target(
        name="cpu",
        title="Two CPU cores",
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        flops_per_s={"float32": 250e9, "bfloat16": 1000e9, "float16": 290e9},
        bandwidth_bytes_per_s=23e9,
        host_link_bytes_per_s=23e9,
        launch_s=2e-6,
        device_kind="cpu",
        source="rough constants; memory is that of the machine at hand",
        random_number_s=9e-9,
    )


_GA102 = "NVIDIA Ampere GA102 whitepaper"
_ADA = "NVIDIA Ada whitepaper"
_SOURCES = {
    "rtx3070-8g": _GA102,
    "rtx3060-12g": "NVIDIA GeForce RTX 3060 specifications",
    "t4-16g": "NVIDIA T4 datasheet",
    "v100-16g": "NVIDIA V100 datasheet (SXM2)",
    "rtx4060ti-16g": "NVIDIA GeForce RTX 4060 Ti specifications",
    "a10g-24g": "NVIDIA A10G datasheet",
    "l4-24g": "NVIDIA L4 datasheet",
    "rtx3090-24g": _GA102,
    "rtx4090-24g": _ADA,
    "rtx5090-32g": "NVIDIA RTX Blackwell whitepaper",
    "v100-32g": "NVIDIA V100 datasheet (SXM2)",
    "a100-40g": "NVIDIA A100 datasheet (SXM4)",
    "l40s-48g": "NVIDIA L40S datasheet",
    "rtxa6000-48g": _GA102,
    "rtx6000ada-48g": "NVIDIA RTX 6000 Ada Generation datasheet",
    "mi250x-64g": "AMD Instinct MI250X data sheet, one of two dies",
    "h100-80g": "NVIDIA H100 datasheet (SXM5)",
    "a100-80g": "NVIDIA A100 datasheet (SXM4)",
    "h200-141g": "NVIDIA H200 datasheet (SXM5)",
    "b200-180g": "NVIDIA HGX B200 datasheet",
    "mi300x-192g": "AMD Instinct MI300X data sheet",
    "mi325x-256g": "AMD Instinct MI325X data sheet",
    "b300-288g": "NVIDIA HGX B300 datasheet",
    "mi355x-288g": "AMD Instinct MI355X data sheet",
}
_BLAS_WORKSPACE_BYTES = dict.fromkeys(
    ("rtx5090-32g", "mi250x-64g", "h100-80g", "h200-141g", "b200-180g", "b300-288g"), 32 * 2**20
) | dict.fromkeys(("mi300x-192g", "mi325x-256g", "mi355x-288g"), 128 * 2**20)
"""Where it is not ``:4096:2:16:8``: ``parseChosenWorkspaceSize`` in torch 2.13's ``CublasHandlePool.cpp``."""
_TARGETS = {
    target.name: target
    for target in sorted(
        (
            _gpu("rtx3070-8g", "GeForce RTX 3070", 8_192, (20.3, 40.6, 40.6), (448, 32)),
            _gpu("rtx3060-12g", "GeForce RTX 3060", 12_288, (12.7, 25.5, 25.5), (360, 32)),
            _gpu("t4-16g", "Tesla T4", 15_360, (8.1, 65, 0), (320, 16)),
            _gpu("v100-16g", "Tesla V100 16 GB", 16_384, (15.7, 125, 0), (900, 16)),
            _gpu("rtx4060ti-16g", "GeForce RTX 4060 Ti", 16_380, (22.1, 44.1, 44.1), (288, 16)),
            _gpu("a10g-24g", "A10G", 23_028, (31.2, 70, 70), (600, 32)),
            _gpu("l4-24g", "L4", 23_034, (30.3, 121, 121), (300, 32)),
            _gpu("rtx4090-24g", "GeForce RTX 4090", 24_564, (82.6, 165.2, 165.2), (1_008, 32)),
            _gpu("rtx3090-24g", "GeForce RTX 3090", 24_576, (35.6, 71, 71), (936, 32)),
            _gpu("rtx5090-32g", "GeForce RTX 5090", 32_607, (104.8, 209.5, 209.5), (1_792, 64)),
            _gpu("v100-32g", "Tesla V100 32 GB", 32_768, (15.7, 125, 0), (900, 16)),
            _gpu("a100-40g", "A100 40 GB", 40_960, (19.5, 312, 312), (1_555, 32)),
            _gpu("l40s-48g", "L40S", 46_068, (91.6, 362, 362), (864, 32)),
            _gpu("rtxa6000-48g", "RTX A6000", 49_140, (38.7, 154.8, 154.8), (768, 32)),
            _gpu("rtx6000ada-48g", "RTX 6000 Ada", 49_140, (91.1, 364.2, 364.2), (960, 32)),
            _gpu("mi250x-64g", "Instinct MI250X, one die", 65_520, (47.9, 191.5, 191.5), (1_638, 32)),
            _gpu("h100-80g", "H100 80 GB", 81_559, (67, 989, 989), (3_350, 64)),
            _gpu("a100-80g", "A100 80 GB", 81_920, (19.5, 312, 312), (2_039, 32)),
            _gpu("h200-141g", "H200", 143_771, (67, 989, 989), (4_800, 64)),
            _gpu("b200-180g", "B200", 183_359, (75, 2_250, 2_250), (8_000, 64)),
            _gpu("mi300x-192g", "Instinct MI300X", 196_592, (163.4, 1_307, 1_307), (5_300, 64)),
            _gpu("mi325x-256g", "Instinct MI325X", 262_128, (163.4, 1_307, 1_307), (6_000, 64)),
            _gpu("b300-288g", "B300", 275_040, (75, 2_250, 2_250), (8_000, 64)),
            _gpu("mi355x-288g", "Instinct MI355X", 294_896, (157.3, 2_516, 2_516), (8_000, 64)),
        ),
        key=lambda target: target.memory_bytes,
    )
} | {"cpu": _cpu()}

"""What memory the device has left, and what to say when there was none.

Known limits: on a CPU the free memory is read from Linux (``/proc/meminfo`` and the limits of control groups); what
other processes take later is not known. On a GPU it is what the driver reports, with what torch's allocator has cached.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from autoremat._errors import BudgetError
from autoremat._plan import Plan
from autoremat._units import format_bytes

RESERVE_SHARE = 0.05
"""What budget="auto" leaves free, as a share of the device's memory: contexts and libraries grow while training."""
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


def budget_left(model: nn.Module, static_bytes: int, reserve_bytes: int | None) -> int:
    """All memory that a step of the model can have on its device, less a reserve, bytes.

    Args:
        model: On its device.
        static_bytes: What the step has there already (parameters and the like): it is part of the budget.
        reserve_bytes: What to leave free; None leaves `RESERVE_SHARE` of the device.

    Raises:
        BudgetError: If the device does not say what is free, or nothing is left.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device)
    elif device.type == "cpu":
        free, total = _host_memory()
        free += static_bytes
    else:
        raise BudgetError(f"budget='auto' does not know what is free on {device.type!r}: give a number of bytes.")
    reserve = int(RESERVE_SHARE * total) if reserve_bytes is None else reserve_bytes
    if free <= reserve:
        raise BudgetError(
            f"budget='auto': {format_bytes(free)} are free on {device}, and {format_bytes(reserve)} of them are kept "
            "in reserve. Free some memory, give a smaller reserve=, or a budget in bytes."
        )
    return free - reserve


def _host_memory() -> tuple[int, int]:
    """Free and total bytes of host memory, within the limits of the control group."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        free, total = kib["MemAvailable"] * 1024, kib["MemTotal"] * 1024
    except (OSError, KeyError, ValueError, IndexError):
        page = os.sysconf("SC_PAGE_SIZE")
        free, total = page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        used = int((group / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):  # no limit, or another version of control groups
        return free, total
    return min(free, max(0, limit - used)), min(total, limit)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on a GPU or on a CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def explain_out_of_memory(model: nn.Module, plan: Plan | None, held: dict[str, int]) -> str:
    """What was alive, by cause, and what to do.

    Args:
        model: The model.
        plan: The plan that was on it.
        held: Bytes that are alive all through the step, by cause, as they were found.
    """
    text = ", ".join(f"{cause} {format_bytes(size)}" for cause, size in held.items() if size)
    lines = [f"autoremat: {type(model).__name__} ran out of memory. Alive all through the step: {text}."]
    planned = plan.planned if plan is not None else None
    if plan is None or planned is None:
        lines.append("No plan was on the model.")
        return " ".join(lines)
    causes = sorted(planned.peak_by_cause.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{cause.replace('_', ' ')} {format_bytes(size)}" for cause, size in causes if size)
    lines.append(
        f"The plan's peak is {format_bytes(planned.peak_bytes)} of a budget of {format_bytes(plan.budget_bytes or 0)}, "
        f"at {planned.peak_at}: {parts}."
    )
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        lines.append(f"The device has {format_bytes(free)} free of {format_bytes(total)}.")
    smallest = plan.smallest_bytes
    if smallest is not None and smallest < planned.peak_bytes:
        lines.append(
            f"Give a smaller budget (the smallest possible is {format_bytes(smallest)}), or run the step with "
            "autoremat.retry_step (with Transformers' Trainer: AutorematCallback.retry), which moves to a tighter plan."
        )
    else:
        lines.append("No plan needs less: use a smaller batch, a lower precision or an optimizer with less state.")
    return " ".join(lines)

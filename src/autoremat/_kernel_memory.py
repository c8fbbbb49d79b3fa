"""Ask a CPU kernel how much memory it takes while it runs: call it once on zeros and read the allocator's events.

What a kernel allocates inside one op depends on the machine (oneDNN picks kernels by instruction set), on the number
of threads and on dtypes and strides, so the kernel itself is the only truthful source. Each kind of call is asked
once in a process; calls too large to be asked in passing are left to the rules in `_workspace.py`.

The events come from ``torch.autograd``'s legacy profiler (private; torch 2.13), which costs microseconds and starts
nothing, unlike the Kineto profiler that `_measure.py` judges with.

Known limits: zeros stand for every value, so a kernel whose workspace depends on values is asked for that of zeros.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_iter, tree_unflatten

from autoremat._memory_meter import make_way
from autoremat._random import preserved_random_state

MAX_BYTES = 64 * 2**20
"""Calls whose tensors take more are not asked: tracing must not take the memory of a step."""
MAX_FLOPS = 10**10
"""Calls of more FLOPs are not asked: a core takes about a second for ten times this."""


@dataclass(frozen=True, slots=True)
class KernelMemory:
    """What one call of a kernel allocates.

    Attributes:
        workspace_bytes: What it takes and returns, on top of its outputs at the highest moment.
        output_bytes: Size of the storage of each tensor that it returns. Some kernels compute into a larger storage
            than the result's shape says.
    """

    workspace_bytes: int
    output_bytes: tuple[int, ...]


_answers: dict[Any, KernelMemory | None] = {}


def kernel_memory(func: Any, args: Any, kwargs: Any, *, flops: int = 0, is_random: bool = False) -> KernelMemory | None:
    """What a CPU kernel allocates in one call.

    Args:
        func: An ATen operator.
        args: Positional arguments; of tensors (fake or real) only shape, strides and dtype count.
        kwargs: Keyword arguments.
        flops: FLOPs of the call.
        is_random: Whether it draws random numbers, which are put back.

    Returns:
        Its answer; None if the call is too large to be asked, not an operator of torch's own, or does not run on
        zeros.

    Example:
        >>> x = torch.ones(4, 4)
        >>> kernel_memory(torch.ops.aten.mul.Tensor, (x, 2.0), {})  # the number as float64 and as float32
        KernelMemory(workspace_bytes=12, output_bytes=(64,))
    """
    leaves, structure = tree_flatten((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    if flops > MAX_FLOPS or func.namespace not in ("aten", "prims") or not all(map(_is_plain, leaves)):
        return None
    if sum(x.numel() * x.element_size() for x in tensors) > MAX_BYTES:
        return None
    key = (func, structure, torch.get_num_threads(), *map(_describe, leaves))
    if key not in _answers:
        zeros = [_zeros_like(x) if isinstance(x, Tensor) else x for x in leaves]
        with _disable_current_modes(), preserved_random_state() if is_random else contextlib.nullcontext():
            _answers[key] = _ask(func, *tree_unflatten(zeros, structure))
    return _answers[key]


def _is_plain(leaf: object) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.device.type == "cpu" and leaf.layout == torch.strided and not leaf.is_quantized
    known = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
    return leaf is None or isinstance(leaf, known)


def _describe(leaf: Any) -> Any:
    """What of an argument a kernel's memory can depend on."""
    return (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), leaf)


def _zeros_like(tensor: Tensor) -> Tensor:
    with _disable_current_modes():
        reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        zeros = torch.zeros(reach if tensor.numel() else 0, dtype=tensor.dtype)
        return zeros.as_strided(tensor.shape, tensor.stride())


def _ask(func: Callable[..., Any], args: Any, kwargs: Any) -> KernelMemory | None:
    own = {_key(x) for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)}
    try:
        out, changes = record_allocations(lambda: func(*args, **kwargs))
    except Exception:  # noqa: BLE001 - whatever a kernel says of zeros, there is no answer
        return None
    results = [x for x in tree_iter(out) if isinstance(x, Tensor)]
    new = {_key(x): x.untyped_storage().nbytes() for x in results if _key(x) not in own}
    live = highest = 0
    for change in changes:
        live += change
        highest = max(highest, live)
    return KernelMemory(
        workspace_bytes=max(0, highest - sum(new.values())),
        output_bytes=tuple(x.untyped_storage().nbytes() for x in results),
    )


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def record_allocations(function: Callable[[], Any]) -> tuple[Any, Iterable[int]]:
    """Run a function and note every allocation (positive) and release (negative) of CPU memory in it, bytes.

    Args:
        function: What to run, on this thread.

    Returns:
        What it returned, and the changes in order.
    """
    make_way()
    profiler: Any = torch.autograd
    options = torch._C._profiler._ExperimentalConfig()
    profiler._enable_profiler_legacy(
        profiler.ProfilerConfig(profiler.ProfilerState.CPU, False, True, False, False, False, options)
    )
    try:
        out = function()
    finally:
        threads = profiler._disable_profiler_legacy()
    return out, [event.cpu_memory_usage() for events in threads for event in events if event.kind() == "memory_alloc"]

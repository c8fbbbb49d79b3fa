"""Independent judges of a step: what it allocates, by the profiler, and what it computes. No code of autoremat's.

FLOPs are those of matrix products, convolutions and attention, which is all that counts; a multiply and an add are two.
"""

import os
import platform
import warnings

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


def flops_of(name, args, out):
    """FLOPs of an aten call, from anything that has shapes.

    Args:
        name: Without namespace and overload.
        args: Positional arguments.
        out: What it returned.
    """
    if name in _PRODUCTS:
        a, b = args[-2:]
        return 2 * a.numel() * b.shape[-1]
    if name.startswith(_ATTENTION):
        # Scores and weighted values; backward also makes the scores again: five products for two.
        is_backward = name.endswith("backward")
        query, key = args[1:3] if is_backward else args[0:2]
        return 2 * query.numel() * key.shape[-2] * (5 if is_backward else 2)
    if name in ("convolution", "_convolution", "convolution_overrideable"):
        return _convolution(args[1], out, is_transposed=args[6], x=args[0])
    if name == "convolution_backward":
        grad, x, weight, transposed, mask = args[0], args[1], args[2], args[7], args[10]
        return _convolution(weight, grad, is_transposed=transposed, x=x) * (bool(mask[0]) + bool(mask[1]))
    return 0


def _convolution(weight, y, *, is_transposed, x):
    places = (x if is_transposed else y).numel() // (x if is_transposed else y).shape[1]
    return 2 * places * weight.numel()


class Flops(TorchDispatchMode):
    """Sums the FLOPs of what runs inside; holds no tensors."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.total += flops_of(func.__name__.split(".")[0], args, out)
        return out


def peak_bytes(run):
    """Largest live bytes above what was alive before, from the profiler's memory events; and what it returned."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            result = run()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    live = peak = 0
    for event in events:
        live += event.nbytes()
        peak = max(peak, live)
    return peak, result


def machine():
    """The machine in a line."""
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"

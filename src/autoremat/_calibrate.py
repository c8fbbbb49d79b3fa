"""Measure the machine at hand: what `_calibration.Calibration` holds, in well under two minutes.

Calls of a kind take turns, so that none finds the caches as it left them itself (`_bench`). What an op costs around
its kernel, and what regions cost, comes from a tiny step (`_calibrate_host`). At the end a step of a middling
transformer is predicted and run, and the relative error is kept with the figures.

Known limits: the time of a convolution is fitted to its FLOPs and the bytes that it moves, whatever its kernel's shape;
an operator that is not in the table moves its bytes and computes nothing. The path for CUDA has not been run by this
project yet.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_iter

from autoremat._bench import ROUNDS, Bench, low_quartile
from autoremat._build_graph import trace
from autoremat._calibrate_host import host_cost
from autoremat._calibrate_ops import element_calls
from autoremat._calibration import Calibration, Curve
from autoremat._cost import step_seconds
from autoremat._errors import UsageError
from autoremat._measure_ops import times_path
from autoremat._model_states import States
from autoremat._random import preserved_random_state
from autoremat._step import run_step
from autoremat._targets import this_machine

Progress = Callable[[str, float], None]
FAULT_FROM_BYTES = 32 * 2**20
"""DEFAULT_MMAP_THRESHOLD_MAX of glibc on 64 bit: blocks of this size are mapped anew each time (mallopt(3))."""
_MATMUL_SIZES = (32, 64, 128, 256, 512, 1024, 2048)
_ATTENTION_SIZES = ((2, 4, 64, 64), (2, 4, 256, 64), (2, 8, 512, 64), (1, 8, 1024, 64))
_CONVOLUTION_SIZES = (
    (256, 64, 24, 1),
    (64, 64, 24, 3),
    (256, 512, 12, 1),
    (128, 128, 12, 3),
    (1024, 256, 6, 1),
    (256, 256, 6, 3),
    (2048, 512, 4, 1),
    (512, 512, 4, 3),
)
"""Channels in and out, height and width, kernel: those of a ResNet's four stages."""
_CONVOLUTION_BATCH = 4
_TRAFFIC_BYTES = tuple(3 * 2**power for power in (14, 17, 20, 22, 24, 26))
_TRAFFIC_COLD_BYTES, _MAX_SETS = 24 * 2**20, 64
"""Small sums go through about so much memory in a round, so that none finds its inputs in a near cache."""
_STEPS = 7
_TINY_CALLS = 100


def calibrate(
    *,
    dtypes: tuple[str, ...] = ("float32", "bfloat16"),
    device: str | None = None,
    rounds: int = ROUNDS,
    save: bool = True,
    progress: Progress | None = None,
) -> Calibration:
    """Measure this machine, for targets named ``"here"``.

    Args:
        dtypes: Dtypes to measure; "float32" must be among them.
        device: "cpu" or "cuda"; None takes a GPU where there is one.
        rounds: How often each kind of call is made; fewer are quicker and less exact.
        save: Keep the result in the cache directory, where `get_target` finds it.
        progress: Called with a label and a fraction done.

    Returns:
        The figures, with the relative error of a step that was predicted from them and run.

    Raises:
        UsageError: For a device that is not there, dtypes without float32, or rounds below one.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise UsageError(f"device={device!r}: use 'cpu', or 'cuda' where torch finds a GPU.")
    unknown = [name for name in dtypes if not isinstance(getattr(torch, name, None), torch.dtype)]
    if "float32" not in dtypes or unknown:
        raise UsageError(f"dtypes={dtypes!r}: give names of torch dtypes, float32 among them.")
    if rounds < 1:
        raise UsageError(f"rounds={rounds}: each call is made at least once.")
    with preserved_random_state():
        bench = Bench(torch.device(device), rounds)
        found = _measure(bench, dtypes, progress or (lambda label, fraction: None))
    if save:
        found.save()
        times_path(found).unlink(missing_ok=True)  # single calls were timed on the machine as it was before
    return found


def _measure(bench: Bench, dtypes: tuple[str, ...], report: Progress) -> Calibration:
    names = {name: getattr(torch, name) for name in dtypes}
    with torch.no_grad():
        report("calling ops", 0.0)
        tiny = bench.randn(4)
        bench.launch_s = low_quartile(bench.calls_s([lambda: tiny + tiny] * _TINY_CALLS))
        report("matrix products", 0.1)
        rates = {"matmul": {name: _matmul(bench, dtype) for name, dtype in names.items()}}
    report("attention and convolutions", 0.3)
    attention = {name: _attention(bench, dtype) for name, dtype in names.items()}
    convolution = {name: _convolutions(bench, dtype) for name, dtype in names.items()}
    for suffix, part in (("", 0), ("_backward", 1)):
        rates[f"attention{suffix}"] = {name: both[part] for name, both in attention.items()}
    fits = {
        f"convolution{suffix}": {name: both[part] for name, both in convolution.items()}
        for suffix, part in (("", 0), ("_backward", 1))
    }
    with torch.no_grad():
        report("memory", 0.5)
        traffic = _traffic(bench)
        fault = _fault_s_per_byte(bench, traffic[-1][1])
        report("elementwise ops", 0.6)
        elements = _elements(bench, names)
    report("small steps", 0.8)
    host = host_cost(bench)
    found = Calibration(
        device=_device_name(bench.device),
        device_kind="cuda" if bench.device.type == "cuda" else "cpu",
        num_threads=torch.get_num_threads(),
        memory_bytes=_memory_bytes(bench.device),
        torch_version=torch.__version__,
        made_at=dt.datetime.now(dt.UTC).date().isoformat(),
        flops_per_s=rates,
        fitted_s=fits,
        traffic_s_per_byte=traffic,
        op_s_per_byte=elements,
        fault_s_per_byte=fault,
        fault_from_bytes=FAULT_FROM_BYTES,
        launch_s=bench.launch_s,
        op_s=host.op_s,
        region_s=host.region_s,
        saved_s=host.saved_s,
        watched_op_s=host.watched_op_s,
        error=0.0,
    )
    report("checking a step", 0.9)
    return _with_error(found, bench)


def _matmul(bench: Bench, dtype: torch.dtype) -> Curve:
    """Rates of a linear layer's three products (output, gradient of input, gradient of weight) over their FLOPs."""
    calls: list[Callable[[], Tensor]] = []
    for n in _MATMUL_SIZES:
        x, y = bench.randn(2 * n, n // 2, dtype=dtype), bench.randn(2 * n, n, dtype=dtype)
        weight = bench.randn(n, n // 2, dtype=dtype)
        calls += [partial(torch.mm, a, b) for a, b in ((x, weight.t()), (y, weight), (y.t(), x))]
    taken = bench.kernels_s(calls)
    return tuple((2.0 * n**3, 6 * n**3 / sum(taken[3 * i : 3 * i + 3])) for i, n in enumerate(_MATMUL_SIZES))


def _both(
    bench: Bench, forwards: Sequence[tuple[Callable[..., Tensor], tuple[Tensor, ...]]]
) -> tuple[list[float], list[float]]:
    """Seconds of functions' forwards and of their backwards."""
    with torch.no_grad():
        forward_s = bench.kernels_s([partial(forward, *inputs) for forward, inputs in forwards])
    backwards = []
    for forward, inputs in forwards:
        out = forward(*inputs)
        backwards.append(partial(torch.autograd.grad, out, inputs, torch.ones_like(out), retain_graph=True))
    return forward_s, bench.kernels_s(backwards)


def _attention(bench: Bench, dtype: torch.dtype) -> tuple[Curve, Curve]:
    forwards, flops = [], []
    for batch, heads, length, width in _ATTENTION_SIZES:
        shape = (batch, heads, length, width)
        inputs = tuple(bench.randn(*shape, dtype=dtype).requires_grad_() for _ in range(3))
        forwards.append((F.scaled_dot_product_attention, inputs))
        flops.append(4.0 * batch * heads * length * length * width)
    forward_s, backward_s = _both(bench, forwards)
    forward = ((work, work / s) for work, s in zip(flops, forward_s, strict=True))
    backward = ((2.5 * work, 2.5 * work / s) for work, s in zip(flops, backward_s, strict=True))
    return tuple(sorted(forward)), tuple(sorted(backward))


def _convolutions(bench: Bench, dtype: torch.dtype) -> tuple[tuple[float, float], tuple[float, float]]:
    """Seconds for a FLOP and for a byte moved, of convolutions and of their backward: least squares of ratios."""
    forwards, work = [], []
    for channels, out_channels, size, kernel in _CONVOLUTION_SIZES:
        image = bench.randn(_CONVOLUTION_BATCH, channels, size, size, dtype=dtype).requires_grad_()
        weight = bench.randn(out_channels, channels, kernel, kernel, dtype=dtype).requires_grad_()
        forwards.append((partial(F.conv2d, padding=kernel // 2), (image, weight)))
        flops = 2.0 * weight.numel() * _CONVOLUTION_BATCH * size**2
        out_bytes = _CONVOLUTION_BATCH * out_channels * size**2 * image.element_size()
        work.append((flops, image.nbytes + weight.nbytes, out_bytes))
    forward_s, backward_s = _both(bench, forwards)
    return (
        _fit([(flops, read + out, s) for (flops, read, out), s in zip(work, forward_s, strict=True)]),
        _fit([(2 * flops, 2 * read + out, s) for (flops, read, out), s in zip(work, backward_s, strict=True)]),
    )


def _fit(rows: list[tuple[float, float, float]]) -> tuple[float, float]:
    """(a, b) with seconds about a * FLOPs + b * bytes, neither below zero, in relative least squares."""
    scaled = np.array([(flops / s, moved / s) for flops, moved, s in rows])
    ones = np.ones(len(rows))
    both, *_ = np.linalg.lstsq(scaled, ones, rcond=None)
    if both.min() < 0:  # one of them explains more than all: leave the other out
        by_flops = float(scaled[:, 0].sum() / (scaled[:, 0] ** 2).sum())
        return by_flops, 0.0
    return float(both[0]), float(both[1])


def _traffic(bench: Bench) -> Curve:
    """Seconds for each byte of a sum into a tensor that is there already, over the bytes that it moves."""
    calls, sizes = [], []
    for num_bytes in _TRAFFIC_BYTES:
        for _ in range(max(1, min(_MAX_SETS, _TRAFFIC_COLD_BYTES // num_bytes))):
            x, y, out = (bench.randn(num_bytes // 12) for _ in range(3))
            calls.append(partial(torch.add, x, y, out=out))
            sizes.append(num_bytes)
    taken: dict[int, list[float]] = {}
    for size, seconds in zip(sizes, bench.kernels_s(calls), strict=True):
        taken.setdefault(size, []).append(seconds)
    return tuple((float(size), low_quartile(seconds) / size) for size, seconds in taken.items())


def _fault_s_per_byte(bench: Bench, traffic_s_per_byte: float) -> float:
    """What a byte of a fresh large tensor costs beyond writing it; a GPU's allocator keeps its memory."""
    if bench.device.type == "cuda":
        return 0.0
    num_bytes = 2 * FAULT_FROM_BYTES
    x = bench.randn(num_bytes // 4)
    taken = bench.calls_s([partial(torch.neg, x)])[0]
    return max(0.0, taken / num_bytes - 2 * traffic_s_per_byte)


def _elements(bench: Bench, dtypes: dict[str, torch.dtype]) -> dict[str, dict[str, float]]:
    calls, moved = [], []
    for name, dtype in dtypes.items():
        for call in element_calls(bench.randn, dtype):
            try:
                out = call.operator(*call.arguments, **call.keywords)
            except (NotImplementedError, RuntimeError):
                continue  # no kernel for this dtype here: the op keeps float32's time
            num_bytes = sum(x.nbytes for x in tree_iter((call.arguments, out)) if isinstance(x, Tensor))
            calls.append(partial(call.operator, *call.arguments, **call.keywords))
            moved.append((str(call.operator), name, num_bytes))
    found: dict[str, dict[str, float]] = {}
    for (operator, dtype_name, num_bytes), seconds in zip(moved, bench.kernels_s(calls), strict=True):
        found.setdefault(operator, {})[dtype_name] = seconds / num_bytes
    return found


def _square(output: Tensor) -> Tensor:
    mean: Tensor = output.square().mean()
    return mean


def _with_error(found: Calibration, bench: Bench) -> Calibration:
    """Predict a middling step, run it, and keep the relative difference."""
    layers = [nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True) for _ in range(3)]
    model = nn.Sequential(*layers, nn.Linear(256, 64)).to(bench.device)
    batch = bench.randn(4, 128, 256)
    graph = trace(model, batch, loss=_square, device_kind=bench.device.type)
    predicted = sum(step_seconds(graph, this_machine(calibration=found)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=bench.device.type == "cuda")
    states = States(optimizer)
    taken = []
    for _ in range(2 * _STEPS):
        taken.append(bench.taken_s(lambda: run_step(model, batch, loss=_square, states=states)))
        optimizer.zero_grad(set_to_none=True)
    measured = low_quartile(taken)
    return _replace(found, error=abs(predicted / measured - 1))


def _replace(found: Calibration, **changes: Any) -> Calibration:
    return Calibration(**(found.to_dict() | changes))


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return next(_cpu_names(), "CPU")


def _cpu_names() -> Iterator[str]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                yield value.strip()


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

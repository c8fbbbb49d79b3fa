"""Measure the machine at hand: what `_calibration.Calibration` holds, in well under two minutes.

Each figure is the fastest of repeated calls with inputs that rotate, so that neither other processes nor a warm cache
decide it. What an op costs around its kernel comes from a step of a model so small that there is nothing else; what a
region costs comes from the same step with regions. At the end a step of a middling transformer is predicted and run,
and the relative error is kept with the figures.

Known limits: the time of a convolution is fitted to its FLOPs and the bytes that it moves, whatever its kernel's shape;
an operator that is not in the table moves its bytes and computes nothing. The path for CUDA has not been run by this
project yet.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_iter

from autoremat._bench import CALL_S, Bench
from autoremat._build_graph import trace
from autoremat._calibrate_ops import element_calls
from autoremat._calibration import Calibration, Curve
from autoremat._cost import step_seconds
from autoremat._errors import UsageError
from autoremat._model_states import States
from autoremat._plan import Plan
from autoremat._random import preserved_random_state
from autoremat._regions import describe_all
from autoremat._replay import RegionSpec
from autoremat._step import run_step
from autoremat._targets import this_machine
from autoremat.runtime import apply

Progress = Callable[[str, float], None]
NUM_SETS = 3
"""Sets of inputs that rotate."""
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
_STEPS = 7


def calibrate(
    *,
    dtypes: tuple[str, ...] = ("float32", "bfloat16"),
    device: str | None = None,
    call_s: float = CALL_S,
    save: bool = True,
    progress: Progress | None = None,
) -> Calibration:
    """Measure this machine, for targets named ``"here"``.

    Args:
        dtypes: Dtypes to measure; "float32" must be among them.
        device: "cpu" or "cuda"; None takes a GPU where there is one.
        call_s: How long each kind of call is repeated, seconds; less is quicker and less exact.
        save: Keep the result in the cache directory, where `get_target` finds it.
        progress: Called with a label and a fraction done.

    Returns:
        The figures, with the relative error of a step that was predicted from them and run.

    Raises:
        UsageError: For a device that is not there, or dtypes without float32.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise UsageError(f"device={device!r}: use 'cpu', or 'cuda' where torch finds a GPU.")
    unknown = [name for name in dtypes if not isinstance(getattr(torch, name, None), torch.dtype)]
    if "float32" not in dtypes or unknown:
        raise UsageError(f"dtypes={dtypes!r}: give names of torch dtypes, float32 among them.")
    with preserved_random_state():
        bench = Bench(torch.device(device), call_s=call_s)
        found = _measure(bench, dtypes, progress or (lambda label, fraction: None))
    if save:
        found.save()
    return found


def _measure(bench: Bench, dtypes: tuple[str, ...], report: Progress) -> Calibration:
    names = {name: getattr(torch, name) for name in dtypes}
    with torch.no_grad():
        report("calling ops", 0.0)
        tiny = bench.randn(4)
        bench.launch_s = bench.best_s([lambda: tiny + tiny])
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
        traffic = tuple((float(size), _traffic(bench, size)) for size in _TRAFFIC_BYTES)
        fault = _fault_s_per_byte(bench, traffic[-1][1])
        report("elementwise ops", 0.6)
        elements = _elements(bench, names)
    report("small steps", 0.8)
    op_s, region_s, watched_op_s = _around_ops(bench)
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
        op_s=op_s,
        region_s=region_s,
        watched_op_s=watched_op_s,
        error=0.0,
    )
    report("checking a step", 0.9)
    return _with_error(found, bench)


def _matmul(bench: Bench, dtype: torch.dtype) -> Curve:
    curve = []
    for n in _MATMUL_SIZES:
        pairs = [(bench.randn(n, n, dtype=dtype), bench.randn(n, n, dtype=dtype)) for _ in range(NUM_SETS)]
        curve.append((2.0 * n**3, 2 * n**3 / bench.kernel_s([partial(torch.mm, a, b.t()) for a, b in pairs])))
    return tuple(curve)


def _both(
    bench: Bench, forward: Callable[..., Tensor], inputs: tuple[Tensor, ...], flops: float, backward_ratio: float
) -> tuple[tuple[float, float], tuple[float, float]]:
    """(FLOPs, rate) of a function's forward and of its backward."""
    with torch.no_grad():
        forward_s = bench.kernel_s([lambda: forward(*inputs)])
    out = forward(*inputs)
    gradient = torch.ones_like(out)
    backward_s = bench.kernel_s([lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)])
    back = backward_ratio * flops
    return (flops, flops / forward_s), (back, back / backward_s)


def _attention(bench: Bench, dtype: torch.dtype) -> tuple[Curve, Curve]:
    points = []
    for batch, heads, length, width in _ATTENTION_SIZES:
        shape = (batch, heads, length, width)
        inputs = tuple(bench.randn(*shape, dtype=dtype).requires_grad_() for _ in range(3))
        flops = 4.0 * batch * heads * length * length * width
        points.append(_both(bench, F.scaled_dot_product_attention, inputs, flops, 2.5))
    return _curves(points)


def _convolutions(bench: Bench, dtype: torch.dtype) -> tuple[tuple[float, float], tuple[float, float]]:
    """Seconds for a FLOP and for a byte moved, of convolutions and of their backward: least squares of ratios."""
    rows: tuple[list[tuple[float, float, float]], ...] = ([], [])
    for channels, out_channels, size, kernel in _CONVOLUTION_SIZES:
        image = bench.randn(_CONVOLUTION_BATCH, channels, size, size, dtype=dtype).requires_grad_()
        weight = bench.randn(out_channels, channels, kernel, kernel, dtype=dtype).requires_grad_()
        flops = 2.0 * weight.numel() * _CONVOLUTION_BATCH * size**2
        forward, backward = _both(bench, partial(F.conv2d, padding=kernel // 2), (image, weight), flops, 2.0)
        out_bytes = _CONVOLUTION_BATCH * out_channels * size**2 * image.element_size()
        moved = (image.nbytes + weight.nbytes + out_bytes, 2 * (image.nbytes + weight.nbytes) + out_bytes)
        for found, (done, rate), num_bytes in zip(rows, (forward, backward), moved, strict=True):
            found.append((done, num_bytes, done / rate))
    return _fit(rows[0]), _fit(rows[1])


def _fit(rows: list[tuple[float, float, float]]) -> tuple[float, float]:
    """(a, b) with seconds about a * FLOPs + b * bytes, neither below zero, in relative least squares."""
    scaled = np.array([(flops / s, moved / s) for flops, moved, s in rows])
    ones = np.ones(len(rows))
    both, *_ = np.linalg.lstsq(scaled, ones, rcond=None)
    if both.min() < 0:  # one of them explains more than all: leave the other out
        by_flops = float(scaled[:, 0].sum() / (scaled[:, 0] ** 2).sum())
        return by_flops, 0.0
    return float(both[0]), float(both[1])


def _curves(points: list[tuple[tuple[float, float], tuple[float, float]]]) -> tuple[Curve, Curve]:
    return tuple(sorted(f for f, _ in points)), tuple(sorted(b for _, b in points))


def _traffic(bench: Bench, num_bytes: int) -> float:
    """Seconds for each byte of a sum into a tensor that is there already."""
    count = num_bytes // 12
    sets = [[bench.randn(count) for _ in range(3)] for _ in range(NUM_SETS if num_bytes < 2**26 else 1)]
    return bench.kernel_s([partial(torch.add, x, y, out=out) for x, y, out in sets]) / num_bytes


def _fault_s_per_byte(bench: Bench, traffic_s_per_byte: float) -> float:
    """What a byte of a fresh large tensor costs beyond writing it; a GPU's allocator keeps its memory."""
    if bench.device.type == "cuda":
        return 0.0
    num_bytes = 2 * FAULT_FROM_BYTES
    x = bench.randn(num_bytes // 4)
    taken = bench.best_s([partial(torch.neg, x)])
    return max(0.0, taken / num_bytes - 2 * traffic_s_per_byte)


def _elements(bench: Bench, dtypes: dict[str, torch.dtype]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for name, dtype in dtypes.items():
        sets = [element_calls(bench.randn, dtype) for _ in range(NUM_SETS)]
        for calls in zip(*sets, strict=True):
            operator, arguments = calls[0].operator, calls[0].arguments
            try:
                out = operator(*arguments)
            except (NotImplementedError, RuntimeError):
                continue  # no kernel for this dtype here: the op keeps float32's time
            moved = sum(x.nbytes for x in tree_iter((arguments, out)) if isinstance(x, Tensor))
            seconds = bench.kernel_s([partial(call.operator, *call.arguments) for call in calls])
            found.setdefault(str(operator), {})[name] = seconds / moved
    return found


class _Tiny(nn.Module):
    """A block of the usual ops on tensors so small that only what is around them takes time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x).view(2, -1, x.shape[-1]).transpose(0, 1)
        out: Tensor = x + self.drop(self.down(F.gelu(self.up(y)))).transpose(0, 1).reshape(x.shape) * 0.5
        return out


def _around_ops(bench: Bench) -> tuple[dict[str, float], float, float]:
    """What each op costs around its kernel by phase; what a region adds; what each op of a watched region adds."""
    model = nn.Sequential(*[_Tiny(8) for _ in range(8)]).to(bench.device)
    batch = bench.randn(4, 8)
    graph = trace(model, batch, loss=_square, optimizer="adamw", device_kind=bench.device.type)
    counts = {phase: sum(op.phase == phase for op in graph.ops) for phase in ("forward", "backward", "optimizer")}
    optimizer = torch.optim.AdamW(model.parameters(), foreach=bench.device.type == "cuda")
    phases = [_phases(bench, model, batch, optimizer) for _ in range(5 * _STEPS)][1:]
    fastest = [min(taken) for taken in zip(*phases, strict=True)]
    op_s = {phase: seconds / counts[phase] for phase, seconds in zip(counts, fastest, strict=True)}
    blocks = [call for call in graph.calls if call.parent == 0]
    plain = [RegionSpec(call=call.index) for call in blocks]
    watched = [RegionSpec(call=c.index, kept=frozenset({_first_output(graph, c.start, c.end)})) for c in blocks]
    step_s = {}
    for kind, specs in (("none", []), ("plain", plain), ("watched", watched)):
        with apply(model, Plan(describe_all(graph, specs)), check="never") if specs else contextlib.nullcontext():
            step_s[kind] = min(sum(_phases(bench, model, batch, optimizer)[:2]) for _ in range(5 * _STEPS))
    again_s = op_s["forward"] * counts["forward"]
    region_s = max(0.0, step_s["plain"] - step_s["none"] - again_s) / len(blocks)
    num_watched = sum(call.end - call.start for call in blocks)
    return op_s, region_s, max(0.0, step_s["watched"] - step_s["plain"]) / num_watched


def _first_output(graph: Any, start: int, end: int) -> int:
    op = next(op for op in graph.ops[start:end] if not op.is_view and op.flops)
    return int(op.outputs[0])


def _phases(
    bench: Bench, model: nn.Module, batch: Tensor, optimizer: torch.optim.Optimizer
) -> tuple[float, float, float]:
    """Seconds of forward, backward and optimizer of one step."""
    times = [bench.clock()]
    loss = _square(model(batch))
    for part in (loss.backward, optimizer.step):
        bench.sync()
        times.append(bench.clock())
        part()
    bench.sync()
    times.append(bench.clock())
    optimizer.zero_grad(set_to_none=True)
    return times[1] - times[0], times[2] - times[1], times[3] - times[2]


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
    measured = statistics.median(sorted(taken)[:_STEPS])
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

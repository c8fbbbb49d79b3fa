"""Time every distinct op call of a traced step on the machine at hand: same operator, shapes, dtypes and strides.

`CallLog` writes the calls down while a step is traced; `measure_calls` runs each of them on random numbers. Times are
kept in a file beside the calibration's, so that the next trace finds them.

Known limits: the values are random, except for integers that the trace had (labels, token ids), and zeros for other
integers; an op whose time depends on values (sparse gradients, sorting) is timed for those. An op that fails on them,
such as one with a workspace of its own, keeps the roofline's time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map

from autoremat._bench import Bench
from autoremat._calibration import Calibration, calibration_path
from autoremat._random import preserved_random_state

Progress = Callable[[str, float], None]
CALL_S = 0.02
COLD_BYTES = 64 * 2**20
"""Inputs of small calls rotate through about so much memory: in a step they are rarely in the nearest caches."""
_MAX_SETS = 6


@dataclass(frozen=True, slots=True)
class _Spec:
    """Enough of a tensor to make another one like it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    values: Tensor | None = field(default=None, compare=False, hash=False)

    @property
    def extent(self) -> int:
        """Elements of the storage that it reaches over."""
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True)) if 0 not in self.shape else 0

    def make(self, device: torch.device) -> Tensor:
        if self.values is not None:
            return self.values
        count = max(1, self.extent)
        if self.dtype.is_floating_point:
            flat = (torch.randn(count, device=device).abs() * 0.1 + 0.01).to(self.dtype)
        elif self.dtype == torch.bool:
            flat = torch.rand(count, device=device) > 0.1
        else:
            flat = torch.zeros(count, dtype=self.dtype, device=device)
        return flat.as_strided(self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class _Call:
    operator: Any
    arguments: Any
    keywords: Any

    def bytes(self) -> int:
        specs = (x for x in tree_iter((self.arguments, self.keywords)) if isinstance(x, _Spec))
        return sum(spec.extent * spec.dtype.itemsize for spec in specs)

    def bind(self, device: torch.device) -> Callable[[], object]:
        def make(x: Any) -> Any:
            return x.make(device) if isinstance(x, _Spec) else x

        return partial(self.operator, *tree_map(make, self.arguments), **tree_map(make, self.keywords))


class CallLog:
    """Writes down the op calls of a trace. Pass it as ``on_op``."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.calls: dict[str, _Call] = {}

    def __call__(self, operator: Any, arguments: Any, keywords: Any) -> None:
        """An op was recorded."""
        call = _Call(operator, tree_map(_spec, arguments), tree_map(_spec, keywords))
        text = f"{operator}{call.arguments}{sorted(call.keywords.items())}"
        key = f"{operator} {hashlib.sha256(text.encode()).hexdigest()[:24]}"
        self.keys.append(key)
        self.calls.setdefault(key, call)


def _spec(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    values = None
    if not isinstance(x, FakeTensor) and not x.dtype.is_floating_point:
        with _disable_current_modes():
            values = x.detach().clone()
    return _Spec(tuple(x.shape), tuple(x.stride()), x.dtype, values)


def measure_calls(log: CallLog, calibration: Calibration, *, progress: Progress | None = None) -> list[float | None]:
    """Seconds of each logged call by itself, in order; None where it does not run alone.

    Args:
        log: Of a trace.
        calibration: Of the machine at hand; its file's neighbour keeps the times.
        progress: Called with a label and a fraction done.
    """
    path = _times_path(calibration)
    known: dict[str, float | None] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    missing = [key for key in log.calls if key not in known]
    bench = Bench(torch.device(calibration.device_kind), call_s=CALL_S)
    with preserved_random_state(), torch.no_grad():
        for number, key in enumerate(missing):
            if progress is not None:
                progress("timing ops", number / len(missing))
            known[key] = _time(log.calls[key], bench)
    if missing:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(known, indent=0) + "\n", encoding="utf-8")
    return [known[key] for key in log.keys]


def _time(call: _Call, bench: Bench) -> float | None:
    num_sets = max(1, min(_MAX_SETS, COLD_BYTES // max(1, call.bytes())))
    with contextlib.suppress(Exception):  # whatever a kernel has against random numbers: it keeps the roofline's time
        return bench.best_s([call.bind(bench.device) for _ in range(num_sets)])
    return None


def _times_path(calibration: Calibration) -> Path:
    path = calibration_path(calibration)
    return path.with_name(path.name.replace("calibration-", f"ops-{torch.__version__}-"))

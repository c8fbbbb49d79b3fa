"""Time every distinct op call of a traced step on the machine at hand: same operator, shapes, dtypes and strides.

`CallLog` writes the calls down while a step is traced; `CallTimes` runs them on random numbers, in turns in the order
of the step, so that each finds the caches as others leave them. `measure_calls` keeps the times in a file beside the
calibration's, so that the next trace finds them.

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

from autoremat._bench import Bench, Turns
from autoremat._calibration import Calibration, calibration_path
from autoremat._random import preserved_random_state

Progress = Callable[[str, float], None]
GROUP_BYTES = 512 * 2**20
"""Calls take turns in groups whose inputs need about so much memory."""
_POOL_NUMBERS = 2**20


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

    def make(self, pool: Tensor) -> Tensor:
        """A tensor with numbers from a pool of small positive ones."""
        if self.values is not None:
            return self.values.to(pool.device)
        count = max(1, self.extent)
        if self.dtype.is_floating_point or self.dtype == torch.bool:
            numbers = pool.repeat(-(-count // len(pool)))[:count]
            flat = numbers > pool.median() if self.dtype == torch.bool else numbers.to(self.dtype)
        else:
            flat = torch.zeros(count, dtype=self.dtype, device=pool.device)
        return flat.as_strided(self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class _Call:
    operator: Any
    arguments: Any
    keywords: Any

    @property
    def num_bytes(self) -> int:
        specs = (x for x in tree_iter((self.arguments, self.keywords)) if isinstance(x, _Spec))
        return sum(spec.extent * spec.dtype.itemsize for spec in specs)

    def bind(self, pool: Tensor) -> Callable[[], object]:
        def make(x: Any) -> Any:
            return x.make(pool) if isinstance(x, _Spec) else x

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
    path = times_path(calibration)
    known: dict[str, float | None] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    missing = {key: call for key, call in log.calls.items() if key not in known}
    bench = Bench(torch.device(calibration.device_kind))
    for number, group in enumerate(groups := grouped(missing)):
        if progress is not None:
            progress("timing ops", number / len(groups))
        times = CallTimes(group, bench)
        for _ in range(bench.rounds):
            times.round()
        known |= times.seconds()
    if missing:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(known, indent=0) + "\n", encoding="utf-8")
    return [known[key] for key in log.keys]


class CallTimes:
    """Times of logged calls, taken round by round.

    Args:
        calls: By key, as in `CallLog.calls`; all their inputs are held at once.
        bench: Of the machine at hand.
    """

    def __init__(self, calls: dict[str, _Call], bench: Bench) -> None:
        bound: dict[str, Callable[[], object]] = {}
        with preserved_random_state(), torch.no_grad():
            pool = bench.randn(_POOL_NUMBERS).abs() * 0.1 + 0.01
            for key, call in calls.items():
                ready = call.bind(pool)
                with contextlib.suppress(Exception):  # whatever a kernel has against these numbers
                    ready()
                    bound[key] = ready
            self._turns = Turns(bench, list(bound.values()))
        self._keys, self._all = tuple(bound), tuple(calls)

    def round(self) -> None:
        """One turn of each call."""
        with preserved_random_state(), torch.no_grad():
            self._turns.round()

    def seconds(self) -> dict[str, float | None]:
        """What each call takes by itself, by key; None where it does not run alone."""
        return dict.fromkeys(self._all) | dict(zip(self._keys, self._turns.seconds(), strict=True))


def grouped(calls: dict[str, _Call]) -> list[dict[str, _Call]]:
    """The calls, in order, in groups of bounded inputs."""
    groups: list[dict[str, _Call]] = []
    room = 0
    for key, call in calls.items():
        if not groups or call.num_bytes > room:
            groups.append({})
            room = GROUP_BYTES
        groups[-1][key] = call
        room -= call.num_bytes
    return groups


def times_path(calibration: Calibration) -> Path:
    """The file that keeps the times of calls on the machine of a calibration."""
    path = calibration_path(calibration)
    return path.with_name(path.name.replace("calibration-", f"ops-{torch.__version__}-"))

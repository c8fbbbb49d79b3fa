"""What Python, autograd and dispatch add to the ops of a step, and what regions add, for `_calibrate`.

Measured on steps of a model so small that its kernels take no time. Between two kernels of a real step the code and
data of the host are pushed out of the near caches by what the kernels move, and the host is slower for it. So the
model's forward goes through some memory of its own between its ops; that time is not counted.

Plans of four kinds take turns: no region, one for all blocks, one for each block, and one for each block that stores
every second output of a kernel. Their differences tell apart what regions cost.

Known limit: in backward and in the optimizer the caches are left alone; nearly all that runs there is compiled code.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoremat._bench import Bench, low_quartile
from autoremat._build_graph import trace
from autoremat._plan import Plan
from autoremat._regions import describe_all
from autoremat._replay import RegionSpec, saved_in
from autoremat._step_graph import ModuleCall, StepGraph
from autoremat.runtime import apply

STEPS = 4
"""Steps in a turn of a kind of plan, after one to warm up."""
_NUM_BLOCKS, _WIDTH = 8, 8
_SWEPT_BYTES = 4 * 2**20
"""Four times the second cache of the machines that this was written on."""
_Phases = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class HostCost:
    """Seconds; each field as in `_calibration.Calibration`."""

    op_s: dict[str, float]
    region_s: float
    saved_s: float
    watched_op_s: float


def host_cost(bench: Bench) -> HostCost:
    """What each op costs around its kernel by phase, and what regions add."""
    steps = _Steps(bench)
    graph = trace(steps.model, steps.batch, loss=_square, optimizer="adamw", device_kind=bench.device.type)
    counts = {phase: sum(op.phase == phase for op in graph.ops) for phase in ("forward", "backward", "optimizer")}
    blocks = [call for call in graph.calls if call.parent == 0 and not call.is_function]
    kinds = _regions(graph, blocks)
    taken: dict[str, list[_Phases]] = {kind: [] for kind in kinds}
    for _ in range(bench.rounds):
        for kind, specs in kinds.items():
            plan = Plan(describe_all(graph, specs))
            with apply(steps.model, plan, check="never") if specs else contextlib.nullcontext():
                steps.run()
                found = [steps.run() for _ in range(STEPS)]
            forward, backward, optimizer = map(low_quartile, zip(*found, strict=True))
            taken[kind].append((forward, backward, optimizer))

    def added(kind: str, other: str) -> float:
        """Seconds that a kind takes more than another in forward and backward: of pairs, which share what disturbs."""
        pairs = zip(taken[kind], taken[other], strict=True)
        return statistics.median(sum(a[:2]) - sum(b[:2]) for a, b in pairs)

    usual = [low_quartile(phase) for phase in zip(*taken["none"], strict=True)]
    op_s = {phase: seconds / counts[phase] for phase, seconds in zip(counts, usual, strict=True)}
    num_ops = sum(call.end - call.start for call in blocks)
    num_saved = len(saved_in(graph, *(call.index for call in blocks)))
    region_s = max(0.0, added("each", "one") / (len(blocks) - 1))
    hooks_s = added("each", "none") - op_s["forward"] * num_ops - len(blocks) * region_s
    return HostCost(
        op_s=op_s,
        region_s=region_s,
        saved_s=max(0.0, hooks_s) / num_saved,
        watched_op_s=max(0.0, added("watched", "each")) / num_ops,
    )


def _regions(graph: StepGraph, blocks: list[ModuleCall]) -> dict[str, list[RegionSpec]]:
    """Kinds of plans that are compared."""
    return {
        "none": [],
        "one": [RegionSpec(0)],
        "each": [RegionSpec(call.index) for call in blocks],
        "watched": [RegionSpec(call.index, kept=_every_second(graph, call)) for call in blocks],
    }


def _every_second(graph: StepGraph, call: ModuleCall) -> frozenset[int]:
    """Every second output of a kernel, the last one left out: it is held by the next block anyway."""
    made = [
        op.outputs[0] for op in graph.ops[call.start : call.end] if not op.is_view and op.outputs and not op.mutates
    ]
    return frozenset(made[:-1:2])


class _Steps:
    """Runs steps of the tiny model."""

    def __init__(self, bench: Bench) -> None:
        self._bench, self._swept_s = bench, 0.0
        self._memory = np.zeros(_SWEPT_BYTES // 8)
        sweep = self._sweep if bench.device.type == "cpu" else lambda: None  # a GPU's kernels leave the host alone
        self.model = nn.Sequential(*[_Tiny(_WIDTH, sweep) for _ in range(_NUM_BLOCKS)]).to(bench.device)
        self.batch = bench.randn(4, _WIDTH)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), foreach=bench.device.type == "cuda")

    def run(self) -> _Phases:
        """Seconds of forward, backward and optimizer of one step."""
        times = [self._now()]
        loss = _square(self.model(self.batch))
        for part in (loss.backward, self._optimizer.step):
            self._bench.sync()
            times.append(self._now())
            part()
        self._bench.sync()
        times.append(self._now())
        self._optimizer.zero_grad(set_to_none=True)
        return times[1] - times[0], times[2] - times[1], times[3] - times[2]

    def _now(self) -> float:
        return self._bench.clock() - self._swept_s

    def _sweep(self) -> None:
        start = self._bench.clock()
        self._memory += 1.0
        self._swept_s += self._bench.clock() - start


class _Tiny(nn.Module):
    """A block of the usual ops on tensors so small that only what is around them takes time.

    Args:
        width: Of its tensors.
        sweep: Called between kernels.
    """

    def __init__(self, width: int, sweep: Callable[[], None]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)
        self._sweep = [sweep]

    def forward(self, x: Tensor) -> Tensor:
        sweep = self._sweep[0]
        sweep()
        y = self.norm(x).view(2, -1, x.shape[-1]).transpose(0, 1)
        sweep()
        y = self.up(y)
        sweep()
        y = F.gelu(y)
        sweep()
        y = self.down(y)
        sweep()
        y = self.drop(y)
        sweep()
        out: Tensor = x + y.transpose(0, 1).reshape(x.shape) * 0.5
        return out


def _square(output: Tensor) -> Tensor:
    mean: Tensor = output.square().mean()
    return mean

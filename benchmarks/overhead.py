"""Time that a region adds to a step, beside torch's own checkpoint, in one process, paired.

Twenty regions of thirty tiny ops. Four variants of the same chain run in turn, many rounds, in an order that rotates:
plain, torch's checkpoint, ours, torch's selective checkpoint, ours with the same stored outputs. What a variant adds
is its time minus the plain step's, medians over rounds of paired differences, recomputed ops included (both sides
run the same ones). Then regions of thirty products of about a millisecond, where the step should cost what its FLOPs
say.

    python benchmarks/overhead.py [--rounds 60] [--json]
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import autoremat.runtime as ar
from autoremat._plan import OpCall, Plan, Region, SavedOutput

NUM_REGIONS = 20
NUM_OPS = 30
STEPS_PER_SAMPLE = 3
NUM_LARGE_REGIONS = 3
LARGE_WIDTH = 400
"""Square products of about a millisecond: the same shape in forward, backward and recompute, so the same rate."""


class TinyBlock(nn.Module):
    """Thirty ops: fifteen pairs of a multiplication by a constant and a tanh."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((width,), 0.9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the block."""
        for _ in range(NUM_OPS // 2):
            x = torch.tanh(x * self.scale)
        return x


class LargeBlock(nn.Module):
    """Matrix products of about a millisecond each, and nothing else: what FLOPs do not count takes no time."""

    def __init__(self, width: int, num_layers: int = NUM_OPS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the block."""
        for layer in self.layers:
            x = layer(x)
        return x


class Chain(nn.Module):
    """Blocks in a row; torch's checkpoint is applied here if given."""

    def __init__(self, blocks: list[nn.Module], wrap: Callable[..., torch.Tensor] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.wrap = wrap

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the block."""
        for block in self.blocks:
            x = block(x) if self.wrap is None else self.wrap(block, x)
        return x


def _saves(_context: object, operator: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
    keep = operator is torch.ops.aten.tanh.default
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def torch_plain(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=False)


def torch_selective(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    contexts = functools.partial(create_selective_checkpoint_contexts, _saves)
    return checkpoint(block, x, use_reentrant=False, context_fn=contexts)


def our_plan(*, selective: bool) -> Plan:
    """Regions for every block; selective ones store each tanh, as `_saves` does."""
    saved = tuple(SavedOutput("aten.tanh.default", i, 0, "", 0) for i in range(NUM_OPS // 2)) if selective else ()
    skipped = tuple(OpCall(output.op, output.occurrence) for output in saved)
    return Plan(tuple(Region(f"blocks.{i}", saved=saved, skipped=skipped) for i in range(NUM_REGIONS)))


def step(model: nn.Module, x: torch.Tensor) -> float:
    """Seconds of one forward and backward: CPU time of this thread, so that other processes disturb it little."""
    model.zero_grad(set_to_none=True)  # adding to a gradient is work that no FLOP counts
    start = time.thread_time()
    model(x).sum().backward()
    return time.thread_time() - start


def paired(models: dict[str, nn.Module], x: torch.Tensor, rounds: int) -> dict[str, list[float]]:
    """Seconds a step of every model, round by round, the order rotating."""
    names = list(models)
    for model in models.values():
        for _ in range(3):
            step(model, x)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            times[name].append(min(step(models[name], x) for _ in range(STEPS_PER_SAMPLE)))
    return times


def tiny(rounds: int) -> dict[str, float]:
    """Added microseconds a region, and their ratios."""
    blocks = [TinyBlock(16) for _ in range(NUM_REGIONS)]
    models: dict[str, nn.Module] = {
        "plain": Chain(blocks),
        "torch": Chain(blocks, torch_plain),
        "torch selective": Chain(blocks, torch_selective),
    }
    for name, selective in (("ours", False), ("ours selective", True)):
        models[name] = Chain([TinyBlock(16) for _ in range(NUM_REGIONS)])
        ar.apply(models[name], our_plan(selective=selective))
    models["ours checkpoint()"] = Chain(blocks, ar.checkpoint)
    times = paired(models, torch.randn(4, 16), rounds)
    added = {
        name: statistics.median(t - p for t, p in zip(times[name], times["plain"], strict=True)) / NUM_REGIONS * 1e6
        for name in models
        if name != "plain"
    }
    result = {f"{name}, added us a region": value for name, value in added.items()}
    result["plain step, us a region"] = statistics.median(times["plain"]) / NUM_REGIONS * 1e6
    result["plain region: ours / torch"] = added["ours"] / added["torch"]
    result["checkpoint(): ours / torch"] = added["ours checkpoint()"] / added["torch"]
    result["selective region: ours / torch"] = added["ours selective"] / added["torch selective"]
    result["selective replay over plain region: ours / torch"] = (added["ours selective"] - added["ours"]) / (
        added["torch selective"] - added["torch"]
    )
    return result


def large(rounds: int) -> dict[str, float]:
    """Step time over the plain step's, beside the ratio of FLOPs."""
    blocks = [LargeBlock(LARGE_WIDTH) for _ in range(NUM_LARGE_REGIONS)]
    models: dict[str, nn.Module] = {"plain": Chain(blocks), "torch": Chain(blocks, torch_plain)}
    models["ours"] = Chain([LargeBlock(LARGE_WIDTH) for _ in range(NUM_LARGE_REGIONS)])
    ar.apply(models["ours"], Plan(tuple(Region(f"blocks.{i}") for i in range(NUM_LARGE_REGIONS))))
    times = paired(models, torch.randn(LARGE_WIDTH, LARGE_WIDTH), rounds)
    # Forward 1, backward 2; the first layer of all needs no input gradient. A layer saves its input, so that recompute
    # runs all but the last layer of each block.
    num_products, num_recomputed = NUM_LARGE_REGIONS * NUM_OPS, NUM_LARGE_REGIONS * (NUM_OPS - 1)
    result = {
        f"{name} / plain": statistics.median(t / p for t, p in zip(times[name], times["plain"], strict=True))
        for name in ("torch", "ours")
    }
    result["plain step, ms a product"] = statistics.median(times["plain"]) * 1e3 / (3 * num_products - 1)
    result["FLOP ratio"] = (3 * num_products - 1 + num_recomputed) / (3 * num_products - 1)
    result["ours over FLOP ratio"] = result["ours / plain"] / result["FLOP ratio"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, 1 thread"
    results = {"tiny": tiny(arguments.rounds), "large": large(max(3, arguments.rounds // 4))}
    if arguments.json:
        print(json.dumps({"machine": machine, **results}, indent=1))
        return
    print(machine)
    for group, values in results.items():
        print(f"{group}:")
        for name, value in values.items():
            print(f"  {name:55s} {value:10.3f}")


if __name__ == "__main__":
    main()

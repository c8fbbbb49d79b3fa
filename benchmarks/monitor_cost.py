"""What watching a training costs: steps with `autoremat.Monitor` over steps without, in one process, in turn.

Two models with a plan on them: one of larger ops, where a step is mostly kernels, and one of tiny ops, where it is
mostly Python. Blocks of steps without a monitor, with one that does not meter the peak, with the default ("auto"), and
with one that meters every step run in turn; the ratio is of means over a kind's steps, without the slowest tenth. The
first steps of a block count: "auto" meters two of them. The clock is the CPU time of the process, since other programs
run on the machine.

    python benchmarks/monitor_cost.py [--rounds 3] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import autoremat as ar

STEPS_PER_BLOCK = 40
KINDS = {"none": None, "never": "never", "auto": "auto", "always": "always"}
MODELS = {"large ops": {"width": 192, "samples": 4, "tokens": 64}, "tiny ops": {"width": 16, "samples": 2, "tokens": 8}}


def build(width: int, samples: int, tokens: int) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.0) for _ in range(4)]
    return nn.Sequential(*layers), torch.randn(samples, tokens, width)


def measure(sizes: dict[str, int], rounds: int) -> dict[str, object]:
    model, batch = build(**sizes)
    optimizer = torch.optim.AdamW(model.parameters())
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    taken: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with (
        tempfile.TemporaryDirectory() as folder,
        ar.apply(model, ar.Plan(regions=tuple(ar.Region(str(i)) for i in range(4)))),
    ):
        for turn in range(rounds):
            for kind, peak in KINDS.items():
                block: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
                if peak is not None:
                    block = ar.Monitor(
                        model, console_every=None, peak=peak, warn=False, jsonl=Path(folder) / "steps.jsonl"
                    )
                with block:
                    for _ in range(STEPS_PER_BLOCK):
                        start = clock()
                        optimizer.zero_grad()
                        model(batch).square().mean().backward()
                        optimizer.step()
                        if turn:
                            taken[kind].append(clock() - start)
    means = {kind: statistics.fmean(sorted(times)[: int(0.9 * len(times))]) for kind, times in taken.items()}
    return {
        "step_s": means["none"],
        "ratio": {kind: means[kind] / means["none"] for kind in KINDS if kind != "none"},
        "added_s": {kind: means[kind] - means["none"] for kind in KINDS if kind != "none"},
        "num_steps": len(taken["none"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = {name: measure(sizes, arguments.rounds) for name, sizes in MODELS.items()}
    result = {
        "command": "python benchmarks/monitor_cost.py --json",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "threads": torch.get_num_threads(),
        "models": found,
    }
    if arguments.json:
        print(json.dumps(result, indent=1))
        return
    for name, figures in found.items():
        print(name, figures)


if __name__ == "__main__":
    main()

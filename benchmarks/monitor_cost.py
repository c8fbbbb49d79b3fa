"""What watching a training costs: steps with `autoremat.Monitor` beside steps without, in one process, in turn.

Two models with a plan on them: one of larger ops, where a step is mostly kernels, and one of tiny ops, where it is
mostly Python. For each way to meter the peak ("never", "auto", "always") a watched model and an equal one that is not
watched take one step each in turn, the one that goes first changing from pair to pair. The clock is the CPU time of the
process, since other programs run on the machine; what a pair has in common (cache, clock rate) is in both its steps.

`added_s` are the quartiles of the differences within a pair, `ratio` is 1 and the median of them over the median step
without a monitor, with the quartiles beside it. "auto" meters few steps, which a median does not see: `mean_ratio` is
of the sums of all steps, and `num_metered` says how many were metered.

    python benchmarks/monitor_cost.py [--pairs 200] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from judge import machine
from torch import nn

import autoremat as ar

KINDS = ("never", "auto", "always")
MODELS = {"large ops": {"width": 192, "samples": 4, "tokens": 64}, "tiny ops": {"width": 16, "samples": 2, "tokens": 8}}
NUM_LAYERS, NUM_WARM_UP = 4, 5


class Training:
    """A model with a plan on it, its optimizer, and a batch."""

    def __init__(self, width: int, samples: int, tokens: int) -> None:
        torch.manual_seed(0)
        layers = [
            nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.0) for _ in range(NUM_LAYERS)
        ]
        self.model, self.batch = nn.Sequential(*layers), torch.randn(samples, tokens, width)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        ar.apply(self.model, ar.Plan(regions=tuple(ar.Region(str(i)) for i in range(NUM_LAYERS))))

    def step(self) -> float:
        """CPU seconds of one step."""
        start = time.process_time()
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()
        return time.process_time() - start


def measure(sizes: dict[str, int], kind: str, num_pairs: int) -> dict[str, Any]:
    plain, watched = Training(**sizes), Training(**sizes)
    pairs: list[tuple[float, float]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        ar.Monitor(
            watched.model,
            watched.optimizer,
            console_every=None,
            peak=kind,
            warn=False,
            jsonl=Path(folder) / "steps.jsonl",
        ) as monitor,
    ):
        for turn in range(NUM_WARM_UP + num_pairs):
            taken = {training: training.step() for training in ((plain, watched) if turn % 2 else (watched, plain))}
            pairs.append((taken[plain], taken[watched]))
    records = monitor.results.records
    pairs = pairs[NUM_WARM_UP:]
    step_s = statistics.median(without for without, _ in pairs)
    low, median, high = statistics.quantiles((with_it - without for without, with_it in pairs), n=4)
    return {
        "step_s": step_s,
        "added_s": [low, median, high],
        "ratio": [1 + low / step_s, 1 + median / step_s, 1 + high / step_s],
        "mean_ratio": sum(with_it for _, with_it in pairs) / sum(without for without, _ in pairs),
        "num_pairs": num_pairs,
        "num_metered": sum(record.peak_bytes is not None for record in records[NUM_WARM_UP:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = {name: {kind: measure(sizes, kind, arguments.pairs) for kind in KINDS} for name, sizes in MODELS.items()}
    if arguments.json:
        result = {"machine": machine(), "threads": torch.get_num_threads(), "models": found}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for name, kinds in found.items():
        for kind, row in kinds.items():
            low, median, high = (f"{1e3 * seconds:.2f}" for seconds in row["added_s"])
            print(
                f"{name}, {kind}: {1e3 * row['step_s']:.1f} ms a step, {median} ms more ({low} to {high}), "
                f"{row['ratio'][1]:.3f} times as long, {row['mean_ratio']:.3f} in sum, {row['num_metered']} metered"
            )


if __name__ == "__main__":
    main()

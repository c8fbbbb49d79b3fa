"""How long planning takes once a step is traced.

    python benchmarks/solve_times.py [--cases NAME,...] [--json FILE]

Four steps: 126 equal layers; 150 stages no two of which are alike; an encoder and a decoder with cross attention (a
T5 of 4 + 4 layers) as a general graph; and Llama 3 8B. *Plan* is the planner's setup (candidates, options, table,
smallest peak, bound) and the plan for the budget in the middle between the smallest and the plain peak; *frontier* is
setup and 64 points. The objective is FLOPs; every peak is priced by the ledger. Seconds are of the process's CPU;
wall time stands beside them: other programs may run on the machine. *Prices* counts the peaks asked of the ledger.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
from judge import machine
from rich.console import Console
from rich.table import Table

import autoremat as ar
from autoremat._prices import Prices
from autoremat._replay import RegionSpec
from autoremat._step_graph import StepGraph
from autoremat.solve import Planner
from strategies import TRANSFORMER, Recipe, build_step

POINTS = 64


def equal_layers(num: int = 126) -> StepGraph:
    return build_step(tuple((f"h.{i}", TRANSFORMER) for i in range(num)), loss_bytes=20, unit_bytes=1 << 20)


def different_stages(num: int = 150) -> StepGraph:
    """Stages of three to six ops of random kinds and sizes."""
    draw = random.Random(0)
    kinds = ("linear", "gelu", "norm", "linear", "dropout", "batch_norm")

    def stage() -> Recipe:
        return tuple((draw.choice(kinds), draw.randrange(2), draw.randint(1, 40)) for _ in range(draw.randint(3, 6)))

    return build_step(tuple((f"h.{i}", stage()) for i in range(num)), loss_bytes=20, unit_bytes=1 << 20)


def preset(name: str, **options: object) -> StepGraph:
    built = ar.build_preset(name, **options)  # type: ignore[arg-type]
    return ar.trace(built.model, built.batch, loss=built.loss, optimizer=None, gradients="kept")


def t5(num_layers: int = 4) -> StepGraph:
    import transformers

    sizes = {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_heads": 8, "num_layers": num_layers}
    config = transformers.T5Config(**sizes, use_cache=False, decoder_start_token_id=0, pad_token_id=0)
    model = transformers.T5ForConditionalGeneration(config)
    ids = torch.zeros(4, 256, dtype=torch.long)
    return ar.trace(model, {"input_ids": ids, "labels": ids}, optimizer=None, gradients="kept")


CASES: dict[str, tuple[str, float, Callable[[], StepGraph]]] = {
    "126 equal layers": ("plan", 1.0, equal_layers),
    "150 different stages": ("plan", 5.0, different_stages),
    "T5 of 4 + 4 layers": ("plan", 10.0, t5),
    "Llama 3 8B": ("frontier", 10.0, lambda: preset("llama-3-8b", precision="bf16")),
}
"""By name: what is timed, the time wanted, and how the step is made."""


def solve(graph: StepGraph, what: str) -> dict[str, object]:
    """Plan a step or find its frontier, and say how long it took and how much work it was."""
    op_cost = [float(op.flops) for op in graph.ops]
    prices = 0

    def price(specs: Sequence[RegionSpec]) -> int:
        nonlocal prices
        prices += 1
        return known.peak_bytes(specs)

    wall, cpu = time.perf_counter(), time.process_time()
    known = Prices(graph)
    planner = Planner(graph, op_cost=op_cost, price=price, find_work=known.work)
    setup_s = time.process_time() - cpu
    if what == "plan":
        planner.plan((planner.smallest_bytes + planner.plain_bytes) // 2)
        num_points = 1
    else:
        num_points = len(planner.frontier(POINTS))
    return {
        "num_ops": len(graph.ops),
        "num_points": num_points,
        "num_prices": prices,
        "setup_cpu_s": setup_s,
        "cpu_s": time.process_time() - cpu,
        "wall_s": time.perf_counter() - wall,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    table = Table(title="Planning times, seconds")
    for name in ("step", "ops", "what", "points", "prices", "setup, CPU", "CPU", "wall", "wanted"):
        table.add_column(name, justify="left" if name in ("step", "what") else "right")
    rows = []
    for name in arguments.cases.split(","):
        what, wanted_s, make = CASES[name]
        row = {"step": name, "what": what, **solve(make(), what), "wanted_s": wanted_s}
        rows.append(row)
        counts = (f"{row[key]:,}" for key in ("num_points", "num_prices"))
        seconds = (f"{row[key]:.2f}" for key in ("setup_cpu_s", "cpu_s", "wall_s"))
        table.add_row(name, f"{row['num_ops']:,}", what, *counts, *seconds, f"{wanted_s:.0f}")
    Console(width=120).print(table)
    if arguments.json:
        found = {"machine": f"{machine()}, load {os.getloadavg()[0]:.1f}", "rows": rows}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

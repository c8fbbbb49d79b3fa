"""A real GPT-2 under three budgets: extra FLOPs, predicted and measured peak, gradients, step time.

    python benchmarks/first_light.py [--steps 3] [--json FILE]

GPT-2 with 12 layers, 512 wide, sequence 512, batch 2, vocabulary 8,192, dropout 0.1, AdamW. Budgets are the static
bytes plus a share of what the plain step peaks above them. Peaks are from the profiler's memory events; times are
medians of steps taken in turn in one process, so only their ratio means something. The machine is printed with them.
"""

import argparse
import json
import os
import platform
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table

import autoremat as ar

SHARES = (0.45, 0.32, 0.20)


def build():
    config = transformers.GPT2Config(
        n_layer=12, n_embd=512, n_head=8, n_positions=512, vocab_size=8192, bos_token_id=0, eos_token_id=0,
        loss_type="ForCausalLMLoss",
    )  # fmt: skip
    torch.manual_seed(0)
    ids = torch.randint(0, 8192, (2, 512))
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def measure_share(model, batch, graph, share, *, objective, num_steps):
    plain, static = ar.profile(graph).peak_bytes, graph.static_bytes
    plan = ar.plan(graph, budget=static + int(share * (plain - static)), objective=objective)
    report = ar.verify(model, batch, plan)
    usage = ar.measure(model, batch, plan, num_steps=num_steps)
    return {
        "share": share,
        "objective": objective,
        "budget_bytes": plan.budget_bytes,
        "predicted_bytes": plan.planned.peak_bytes,
        "measured_bytes": usage.planned.peak_bytes,
        "plain_predicted_bytes": plan.plain.peak_bytes,
        "plain_measured_bytes": usage.plain.peak_bytes,
        "extra_flops": plan.overhead_flops,
        "bound": plan.bound,
        "predicted_extra_time": plan.overhead_s,
        "measured_extra_time": usage.planned.step_s / usage.plain.step_s - 1,
        "equal": report.equal,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model, batch = build()
    graph = ar.trace(model, batch)
    rows = [
        measure_share(model, batch, graph, share, objective=objective, num_steps=options.steps)
        for objective in ("time", "flops")
        for share in SHARES
    ]
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    table = Table(title=f"GPT-2 12 x 512, dropout 0.1, AdamW ({machine}, {torch.get_num_threads()} threads)")
    for name in (
        "share",
        "objective",
        "budget",
        "predicted",
        "measured",
        "extra FLOPs",
        "bound",
        "extra time",
        "equal",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            f"{row['share']:.2f}",
            row["objective"],
            f"{row['budget_bytes']:,}",
            f"{row['predicted_bytes']:,}",
            f"{row['measured_bytes']:,}",
            f"{row['extra_flops']:.1%}",
            f"{row['bound']:.1%}",
            f"{row['measured_extra_time']:+.0%} ({row['predicted_extra_time']:+.0%} predicted)",
            "yes" if row["equal"] else "NO",
        )
    Console(width=150).print(table)
    plain = rows[0]
    print(f"plain: predicted {plain['plain_predicted_bytes']:,}, measured {plain['plain_measured_bytes']:,} bytes")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

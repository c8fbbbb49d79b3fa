"""Random models, batches and budgets: does the real peak stay within the budget, and is the budget used?

    python benchmarks/random_budgets.py [--cases 200] [--first 0] [--seconds S] [--json FILE]

A case is drawn from its number: a small model of one of seven kinds with random width, depth, batch and length, dropout
or none, a precision, an optimizer, fresh or kept gradients, accumulation or none, and a budget anywhere between the
smallest possible peak and the plain one. It is planned as `autoremat.plan` does, dry run included, applied, and a real
step is measured by the profiler's raw memory events, which share no code with the ledger. A budget *binds* where it is
below the plain peak. Exits with 1 if any measured peak is above its budget.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from memory_settings import Unet, images, tokens
from rich.console import Console
from torch import Tensor, nn

import autoremat as ar
from autoremat._dry_run import dry_run, keep_budget
from autoremat._planning import Planning, find_target
from autoremat._resnet import cifar_resnet
from autoremat._step import Precision

RESULTS = Path(__file__).parent / "results" / "random_budgets.json"
USED_GOAL = 0.97
Built = tuple[nn.Module, dict[str, Tensor]]


@dataclasses.dataclass(frozen=True)
class Row:
    """One case.

    Attributes:
        number: What it is drawn from.
        kind: Of model.
        shape: Sizes, in words.
        options: As for `autoremat.trace`.
        budget_bytes: Its budget.
        plain_bytes: Predicted peak without regions.
        smallest_bytes: Smallest possible peak.
        static_bytes: Bytes that no plan changes.
        promised_bytes: Peak that the plan promises.
        measured_bytes: Peak of a real step.
        num_regions: Regions of the plan.
        overhead: Recomputed FLOPs over those of the step.
        bound: No schedule within the budget has less.
        cpu_s: Processor time of the whole case.
    """

    number: int
    kind: str
    shape: str
    options: dict[str, Any]
    budget_bytes: int
    plain_bytes: int
    smallest_bytes: int
    static_bytes: int
    promised_bytes: int
    measured_bytes: int
    num_regions: int
    overhead: float
    bound: float
    cpu_s: float

    @property
    def used(self) -> float:
        """Measured peak over budget."""
        return self.measured_bytes / self.budget_bytes


def _transformers(kind: str, **fields: Any) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    config = kind.replace("LMHeadModel", "For").split("For")[0] + "Config"
    model: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**fields))
    return model


def _text(draw: random.Random) -> tuple[int, int, int, int, int, float]:
    """Width, heads, layers, batch, length and dropout."""
    width = draw.choice((64, 96, 128))
    return width, 4, draw.randint(2, 5), draw.randint(1, 6), draw.choice((24, 33, 64, 96)), draw.choice((0.0, 0.1))


def bert(draw: random.Random) -> tuple[Built, str]:
    width, heads, layers, batch, length, dropout = _text(draw)
    model = _transformers(
        "BertForMaskedLM", vocab_size=200, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=4 * width, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return (model, tokens(batch, length, 200)), f"{layers} x {width}, {batch} x {length}, dropout {dropout}"


def gpt2(draw: random.Random) -> tuple[Built, str]:
    width, heads, layers, batch, length, dropout = _text(draw)
    model = _transformers(
        "GPT2LMHeadModel", vocab_size=200, n_embd=width, n_layer=layers, n_head=heads, n_positions=128, use_cache=False,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=0, eos_token_id=0,
        loss_type="ForCausalLMLoss",
    )  # fmt: skip
    return (model, tokens(batch, length, 200)), f"{layers} x {width}, {batch} x {length}, dropout {dropout}"


def llama(draw: random.Random) -> tuple[Built, str]:
    width, heads, layers, batch, length, _ = _text(draw)
    model = _transformers(
        "LlamaForCausalLM", vocab_size=200, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=2, intermediate_size=3 * width, use_cache=False,
    )  # fmt: skip
    return (model, tokens(batch, length, 200)), f"{layers} x {width}, {batch} x {length}"


def t5(draw: random.Random) -> tuple[Built, str]:
    width, heads, layers, batch, length, dropout = _text(draw)
    layers = max(1, layers - 2)
    model = _transformers(
        "T5ForConditionalGeneration", vocab_size=200, d_model=width, d_ff=4 * width, num_layers=layers, num_heads=heads,
        d_kv=width // heads, dropout_rate=dropout, decoder_start_token_id=0, pad_token_id=0, use_cache=False,
    )  # fmt: skip
    return (model, tokens(batch, length, 200)), f"{layers} + {layers} x {width}, {batch} x {length}, dropout {dropout}"


def vit(draw: random.Random) -> tuple[Built, str]:
    width, heads, layers, batch, _, dropout = _text(draw)
    size = draw.choice((16, 32, 48))
    model = _transformers(
        "ViTForImageClassification", hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=4 * width, image_size=size, patch_size=8, hidden_dropout_prob=dropout, num_labels=10,
    )  # fmt: skip
    return (model, images(batch + 2, size, 10)), f"{layers} x {width}, {batch + 2} x {size}, dropout {dropout}"


def unet(draw: random.Random) -> tuple[Built, str]:
    width, batch, size = draw.choice((16, 24, 32)), draw.randint(1, 4), draw.choice((16, 32, 48))
    return (Unet(width), images(batch, size, 10)), f"{width} wide, {batch} x {size}"


def resnet(draw: random.Random) -> tuple[Built, str]:
    depth, batch, size = draw.choice((11, 20, 29)), draw.randint(2, 8), draw.choice((16, 24, 32))
    return (cifar_resnet(depth), images(batch, size, 10)), f"{depth} layers, {batch} x {size}"


KINDS: dict[str, Callable[[random.Random], tuple[Built, str]]] = {
    f.__name__: f for f in (bert, gpt2, llama, t5, vit, unet, resnet)
}


def draw_options(draw: random.Random) -> dict[str, Any]:
    return {
        "precision": draw.choice((None, None, "bf16", "amp-bf16")),
        "optimizer": draw.choice(("adamw", "sgd", "sgd-momentum", None)),
        "gradients": draw.choice(("fresh", "fresh", "kept")),
        "accumulate": draw.choice((1, 1, 1, 2)),
    }


def run_case(number: int) -> Row:
    """Plan, apply and measure what a number draws."""
    start = time.process_time()
    draw = random.Random(number)
    kind = list(KINDS)[number % len(KINDS)]
    torch.manual_seed(number)
    (model, batch), shape = KINDS[kind](draw)
    options, share = draw_options(draw), draw.random()
    traced = dict(options)
    precision = Precision.parse(options["precision"])
    if precision.cast is not None:
        model, batch = model.to(precision.cast), precision.cast_batch(batch)
        del traced["precision"]  # from here on the model has it
    graph = ar.trace(model, batch, **traced)
    planning = Planning(graph, find_target(model, None), "flops")
    plain, smallest = planning.planner.plain_bytes, planning.planner.smallest_bytes
    budget = smallest + int(share * (plain - smallest))
    plan = keep_budget(planning.plan, budget, lambda found: dry_run(model, batch, found, **traced))
    usage = ar.measure(model, batch, plan, num_steps=1, plain=False, **traced)
    assert plan.planned is not None
    return Row(
        number=number,
        kind=kind,
        shape=shape,
        options=options,
        budget_bytes=budget,
        plain_bytes=plain,
        smallest_bytes=smallest,
        static_bytes=graph.static_bytes,
        promised_bytes=plan.planned.peak_bytes,
        measured_bytes=usage.planned.peak_bytes,
        num_regions=len(plan.regions),
        overhead=plan.overhead_flops,
        bound=plan.bound or 0.0,
        cpu_s=time.process_time() - start,
    )


def summary_of(rows: list[Row], failed: list[dict[str, Any]]) -> dict[str, Any]:
    binding = [row for row in rows if row.budget_bytes < row.plain_bytes]
    used = [row.used for row in binding]
    return {
        "num_cases": len(rows) + len(failed),
        "num_failed": len(failed),
        "num_above_budget": sum(row.measured_bytes > row.budget_bytes for row in rows),
        "num_as_promised": sum(row.measured_bytes == row.promised_bytes for row in rows),
        "num_binding": len(binding),
        "num_used_enough": sum(share >= USED_GOAL for share in used),
        "least_used": min(used, default=None),
        "median_used": statistics.median(used) if used else None,
        "cpu_s": sum(row.cpu_s for row in rows),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no case after this long")
    parser.add_argument("--json", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    console, start = Console(width=160), time.perf_counter()
    rows: list[Row] = []
    failed: list[dict[str, Any]] = []
    for number in range(arguments.first, arguments.first + arguments.cases):
        if time.perf_counter() - start > arguments.seconds:
            break
        try:
            row = run_case(number)
        except Exception as error:  # noqa: BLE001 - a case that fails is a finding, and the others still count
            failed.append({"number": number, "error": f"{type(error).__name__}: {error}"})
            console.print(f"{number}: {failed[-1]['error'][:140]}", style="red")
            continue
        rows.append(row)
        over = row.measured_bytes - row.budget_bytes
        console.print(
            f"{number:4} {row.kind:7} {row.shape:34} used {row.used:7.2%} over {over:+12,} promised-measured "
            f"{row.promised_bytes - row.measured_bytes:+9,} {row.num_regions:3} regions {row.overhead:6.2%} "
            f"(bound {row.bound:.2%}) {row.cpu_s:5.1f} s",
            style="red"
            if over > 0
            else "yellow"
            if row.used < USED_GOAL and row.budget_bytes < row.plain_bytes
            else "",
        )
        write(arguments.json, rows, failed)
    console.print_json(data=summary_of(rows, failed))
    return int(bool(failed) or any(row.measured_bytes > row.budget_bytes for row in rows))


def write(target: Path, rows: list[Row], failed: list[dict[str, Any]]) -> None:
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}"
    found = {"machine": machine, "summary": summary_of(rows, failed), "failed": failed}
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(found | {"rows": [dataclasses.asdict(row) for row in rows]}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())

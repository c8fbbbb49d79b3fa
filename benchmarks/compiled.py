"""Plans on compiled models beside eager ones, and beside the compiler's own memory budget: gradients, peaks, times.

    python benchmarks/compiled.py [--only NAME] [--inductor] [--json FILE]

A small GPT-2 and a small BERT, forward and backward, float32, no dropout, gradients set to None between steps (a
compiled backward returns all of them at its end, so that gradients that exist all along would be there twice).

*whole ops* and *decomposed* run what AOTAutograd's partitioner makes, op by op, without and with inductor's
decompositions (the latter is what `aot_eager_decomp_partition` does); *inductor* fuses them, where asked for. Peaks are
the profiler's, above what is alive before the step; FLOPs those of the graphs' matrix products and attention
(`judge.py`). Gradients: the largest difference from the plain eager step's, over the largest entry of the parameter's
gradient; `tolerance` is ten times what compiling the plain step alone makes. Then rows of `activation_memory_budget`;
beside each, of our plans (made with `for_compile=True`, and by name), by the same backend, the one with the fewest
FLOPs whose measured peak is no more than 2 % above. Times are the least of seven steps, as a share of the plain step's
by the same backend; compare them within one run only. `compiled_peaks.py` says what makes the peaks differ.
"""

import argparse
import contextlib
import json
import time
from pathlib import Path

import torch
import transformers
from compile_budgets import compiled
from judge import Flops, machine, peak_bytes
from rich.console import Console
from rich.table import Table

import autoremat as ar

BUDGETS = (0.7, 0.5, 0.3, 0.1)
SHARES = (0.7, 0.6, 0.5, 0.4)
SCHEDULES = ("save:matmuls", "every-block")
WAY = "whole ops"
NUM_STEPS = 7
WIDTH, HEADS, LAYERS, LENGTH, VOCABULARY, BATCH = 64, 4, 3, 128, 128, 4


def gpt2():
    config = transformers.GPT2Config(
        n_layer=LAYERS, n_embd=WIDTH, n_head=HEADS, n_positions=LENGTH, vocab_size=VOCABULARY, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, loss_type="ForCausalLM",
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def bert():
    config = transformers.BertConfig(
        num_hidden_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=HEADS, intermediate_size=4 * WIDTH,
        vocab_size=VOCABULARY, max_position_embeddings=LENGTH, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, loss_type="ForMaskedLM",
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


MODELS = {"gpt2": gpt2, "bert": bert}


def build(make):
    torch.manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    return make(), {"input_ids": ids, "labels": ids}


@contextlib.contextmanager
def prepared(model, how, budget):
    """What to call, and the list that gets FLOPs."""
    if how == "eager":
        yield model, []
    elif how == "inductor":
        torch._dynamo.reset()
        yield torch.compile(model), []
    else:
        with compiled(model, budget, decompose=how == "decomposed") as (call, counts):
            yield call, counts


def measure(make, how, plan=None, budget=1.0):
    """Gradients of a step, its peak, FLOPs and time."""
    model, batch = build(make)
    if plan is not None:
        ar.apply(model, plan)

    def step():
        model.zero_grad(set_to_none=True)
        call(**batch).loss.backward()

    with prepared(model, how, budget) as (call, counts):
        step()
        flops = sum(counts)
        if how == "eager":
            with Flops() as seen:
                step()
            flops = seen.total
        step()
        gradients = [p.grad.clone() for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        peak, _ = peak_bytes(step)
        times = []
        for _ in range(NUM_STEPS):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
    return gradients, {"peak_bytes": peak, "flops": flops or None, "step_s": min(times)}


def difference(found, expected):
    pairs = zip(found, expected, strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-6)) for a, b in pairs)


class Bench:
    """Rows of one model; each run has a fresh model and a fresh compiler."""

    def __init__(self, name):
        self.name, self.make, self.rows = name, MODELS[name], []
        self.plain, self.tolerance, self.expected = {}, {}, None
        model, batch = build(self.make)
        self.graph = ar.trace(model, batch, optimizer=None)

    def row(self, how, what, plan=None, budget=1.0, **more):
        start = time.perf_counter()
        gradients, found = measure(self.make, how, plan, budget)
        if what == "plain":
            self.expected = self.expected or gradients
            self.plain[how] = found
            self.tolerance[how] = 10 * difference(gradients, self.expected)
        plain, away = self.plain[how], difference(gradients, self.expected)
        row = {
            "model": self.name,
            "how": how,
            "what": what,
            **found,
            "peak_of_plain": found["peak_bytes"] / plain["peak_bytes"],
            "flops_of_plain": found["flops"] / plain["flops"] if found["flops"] else None,
            "time_of_plain": found["step_s"] / plain["step_s"],
            "gradient_difference": away,
            "tolerance": self.tolerance[how],
            "within_tolerance": away <= self.tolerance[how],
            **more,
            "whole_row_s": time.perf_counter() - start,
        }
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        return row

    def schedules(self, ways):
        """The same plan in each way."""
        for way in ways:
            self.row(way, "plain")
        for name in SCHEDULES:
            plan = ar.classic(self.graph, name)
            eager = None
            for way in ways:
                row = self.row(way, name, plan)
                eager = eager or row
                row["peak_over_eager"] = row["peak_bytes"] / eager["peak_bytes"] - 1

    def budgets(self):
        """The compiler's budget, and the plan with the fewest FLOPs among ours whose compiled peak is about as low."""
        ours = [row for row in self.rows if row["how"] == WAY]
        for share in SHARES:
            plan = ar.plan(self.graph, activation_memory_budget=share, for_compile=True)
            ours.append(self.row(WAY, f"plan for {share}", plan))
        ours += [self.row(WAY, name, ar.classic(self.graph, name)) for name in ("uniform:2", "save:attention")]
        for budget in BUDGETS:
            theirs = self.row(WAY, f"budget {budget}", budget=budget)
            fitting = [row for row in ours if row["peak_bytes"] <= 1.02 * theirs["peak_bytes"]]
            best = min(fitting, key=lambda row: (row["flops"], row["peak_bytes"]), default=None)
            if best is not None:
                theirs["ours"] = best["what"]
                theirs["our_peak_of_theirs"] = best["peak_bytes"] / theirs["peak_bytes"]
                theirs["our_flops_of_theirs"] = best["flops"] / theirs["flops"]
                theirs["our_time_of_theirs"] = best["step_s"] / theirs["step_s"]


def table_of(rows):
    columns = ("peak_bytes", "peak_of_plain", "peak_over_eager", "flops_of_plain", "time_of_plain")
    beside = ("our_peak_of_theirs", "our_flops_of_theirs", "our_time_of_theirs")
    table = Table("model", "how", "what", *columns, "ours", *beside, "gradients within tolerance")
    for row in rows:
        cells = [row.get(column) for column in (*columns, "ours", *beside)]
        texts = [f"{cell:.3f}" if isinstance(cell, float) else "" if cell is None else str(cell) for cell in cells]
        table.add_row(row["model"], row["how"], row["what"], *texts, str(row["within_tolerance"]))
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=MODELS)
    parser.add_argument("--inductor", action="store_true", help="as well; it takes minutes for each model")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ways = ["eager", WAY, "decomposed"] + (["inductor"] if options.inductor else [])
    rows = []
    for name in [options.only] if options.only else MODELS:
        bench = Bench(name)
        bench.schedules(ways)
        bench.budgets()
        rows += bench.rows
    if options.json:
        size = {"layers": LAYERS, "width": WIDTH, "heads": HEADS, "batch": BATCH, "length": LENGTH}
        found = {"machine": machine(), "threads": torch.get_num_threads(), "size": size, "rows": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    Console(width=210).print(table_of(rows))


if __name__ == "__main__":
    main()

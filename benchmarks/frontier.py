"""Every way to checkpoint a GPT-2 that runs here, for real, beside our frontier: peak, extra FLOPs, planning time.

    python benchmarks/frontier.py [--no-compile] [--json FILE]

GPT-2 with 12 layers, 512 wide, 512 tokens, batch 2, vocabulary 8,192, float32, no dropout; forward and backward with
gradients preallocated. All rows run in one process. The peak is that of the profiler's memory events above what is
alive before the step, as a share of the plain step's; FLOPs are counted by a dispatch mode, for torch.compile on its
graphs, as a share of the plain step's (`judge.py`, `compile_budgets.py`: no code of autoremat's). Packages that plan
checkpointing are rows, too, where they are installed; most say why they do not run here.
"""

import argparse
import contextlib
import functools
import json
import math
import time
from pathlib import Path

import torch
import transformers
from compile_budgets import SETTINGS, compiled
from judge import Flops, machine, peak_bytes
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import autoremat as ar

SHARES = (0.472, 0.442, 0.41, 0.393, 0.35, 0.32, 0.291, 0.193, 0.161, 0.15, 0.14)
ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
}
MATMULS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}


def build():
    config = transformers.GPT2Config(
        n_layer=12, n_embd=512, n_head=8, n_positions=512, vocab_size=8192, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, loss_type="ForCausalLMLoss",
    )  # fmt: skip
    torch.manual_seed(0)
    ids = torch.randint(0, 8192, (2, 512))
    model = transformers.GPT2LMHeadModel(config)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model, {"input_ids": ids, "labels": ids}


def step(model, batch):
    loss = model(**batch).loss
    loss.backward()
    return loss.item()


def measure(model, batch):
    """Peak bytes above what was alive, and FLOPs."""
    with Flops() as flops:
        step(model, batch)
    peak, loss = peak_bytes(lambda: step(model, batch))
    return peak, flops.total, loss


def measure_compiled(model, batch, budget, solver):
    """The same of the compiled model: its FLOPs are those of its graphs."""
    with compiled(model, budget, solver) as (run, counts):
        step(run, batch)
        peak, loss = peak_bytes(lambda: step(run, batch))
    assert len(counts) == 2, "one graph of forward and one of backward"
    return peak, sum(counts), loss


def ckptplan(model, batch):
    """Profile the blocks and plan for half of the activations, as its documentation says."""
    from ckptplan import declare_blocks, plan_checkpoints, profile_blocks

    blocks = declare_blocks(model.transformer, [(f"h{i}", block) for i, block in enumerate(model.transformer.h)])
    inputs = (torch.zeros(2, 512, 512),)
    profiles = profile_blocks(blocks, inputs, device="cpu", dtype=torch.float32)
    total = sum(p.activation_bytes_estimate or 0 for p in profiles)
    return plan_checkpoints(
        profiles, blocks, target_kind="activation_budget_bytes", target_value=total // 2, planner="dynamic_programming"
    )


def rockmate(model, batch):
    from rockmate import Rockmate

    return Rockmate(model, batch, budget=400 * 2**20)


def auto_sac(model, batch):
    """Torch's own: memory and time of each module, then an integer program in PuLP."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.sac_estimator import SACEstimator
    from torch.distributed._tools.sac_ilp import sac_milp

    assert sac_milp
    with FakeTensorMode(allow_non_fake_inputs=True):
        estimator = SACEstimator()
        with estimator(estimate_mode_type="operator-level-cost-model"):
            step(model, batch)
    return estimator


PACKAGES = {"ckptplan 0.1": ckptplan, "rockmate": rockmate, "torch auto-SAC": auto_sac}


class Segment(nn.Module):
    """Consecutive blocks under one call of torch's checkpoint."""

    def __init__(self, blocks, context_fn=None):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.options = {} if context_fn is None else {"context_fn": context_fn}

    def forward(self, x, *args, **kwargs):
        def run(x):
            for block in self.blocks:
                x = block(x, *args, **kwargs)
            return x

        return checkpoint(run, x, use_reentrant=False, **self.options)


@contextlib.contextmanager
def segments(model, size, context_fn=None):
    blocks = model.transformer.h
    groups = [blocks[i : i + size] for i in range(0, len(blocks), size)]
    model.transformer.h = nn.ModuleList(Segment(group, context_fn) for group in groups)
    layers, model.config.n_layer = model.config.n_layer, len(groups)
    model.transformer.config.num_hidden_layers = len(groups)
    try:
        yield
    finally:
        model.transformer.h = blocks
        model.config.n_layer = layers
        model.transformer.config.num_hidden_layers = layers


def saving(ops, every=1):
    """A context function that stores the outputs of these ops (of matrix products every n-th)."""

    def contexts():
        seen = [0]

        def policy(ctx, op, *args, **kwargs):
            if op not in ops:
                return CheckpointPolicy.PREFER_RECOMPUTE
            if op in MATMULS and not ctx.is_recompute:
                seen[0] += 1
            if op in MATMULS and every > 1:
                key = "again" if ctx.is_recompute else "first"
                policy.counts[key] = policy.counts.get(key, 0) + 1
                if policy.counts[key] % every == 0:
                    return CheckpointPolicy.PREFER_RECOMPUTE
            return CheckpointPolicy.MUST_SAVE

        policy.counts = {}
        return create_selective_checkpoint_contexts(policy)

    return contexts


def peers(model):
    yield "plain", contextlib.nullcontext()
    yield "torch checkpoint, every block", segments(model, 1)
    for size in (2, 3, 4, 6):
        yield f"torch checkpoint, segments of {size}", segments(model, size)
    yield "torch selective, attention", segments(model, 1, saving(ATTENTION))
    yield "torch selective, matmuls", segments(model, 1, saving(MATMULS))
    yield "torch selective, attention + matmuls", segments(model, 1, saving(ATTENTION | MATMULS))
    yield "torch selective, attention + half the matmuls", segments(model, 1, saving(ATTENTION | MATMULS, every=2))


def ours(model, batch, plain_peak):
    """Our plans at fixed shares of the plain peak above what is static, and at the smallest."""
    start = time.perf_counter()
    graph = ar.trace(model, batch, optimizer=None, gradients="kept")
    traced_s = time.perf_counter() - start
    static = graph.static_bytes
    start = time.perf_counter()
    curve = ar.frontier(graph, num_points=64)
    solved_s = time.perf_counter() - start
    budgets = [static + int(share * plain_peak) for share in SHARES]
    budgets = [*(b for b in budgets if b >= curve.smallest_bytes), curve.smallest_bytes]
    plans = [curve.plan(budget) for budget in budgets]
    return [("ours", plan, traced_s + solved_s) for plan in plans], curve


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--no-compile", action="store_true", help="Keep torch.compile's rows of the JSON there is.")
    options = parser.parse_args()
    model, batch = build()
    rows = []

    def run(name, context, how=None, **more):
        start = time.perf_counter()
        try:
            with context:
                peak, flops, loss = (how or (lambda: measure(model, batch)))()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a peer that does not run is a row that says so
            said = " ".join(str(error).split())[:200]
            rows.append({"name": name, "failed": f"{type(error).__name__}: {said}"})
            return
        rows.append(
            {
                "name": name,
                "peak_bytes": peak,
                "flops": flops,
                "loss": loss,
                "took_s": time.perf_counter() - start,
                **more,
            }
        )

    for name, context in peers(model):
        run(name, context)
    plain = rows[0]
    for name, package in PACKAGES.items():
        run(name, contextlib.nullcontext(), lambda package=package: package(model, batch))
    plans, curve = ours(model, batch, plain["peak_bytes"])
    for name, plan, planned_s in plans:
        predicted = plan.planned.peak_bytes - plan.static_bytes
        run(name, ar.apply(model, plan), predicted_bytes=predicted, bound=plan.bound, planned_s=planned_s)
    if options.no_compile and options.json and options.json.exists():
        known = json.loads(options.json.read_text())["rows"]
        rows += [row for row in known if row["name"].startswith("torch.compile")]
    finish(rows, plain, curve, options.json)
    for budget, solver in () if options.no_compile else SETTINGS:
        how = functools.partial(measure_compiled, model, batch, budget, solver)
        run(f"torch.compile, budget {budget}, {solver}", contextlib.nullcontext(), how)
        print(rows[-1], flush=True)
        finish(rows, plain, curve, options.json)
    report(rows, plain, curve)


def finish(rows, plain, curve, path):
    """Work out shares, and write what there is: compiling takes minutes a row."""
    for row in rows:
        if "peak_bytes" in row:
            row["peak"] = row["peak_bytes"] / plain["peak_bytes"]
            row["extra_flops"] = row["flops"] / plain["flops"] - 1
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        found = {"machine": machine(), "rows": rows, "frontier": curve.to_dict()}
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def report(rows, plain, curve):
    table = Table(title=f"GPT-2 12 x 512, forward and backward ({machine()})")
    for name in ("how", "peak", "extra FLOPs", "bound", "ours at that peak", "predicted = measured"):
        table.add_column(name, justify="left" if name == "how" else "right")
    our = [row for row in rows if row["name"] == "ours" and "peak" in row]
    beaten = 0
    for row in rows:
        if "failed" in row:
            table.add_row(row["name"], "does not run:", row["failed"])
            continue
        best = min((o["extra_flops"] for o in our if o["peak"] <= row["peak"] + 1e-3), default=math.inf)
        is_peer = row["name"] != "ours"
        beaten += is_peer and best <= row["extra_flops"] + 1e-4
        same = "" if is_peer else str(row["predicted_bytes"] == row["peak_bytes"])
        bound = "" if is_peer else f"{row['bound']:.2%}"
        shown = (f"{best:.2%}" if math.isfinite(best) else "none") if is_peer else ""
        table.add_row(row["name"], f"{row['peak']:.3f}", f"{row['extra_flops']:.2%}", bound, shown, same)
    Console(width=140).print(table)
    num_peers = sum(row["name"] != "ours" and "peak" in row for row in rows)
    print(f"ours is at or below {beaten} of {num_peers} rows of others")
    print(f"losses: {sorted({row['loss'] for row in rows if 'loss' in row})}")
    print(f"trace and frontier of {len(curve.points)} plans: {our[0]['planned_s']:.1f} s")


if __name__ == "__main__":
    main()

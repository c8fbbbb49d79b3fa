"""States around the step, and steps on many devices: predicted against measured peak.

    python benchmarks/parallel_memory.py [--json FILE]

GPT-2 with 6 layers, 256 wide, sequence 256, batch 2, vocabulary 4,096, dropout 0.1, AdamW, on this CPU. Measured peaks
are from the profiler's memory events, of torch's own GradScaler, AveragedModel, DistributedDataParallel (gloo, one
process) and fully_shard (the first of eight devices, on a process group that moves no data: what FSDP2 allocates,
without what a communication library does). A second table is predicted alone: Llama 3 8B, one sequence of 4,096 tokens,
bf16, AdamW, for one of eight H100. The machine is printed with them.
"""

import argparse
import itertools
import json
import os
import platform
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import autoremat as ar
from autoremat._measure import record_memory, unique_bytes

WORLD_SIZE = 8


def build():
    config = transformers.GPT2Config(
        n_layer=6, n_embd=256, n_head=4, n_positions=256, vocab_size=4096, bos_token_id=0, eos_token_id=0,
        loss_type="ForCausalLMLoss",
    )  # fmt: skip
    torch.manual_seed(0)
    ids = torch.randint(0, 4096, (2, 256))
    return transformers.GPT2LMHeadModel(config).train(), {"input_ids": ids, "labels": ids}


def around(name, **options):
    """A step with something around it, as `measure` runs it."""
    model, batch = build()
    predicted = ar.profile(ar.trace(model, batch, **options)).peak_bytes
    measured = ar.measure(model, batch, num_steps=1, **options).planned.peak_bytes
    return {"setting": name, "predicted_bytes": predicted, "measured_bytes": measured}


def replicated(name, how):
    """A step under DistributedDataParallel."""
    model, batch = build()
    predicted = ar.profile(ar.trace(model, batch, parallel=how)).peak_bytes
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    ddp = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=how.gradient_as_bucket_view)
    measured = run(ddp, batch, 1) + gradients  # the buckets are made before the step
    dist.destroy_process_group()
    return {"setting": name, "predicted_bytes": predicted, "measured_bytes": measured}


def sharded(name, how, *, accumulate=1, share=None, **options):
    """A step under fully_shard, plain or with a plan for a share of what can be saved."""
    model, batch = build()
    precision = "fp16" if "mp_policy" in options else None
    graph = ar.trace(model, batch, precision=precision, accumulate=accumulate, parallel=how)
    predicted = ar.profile(graph).peak_bytes
    if share is not None:
        plan = ar.plan(graph, activation_memory_budget=share)
        predicted = plan.planned.peak_bytes
        ar.apply(model, plan)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    options["mesh"] = init_device_mesh("cpu", (WORLD_SIZE,))
    for block in model.transformer.h:
        fully_shard(block, reshard_after_forward=how.reshard_after_forward, **options)
    fully_shard(model, **options)
    measured = run(model, batch, accumulate)
    dist.destroy_process_group()
    return {"setting": name, "predicted_bytes": predicted, "measured_bytes": measured}


def run(model, batch, accumulate):
    """Peak of a step, counted from the tensors that are there before it."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step():
        value = torch.zeros(())
        for _ in range(accumulate):
            value = model(**batch).loss
            value = value / accumulate if accumulate > 1 else value
            value.backward()
            value = value.detach()
        optimizer.step()
        return value

    for _ in range(2):
        step()
        optimizer.zero_grad(set_to_none=True)
    _, events = record_memory(step)
    state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    tensors = [*model.parameters(), *model.buffers(), *batch.values(), *state]
    static = unique_bytes(t.to_local() if hasattr(t, "to_local") else t for t in tensors)
    return static + max(itertools.accumulate(change for _, change in events))


def many_devices():
    """Predicted peaks of one of eight devices."""
    built = ar.build_preset("llama-3-8b", batch=1, seq=4096, precision="bf16", fake=True)
    graph = ar.trace(built.model, built.batch, loss=built.loss, target="h100-80g")
    hows = [None, ar.DataParallel(), ar.DataParallel(gradient_as_bucket_view=True)]
    hows += [ar.Sharding(stage=stage) for stage in (1, 2, 3)]
    hows.append(ar.Sharding(parameter_dtype="fp32", reduce_dtype="fp32"))
    for how in hows:
        found = ar.profile(graph if how is None else ar.distribute(graph, how), target="h100-80g")
        name = "one device" if how is None else how.describe()
        yield {"setting": name, "peak_bytes": found.peak_bytes, "by_cause": found.peak_by_cause}


def measured_settings():
    fp16 = {"precision": "amp-fp16"}
    yield around("plain")
    yield around("GradScaler, fp16 autocast", scaler=True, **fp16)
    yield around("running average", ema=True)
    yield around("both, fp16 autocast", scaler=True, ema=True, **fp16)
    yield replicated("DistributedDataParallel", ar.DataParallel())
    yield replicated("DistributedDataParallel, views of buckets", ar.DataParallel(gradient_as_bucket_view=True))
    yield sharded("fully_shard", ar.Sharding())
    yield sharded("fully_shard, two micro-steps", ar.Sharding(), accumulate=2)
    yield sharded("fully_shard, gathered between passes", ar.Sharding(reshard_after_forward=False))
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    yield sharded(
        "fully_shard, fp16, reduced in fp32", ar.Sharding(parameter_dtype="fp32", reduce_dtype="fp32"), mp_policy=policy
    )
    yield sharded("fully_shard, planned for half of the activations", ar.Sharding(), share=0.5)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    rows = list(measured_settings())
    predicted = list(many_devices())
    console = Console()
    table = Table(title=machine)
    for column in ("setting", "predicted", "measured", "difference"):
        table.add_column(column, justify="left" if column == "setting" else "right")
    for row in rows:
        difference = row["predicted_bytes"] - row["measured_bytes"]
        share = difference / row["measured_bytes"]
        row["difference_bytes"] = difference
        table.add_row(
            row["setting"],
            f"{row['predicted_bytes']:,}",
            f"{row['measured_bytes']:,}",
            f"{difference:+,} ({share:+.4%})",
        )
    console.print(table)
    causes = [c for c in predicted[0]["by_cause"] if any(row["by_cause"][c] > 2**24 for row in predicted)]
    table = Table(title="Llama 3 8B, 1 x 4,096 tokens, bf16, AdamW: peak of one of eight devices, GiB, predicted")
    for column in ("setting", "peak", *causes):
        table.add_column(column.replace("_", " "), justify="left" if column == "setting" else "right")
    for row in predicted:
        gib = [f"{row['by_cause'][cause] / 2**30:.2f}" for cause in causes]
        table.add_row(row["setting"], f"{row['peak_bytes'] / 2**30:.2f}", *gib)
    console.print(table)
    if arguments.json:
        content = {"machine": machine, "measured": rows, "predicted": predicted}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Steps under DistributedDataParallel: bucket bytes by hand, and peaks as the real thing has them."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autoremat as ar
from autoremat._data_parallel import MIB, DataParallel, bucket_sizes, replicate
from autoremat._ledger import expand, peak_bytes
from autoremat._measure import record_memory, unique_bytes
from autoremat._model_states import StatesFactory
from machine import run_schedule
from zoo import MODELS

HOW = {
    "copies": DataParallel(),
    "views": DataParallel(gradient_as_bucket_view=True),
    "copies, small buckets": DataParallel(bucket_cap_mb=0.01, first_bucket_mb=0.001),
    "views, every backward": DataParallel(gradient_as_bucket_view=True, sync_every_micro_step=True),
    "copies, every backward": DataParallel(sync_every_micro_step=True),
}


@pytest.fixture(scope="module")
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def run(ddp, case, how, accumulate):
    args = case.batch if isinstance(case.batch, tuple) else ()
    kwargs = case.batch if isinstance(case.batch, dict) else {}
    value = torch.zeros(())
    for micro_step in range(accumulate):
        last = micro_step == accumulate - 1
        with ddp.no_sync() if not (last or how.sync_every_micro_step) else torch.enable_grad():
            value = case.loss_fn(ddp(*args, **kwargs))
            if accumulate > 1:
                value = value / accumulate
            value.backward()
            value = value.detach()
    return value


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", ["mlp", "gpt2"])
@pytest.mark.parametrize("case", HOW)
def test_the_predicted_peak_is_that_of_a_real_one(group, name, case, accumulate):
    how, build = HOW[case], MODELS[name]()
    torch.manual_seed(0)
    model = build.build().train()
    graph = ar.trace(model, build.batch, loss=build.loss_fn, optimizer="adamw", accumulate=accumulate, parallel=how)
    states = StatesFactory.parse("adamw").build(model)
    ddp = nn.parallel.DistributedDataParallel(
        model,
        bucket_cap_mb=how.bucket_cap_mb,
        gradient_as_bucket_view=how.gradient_as_bucket_view,
    )

    inputs = [x for x in torch.utils._pytree.tree_leaves(build.batch) if isinstance(x, torch.Tensor)]

    def step():
        loss = run(ddp, build, how, accumulate)
        states.end_step(model)
        return loss

    for _ in range(2):
        step()
        for tensor in (*model.parameters(), *inputs):
            tensor.grad = None
    _, events = record_memory(step)
    tensors = [*model.parameters(), *model.buffers(), *inputs, *(t for _, _, t in states.tensors(model))]
    gradient_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    static = unique_bytes(tensors) + gradient_bytes  # the buckets
    assert graph.static_bytes == static
    predicted = peak_bytes(graph, expand(graph))
    measured = static + max(itertools.accumulate(change for _, change in events))
    assert predicted - graph.hidden_bytes <= measured <= predicted
    if accumulate == 1 and name == "mlp":
        assert graph.hidden_bytes == 0
        assert predicted == measured


@pytest.mark.parametrize("case", ["copies", "views"])
def test_a_plan_made_for_one_of_many_devices_keeps_its_promise_there(group, case):
    how, build = HOW[case], MODELS["gpt2"]()
    torch.manual_seed(0)
    model = build.build().train()
    options = {"loss": build.loss_fn, "optimizer": "sgd", "parallel": how}
    plan = ar.plan(model, build.batch, activation_memory_budget=0.7, **options)
    assert plan.regions
    ar.apply(model, plan)
    ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=how.gradient_as_bucket_view)
    states = StatesFactory.parse("sgd").build(model)

    def step():
        loss = run(ddp, build, how, 1)
        states.end_step(model)
        return loss

    for _ in range(2):
        step()
        model.zero_grad(set_to_none=True)
    _, events = record_memory(step)
    peak = plan.static_bytes + max(itertools.accumulate(change for _, change in events))
    assert peak == plan.planned.peak_bytes <= plan.budget_bytes < plan.plain.peak_bytes


def linears(*widths):
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(widths)))


def test_buckets_fill_in_order_of_arrival():
    model = linears(256, 1024, 512, 256, 64)  # 1 MiB, 2 MiB, 512 KiB, 64 KiB
    graph = ar.trace(model, torch.ones(1, 256), loss=lambda y: y.sum())
    assert bucket_sizes(graph, DataParallel()) == (64 * 1024 + 512 * 1024 + 2 * MIB, 1 * MIB)
    assert bucket_sizes(graph, DataParallel(bucket_cap_mb=1, first_bucket_mb=0.5)) == (576 * 1024, 2 * MIB, 1 * MIB)
    reducer = [64 * 256 * 4, 512 * 256 * 4, 1024 * 512 * 4, 256 * 1024 * 4]
    tensors = [torch.empty(size // 4) for size in reducer]
    for first, cap in ((1.0, 25.0), (0.5, 1.0), (0.05, 0.1)):
        limits = [int(first * MIB), int(cap * MIB)]
        indices, _ = dist._compute_bucket_assignment_by_size(tensors, limits, [False] * len(tensors))
        real = tuple(sum(reducer[i] for i in bucket) for bucket in indices)
        assert bucket_sizes(graph, DataParallel(bucket_cap_mb=cap, first_bucket_mb=first)) == real


def test_copies_cost_the_gradients_once_more_and_views_only_what_is_on_its_way():
    model = linears(64, 64, 64, 64)
    options = {"loss": lambda y: y.sum(), "optimizer": "sgd"}
    size = 4 * 64 * 64
    plain = ar.trace(model, torch.ones(1, 64), **options)
    peaks = {
        view: ar.profile(replicate(plain, DataParallel(gradient_as_bucket_view=view))).peak_by_cause
        for view in (False, True)
    }
    assert peaks[False]["communication"] == peaks[True]["communication"] == 3 * size
    assert peaks[False]["gradient"] == 3 * size
    assert peaks[True]["gradient"] == size


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("case", HOW)
def test_schedules_of_replicated_steps_are_legal(case, accumulate):
    build = MODELS["gpt2"]()
    graph = ar.trace(build.build(), build.batch, loss=build.loss_fn, accumulate=accumulate, parallel=HOW[case])
    blocks = [c.index for c in graph.calls if c.path in build.paths]
    from autoremat._replay import RegionSpec

    for specs in ([], [RegionSpec(c) for c in blocks]):
        schedule = expand(graph, specs)
        workspace = max(op.workspace_bytes for op in graph.ops)
        peak = run_schedule(graph, schedule)
        assert peak <= peak_bytes(graph, schedule) <= peak + workspace


@pytest.mark.parametrize("gradients", ["fresh", "kept"])
def test_kept_gradients_that_are_views_count_once(gradients):
    options = {"loss": lambda y: y.sum(), "optimizer": "sgd", "gradients": gradients}
    graph = ar.trace(linears(64, 64), torch.ones(1, 64), parallel=HOW["views"], **options)
    assert graph.static_bytes == 2 * 4 * 64 * 64 + 4 * 64


def test_a_plan_says_that_it_is_for_one_of_many_devices_and_is_not_measured_alone():
    model, batch = linears(64, 64, 64), torch.ones(1, 64)
    plan = ar.plan(model, batch, loss=lambda y: y.sum(), budget="1MiB", parallel=DataParallel(), ema=True)
    assert (plan.parallel, plan.around) == ("ddp", "ema")
    assert plan.plain.peak_by_cause["communication"] == 2 * 4 * 64 * 64
    with pytest.raises(ar.UsageError, match="one of several devices"):
        ar.measure(model, batch, plan, loss=lambda y: y.sum())


def test_wrong_use_is_refused():
    graph = ar.trace(linears(8, 8), torch.ones(1, 8), loss=lambda y: y.sum())
    with pytest.raises(ar.UsageError, match="spread over devices already"):
        replicate(replicate(graph, DataParallel()), DataParallel())
    with pytest.raises(ar.UsageError, match="above 0"):
        DataParallel(bucket_cap_mb=0)

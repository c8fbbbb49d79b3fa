"""On a real GPU: predictions, the allocator's model, and equality of gradients. Skipped where there is none."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

import autoremat as ar

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch sees none here"),
]
MIB = 2**20
ALLOCATED_WITHIN = 0.005
"""Promise 2: predicted and measured allocated peaks differ by at most this share."""


def chain():
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Dropout(0.1), nn.Linear(4096, 1024), nn.LayerNorm(1024))
        for _ in range(6)
    ]
    return nn.Sequential(*blocks)


def square_mean(y):
    return y.square().mean()


@pytest.fixture
def model():
    return chain().cuda()


@pytest.fixture
def batch():
    return torch.randn(4096, 1024, generator=torch.Generator().manual_seed(0)).cuda()


def planned(model, batch):
    graph = ar.trace(model, batch, loss=square_mean)
    free = ar.plan(graph, budget=2**60)
    return ar.plan(graph, budget=(free.smallest_bytes + free.plain.peak_bytes) // 2)


def test_the_step_traced_without_the_gpu_is_the_step_traced_on_it(model, batch):
    here = ar.trace(model, batch, loss=square_mean)
    without = ar.trace(chain(), batch.cpu(), loss=square_mean, target="a100-80g")
    assert [op.name for op in here.ops] == [op.name for op in without.ops]
    assert [s.num_bytes for s in here.storages] == [s.num_bytes for s in without.storages]


def test_predicted_and_measured_peaks_agree(model, batch):
    plan = planned(model, batch)
    usage = ar.measure(model, batch, plan, loss=square_mean)
    assert usage.plain.peak_bytes == pytest.approx(plan.plain.peak_bytes, rel=ALLOCATED_WITHIN)
    assert usage.planned.peak_bytes == pytest.approx(plan.planned.peak_bytes, rel=ALLOCATED_WITHIN)
    assert usage.judge == "CUDA caching allocator"


def test_gradients_are_equal_to_the_bit(model, batch):
    plan = planned(model, batch)
    assert plan.regions
    report = ar.verify(model, batch, plan, loss=square_mean, optimizer="adamw")
    assert report.equal, report.differences
    assert report.num_recomputed_regions > 0


def test_a_recorded_history_reserves_what_the_model_of_the_allocator_says():
    script = Path(__file__).parent.parent / "benchmarks" / "gpu_check.py"
    spec = importlib.util.spec_from_file_location("gpu_check", script)
    gpu_check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gpu_check)
    torch.cuda.empty_cache()
    if torch.cuda.memory_reserved():
        pytest.skip("other tests hold memory, so the allocator is not empty")
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=1_000_000)
    try:
        model, batch = chain().cuda(), torch.ones(4096, 1024, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            optimizer.zero_grad(set_to_none=True)
            square_mean(model(batch)).backward()
            optimizer.step()
        found = gpu_check.check_snapshot(torch.cuda.memory._snapshot(), "")
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    assert found["exact"], found["first_difference"]
    assert found["num_allocations"] > 100

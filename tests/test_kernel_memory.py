"""Kernels say what they allocate, without leaving a trace."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import autoremat as ar
from autoremat._capture import workspace_bytes
from autoremat._kernel_memory import MAX_BYTES, kernel_memory, record_allocations

aten = torch.ops.aten


def test_a_kernel_computes_into_a_larger_storage_than_its_result():
    x = torch.ones(4, 8)
    told = kernel_memory(aten.mse_loss.default, (x, x), {})
    assert told.output_bytes == (x.nbytes,)
    assert told.workspace_bytes == x.nbytes + 12  # the mean, and its count as float64 and float32


def test_fake_tensors_are_asked_for_by_their_geometry():
    with FakeTensorMode():
        fake = torch.empty(6, 4).t()
    assert kernel_memory(aten.mm.default, (fake, fake.t()), {}).output_bytes == (64,)
    assert kernel_memory(aten.sort.default, (torch.zeros(6, dtype=torch.int64),), {}).output_bytes == (48, 48)


def test_what_cannot_be_asked_has_no_answer():
    large = torch.empty(MAX_BYTES + 4, dtype=torch.int8)
    assert kernel_memory(aten.neg.default, (large,), {}) is None
    assert kernel_memory(aten.mm.default, (torch.ones(2, 2), torch.ones(2, 2)), {}, flops=10**12) is None
    assert kernel_memory(aten.cholesky_inverse.default, (torch.ones(2, 3),), {}) is None
    assert kernel_memory(aten.bernoulli.default, (torch.ones(2),), {"generator": torch.Generator()}) is None


def test_random_state_is_left_alone():
    state = torch.get_rng_state()
    assert kernel_memory(aten.bernoulli_.float, (torch.ones(7, 3), 0.5), {}, is_random=True).workspace_bytes == 0
    assert torch.equal(state, torch.get_rng_state())


def test_allocations_are_seen_in_order_and_inside_another_profiler():
    out, changes = record_allocations(lambda: torch.ones(4) + torch.ones(4))
    assert out.sum() == 8
    assert list(changes) == [16, 16, 16, -16, -16]


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("mul.Tensor", (torch.ones(8, 8), 2.0)),
        ("div.Tensor", (torch.ones(8, 8, dtype=torch.bfloat16), 2.0)),
        ("add.Tensor", (torch.ones(8, 8, dtype=torch.bfloat16), torch.ones(8, 8))),
        ("mul.Tensor", (torch.ones(3, 8, 8), torch.ones(8, 1, dtype=torch.bfloat16))),
        ("add_.Tensor", (torch.ones(3, 8), torch.ones(3, 8, dtype=torch.bfloat16))),
        ("mean.default", (torch.ones(8, 8),)),
        ("_safe_softmax.default", (torch.ones(4, 8), -1)),
        (
            "native_batch_norm.default",
            (torch.ones(4, 3, 5, 5), torch.ones(3), torch.ones(3), None, None, True, 0.1, 1e-5),
        ),
    ],
)
def test_rules_agree_with_kernels(name, args):
    packet, overload = name.split(".")
    func = getattr(getattr(aten, packet), overload)
    out = func(*args)
    results = [out] if isinstance(out, torch.Tensor) else list(out)
    assert kernel_memory(func, args, {}).workspace_bytes == workspace_bytes(f"aten.{name}", args, results)


def test_a_trace_has_the_sizes_that_kernels_really_allocate():
    model = nn.Linear(4, 4)
    x = torch.ones(3, 4)
    fake, real = (ar.trace(model, x, loss=lambda y: nn.functional.mse_loss(y, x), fake=fake) for fake in (True, False))
    made = [next(op for op in graph.ops if op.name == "aten.mse_loss.default").outputs[0] for graph in (fake, real)]
    assert fake.storages[made[0]].num_bytes == real.storages[made[1]].num_bytes == x.nbytes


def test_what_is_too_large_to_be_asked_goes_by_a_rule_that_is_not_too_low():
    for m, k, n in ((512, 128, 512), (96, 640, 32)):
        a, b = torch.zeros(m, k, dtype=torch.bfloat16), torch.zeros(n, k, dtype=torch.bfloat16).t()
        told = kernel_memory(aten.mm.default, (a, b), {}).workspace_bytes
        assert told <= workspace_bytes("aten.mm.default", (a, b), [a @ b]) == torch.get_num_threads() * 2**21
    x = torch.zeros(4, 4)
    assert kernel_memory(aten.mm.default, (x, x), {}).workspace_bytes == 0
    assert workspace_bytes("aten.mm.default", (x, x), [x]) == 0

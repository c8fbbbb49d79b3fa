"""A step graph says what really happens: the same on fake and on real tensors, with exact bytes and FLOPs."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import autoremat as ar
from autoremat import BatchError, LossError, TraceError, UsageError, fake_weights, trace
from autoremat._fake_kernels import FakeKernels
from autoremat._ledger import expand, peak_bytes
from autoremat._op_info import op_info
from autoremat._regions import resolve
from autoremat._replay import saved_in
from autoremat._step_graph import BEFORE_STEP
from zoo import MODELS


def step_of(name, **options):
    case = MODELS[name]()
    torch.manual_seed(0)
    return trace(case.build(), case.batch, loss=case.loss_fn, **options)


@pytest.mark.parametrize("name", MODELS)
def test_fake_tensors_take_the_path_of_real_ones(name):
    fake, real = step_of(name), step_of(name, fake=False)
    assert [op.name for op in fake.ops] == [op.name for op in real.ops]
    assert fake.ops == real.ops
    assert [(s.storage, s.packed, s.unpacked, s.released) for s in fake.saved] == [
        (s.storage, s.packed, s.unpacked, s.released) for s in real.saved
    ]
    assert fake.calls == real.calls
    assert peak_bytes(fake, expand(fake)) == peak_bytes(real, expand(real))


@pytest.mark.parametrize("name", MODELS)
def test_every_call_holds_its_ops_and_every_op_has_a_call(name):
    graph = step_of(name)
    for call in graph.calls:
        assert call.start <= call.end
        if call.parent >= 0:
            parent = graph.calls[call.parent]
            assert parent.start <= call.start <= call.end <= parent.end
    for op in graph.ops:
        if op.phase == "forward" and op.call > 0:
            call = graph.calls[op.call]
            assert call.start <= op.index < call.end


def test_calls_are_numbered_within_a_micro_step():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(self.layer(x)).sum()

    graph = trace(Twice(), torch.ones(2, 4), accumulate=2)
    layers = [c for c in graph.calls if c.path == "layer"]
    assert [(c.micro_step, c.number) for c in layers] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_flops_of_matmul_convolution_and_attention_are_exact():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3, padding=1)
            self.proj = nn.Linear(8, 16)

        def forward(self, x):
            y = self.proj(self.conv(x).flatten(2).transpose(1, 2)).unsqueeze(1)
            return F.scaled_dot_product_attention(y, y, y).sum()

    graph = trace(Net(), torch.ones(2, 3, 4, 4), optimizer=None)
    forward = {op.name.split(".")[1]: op.flops for op in graph.ops if op.phase == "forward" and op.flops}
    backward = {op.name.split(".")[1]: op.flops for op in graph.ops if op.phase == "backward" and op.flops}
    conv = 2 * (2 * 4 * 4) * 8 * 3 * 9
    attention = 2 * 2 * 16 * 16 * (16 + 16)
    assert forward == {
        "convolution": conv,
        "mm": 2 * 32 * 8 * 16,
        "_scaled_dot_product_flash_attention_for_cpu": attention,
    }
    assert backward["_scaled_dot_product_flash_attention_for_cpu_backward"] == attention * 5 // 2
    assert backward["convolution_backward"] == conv  # the input needs no gradient
    assert backward["mm"] == 2 * 32 * 8 * 16  # the last of two


def test_saved_tensors_count_once_per_storage():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            y = self.layer(x)
            a, b = y.chunk(2, -1)  # two views of one storage, both saved by the product
            return (a * b).sum()

    graph = trace(Net(), torch.ones(4, 8), optimizer=None)
    born = [s for s in saved_in(graph, 0) if graph.storages[s.storage].born != BEFORE_STEP]
    assert len(born) == 2
    assert {graph.storages[s.storage].num_bytes for s in born} == {4 * 8 * 4}
    assert len({s.storage for s in born}) == 1


def test_in_place_ops_and_running_statistics_are_mutations():
    graph = trace(nn.Sequential(nn.BatchNorm1d(4), nn.ReLU(inplace=True)), torch.ones(3, 4), loss=lambda y: y.sum())
    written = {
        graph.storages[s].label
        for op in graph.ops
        if op.phase == "forward"
        for s in op.mutates
        if graph.storages[s].label
    }
    assert written == {"0.running_mean", "0.running_var", "0.num_batches_tracked"}
    relu = next(op for op in graph.ops if op.name == "aten.relu_.default")
    assert relu.mutates == relu.outputs


def test_a_buffer_that_results_are_written_into_is_counted_once():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            y = self.layer(x)
            with torch.no_grad():  # as a fused loss that works in tiles
                buffer = torch.empty(64, 64)
                torch.mm(y, y.t(), out=buffer[:4, :4])
                buffer[:4].add_(y.sum())
            return y.square().mean()

    fake, real = (trace(Net(), torch.ones(4, 8), optimizer=None, fake=fake) for fake in (True, False))
    assert ar.profile(fake).peak_bytes == ar.profile(real).peak_bytes
    assert sum(s.num_bytes == 64 * 64 * 4 for s in fake.storages) == 1


def test_dropout_is_random_and_attention_without_dropout_is_not():
    graph = step_of("gpt2")
    assert {op.name for op in graph.ops if op.is_random} == {"aten.bernoulli_.float"}
    flash = [op for op in step_of("llama").ops if "flash_attention_for_cpu.default" in op.name]
    assert flash
    assert not any(op.is_random for op in flash)


@pytest.mark.parametrize("name", ["gpt2", "resnet", "mlp"])
def test_the_model_and_random_state_are_left_alone(name):
    case = MODELS[name]()
    model = case.build().eval()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    trace(model, case.batch, loss=case.loss_fn)
    trace(model, case.batch, loss=case.loss_fn, fake=False)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert not model.training
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_weights_need_no_memory():
    with fake_weights():
        model = nn.Sequential(nn.Linear(200_000, 200_000), nn.Linear(200_000, 1))
    graph = trace(model, torch.ones(1, 200_000), loss=lambda y: y.sum())
    assert graph.static_bytes > 3 * 4 * 200_000**2


def test_gradients_appear_or_are_kept():
    model = nn.Sequential(nn.Linear(8, 8))
    fresh = trace(model, torch.ones(2, 8), loss=lambda y: y.sum())
    kept = trace(model, torch.ones(2, 8), loss=lambda y: y.sum(), gradients="kept")
    size = 4 * (64 + 8)
    assert kept.static_bytes == fresh.static_bytes + size
    assert sum(s.num_bytes for s in fresh.storages if s.cause == "gradient") == size


def test_precision_casts_parameters_and_inputs():
    model = nn.Sequential(nn.Linear(8, 8))
    graph = trace(model, torch.ones(2, 8), loss=lambda y: y.float().sum(), precision="bf16", optimizer=None)
    assert sum(s.num_bytes for s in graph.storages if s.cause == "parameter") == 2 * (64 + 8)
    assert next(op for op in graph.ops if op.name.startswith("aten.addmm")).dtype == "bfloat16"
    assert model[0].weight.dtype == torch.float32
    autocast = trace(model, torch.ones(2, 8), loss=lambda y: y.float().sum(), precision="amp-bf16", optimizer=None)
    assert sum(op.name == "aten._to_copy.default" for op in autocast.ops if op.phase == "forward") >= 3


def test_a_gpu_step_keeps_no_attention_probabilities():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(16, 16)
            self.drop = nn.Dropout(0.1)

        def forward(self, x):
            y = self.proj(x)
            return self.drop(F.scaled_dot_product_attention(y, y, y, dropout_p=0.1, is_causal=True)).sum()

    batch = torch.ones(1, 2, 64, 16)
    cpu = trace(Attention(), batch, optimizer=None)
    for precision, kernel in ((None, "efficient"), ("bf16", "flash")):
        gpu = trace(Attention(), batch, optimizer=None, precision=precision, target="a100-40g")
        assert any(f"_scaled_dot_product_{kernel}_attention.default" in op.name for op in gpu.ops)
        assert any("native_dropout" in op.name for op in gpu.ops)
        largest = max(s.num_bytes for s in gpu.storages if s.cause == "activation")
        assert largest < 4 * 2 * 64 * 64 <= max(s.num_bytes for s in cpu.storages if s.cause == "activation")


def test_real_values_of_the_batch_decide_branches():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x, mask):
            y = self.layer(x)
            return (y if mask.all() else y * mask.unsqueeze(-1).to(y.dtype)).sum()

    x = torch.ones(2, 4)
    every = trace(Masked(), (x, torch.tensor([True, True])), optimizer=None)
    some = trace(Masked(), (x, torch.tensor([True, False])), optimizer=None)
    assert not any(op.name == "aten.mul.Tensor" and op.phase == "forward" for op in every.ops)
    assert any(op.name == "aten.mul.Tensor" and op.phase == "forward" for op in some.ops)


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        y = self.inner(x)
        return y.sum() if y.sum().item() > 0 else -y.sum()


class Routed(nn.Module):
    """Rows by the sign of their sum, as loops over experts have it."""

    def __init__(self, width):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x):
        chosen = x.sum(-1) > 0
        out = torch.zeros_like(x)
        for expert, rows in zip(self.experts, (chosen.nonzero()[:, 0], (~chosen).nonzero()[:, 0]), strict=True):
            out = out.index_add(0, rows, expert(x[rows]))
        return out


def test_a_plan_for_code_that_reads_activations_runs_dry_on_real_tensors():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 16), Routed(16), Routed(16)), torch.randn(256, 16)
    loss = lambda y: y.square().mean()  # noqa: E731 - used thrice
    graph = trace(model, x, loss=loss, fake=False)
    plain = peak_bytes(graph, expand(graph))
    made = ar.plan(model, x, budget=plain - 4096, loss=loss, fake=False)
    assert made.regions
    usage = ar.measure(model, x, made, loss=loss, num_steps=1)
    assert usage.plain.peak_bytes == plain
    promised = made.planned.peak_bytes
    assert promised == peak_bytes(graph, expand(graph, resolve(graph, made))) <= made.budget_bytes
    # Routing follows the weights, which the steps before the measured one have trained: a row more or less.
    assert abs(promised - usage.planned.peak_bytes) <= 0.001 * promised


def batch_reader(read):
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(50, 8), nn.Linear(8, 8)

        def forward(self, input_ids, mask):
            return self.head(read(self.embed(input_ids), input_ids, mask)).square().mean()

    return Reader


READS_OF_THE_BATCH = {
    "all": lambda x, ids, mask: x if mask.all() else x * mask.unsqueeze(-1),
    "item": lambda x, ids, mask: x[:, : int(mask.sum(-1).max().item())],
    "tolist": lambda x, ids, mask: torch.cat([row[:n] for row, n in zip(x, mask.sum(-1).tolist(), strict=True)]),
    "max of ids": lambda x, ids, mask: x.repeat(1, int(ids.max()) % 3 + 1, 1),
    "nonzero": lambda x, ids, mask: x[mask.nonzero(as_tuple=True)],
    "boolean index": lambda x, ids, mask: x[mask.bool()],
    "numpy": lambda x, ids, mask: x[:, : int(mask.numpy().sum(1).max())],
    "masked select": lambda x, ids, mask: x.masked_select(mask.bool().unsqueeze(-1)).view(-1, 8),
    "unique": lambda x, ids, mask: x[:, torch.unique(ids).numel() % 5 :],
    "arange": lambda x, ids, mask: x + torch.arange(ids.shape[1]).masked_select(mask[0].bool()).sum().item(),
}


@pytest.mark.parametrize("mask", [torch.ones(2, 9).long(), torch.arange(9).expand(2, 9).lt(6).long()])
@pytest.mark.parametrize("read", READS_OF_THE_BATCH)
def test_values_that_come_from_the_batch_are_real(read, mask):
    model = batch_reader(READS_OF_THE_BATCH[read])()
    batch = {"input_ids": torch.arange(18).view(2, 9), "mask": mask}
    fake, real = trace(model, batch, fake=True), trace(model, batch, fake=False)
    assert fake.ops == real.ops
    assert [s.num_bytes for s in fake.storages] == [s.num_bytes for s in real.storages]


def test_a_mixture_of_experts_is_traced_on_fake_tensors_whatever_its_routing():
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, use_cache=False,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    ids = torch.arange(32).view(2, 16)
    fake, real = (trace(model, {"input_ids": ids, "labels": ids}, fake=fake) for fake in (True, False))
    assert [op.name for op in fake.ops] == [op.name for op in real.ops]
    assert peak_bytes(fake, expand(fake)) == peak_bytes(real, expand(real))


def test_code_that_reads_activations_is_named_and_runs_on_real_tensors():
    with pytest.raises(TraceError, match=r"Reads failed in module '' \(Reads\).*fake=False"):
        trace(Reads(), torch.ones(1, 4), fake=True)
    model = Reads()
    graph = trace(model, torch.ones(1, 4), fake=False)
    assert any(op.reads_value for op in graph.ops)
    with pytest.warns(UserWarning, match=r"Reads failed in module ''.*real copy instead"):
        assert trace(model, torch.ones(1, 4)).ops == graph.ops
    with fake_weights():
        large = nn.Sequential(nn.Linear(600, 600), Routed(600))
    with pytest.raises(TraceError, match=r"'1' \(Routed\).*build it with real weights"):
        trace(large, torch.ones(2, 600), loss=lambda y: y.sum())


def test_wrong_input_is_refused_by_name():
    model = nn.Linear(4, 4)
    with pytest.raises(BatchError, match=r"Linear.forward\(input\).*labels"):
        trace(model, {"input": torch.ones(1, 4), "labels": torch.ones(1)})
    with pytest.raises(BatchError, match="a tensor, a tuple"):
        trace(model, 3)
    with pytest.raises(LossError, match=r"Linear is a tensor of shape \[1, 4\], not a scalar"):
        trace(model, torch.ones(1, 4))
    with pytest.raises(UsageError, match="adamw"):
        trace(model, torch.ones(1, 4), optimizer="lion")
    with pytest.raises(UsageError, match="amp-bf16"):
        trace(model, torch.ones(1, 4), precision="int4")
    with pytest.raises(UsageError, match="at least one micro-step"):
        trace(model, torch.ones(1, 4), accumulate=0)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw:foreach", "adamw:fused", "sgd", "sgd-momentum", "adafactor"])
def test_optimizer_state_is_there_before_the_step(optimizer):
    graph = trace(nn.Linear(64, 64), torch.ones(1, 64), loss=lambda y: y.sum(), optimizer=optimizer)
    state = sum(s.num_bytes for s in graph.storages if s.cause == "optimizer_state")
    size = 4 * (64 * 64 + 64)
    expected = {"sgd": 0, "sgd-momentum": size}.get(optimizer)
    if optimizer.startswith("adamw"):
        assert 2 * size < state < 2 * size + 64
    elif expected is not None:
        assert state == expected
    else:
        assert 0 < state < size
    assert any(op.phase == "optimizer" for op in graph.ops)


def test_clipping_gradients_is_part_of_the_step():
    model = nn.Linear(64, 64)
    plain, clipped = (
        trace(model, torch.ones(1, 64), loss=lambda y: y.sum(), clip_grad_norm=norm) for norm in (None, 1.0)
    )
    added = {op.name for op in clipped.ops if op.phase == "optimizer"} - {op.name for op in plain.ops}
    assert "aten._foreach_norm.Scalar" in added or any("norm" in name for name in added)
    with pytest.raises(UsageError, match="positive norm"):
        trace(model, torch.ones(1, 64), clip_grad_norm=0.0)


def test_list_ops_that_only_change_values_are_not_run_on_fake_tensors():
    class Counted:
        _schema = torch.ops.aten._foreach_add_.Scalar._schema
        num_runs = 0

        def __call__(self, *args):
            self.num_runs += 1
            return torch.ops.aten._foreach_add_.Scalar(*args)

    func, mode = Counted(), FakeTensorMode()
    kernels, info = FakeKernels(mode), op_info(torch.ops.aten._foreach_add_.Scalar)
    real = torch.ones(3)
    assert kernels.run(func, info, ([mode.from_tensor(real)], 1.0), {}) is None
    assert func.num_runs == 0
    kernels.run(func, info, ([real], 1.0), {})
    assert (func.num_runs, real.tolist()) == (1, [2.0] * 3), "values that are there do change"

"""Sharded steps: pieces by hand, peaks as ``fully_shard`` has them, to the byte, on a group that moves no data."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import autoremat as ar
from autoremat._ledger import expand, peak_bytes
from autoremat._measure import record_memory
from autoremat._replay import RegionSpec
from autoremat._schedule import Action
from autoremat._sharding import Sharding, shard
from autoremat._step_graph import BEFORE_STEP
from machine import run_schedule
from zoo import MODELS

WORLD_SIZE = 4
IDS = torch.arange(32).remainder(64).view(2, 16)


class Block(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks between an embedding and a head of the root's; 33 and 101 do not divide by 4."""

    def __init__(self, width=33, inner=101, num_blocks=3):
        super().__init__()
        self.embed = nn.Embedding(65, width)
        self.blocks = nn.ModuleList(Block(width, inner) for _ in range(num_blocks))
        self.head = nn.Linear(width, 65)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x).clone()  # not a view, which fully_shard warns of


def loss_of(logits):
    logits = logits.float().flatten(0, -2)
    return F.cross_entropy(logits, torch.arange(len(logits)).remainder(64))


@pytest.fixture(scope="module")
def mesh():
    """Four devices, of which this process is the first; collectives return at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    yield init_device_mesh("cpu", (WORLD_SIZE,))
    dist.destroy_process_group()


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def levels(model, optimizer, accumulate=1, *, ids=IDS, loss=loss_of, keep_gradients=False):
    """Static bytes of a real sharded step, and its live bytes above them over time."""

    def step():
        value = torch.zeros(())
        for _ in range(accumulate):
            value = loss(model(ids))
            if accumulate > 1:
                value = value / accumulate
            value.backward()
            value = value.detach()
        optimizer.step()
        return value

    for _ in range(2):
        step()
        optimizer.zero_grad(set_to_none=not keep_gradients)
    _, events = record_memory(step)
    state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    kept = [p.grad for p in model.parameters() if keep_gradients]
    tensors = [local(t) for t in (*model.parameters(), *state, *kept)]
    static = ids.untyped_storage().nbytes() + sum(t.numel() * t.element_size() for t in tensors)
    return static, list(itertools.accumulate(change for _, change in events))


def measured(model, optimizer, accumulate=1, **options):
    """Static bytes and peak of a real sharded step."""
    static, above = levels(model, optimizer, accumulate, **options)
    return static, static + max(above)


def sharded(model, mesh, **options):
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    options.pop("reshard_after_forward", None)
    fully_shard(model, mesh=mesh, **options)
    return model


def predicted(graph, specs=()):
    return peak_bytes(graph, expand(graph, specs))


CASES = {
    "default": (Sharding(world_size=4), {}),
    "no prefetch": (Sharding(world_size=4, prefetch=0), {}),
    "kept gathered": (Sharding(world_size=4, reshard_after_forward=False), {"reshard_after_forward": False}),
}
SIZES = {"many tokens": (IDS.repeat(1, 16), 33, 101), "wide": (IDS, 64, 300), "few tokens": (IDS[:, :8], 33, 101)}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES)
def test_the_predicted_peak_is_that_of_fully_shard(mesh, case, size):
    how, options = CASES[case]
    ids, width, inner = SIZES[size]
    torch.manual_seed(0)
    model = Net(width, inner)
    graph = ar.trace(model, ids, loss=loss_of, optimizer="adamw", parallel=how)
    sharded(model, mesh, **options)
    if how.prefetch == 0:
        for module in (model, *model.blocks):
            module.set_modules_to_backward_prefetch([module])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    assert (graph.static_bytes, predicted(graph)) == measured(model, optimizer, ids=ids)


SCALARS_BYTES = 8
"""The loss and its gradient: autograd holds them until its last callbacks have run."""


class Towers(nn.Module):
    """Two units whose inputs need no gradient: backward does not see where they end."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 80), nn.Tanh(), nn.Linear(80, 24)) for _ in range(2))

    def forward(self, x):
        return self.blocks[0](x) * self.blocks[1](x)


@pytest.mark.parametrize("loss", [loss_of, lambda y: y.square().mean()])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("build", "batch"), [(Net, IDS), (Towers, torch.ones(8, 16))])
def test_live_bytes_after_every_op_are_those_of_fully_shard(mesh, case, loss, build, batch):
    how, options = CASES[case]
    torch.manual_seed(0)
    model = build()
    graph = ar.trace(model, batch, loss=loss, optimizer="adamw", parallel=how)
    sharded(model, mesh, **options)
    if how.prefetch == 0:
        for module in (model, *model.blocks):
            module.set_modules_to_backward_prefetch([module])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    static, above = levels(model, optimizer, ids=batch, loss=loss)
    assert graph.static_bytes == static
    before = live = static + graph.hidden_bytes
    position = 0
    for event in expand(graph).events:
        if event.action is Action.DROP:
            live -= graph.storages[event.storage].num_bytes
        if event.op < 0:
            continue
        op = graph.ops[event.op]
        live += sum(graph.storages[s].num_bytes for s in set(op.outputs) if graph.storages[s].born == op.index)
        if op.phase == "backward" and op.name == "aten.add.Tensor":
            continue  # the gradients of a sum: autograd adds them in place where tensors are real
        found = (at for at in range(position, len(above)) if 0 <= static + above[at] - live <= SCALARS_BYTES)
        at = next(found, None)
        assert at is not None, f"{op.name} #{op.index} of {graph.calls[op.call].path!r}: {live - static} bytes"
        highest = max(before, live + op.workspace_bytes)
        assert static + max(above[position : at + 1]) <= highest + SCALARS_BYTES, op.name
        before, position = live + op.workspace_bytes, at


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("gradients", ["fresh", "kept"])
def test_gradients_of_several_backwards_are_added_piece_by_piece(mesh, gradients, accumulate):
    torch.manual_seed(0)
    model = Net()
    options = {"optimizer": "sgd-momentum", "gradients": gradients, "accumulate": accumulate}
    graph = ar.trace(model, IDS, loss=loss_of, parallel=Sharding(world_size=4), **options)
    sharded(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    static, peak = measured(model, optimizer, accumulate, keep_gradients=gradients == "kept")
    assert graph.static_bytes == static
    assert predicted(graph) - graph.hidden_bytes <= peak <= predicted(graph)
    if accumulate == 1:
        assert peak == predicted(graph)


@pytest.mark.parametrize("reduce_dtype", [None, "fp32"])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("size", SIZES)
def test_mixed_precision_keeps_pieces_in_one_dtype_and_gathers_in_another(mesh, size, precision, reduce_dtype):
    ids, width, inner = SIZES[size]
    torch.manual_seed(0)
    model = Net(width, inner)
    how = Sharding(world_size=4, parameter_dtype="fp32", reduce_dtype=reduce_dtype)
    graph = ar.trace(model, ids, loss=loss_of, optimizer="adamw", precision=precision, parallel=how)
    dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, None: None}
    policy = MixedPrecisionPolicy(param_dtype=dtypes[precision], reduce_dtype=dtypes[reduce_dtype])
    sharded(model, mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    assert (graph.static_bytes, predicted(graph)) == measured(model, optimizer, ids=ids)


@pytest.mark.parametrize("applied", ["before", "after"])
def test_a_plan_made_for_one_of_many_devices_keeps_its_promise_there(mesh, applied):
    ids = IDS.repeat(1, 16)
    torch.manual_seed(0)
    model = Net()
    options = {"loss": loss_of, "optimizer": "adamw", "parallel": Sharding(world_size=4)}
    plan = ar.plan(model, ids, activation_memory_budget=0.5, **options)
    assert plan.parallel == "sharded, stage 3 over 4 devices"
    assert plan.regions
    if applied == "before":
        ar.apply(model, plan)
    sharded(model, mesh)
    if applied == "after":
        ar.apply(model, plan)
    _, peak = measured(model, torch.optim.AdamW(model.parameters(), foreach=False), ids=ids)
    assert peak == plan.planned.peak_bytes <= plan.budget_bytes < plan.plain.peak_bytes


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # T5's blocks return views
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "vit"])
def test_transformers_of_several_kinds_and_clipped_gradients(mesh, name):
    case = MODELS[name]()
    torch.manual_seed(0)
    model = case.build().train()
    options = {"loss": case.loss_fn, "optimizer": "adamw", "clip_grad_norm": 1.0}
    graph = ar.trace(model, case.batch, parallel=Sharding(world_size=4), **options)
    for path in case.paths:
        fully_shard(model.get_submodule(path), mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step():
        loss = case.loss_fn(model(**case.batch))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    for _ in range(2):
        step()
        optimizer.zero_grad(set_to_none=True)
    _, events = record_memory(step)
    peak = graph.static_bytes + max(itertools.accumulate(change for _, change in events))
    assert 0 <= predicted(graph) - peak <= SMALL_BYTES


SMALL_BYTES = 16
"""What sums of scalars may differ by: T5's peak is 4 bytes below its prediction."""
WIDTH, INNER, BLOCKS = 10, 23, 2


def by_cause(graph):
    sums = {}
    for storage in graph.storages:
        sums[storage.cause] = sums.get(storage.cause, 0) + storage.num_bytes * (storage.born == BEFORE_STEP)
    return sums


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_pieces_are_cut_along_the_first_dimension_and_rounded_up(stage):
    model = Net(WIDTH, INNER, BLOCKS)
    plain = ar.trace(model, IDS, loss=loss_of, optimizer="adamw", gradients="kept")
    graph = shard(plain, Sharding(stage=stage, world_size=4))
    # 10 -> 3 rows of 4, 23 -> 6, 65 -> 17: norm, norm, up, up, down, down; embedding, head, head
    block = 3 + 3 + 6 * 10 + 6 + 3 * 23 + 3
    piece = 4 * (BLOCKS * block + 17 * 10 + 17 * 10 + 17)
    whole = sum(4 * p.numel() for p in model.parameters())
    num_parameters = len(list(model.parameters()))
    sums = by_cause(graph)
    assert sums["optimizer_state"] == 2 * piece + 4 * num_parameters
    assert sums["gradient"] == (whole if stage == 1 else piece)
    assert sums["parameter"] == (whole if stage < 3 else piece)


def test_stage_3_holds_the_root_and_a_unit_whole_and_the_next_one_on_its_way():
    plain = ar.trace(Net(WIDTH, INNER, BLOCKS), IDS, loss=loss_of, optimizer="sgd")
    graph = shard(plain, Sharding(world_size=4))
    block = 4 * 4 * (3 + 3 + 6 * 10 + 6 + 3 * 23 + 3)
    root = 4 * 4 * (17 * 10 + 17 * 10 + 17)
    sizes = {s.label: s.num_bytes for s in graph.storages if s.label.endswith(("gathered", "way"))}
    assert sizes == {
        "the root on its way": root,
        "the root gathered": root,
        "the root gradients on their way": root,
        **{
            f"blocks.{i} {what}": block
            for i in range(2)
            for what in ("on its way", "gathered", "gradients on their way")
        },
    }
    names = [op.name.removeprefix("fsdp.") for op in graph.ops if op.name.startswith("fsdp.")]
    gather, reduce = ["all_gather", "copy_out"], ["reduce_copy_in", "reduce_scatter"]
    forward = [*gather * 3]
    backward = ["all_gather", "copy_out", "all_gather", *reduce, "copy_out", *reduce, *reduce]
    assert names == forward + backward


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "resnet"])
def test_schedules_of_sharded_steps_are_legal(name, stage, accumulate):
    case = MODELS[name]()
    graph = ar.trace(case.build(), case.batch, loss=case.loss_fn, accumulate=accumulate)
    graph = shard(graph, Sharding(stage=stage, world_size=4))
    blocks = [RegionSpec(c.index) for c in graph.calls if c.path in case.paths]
    for specs in ([], blocks):
        workspace = max(op.workspace_bytes for op in graph.ops)
        peak = run_schedule(graph, expand(graph, specs))
        assert peak <= predicted(graph, specs) <= peak + workspace


def test_more_devices_take_less_of_each():
    plain = ar.trace(Net(), IDS, loss=loss_of, optimizer="adamw")
    for stage in (1, 2, 3):
        peaks = [predicted(shard(plain, Sharding(stage=stage, world_size=n))) for n in (2, 4, 8)]
        assert peaks == sorted(peaks, reverse=True)
    assert [shard(plain, Sharding(stage=s)).static_bytes for s in (1, 2, 3)] == sorted(
        (shard(plain, Sharding(stage=s)).static_bytes for s in (1, 2, 3)), reverse=True
    )


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.other(self.inner(self.inner(x)))


class Borrows(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * self.scale


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (Twice(), {"units": ("inner",)}, "Unit 'inner' is called 2 times"),
        (Twice(), {"units": ("missing",)}, "Unit 'missing' is no module"),
        (Borrows(), {"units": ("first", "second")}, "'second' reads parameter 'first.weight'"),
        (Scalar(), {}, "'scale' has no dimension"),
    ],
)
def test_what_fully_shard_cannot_do_is_refused_by_name(model, options, message):
    with pytest.raises(ar.UsageError, match=message):
        ar.trace(model, torch.ones(2, 8), loss=lambda y: y.sum(), parallel=Sharding(**options))


class Stack(Net):
    """The blocks are parts of a module that is called: it could be a region, but not one with units in it."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*self.blocks)

    def forward(self, ids):
        return self.head(self.blocks(self.embed(ids)))


def test_regions_lie_inside_units():
    ids = IDS.repeat(1, 16)
    options = {"loss": loss_of, "optimizer": "adamw", "parallel": Sharding(world_size=4)}
    graph = ar.trace(Stack(), ids, **options)
    with pytest.raises(ar.PlanError, match="'blocks' has sharded units inside it"):
        ar.profile(graph, ar.Plan(regions=(ar.Region("blocks"),)))
    smallest = ar.plan(graph, activation_memory_budget=0.55)
    assert smallest.regions
    assert all(region.path.startswith("blocks.") for region in smallest.regions)


def test_options_out_of_range_are_refused():
    for options in ({"stage": 4}, {"world_size": 1}, {"prefetch": -1}, {"reduce_dtype": "int8"}):
        with pytest.raises(ar.UsageError, match=next(iter(options))):
            Sharding(**options)
    assert Sharding.parse("2:16") == Sharding(stage=2, world_size=16)
    assert Sharding.parse("3:8:fp32") == Sharding(parameter_dtype="fp32")
    with pytest.raises(ar.UsageError, match="STAGE:DEVICES"):
        Sharding.parse("zero3")
    once = ar.trace(Net(), IDS, loss=loss_of, parallel=Sharding())
    with pytest.raises(ar.UsageError, match="spread over devices already"):
        shard(once, Sharding())


def run_in_one_of_two_processes(rank, address):
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = sharded(Net(), init_device_mesh("cpu", (2,)))
    found = measured(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9))
    sys.stdout.write(" ".join(map(str, found)))
    dist.destroy_process_group()


def in_two_processes(store):
    """What each of two processes measures: static bytes and the peak."""
    program = "import sys, test_sharding as t; t.run_in_one_of_two_processes(int(sys.argv[1]), sys.argv[2])"
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), f"file://{store}"], env=env, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    return tuple(int(word) for word in outputs[0].split())


@pytest.mark.slow
def test_two_processes_take_no_more_than_gloo_copies_besides(tmp_path):
    torch.manual_seed(0)
    graph = ar.trace(Net(), IDS, loss=loss_of, optimizer="sgd-momentum", parallel=Sharding(world_size=2))
    largest = max(s.num_bytes for s in graph.storages if s.label.endswith("way"))
    limit = predicted(graph) + 2 * largest  # one copy in a gather, one in a reduction
    for attempt in range(5):
        static, peak = in_two_processes(tmp_path / str(attempt))
        assert graph.static_bytes == static
        assert predicted(graph) <= peak
        if peak <= limit:  # on a busy machine gloo's own thread may let go of a copy only after the next one is made
            break
    else:
        pytest.fail(f"{peak} bytes in the last of five runs, at most {limit} expected")

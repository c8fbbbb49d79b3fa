"""Hooks of others, interrupts and wrappers around regions: each fires as in plain training, or stays outside."""

import contextlib
import threading

import pytest
import torch
from torch import nn

import autoremat.runtime as ar
from around import Around, Block, X
from autoremat._errors import PlanError
from autoremat._plan import CallName, Plan, Region, SavedOutput
from comparing import seed, train


def test_weight_shared_with_the_outside_and_stepped_in_backward():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)
            self.outer.weight = self.inner.weight

        def forward(self, x):
            return self.outer(torch.tanh(self.inner(x)))

    def run(apply):
        seed()
        model = Tied()
        if apply:
            ar.apply(model, Plan((Region("inner"),)))
        fired = []

        def fused_step(parameter):
            fired.append(1)
            with torch.no_grad():
                parameter.sub_(parameter.grad * 0.1)
            parameter.grad = None

        model.inner.weight.register_post_accumulate_grad_hook(fused_step)
        model(X).square().sum().backward()
        return len(fired), model.inner.weight.detach()

    (plain_fired, plain), (fired, planned) = run(False), run(True)
    assert plain_fired == fired == 1
    assert torch.equal(plain, planned)


def test_every_pre_hook_has_its_post_hook():
    open_calls = []

    class Inner(Block):
        def forward(self, x):
            return torch.tanh(self.lin(x))

    model = Around(nn.Sequential(Inner(), Inner()))
    for block in model.blocks[0]:
        block.lin.register_forward_pre_hook(lambda m, a: open_calls.append(m))
        block.lin.register_forward_hook(lambda m, a, o: open_calls.remove(m))
    ar.apply(model, Plan((Region("blocks.0"),)))
    model(X).sum().backward()
    assert not open_calls


def test_hooks_of_the_region_itself_fire_once():
    fired = []
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    model = Around(block)
    block.register_forward_pre_hook(lambda m, a: fired.append("pre"))
    block.register_forward_hook(lambda m, a, o: fired.append("post"))
    ar.apply(model, Plan((Region("blocks.0"),)))
    block.register_full_backward_hook(lambda m, gi, go: fired.append("backward"))
    model(X).sum().backward()
    assert fired == ["pre", "post", "backward"]


def test_hooks_added_after_the_plan_stay_outside_the_region():
    def run(apply):
        seed()
        model = Around(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
        if apply:
            applied = ar.apply(model, Plan((Region("blocks.0"),)), check="always")
        block = model.blocks[0]
        block.register_forward_pre_hook(lambda m, a: (a[0].sin().exp(),))
        block.register_forward_hook(lambda m, a, o: o.sin().exp(), prepend=True)
        grads = []
        for _ in range(2):
            model.zero_grad()
            model(X).sum().backward()
            grads.append([p.grad.clone() for p in model.parameters()])
        if apply:
            assert applied.executed[0].num_recomputes == 1  # the call that found the new hook ran plain
        return grads

    for plain, planned in zip(run(False), run(True), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(plain, planned, strict=True))


class Interrupted(Block):
    interrupts = True

    def forward(self, x):
        h = torch.tanh(self.lin(x))
        if self.interrupts:
            raise KeyboardInterrupt
        return h


def what_autograd_saves():
    y = torch.ones(2, requires_grad=True).exp()
    saved = type(y.grad_fn._raw_saved_result.data)
    y.sum().backward()
    return saved


@pytest.mark.parametrize("is_nested", [False, True])
def test_keyboard_interrupt_in_a_region(is_nested):
    inner = Interrupted()
    model = Around(nn.Sequential(inner, nn.Tanh()) if is_nested else inner)
    children = (Region("blocks.0.0", saved=(SavedOutput("aten.addmm.default", 0, 0, "", 0),)),) if is_nested else ()
    applied = ar.apply(model, Plan((Region("blocks.0", children=children),)))
    with contextlib.suppress(KeyboardInterrupt):
        model(X)
    assert what_autograd_saves() is torch.Tensor
    inner.interrupts = False
    model(X).sum().backward()
    assert applied.executed[0].num_recomputes == 1


def test_keyboard_interrupt_whose_traceback_is_held():
    model = Around(Interrupted())
    ar.apply(model, Plan((Region("blocks.0"),)))
    with pytest.raises(KeyboardInterrupt) as held:
        model(X)
    model.blocks[0].interrupts = False
    model(X).sum().backward()
    assert what_autograd_saves() is torch.Tensor
    del held


@pytest.mark.parametrize("first_out", ["first", "second"])
def test_two_threads_in_regions_of_one_model(first_out):
    """Hooks are put aside while a region runs; they are back when the last thread has left it."""
    fired = []
    steps = {name: threading.Event() for name in ("first in", "second in", "first out", "second out")}

    class Waits(Block):
        def forward(self, x):
            name = threading.current_thread().name
            if name not in ("first", "second"):
                return torch.tanh(self.lin(x))
            other = "second" if name == "first" else "first"
            steps[f"{name} in"].set()
            steps[f"{other} in"].wait(10)
            y = torch.tanh(self.lin(x))
            if name != first_out:
                steps[f"{other} out"].wait(10)
            return y

    model = Around(Waits())
    model.blocks[0].lin.register_forward_hook(lambda m, a, o: fired.append(threading.current_thread().name))
    ar.apply(model, Plan((Region("blocks.0"),)))

    def train_once():
        model(X).sum()
        steps[f"{threading.current_thread().name} out"].set()

    threads = [threading.Thread(target=train_once, name=name) for name in ("first", "second")]
    threads[0].start()
    steps["first in"].wait(10)
    threads[1].start()
    for thread in threads:
        thread.join()
    assert sorted(fired) == ["first", "second"]
    (hook,) = model.blocks[0].lin._forward_hooks.values()
    assert hook.__module__ == __name__
    model(X).sum().backward()
    assert len(fired) == 3


@contextlib.contextmanager
def one_process():
    """A process group of one, on the CPU."""
    dist = torch.distributed
    if not dist.is_available():
        pytest.skip("needs torch.distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def shard(model, modules, **options):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    for module in (*modules, model):
        fully_shard(module, mesh=mesh, **options)


def two_blocks():
    seed()
    return Around(
        nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    )


def losses_of(model, **kwargs):
    seen = train(model, (X,), torch.sum, steps=3, **kwargs)
    return [value for name, value in seen.items() if name.startswith("loss")]


BOTH_BLOCKS = Plan((Region("blocks.0"), Region("blocks.1")))


@pytest.mark.parametrize("reshard", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_fully_sharded_modules(inside, reshard):
    """As regions, or inside of regions, where their hooks gather the parameters in recompute, too."""
    with one_process():
        model = two_blocks()
        plain = losses_of(model)
        model = two_blocks()
        linears = [model.blocks[0][0], model.blocks[0][2], model.blocks[1][0]]
        shard(model, linears if inside else model.blocks, reshard_after_forward=reshard)
        ar.apply(model, BOTH_BLOCKS, check="always")
        assert losses_of(model) == plain
        for module in linears if reshard else ():
            assert type(module.weight.data).__name__ == "DTensor"  # not left gathered


@pytest.mark.parametrize("inside", [False, True])
def test_a_span_over_sharded_units_is_refused_and_one_over_their_owners_is_not(inside):
    with one_process():
        model = two_blocks()
        plain = losses_of(model)
        model = two_blocks()
        linears = [model.blocks[0][0], model.blocks[0][2], model.blocks[1][0]]
        ar.apply(model, Plan((Region("blocks.0", then=(CallName("blocks.1"),)),)), check="always")
        shard(model, linears if inside else model.blocks, reshard_after_forward=True)
        if inside:
            assert losses_of(model) == plain
        else:
            with pytest.raises(PlanError, match=r"'blocks\.0' is a unit of fully_shard"):
                model(X)


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}])
def test_distributed_data_parallel(options):
    with one_process():
        plain = train(two_blocks(), (X,), torch.sum)
        model = two_blocks()
        ar.apply(model, BOTH_BLOCKS, check="always")
        parallel = nn.parallel.DistributedDataParallel(model, **options)
        hooked = []
        parallel.register_comm_hook(hooked, _average)
        planned = train(parallel, (X,), torch.sum)
        assert len(hooked) == 2  # one bucket, once a step
        for name, value in plain.items():
            if name.startswith(("loss", "torch random")):
                assert torch.equal(value, planned[name])
        for name, parameter in model.named_parameters():
            assert torch.equal(plain[f"parameter {name}"], parameter.detach())


def _average(buckets, bucket):
    buckets.append(bucket.index())
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future

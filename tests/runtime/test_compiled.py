"""Plans under torch.compile: what is stored and recomputed, gradients, random numbers, and what is refused."""

from __future__ import annotations

import copy
import functools
import pickle
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import autoremat as ar
from autoremat import Plan, PlanError, Region, SavedOutput
from autoremat.runtime._compiled import CompiledForward

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}  # between compiled and eager plain steps of these models, in float32
BACKEND = "aot_eager_decomp_partition"

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's own, at its first compile
    pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # the compiler asks for it
]


class Block(nn.Module):
    def __init__(self, p: float = 0.3) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)
        self.drop = nn.Dropout(p)

    def forward(self, x):
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


def build(p: float = 0.3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(p) for _ in range(3)], nn.Linear(8, 1))


X = torch.linspace(-1, 1, 96).reshape(2, 6, 8)


def loss(y):
    return y.square().mean()


def step(call, model, x=X):
    """Gradients of a step, and buffers after it."""
    model.zero_grad()
    torch.manual_seed(5)
    loss(call(x)).backward()
    return [p.grad.clone() for p in model.parameters()] + [b.clone() for b in model.buffers()]


def plain_step(make=build, x=X):
    model = make()
    return step(model, model, x)


def assert_close(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE)


@pytest.fixture(scope="module")
def graph():
    return ar.trace(build(), X, loss=loss, optimizer=None)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    with torch._inductor.config.patch(fallback_random=True):  # else compiled code draws other numbers than eager code
        yield


class Partitions:
    """A backend that keeps what AOTAutograd's partitioner makes, and runs it as it is."""

    def __init__(self):
        self.forward, self.backward = [], []

    def backend(self):
        from functorch.compile import min_cut_rematerialization_partition

        def keeper(found):
            return lambda graph, _: found.append(graph) or graph

        return aot_autograd(
            fw_compiler=keeper(self.forward),
            bw_compiler=keeper(self.backward),
            partition_fn=min_cut_rematerialization_partition,
        )

    def stored(self) -> Counter[str]:
        """Operators whose outputs forward leaves for backward."""
        outputs = next(node for node in self.forward[-1].graph.nodes if node.op == "output").args[0]
        return Counter(str(node.target) for node in outputs[1:] if hasattr(node, "op") and node.op == "call_function")

    def stored_sizes(self) -> list[int]:
        """Numbers of elements of the tensors that forward leaves for backward, without parameters and inputs."""
        outputs = next(node for node in self.forward[-1].graph.nodes if node.op == "output").args[0]
        return [node.meta["val"].numel() for node in outputs[1:] if getattr(node, "op", "") == "call_function"]

    def recomputed(self) -> Counter[str]:
        return Counter(str(node.target) for node in self.backward[-1].graph.nodes if node.op == "call_function")


@pytest.mark.parametrize(
    ("name", "stored", "addmms_again"),
    [
        ("every-block", {"aten.add.Tensor": 2, "aten.view.default": 1}, 6),  # a view of the last block's sum
        ("save:matmuls", {"aten.add.Tensor": 2, "aten.view.default": 1, "aten.addmm.default": 6}, 0),
        ("uniform:2", {"aten.add.Tensor": 1, "aten.view.default": 1}, 6),
    ],
)
def test_exactly_what_the_plan_stores_is_stored(graph, name, stored, addmms_again):
    model, seen = build(), Partitions()
    compiled = torch.compile(model, backend=seen.backend(), fullgraph=True)
    ar.apply(model, ar.classic(graph, name))
    assert_close(step(compiled, model), plain_step())
    found = seen.stored()
    assert {op: n for op, n in found.items() if op.startswith("aten.")} == stored
    assert seen.recomputed()["aten.addmm.default"] == addmms_again


class NormLast(nn.Module):
    """What it hands on is one of several outputs of an op."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 32), nn.Linear(32, 8), nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(x + self.down(torch.tanh(self.up(x))))


class LinearLast(NormLast):
    """What it hands on is a view."""

    def forward(self, x):
        return self.down(torch.tanh(self.up(self.norm(x))))


@pytest.mark.parametrize(("block", "addmms_again"), [(NormLast, 6), (LinearLast, 3)])
def test_what_a_region_hands_on_is_stored_whatever_op_makes_it(block, addmms_again):
    """Else each region would be recomputed from the one before it: all of them would be alive at once."""

    def make():
        torch.manual_seed(0)
        return nn.Sequential(*[block() for _ in range(3)], nn.Linear(8, 1))

    model, seen = make(), Partitions()
    ar.apply(model, Plan(tuple(Region(str(i)) for i in range(3))))
    assert_close(step(torch.compile(model, backend=seen.backend(), fullgraph=True), model), plain_step(make))
    assert sum(n == X.numel() for n in seen.stored_sizes()) == 3
    assert sum(n > X.numel() for n in seen.stored_sizes()) == 0
    assert seen.recomputed()["aten.addmm.default"] == addmms_again


def test_one_op_call_of_several_is_stored(graph):
    """Of the two matrix products of a block, the plan stores the second: a policy by op type could not."""
    saved = SavedOutput("aten.addmm.default", 1, 0, "1.down", 384)
    model, seen = build(0.0), Partitions()
    ar.apply(model, Plan((Region("1", saved=(saved,)),)))
    step(torch.compile(model, backend=seen.backend(), fullgraph=True), model)
    assert seen.recomputed()["aten.addmm.default"] == 1


@pytest.mark.parametrize("how", ["apply first", "compile first", "in place", "block by block"])
def test_gradients_are_those_of_eager_mode(graph, how):
    model, plan = build(), ar.classic(graph, "save:matmuls")
    options = {"backend": BACKEND, "fullgraph": True}
    call = model
    if how == "apply first":
        applied = ar.apply(model, plan)
        call = torch.compile(model, **options)
    elif how == "compile first":
        call = torch.compile(model, **options)
        applied = ar.apply(call, plan)
    elif how == "in place":
        model.compile(**options)
        applied = ar.apply(model, plan)
    else:
        keys = list(model.state_dict())
        for block in model[:2]:
            block.compile(**options)
        model[2] = torch.compile(model[2], **options)
        applied = ar.apply(model, plan)
        assert [key.replace("_orig_mod.", "") for key in model.state_dict()] == keys
    expected = plain_step()
    assert_close(step(call, model), expected)
    assert_close(step(call, model), expected)
    applied.remove()
    assert not any(isinstance(vars(module).get("forward"), CompiledForward) for module in model.modules())
    assert_close(step(call, model), expected)


def test_without_gradients_and_in_eager_mode_a_compiled_region_is_plain_code(graph):
    model = build()
    applied = ar.apply(model, ar.classic(graph, "every-block"))
    compiled = torch.compile(model, backend=BACKEND)
    step(compiled, model)
    model.eval()
    with torch.no_grad():
        assert torch.allclose(compiled(X), build().eval()(X))
    model.train()
    assert all(torch.equal(a, b) for a, b in zip(step(model, model), plain_step(), strict=True))
    assert [region.num_recomputes for region in applied.executed] == [1, 1, 1]


def test_copies_and_pickles_of_a_compiled_region_are_plain(graph):
    model = build()
    ar.apply(model, ar.classic(graph, "every-block"))
    step(torch.compile(model, backend=BACKEND), model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin[0].forward.__self__ is twin[0]
        with torch.no_grad():
            twin[0].down.bias += 1
        assert not torch.equal(twin.eval()(X), model.eval()(X))


def test_other_shapes_compile_again(graph):
    model = build()
    ar.apply(model, ar.classic(graph, "save:matmuls"))
    compiled = torch.compile(model, backend=BACKEND)
    for size in (2, 3, 5):
        x = torch.ones(size, 6, 8)
        assert_close(step(compiled, model, x), plain_step(build, x))


class Masked(nn.Module):
    """Its gradient shows the mask that backward used, its output the one that forward drew."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(x.sin()) * x.cos()


def assert_masks_agree(backend, plan, num_blocks=2):
    model = nn.ModuleList([Masked() for _ in range(num_blocks)])

    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = model

        def forward(self, x):
            return [block(x) for block in self.blocks]

    whole = Several()
    ar.apply(whole, plan)
    x = torch.linspace(0.2, 1.3, 4096, requires_grad=True)
    outputs = torch.compile(whole, backend=backend, fullgraph=True)(x)
    masks = []
    for y in outputs:
        (grad,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        mask = (y.detach() / (x.sin() * x.cos()).detach()).round()
        assert 0.4 < (mask > 0).float().mean() < 0.6
        expected = mask * (x.cos() ** 2 - x.sin() ** 2).detach()
        torch.testing.assert_close(grad, expected, **TOLERANCE)
        masks.append(mask)
    assert not torch.equal(*masks)


def test_backward_uses_the_masks_that_forward_drew():
    assert_masks_agree(BACKEND, Plan((Region("blocks.0"), Region("blocks.1"))))


@pytest.mark.slow
@pytest.mark.parametrize("fallback", [False, True])
def test_backward_uses_the_masks_that_forward_drew_under_inductor(fallback):
    with torch._inductor.config.patch(fallback_random=fallback):
        assert_masks_agree("inductor", Plan((Region("blocks.0"), Region("blocks.1"))))


def test_buffers_are_updated_once_and_ops_in_place_work():
    def make():
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU(inplace=True)) for _ in range(2)]
        return nn.Sequential(*layers)

    model, x = make(), torch.randn(2, 3, 4, 4)
    ar.apply(model, Plan((Region("0"), Region("1"))))
    compiled = torch.compile(model, backend=BACKEND, fullgraph=True)
    assert_close(step(compiled, model, x), plain_step(make, x))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.num_calls = nn.Linear(8, 8), 0

    def forward(self, x):
        self.num_calls += 1
        return torch.tanh(self.linear(x)).sin()


def test_an_attribute_that_forward_changes_is_changed_once():
    def make():
        torch.manual_seed(0)
        return nn.Sequential(Counting(), Counting())

    model = make()
    ar.apply(model, Plan((Region("0"), Region("1"))))
    compiled = torch.compile(model, backend=BACKEND, fullgraph=True)
    assert_close(step(compiled, model), plain_step(make))
    assert [block.num_calls for block in model] == [1, 1]


def test_autocast_finds_the_same_ops():
    def run(call, model):
        with torch.autocast("cpu", torch.bfloat16):
            return step(call, model)

    graph = ar.trace(build(), X, loss=loss, optimizer=None, precision="amp-bf16")
    model, seen = build(), Partitions()
    ar.apply(model, ar.classic(graph, "save:matmuls"))
    found = run(torch.compile(model, backend=seen.backend(), fullgraph=True), model)
    assert seen.recomputed()["aten.addmm.default"] == 0
    plain = build()
    for a, b in zip(found, run(plain, plain), strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=1e-3)  # a bfloat16 has eight bits


def refused(match, model, plan, *, backend=BACKEND, x=X, **options):
    ar.apply(model, plan)
    with pytest.raises(PlanError, match=match):
        loss(torch.compile(model, backend=backend, **options)(x)).backward()
    assert not torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint


def test_a_backend_without_a_partitioner_is_refused(graph):
    refused("Region '0' cannot be recomputed as planned", build(), ar.classic(graph, "every-block"), backend="eager")


def test_a_graph_break_inside_a_region_is_refused():
    class Breaks(nn.Module):
        def forward(self, x):
            x = x.sin()
            torch._dynamo.graph_break()
            return x.sin()

    model = nn.Sequential(nn.Linear(8, 8), Breaks(), nn.Linear(8, 1))
    refused("Region '1' cannot be recomputed as planned: there is a graph break", model, Plan((Region("1"),)))


def test_torchs_own_budget_beside_a_plan_is_refused(graph):
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        refused("activation_memory_budget is set to 0.5", build(), ar.classic(graph, "every-block"))


def test_a_stored_op_that_the_compiler_does_not_see_is_refused():
    saved = SavedOutput("aten.addmm.default", 2, 0, "1.down", 384)
    refused("stores aten.addmm.default #2 .* has 2 calls", build(), Plan((Region("1", saved=(saved,)),)))


def test_a_stored_op_of_another_module_is_refused():
    saved = SavedOutput("aten.addmm.default", 1, 0, "1.up", 384)
    refused("which '1.up' calls in eager mode", build(), Plan((Region("1", saved=(saved,)),)))


def test_regions_in_regions_are_refused(graph):
    plan = ar.classic(graph, "recursive")
    refused("'0 .. 1' has regions inside it", build(), plan)
    with pytest.raises(PlanError, match=r"has regions inside it.*for_compile=True"):
        ar.apply(torch.compile(model := build(), backend=BACKEND), plan)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_single_calls_of_a_module_are_refused():
    refused("is call 1 of '0' alone.*for_compile=True", build(), Plan((Region("0", 1),)))


@pytest.mark.parametrize("is_shared", [False, True], ids=["layers", "layers that are called twice"])
def test_a_plan_for_compiled_code_is_one_that_it_can_express(is_shared):
    def make():
        blocks = build(p=0.0)[:3]
        return nn.Sequential(*blocks, *(blocks if is_shared else copy.deepcopy(blocks)))

    x = torch.linspace(-1, 1, 1024).reshape(16, 8, 8)
    graph, model = ar.trace(make(), x, loss=loss, optimizer=None), make()
    smallest = ar.frontier(graph, num_points=2, for_compile=True).smallest_bytes
    assert any(region.children for region in ar.plan(graph, budget=ar.frontier(graph).smallest_bytes).regions)
    plan = ar.plan(graph, budget=smallest, for_compile=True)
    assert len(plan.regions) >= 3
    assert not any(region.children or region.number is not None for region in plan.regions)
    ar.apply(model, plan)
    assert_close(step(torch.compile(model, backend=BACKEND), model, x), plain_step(make, x))
    with pytest.raises(ar.BudgetInfeasible, match=r"without regions inside regions \(for_compile=True\)"):
        ar.plan(graph, budget=smallest - 1, for_compile=True)


def test_a_span_in_several_graphs_is_refused(graph):
    plan = ar.classic(graph, "uniform:2")
    model = build()
    for block in model[:3]:
        block.compile(backend=BACKEND)
    with pytest.raises(PlanError, match=r"'0 \.\. 1' is a span over modules that are compiled one by one"):
        ar.apply(model, plan)

    class Broken(nn.Sequential):
        def forward(self, x):
            x = self[0](x)
            torch._dynamo.graph_break()
            return self[1](x)

    torch.manual_seed(0)
    model = Broken(Block(), Block())
    refused(
        "a span whose calls the compiler puts into different graphs",
        model,
        Plan((Region("0", then=(ar.CallName("1"),)),)),
    )


def test_a_region_around_what_is_compiled_is_refused():
    model = nn.Sequential(nn.Sequential(Block(), nn.Linear(8, 1)))
    model[0][0].compile(backend=BACKEND)
    with pytest.raises(PlanError, match="'0' has compiled modules inside it"):
        ar.apply(model, Plan((Region("0"),)))


def test_a_region_that_is_compiled_later_by_itself_is_refused(graph):
    model = build()
    ar.apply(model, ar.classic(graph, "every-block"))
    model[1].compile(backend=BACKEND)
    with pytest.raises(PlanError, match="was compiled by itself after the plan was applied"):
        model(X)


def test_the_whole_model_as_a_region_is_refused_unless_it_is_compiled_first():
    refused("The whole Sequential is a region", build(), Plan((Region(""),)))
    model, seen = build(), Partitions()
    compiled = torch.compile(model, backend=seen.backend(), fullgraph=True)
    ar.apply(compiled, Plan((Region(""),)))
    assert_close(step(compiled, model), plain_step())
    assert seen.recomputed()["aten.addmm.default"] == 6


def test_an_exported_model_is_plain():
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1))
    ar.apply(model, Plan((Region("0"),)))
    with pytest.warns(UserWarning, match="Sequential is exported with a plan"):
        program = torch.export.export(model, (X,))
    assert torch.equal(program.module()(X), model(X))


def test_the_example_in_the_documentation_runs(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=BACKEND))
    page = Path(__file__).parents[2] / "docs" / "howto" / "compile.md"
    (example,) = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    exec(compile(example, str(page), "exec"), {})

"""Functions that a forward calls between its modules, as calls of regions: plain's numbers, bytes as predicted."""

import contextlib
import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import autoremat as ar
from autoremat._errors import PlanError, PlanMismatch, UsageError
from autoremat._export import export
from autoremat._plan import CallName, Plan, Region
from autoremat.runtime import apply
from autoremat.solve._facts import SMALL_STEP_OPS
from chains import functions_in
from comparing import assert_equal_to_plain, assert_same, seed, train

WIDTH = 16
BATCH = (torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH),)


class Block(nn.Module):
    """Calls a function by itself that the model around it calls, too."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        return F.relu(self.drop(self.linear(x))) + x


class Net(nn.Module):
    """Lists, keywords, dropout, in-place functions, views, several outputs, a parameter used by itself."""

    def __init__(self):
        super().__init__()
        self.a, self.b = Block(), Block()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.c = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        h = F.dropout(F.relu(self.a(x * self.scale)), p=0.3)
        g = torch.cat([h, self.b(h)], dim=1)
        left, right = g.chunk(2, dim=1)
        y = self.c(torch.cat(tensors=(right.sigmoid(), left), dim=1))
        y += h
        return F.softmax(y[:, 1:].transpose(0, 1), dim=-1).square().sum()


def span(*calls, children=()):
    """A region of these calls, each ``"path"`` for the first call of that path or ``"path 1"``."""
    first, *then = [CallName(name, int(number or 0)) for name, _, number in (call.partition(" ") for call in calls)]
    return Region(first.path, first.number, then=tuple(then), children=tuple(children))


SPANS = {
    "one function": [span("relu()")],
    "functions alone": [span("relu()", "dropout()")],
    "to a module": [span("relu()", "dropout()", "b", "cat()")],
    "a list": [span("cat()", "chunk()", "sigmoid()")],
    "in place": [span("c", "add_()", "__getitem__()", "transpose()", "softmax()", "square()")],
    "with a parameter": [span("mul()", "a", "relu()")],
    "all": [span("mul()", "a", "relu()", "dropout()", "b", "cat()", "chunk()", "sigmoid()", "cat() 1", "c", "add_()")],
    "nested": [
        span("mul()", "a", "relu()", "dropout()", "b", "cat()", children=[span("relu()", "dropout()", "b")]),
        span("chunk()", "sigmoid()", "cat() 1", children=[span("sigmoid()", "cat() 1")]),
    ],
    "in a module": [span("a.relu()", "a.add()"), Region("b", children=(span("b.drop", "b.relu()"),))],
    "in a module of a span": [span("a", "relu()", "dropout()", "b", children=[span("b.linear", "b.drop", "b.relu()")])],
}


@pytest.mark.parametrize("regions", SPANS.values(), ids=SPANS)
def test_same_numbers_as_plain(regions):
    seed()
    executed = assert_equal_to_plain(Net(), BATCH, Plan(tuple(regions)))
    assert all(region.num_calls == region.num_recomputes == 2 for region in executed), executed


def test_under_autocast():
    seed()
    assert_equal_to_plain(Net(), BATCH, Plan(tuple(SPANS["nested"])), autocast=torch.bfloat16)


def recorded(model, batch=BATCH, **options):
    return ar.trace(model, batch, optimizer=None, **options)


def names(graph, parent=""):
    inside = [call for call in graph.calls if call.parent >= 0 and graph.calls[call.parent].path == parent]
    return [f"{call.path} {call.number}" for call in inside]


def test_functions_are_recorded_as_calls_of_the_module_that_makes_them(all_functions):
    graph = recorded(Net())
    assert names(graph) == [
        "mul() 0", "a 0", "relu() 0", "dropout() 0", "b 0", "cat() 0", "chunk() 0", "sigmoid() 0", "cat() 1", "c 0",
        "add_() 0", "__getitem__() 0", "transpose() 0", "softmax() 0", "square() 0", "sum() 0",
    ]  # fmt: skip
    assert names(graph, "a") == ["a.linear 0", "a.drop 0", "a.relu() 0", "a.add() 0"]
    assert names(graph, "a.drop") == [], "what a module does in one call is the module's"
    cat = next(call for call in graph.calls if call.path == "cat()")
    assert [graph.calls[source].path for _, source in cat.links] == ["dropout()", "b", "b.add()"]
    assert cat.is_function
    assert cat.class_name == "function"
    assert sum(op.call == cat.index for op in graph.ops if op.phase == "forward") == 1


def test_only_large_modules_have_functions_of_their_own():
    graph = recorded(nn.Sequential(*(Block() for _ in range(9))), loss=lambda y: y.sum())
    assert not any(call.is_function for call in graph.calls)
    assert {graph.calls[op.call].path for op in graph.ops if op.phase == "forward"} == {
        *(f"{i}{rest}" for i in range(9) for rest in ("", ".linear", ".drop")), "",
    }  # fmt: skip
    model = Net()
    assert {call.path for call in recorded(model).calls if call.is_function and call.parent != 0} <= {
        f"{block}.{name}()" for block in "ab" for name in ("relu", "add")
    }


class Quiet(nn.Module):
    """Functions that take no part in autograd, or return no tensor, are nobody's."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.linear(x.mul(2)).tanh()
        with torch.no_grad():
            mean = y.mean()
        assert y.size(0) == y.shape[0]
        return (y.detach().sum() + mean + y.sum()).abs()


def test_functions_that_take_no_part_are_not_recorded():
    assert names(recorded(Quiet())) == ["linear 0", "tanh() 0", "sum() 0", "add() 0", "abs() 0"]


class Hooked(nn.Module):
    """Calls functions in its children's hooks, which are the children's own."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.register_forward_pre_hook(lambda module, args: (args[0].tanh(),))
        self.second.register_forward_hook(lambda module, args, output: output.tanh())

    def forward(self, x):
        return self.second(self.first(x).tanh()).tanh().sum()


def test_functions_in_hooks_of_children_are_not_the_models():
    assert names(recorded(Hooked())) == ["first 0", "tanh() 0", "second 0", "tanh() 1", "sum() 0"]
    seed()
    (executed,) = assert_equal_to_plain(Hooked(), BATCH, Plan((span("second", "tanh() 1"),)))
    assert executed.num_recomputes == 2


class Twice(nn.Module):
    """Calls a block twice, the first time perhaps without gradients."""

    def __init__(self):
        super().__init__()
        self.block, self.first = Block(), nn.Linear(WIDTH, WIDTH)
        self.frozen = False

    def forward(self, x):
        with torch.set_grad_enabled(not self.frozen):
            x = self.block(self.first(x))
        return self.block(x).sum()


@pytest.mark.parametrize("frozen", [False, True])
def test_calls_are_told_apart_by_number(frozen):
    seed()
    model = Twice()
    model.frozen = frozen
    second = 0 if frozen else 1  # what takes no part in autograd is not counted
    executed = assert_equal_to_plain(model, BATCH, Plan((span(f"block.relu() {second}", f"block.add() {second}"),)))
    assert [r.num_recomputes for r in executed] == [2]
    assert f"block.relu() {second}" in names(recorded(model), "block")


class Interrupting(nn.Module):
    """Raises an exception after a function, if told to."""

    def __init__(self):
        super().__init__()
        self.linear, self.error = nn.Linear(WIDTH, WIDTH), None

    def forward(self, x):
        y = self.linear(x).tanh()
        if self.error is not None:
            raise self.error
        return y.sum()


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_nothing_is_left_behind_by_an_exception(error):
    seed()
    model = Interrupting()
    expected = train(copy.deepcopy(model), BATCH, lambda y: y)
    with apply(model, Plan((span("linear", "tanh()"),)), check="always"):
        model.error = error
        with pytest.raises(type(error)) as held:  # and with its traceback the frames of forward
            model(*BATCH)
        model.error = None
        assert_same(expected, train(model, BATCH, lambda y: y))
        assert torch._C._len_torch_function_stack() == 0, held
    model(*BATCH)


class Doubling(TorchFunctionMode):
    """Doubles what comes out of ``tanh``."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if func.__name__ == "tanh" else out


class UnderMode(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        with Doubling():
            y = self.linear(x).tanh()
        return y.exp().sum()


@pytest.mark.parametrize("around", [False, True])
def test_function_modes_of_the_user(around):
    seed()
    model = UnderMode()
    plan = Plan((span("linear", "tanh()", "exp()"),))

    def loss(y):
        return y

    class Run(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            with Doubling():
                return self.model(x)

    if around:
        plan = Plan((span("model.linear", "model.tanh()", "model.exp()"),))
    executed = assert_equal_to_plain(Run() if around else model, BATCH, plan, loss)
    assert [r.num_recomputes for r in executed] == [2]


def test_a_graph_that_is_kept():
    seed()
    model = Net()
    parameters = list(model.parameters())
    seed(1)
    expected = torch.autograd.grad(model(*BATCH), parameters, create_graph=True)
    twice = torch.autograd.grad(sum(g.square().sum() for g in expected), parameters)
    with apply(model, Plan(tuple(SPANS["nested"])), check="always"):
        seed(1)
        found = torch.autograd.grad(model(*BATCH), parameters, create_graph=True)
        again = torch.autograd.grad(sum(g.square().sum() for g in found), parameters)
    assert all(map(torch.equal, (*expected, *twice), (*found, *again)))


def test_backward_after_the_plan_is_off_and_copies_of_the_model():
    seed()
    model = Net()
    seed(1)
    expected = torch.autograd.grad(model(*BATCH), list(model.parameters()))
    applied = apply(model, Plan(tuple(SPANS["in a module"])))
    seed(1)
    loss, twin = model(*BATCH), copy.deepcopy(model)
    applied.remove()
    assert all(map(torch.equal, expected, torch.autograd.grad(loss, list(model.parameters()))))
    seed(1)
    with record_function_modes(twin.a) as seen:
        assert all(map(torch.equal, expected, torch.autograd.grad(twin(*BATCH), list(twin.parameters()))))
    assert seen == [0], "the copy is plain"


@contextlib.contextmanager
def record_function_modes(module):
    """How many function modes are active when calls of a module start."""
    seen = []
    handle = module.linear.register_forward_pre_hook(lambda *_: seen.append(torch._C._len_torch_function_stack()))
    yield seen
    handle.remove()


def test_a_call_that_does_not_come_is_told():
    model = Net()
    with apply(model, Plan((span("relu()", "dropout()", "gelu()"),))):
        loss = model(*BATCH)
        gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        (region,) = ar.explain(model).regions
    assert region.num_calls == region.num_recomputes == 1
    assert region.unmatched == ("call of gelu()",)
    assert all(map(torch.equal, gradients, torch.autograd.grad(loss, list(model.parameters()))))


@pytest.mark.parametrize(
    ("regions", "error", "words"),
    [
        ([span("d.relu()")], PlanMismatch, "names the module 'd', which Net does not have"),
        ([span("a.batch_norm()")], PlanError, r"changes running statistics.*name the module around it \('a'\)"),
        ([span("relu()"), span("relu()")], PlanError, "names 'relu\\(\\)' twice for the same call"),
        ([span("a"), span("a.relu()")], PlanError, "lies inside region 'a', and is not listed as its child"),
    ],
)
def test_plans_that_cannot_be(regions, error, words):
    model = Net()
    with pytest.raises(error, match=words):
        apply(model, Plan(tuple(regions)))
    model(*BATCH).backward()


def test_what_is_compiled_has_no_functions():
    model, plan = Net(), Plan((span("relu()", "dropout()"),))
    with pytest.raises(PlanError, match=r"has a function among its calls \('relu\(\)'\).*for_compile=True"):
        apply(torch.compile(model, backend="eager"), plan)
    blocks = nn.Sequential(*(nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH) for _ in range(2)))
    for model in (Net(), blocks):
        graph = recorded(model, loss=torch.sum)
        assert any(call.is_function for call in graph.calls)
        for point in ar.frontier(graph, for_compile=True).points:
            plan = ar.plan(graph, budget=point.peak_bytes, for_compile=True)
            assert not functions_in(plan.regions)
            assert not any(output.module.endswith("()") for region in plan.regions for output in region.saved)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # what the compiler looks at
def test_modules_compiled_by_themselves_beside_functions():
    seed()
    model = Interrupting()
    model.linear = nn.Sequential(nn.Sequential(model.linear, nn.Tanh()), nn.Linear(WIDTH, WIDTH))
    expected = torch.autograd.grad(model(*BATCH), list(model.parameters()))
    model.linear[0].compile(backend="aot_eager", fullgraph=True)
    with apply(model, Plan((span("tanh()", "sum()"),))) as applied:  # the compiled module calls a tanh, too
        found = torch.autograd.grad(model(*BATCH), list(model.parameters()))
        assert [r.num_recomputes for r in applied.executed] == [1]
    assert all(map(torch.equal, expected, found))


def test_an_export_has_no_functions():
    graph = recorded(Net())
    plan = Plan((Region("a", then=(CallName("relu()"), CallName("dropout()"))),))
    for to in ("torch", "fsdp"):
        found = export(graph, plan, to)
        assert any("2 functions between modules are not recomputed" in loss for loss in found.losses)
        assert [region.path for region in found.plan.regions] == ["a"]
    with pytest.raises(UsageError, match="recomputes functions between modules only"):
        export(graph, Plan((span("relu()", "dropout()"),)), "fsdp")


class Functional(nn.Module):
    """A network as in torch's tutorials: all between its layers are functions."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(6))
        self.last = nn.Linear(4 * 64, 3)

    def forward(self, x):
        for layer in self.layers:
            x = F.gelu(layer(x))
        return self.last(F.max_pool2d(x, 2).flatten(1)).sum()


def test_plans_of_functional_code():
    seed()
    model, batch = Functional(), torch.ones(16, 4, 16, 16)
    graph = ar.trace(model, batch, optimizer=None)
    curve = ar.frontier(graph)
    free = min(p.peak_bytes for p in curve.points if p.overhead_flops == 0)
    modules_only = ar.frontier(graph, for_compile=True).points[0].peak_bytes
    assert curve.points[0].peak_bytes < free < modules_only, "gelus run again, which costs no FLOPs that count"
    plan = ar.plan(model, batch, budget=curve.points[0].peak_bytes, optimizer=None)
    assert ar.verify(model, batch, plan, optimizer=None).equal
    measured = ar.measure(model, batch, plan, optimizer=None, num_steps=0, plain=False).planned.peak_bytes
    assert plan.planned.peak_bytes == measured


class UNet(nn.Module):
    """Four levels, joined by functions."""

    def __init__(self):
        super().__init__()

        def double(a, b):
            pairs = ((nn.Conv2d(i, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()) for i in (a, b))
            return nn.Sequential(*itertools.chain(*pairs))

        self.down = nn.ModuleList([double(2, 4), double(4, 8), double(8, 16), double(16, 32)])
        self.middle = double(32, 64)
        self.up = nn.ModuleList([double(96, 32), double(48, 16), double(24, 8), double(12, 4)])

    def forward(self, x):
        skips = []
        for block in self.down:
            skips.append(block(x))
            x = F.max_pool2d(skips[-1], 2)
        x = self.middle(x)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], dim=1))
        return x.square().sum()


def test_nests_over_long_rows_store_what_is_worth_it_at_every_budget():
    graph = ar.trace(UNet(), torch.ones(4, 2, 64, 64))
    assert len(graph.ops) > SMALL_STEP_OPS > sum(op.phase == "forward" for op in graph.ops), "the optimizer aside"
    curve = ar.frontier(graph, num_points=32)
    assert max(p.overhead_flops - p.bound for p in curve.points) < 0.09, "0.27 with what the table's nests store"

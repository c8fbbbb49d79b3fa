"""Spans that start in one module and stop in another: same numbers as plain, bytes as the ledger says, also planned."""

import random

import pytest
import torch
from torch import nn

import autoremat as ar
from autoremat._plan import CallName, Plan, Region
from autoremat._regions import describe_all, resolve
from autoremat._replay import RegionSpec, replay
from autoremat.solve._facts import collect_facts
from autoremat.solve._rows import find_rows
from chains import Block, with_random_saves
from comparing import assert_equal_to_plain
from reference import is_legal

WIDTH = 8
BATCH = (torch.linspace(-1, 1, 2 * 512 * WIDTH).view(2, 512, WIDTH),)
LAYERS = (
    lambda: nn.Linear(WIDTH, WIDTH),
    lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    lambda: nn.LayerNorm(WIDTH),
    nn.GELU,
    nn.Tanh,
    nn.Identity,
    lambda: nn.Dropout(0.2),
    lambda: Block(WIDTH, 0.1),
)


class Net(nn.Module):
    """Ends in a number."""

    def __init__(self, *layers):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers)

    def forward(self, x):
        return self.body(x).square().sum()


def across(paths, *children):
    """A region over these calls."""
    return Region(paths[0], then=tuple(CallName(path) for path in paths[1:]), children=tuple(children))


def stages(choose, depth=2):
    """Layers, and modules that do nothing but call others in a row, inside each other to a depth."""
    return [
        nn.Sequential(*stages(choose, depth - 1)) if depth and choose.random() < 0.4 else choose.choice(LAYERS)()
        for _ in range(choose.randint(1, 3) + depth)
    ]


def row_of(model):
    """Paths of what runs, in order."""
    modules = ((name.split("."), module) for name, module in model.named_modules())
    return [".".join(parts) for parts, m in modules if parts[-1].isdigit() and not isinstance(m, nn.Sequential)]


def random_spans(choose, paths, depth=2):
    found, at = [], 0
    while at < len(paths):
        size = choose.randint(1, len(paths) - at)
        if choose.random() < 0.8:
            inner = random_spans(choose, paths[at : at + size], depth - 1) if depth else []
            found.append(across(paths[at : at + size], *(r for r in inner if len(r.calls) < size)))
        at += size
    return found


def assert_peak_is_predicted(model, graph, plan, slack=0):
    measured = ar.measure(model, BATCH, plan, optimizer=None, num_steps=0, plain=False).planned.peak_bytes
    assert abs(measured - ar.profile(graph, plan).peak_bytes) <= slack


def leaves_out_draws(graph, spec):
    """Then the random state that passes through inner regions is counted from another moment than it is there."""
    left_out = any(graph.ops[index].is_random for index in replay(graph, spec).skipped)
    return left_out or any(leaves_out_draws(graph, child) for child in spec.children)


@pytest.mark.parametrize("number", range(16))
def test_random_spans_across_modules(number):
    choose = random.Random(number)
    model = Net(*stages(choose))
    graph = ar.trace(model, BATCH, optimizer=None, gradients="fresh")
    hand = resolve(graph, Plan(tuple(random_spans(choose, row_of(model)))))
    specs = [with_random_saves(choose, graph, spec) for spec in hand]
    if not is_legal(graph, specs):
        specs = [spec for spec in hand if is_legal(graph, [spec])]
    plan = Plan(describe_all(graph, specs))
    assert_equal_to_plain(model, BATCH, plan)
    slack = graph.rng_state_bytes if any(leaves_out_draws(graph, spec) for spec in specs) else 0
    assert_peak_is_predicted(model, graph, plan, slack)


@pytest.mark.parametrize("number", range(4))
def test_what_is_planned_across_modules_is_what_runs(number):
    choose = random.Random(number)
    model = Net(*stages(choose))
    graph = ar.trace(model, BATCH, optimizer=None, gradients="fresh")
    for point in ar.frontier(graph).points[:2]:
        plan = ar.plan(graph, budget=point.peak_bytes)
        assert_peak_is_predicted(model, graph, plan)
        assert_equal_to_plain(model, BATCH, plan)


def test_regions_reach_across_borders():
    wide, narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
    model = Net(nn.Sequential(wide, nn.Tanh()), nn.Sequential(nn.GELU(), narrow))
    graph = ar.trace(model, BATCH, optimizer=None)
    frontier = ar.frontier(graph)
    regions = [r for point in frontier.points for r in ar.plan(graph, budget=point.peak_bytes).regions]
    assert any({call.path[:7] for call in region.calls} >= {"body.1.", "body.2."} for region in regions)


def test_all_that_a_module_calls_is_written_as_the_module():
    model = Net(*[nn.Sequential(nn.Tanh(), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)])
    graph = ar.trace(model, BATCH, optimizer=None)
    rows = find_rows(collect_facts(graph, [0.0] * len(graph.ops)))
    call = {c.path: c.index for c in graph.calls}
    first, second = ([f"body.{i}.{j}" for j in range(3)] for i in (1, 2))

    def spec(paths, *children):
        return RegionSpec(call[paths[0]], then=tuple(call[path] for path in paths[1:]), children=children)

    def folded(*arguments):
        def names(spec):
            return [graph.calls[c].path for c in spec.calls], *(names(child) for child in spec.children)

        return names(rows.folded(spec(*arguments)))

    both, crossing = first + second, first[2:] + second[:1]
    assert folded(second) == (["body.2"],)
    assert folded(crossing) == (crossing,)
    assert folded(["body.0", *both]) == (["body"],)
    assert folded(both, spec(second)) == (["body.1", "body.2"], (["body.2"],))
    assert folded(both, spec(second[:2])) == (["body.1", "body.2"], (second[:2],))
    assert folded(both, spec(crossing)) == (both, (crossing,)), "else the inner one would be in neither"
    assert folded(both, spec(crossing), spec(second)) == (both, (crossing,), (second,))


class Masked(nn.Module):
    """Passes a tensor through a row, but its parts get a mask as well."""

    def __init__(self):
        super().__init__()
        self.up, self.down = Scaled(), Scaled()

    def forward(self, x, mask):
        return self.down(self.up(x, mask), mask)


class Scaled(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x, mask):
        return super().forward(x) * mask


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Masked() for _ in range(3))

    def forward(self, x):
        mask = torch.ones(WIDTH)
        for block in self.blocks:
            x = block(x, mask)
        return x.square().sum()


def test_a_module_whose_parts_get_something_else_besides_stays_whole():
    graph = ar.trace(Stack(), BATCH, optimizer=None)
    rows = find_rows(collect_facts(graph, [0.0] * len(graph.ops)))
    assert not rows.inner
    paths = [[graph.calls[c].path for (c,) in row] for row in rows.rows]
    assert ["blocks.0", "blocks.1", "blocks.2", "square()", "sum()"] in paths


class Twice(nn.Module):
    """Runs a module of two parts twice, and something after it."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.Sequential(nn.GELU()))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.head(self.body(self.body(x))).square().sum()


def test_a_span_stays_in_one_call_of_the_module_around_it():
    model = Twice()
    graph = ar.trace(model, BATCH, optimizer=None, gradients="fresh")
    plan = Plan((across(["body.0.1", "body.1.0"]),))
    pairs = [[graph.calls[c].number for c in spec.calls] for spec in resolve(graph, plan)]
    assert pairs == [[0, 0], [1, 1]]
    assert_equal_to_plain(model, BATCH, plan)
    assert_peak_is_predicted(model, graph, plan)
    with pytest.raises(ar.PlanError, match="no call of 'body\\.0\\.0' follows"):
        resolve(graph, Plan((Region("body.1.0", 0, then=(CallName("body.0.0", 1),)),)))


def test_an_output_that_is_stored_is_made_again_with_the_others_of_its_op():
    model = Net(nn.Dropout(0.2), nn.LayerNorm(WIDTH))
    graph = ar.trace(model, BATCH, optimizer=None, gradients="fresh")
    call = {c.path: c for c in graph.calls}
    (output,) = call["body.2"].outputs
    spec = RegionSpec(call["body.1"].index, frozenset({output}), then=(call["body.2"].index,))
    assert graph.storages[output].num_bytes == BATCH[0].nbytes
    assert_peak_is_predicted(model, graph, Plan(describe_all(graph, [spec])))

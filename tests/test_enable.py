"""One line in a training loop: same results to the bit, within the budget, planned as rarely as possible."""

from __future__ import annotations

import copy
import random
import warnings
from itertools import accumulate

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoremat as ar
from autoremat import _enabled
from autoremat._measure import record_memory
from autoremat._memory_meter import unique_bytes

WIDTH, ROWS = 32, 256


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.drop, self.norm, self.down = (
            nn.Linear(WIDTH, 4 * WIDTH), nn.Dropout(0.1), nn.BatchNorm1d(4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH),
        )  # fmt: skip

    def forward(self, x):
        return x + self.down(F.gelu(self.norm(self.drop(self.up(x)))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(WIDTH, 8)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build():
    torch.manual_seed(0)
    return Net()


def loss_of(output):
    return F.cross_entropy(output, torch.arange(len(output)) % 8)


def train(model, sizes=(ROWS,) * 3, micro_steps=1, autocast=None, optimizer=None):
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    torch.manual_seed(1)
    losses = []
    for rows in sizes:
        optimizer.zero_grad()
        for _ in range(micro_steps):
            batch = torch.randn(rows, WIDTH)
            with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
                loss = loss_of(model(batch)) / micro_steps
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def run(model, **options):
    """Losses, and the peak by the profiler's memory events."""
    static = unique_bytes([*model.parameters(), *model.buffers()])
    losses, events = record_memory(lambda: train(model, **options))
    return losses, max(accumulate((change for _, change in events), initial=static))


def states(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(model, other):
    ours, theirs = states(model), states(other)
    assert list(ours) == list(theirs)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def enable(model, budget, **options):
    return ar.enable(model, budget, **{"loss": loss_of, "holds_output": False, **options})


def tightest(peak, share=0.72):
    return int(share * peak)


@pytest.fixture(scope="module")
def plain():
    model = build()
    losses, peak = run(model)
    return model, losses, peak


def test_a_loop_with_one_more_line_has_the_same_losses_within_the_budget(plain):
    other, losses, plain_peak = plain
    budget = tightest(plain_peak)
    model = build()
    keys, text = list(model.state_dict()), repr(model)
    assert enable(model, budget) is model
    found, peak = run(model)
    assert found == losses
    assert_same(model, other)
    assert 0.85 * budget < peak <= budget < plain_peak  # of a budget this small, what a loop keeps is 6 %
    handle = ar.enabled(model)
    assert handle.plan.regions
    assert handle.plan.optimizer == "AdamW"
    assert handle.plan.planned.peak_bytes <= handle.plan.budget_bytes < handle.budget_bytes == budget
    assert len(handle.plans) == 1
    assert (list(model.state_dict()), repr(model)) == (keys, text)
    assert "1 plans made" in repr(handle)
    handle.disable()
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    with pytest.raises(ar.UsageError, match="not enabled"):
        ar.enabled(model)


def test_accumulated_gradients_are_seen_and_counted(plain):
    options = {"sizes": (ROWS, ROWS), "micro_steps": 2}
    other = build()
    losses, plain_peak = run(other, **options)
    budget = tightest(plain_peak, 0.8)
    model = enable(build(), budget)
    found, peak = run(model, **options)
    assert found == losses
    assert_same(model, other)
    assert peak <= budget
    first, second = ar.enabled(model).plans
    assert second.planned.peak_by_cause["gradient"] > first.planned.peak_by_cause["gradient"]


def test_autocast_is_seen_and_counted():
    other = build()
    losses, plain_peak = run(other, autocast=torch.bfloat16)
    budget = tightest(plain_peak, 0.85)
    model = enable(build(), budget)
    found, peak = run(model, autocast=torch.bfloat16)
    assert found == losses
    assert_same(model, other)
    assert peak <= budget
    assert ar.enabled(model).plan.precision == "amp-bf16"


def test_the_optimizer_that_trains_the_model_is_found_with_its_groups(plain):
    model = build()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.SGD([{"params": decayed, "momentum": 0.9}, {"params": rest}], lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps optimizer.step, which must not reach the real parameters
    enable(model, "1GiB")
    before = states(model)
    ar.enabled(model).before_forward((torch.randn(ROWS, WIDTH),), {})
    assert all(torch.equal(value, before[name]) for name, value in states(model).items())
    plan = ar.enabled(model).plan
    assert plan.optimizer == "SGD"
    momentum = plan.plain.peak_by_cause["optimizer_state"]
    assert momentum == unique_bytes(decayed)
    assert not optimizer.state


def test_two_optimizers_are_counted_together():
    model = build()
    head, body = list(model.head.parameters()), list(model.blocks.parameters())
    optimizers = torch.optim.SGD(head, lr=0.1, momentum=0.9), torch.optim.Adagrad(body)
    enable(model, "1GiB")
    ar.enabled(model).before_forward((torch.randn(ROWS, WIDTH),), {})
    plan = ar.enabled(model).plan
    assert set(plan.optimizer.split(" and ")) == {"SGD", "Adagrad"}
    assert plan.plain.peak_by_cause["optimizer_state"] == unique_bytes(head + body) + 4 * len(body)
    assert all(len(o.state) == (0 if i == 0 else len(body)) for i, o in enumerate(optimizers))


def test_without_optimizer_and_loss_it_says_what_it_counts_instead():
    model = ar.enable(build(), "1GiB")
    with pytest.warns(UserWarning, match="the plan counts") as caught:
        model(torch.randn(ROWS, WIDTH)).square().sum().backward()
    text = [str(w.message) for w in caught]
    assert any("counts AdamW" in t for t in text)
    assert any("counts a cross-entropy over the last dimension" in t for t in text)
    plan = ar.enabled(model).plan
    assert plan.optimizer == "adamw"
    exact = ar.trace(build(), torch.randn(ROWS, WIDTH), loss=loss_of)
    assert plan.plain.peak_bytes >= ar.profile(exact).peak_bytes


def test_evaluation_and_generation_are_plain_and_training_goes_on(plain):
    _, _, peak = plain
    model = enable(build(), tightest(peak), optimizer="adamw")
    x = torch.randn(ROWS, WIDTH)
    model.eval()
    model(x).sum().backward()
    assert ar.enabled(model).plan is None
    model.zero_grad()
    model.train()
    hooks = len(model.blocks[0]._forward_hooks)
    model(x).sum().backward()
    assert ar.enabled(model).plan.regions
    attached = sum(len(m._forward_hooks) for m in model.modules())
    with torch.no_grad():
        model(x)
    assert sum(len(m._forward_hooks) for m in model.modules()) < attached
    model.eval()
    model(x)
    assert len(model.blocks[0]._forward_hooks) == hooks
    model.train()
    model.zero_grad()
    model(x).sum().backward()
    assert sum(len(m._forward_hooks) for m in model.modules()) == attached
    assert len(ar.enabled(model).plans) == 1


def test_shorter_batches_share_plans_and_longer_ones_get_room(plain, monkeypatch):
    _, _, peak = plain
    sizes = [200, ROWS, 250, 120, 60, 100, 128, ROWS, 30, 90]
    other = build()
    losses, _ = run(other, sizes=sizes)
    budget = tightest(peak, 0.8)
    model = enable(build(), budget)
    found, measured = run(model, sizes=sizes)
    assert found == losses
    assert_same(model, other)
    assert measured <= budget
    handle = ar.enabled(model)
    rows = [p.observed.sizes[0] for p in handle._prepared]
    assert rows == [200, 320]  # what came first; then, as sizes grow, a quarter more
    monkeypatch.setattr(_enabled, "MAX_PLANNING_SHARE", 1.0)
    train(model, sizes=[100, 99, 98, 97])
    assert [p.observed.sizes[0] for p in handle._prepared] == [200, 320, 100]
    assert handle.plan.planned.flops <= handle._prepared[0].plan.planned.flops


@pytest.mark.parametrize(
    ("options", "planned"), [({}, [30, 248]), ({"fake": False}, [30, 39, 150]), ({"budget": "1000KiB"}, [30, 124])]
)
def test_growth_is_planned_far_ahead_where_that_is_cheap(options, planned):
    """Not where a trace takes memory, nor where a plan for so much would recompute a lot."""
    model = enable(build(), optimizer=None, **{"budget": "1GiB", **options})
    for rows in (30, 31, 38, 120):
        model(torch.randn(rows, WIDTH))
    assert [p.observed.sizes[0] for p in ar.enabled(model)._prepared] == planned


def test_where_growth_ends_early_a_plan_for_what_came_takes_over(monkeypatch):
    monkeypatch.setattr(_enabled, "MAX_PLANNING_SHARE", 1.0)
    model = enable(build(), "900KiB", optimizer=None)
    for rows in (30, 31, *[70, 69] * _enabled.WORTH_A_PLAN, 68, 89, 110, 110, 110):
        model(torch.randn(rows, WIDTH))
    first, far, last = ar.enabled(model)._prepared
    assert [p.observed.sizes[0] for p in (first, far, last)] == [30, 124, 88]
    assert far.plan.regions
    assert last.plan.planned.flops < far.plan.planned.flops * 88 / 124 + 1
    model(torch.randn(70, WIDTH))
    assert ar.enabled(model).plan is last.plan


def test_growth_is_not_planned_far_ahead_where_a_trace_takes_memory():
    class Reads(Net):
        def forward(self, x):
            return super().forward(x) * (2 if x.float().sum().item() > 0 else 1)

    class Routes(Net):
        def forward(self, x):
            return super().forward(x) * (2 if self.head(x).sum().item() > 0 else 1)

    for build_model, planned in ((Reads, [30, 248]), (Routes, [30, 39])):
        model = enable(build_model(), "1GiB", optimizer=None)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*traced on a real copy")
            for rows in (30, 31):
                model(torch.ones(rows, WIDTH))
        assert [p.observed.sizes[0] for p in ar.enabled(model)._prepared] == planned


def test_a_plan_that_larger_steps_would_break_is_made_for_the_step_alone():
    class Bounded(Net):
        def forward(self, x):
            assert len(x) <= 40
            return super().forward(x)

    model = enable(Bounded(), "1GiB", optimizer=None)
    for rows in (30, 40):
        model(torch.randn(rows, WIDTH))
    assert [p.observed.sizes[0] for p in ar.enabled(model)._prepared] == [30, 40]


@pytest.mark.parametrize("background", [False, True])
def test_where_the_plain_step_fits_the_planner_is_not_asked(monkeypatch, background):
    monkeypatch.setattr("autoremat._planning.Planner", None)
    model = enable(build(), "1GiB", optimizer=None, background=background)
    model(torch.randn(ROWS, WIDTH))
    plan = ar.enabled(model).plan
    assert (plan.regions, plan.bound, plan.overhead_flops) == ((), 0.0, 0.0)
    assert plan.planned.peak_bytes <= plan.budget_bytes


def test_planning_in_the_background_never_leaves_the_budget(plain):
    other, losses, plain_peak = plain
    budget = tightest(plain_peak, 0.8)
    model = enable(build(), budget, background=True)
    found, peak = run(model)
    assert found == losses
    assert_same(model, other)
    assert peak <= budget
    handle = ar.enabled(model)
    if handle._pending is not None:
        assert handle._current.is_rough
        handle._pending[1].join()
        train(model, sizes=(ROWS,))
    assert not handle._current.is_rough
    assert handle.plan.bound is not None


MISTAKES = [
    (lambda m: ar.enable(m, "24 parsecs"), ar.BudgetError, "Cannot read"),
    (lambda m: ar.enable(m, "1GiB", accumulate=2), ar.UsageError, "no option accumulate.*are seen"),
    (lambda m: ar.enable(m, "1GiB", optimizer="adamm"), ar.UsageError, "adamm"),
    (lambda m: ar.enable(m, "1GiB", precision="fp8"), ar.UsageError, "fp8"),
    (lambda m: ar.enable(ar.enable(m, "1GiB"), "1GiB"), ar.PlanError, "enabled already"),
    (lambda m: ar.enable(torch.compile(m), "1GiB"), ar.PlanError, "compiled"),
    (lambda m: ar.enable("model", "1GiB"), ar.UsageError, "not str"),
    (ar.enabled, ar.UsageError, "not enabled"),
    (ar.retry_step, ar.UsageError, "not enabled"),
]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("mistake", "error", "message"), MISTAKES)
def test_a_mistake_is_named_before_anything_changes(mistake, error, message):
    with pytest.raises(error, match=message):
        mistake(nn.Linear(2, 2))


def test_a_model_that_checkpoints_itself_is_refused():
    model = build()
    model.blocks[1].gradient_checkpointing = True  # as Transformers marks its layers
    with pytest.raises(ar.PlanError, match=r"blocks.1 has gradient_checkpointing=True.*_disable"):
        ar.enable(model, "1GiB")


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_model_that_is_compiled_afterwards_is_refused():
    model = torch.compile(enable(build(), "1GiB"), backend="eager")
    with pytest.raises(ar.PlanError, match=r"enabled and being compiled.*apply"):
        model(torch.randn(ROWS, WIDTH))


FAILURES = [
    ({"budget": 10_000}, (ROWS, WIDTH), ar.BudgetInfeasible, "smallest budget that does"),
    ({"budget": "1GiB", "loss": lambda out: out}, (ROWS, WIDTH), ar.LossError, "not a scalar"),
    ({"budget": "1GiB"}, (ROWS, WIDTH + 1), ar.TraceError, "blocks.0.up"),
]


@pytest.mark.parametrize(("options", "shape", "error", "message"), FAILURES)
def test_what_cannot_be_planned_is_one_error_and_the_model_trains_on_plain(options, shape, error, message):
    model, other = build(), build()
    enable(model, **{"optimizer": None, **options})
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with pytest.raises(error, match=message):
        model(torch.zeros(shape))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]
    assert_same(model, other)
    ar.enabled(model).disable()
    assert train(model) == train(other)
    assert_same(model, other)


def test_copies_of_an_enabled_model_are_plain(plain):
    _, _, peak = plain
    model = enable(build(), tightest(peak), optimizer="adamw")
    model(torch.randn(ROWS, WIDTH)).sum().backward()
    twin = copy.deepcopy(model)
    with pytest.raises(ar.UsageError, match="not enabled"):
        ar.enabled(twin)
    with ar.apply(twin, ar.enabled(model).plan) as applied:
        twin(torch.randn(ROWS, WIDTH)).sum().backward()
        assert all(region.num_calls == 1 for region in applied.executed)


def test_auto_is_what_is_left_less_a_reserve():
    model = enable(build(), "auto", optimizer=None, reserve="100MiB")
    assert ar.enabled(model).budget_bytes is None
    assert "auto" in repr(ar.enabled(model))
    model(torch.randn(ROWS, WIDTH))
    with open("/proc/meminfo") as file:  # noqa: PTH123
        total = int(file.readline().split()[1]) * 1024
    assert 0 < ar.enabled(model).budget_bytes <= total - 100 * 2**20
    greedy = enable(build(), "auto", optimizer=None, reserve=total * 2)
    with pytest.raises(ar.BudgetError, match="kept in reserve"):
        greedy(torch.randn(ROWS, WIDTH))


def test_what_runs_beside_a_step_does_not_reach_into_planning(plain):
    _, _, peak = plain

    class Forbidden(torch.utils._python_dispatch.TorchDispatchMode):
        num_ops = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.num_ops += 1
            return func(*args, **(kwargs or {}))

    model = enable(build(), tightest(peak), optimizer="adamw")
    with Forbidden() as planning:
        model(torch.zeros(ROWS, WIDTH))
    with Forbidden() as planned:
        model(torch.zeros(ROWS, WIDTH))
    assert ar.enabled(model).plan.regions
    assert (
        planning.num_ops <= planned.num_ops + 3
    )  # a trace and a dry run are hundreds of ops; a region learns a little

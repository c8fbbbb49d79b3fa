"""Watching a training: steps, peaks, norms, checks, warnings; and that the training is as if nobody watched."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import json
import time

import pytest
import torch
from torch import nn

import autoremat as ar
from autoremat import _monitor, _monitor_check, _monitor_step
from autoremat._plan import Region
from autoremat._slow import UNEXPLAINED, WINDOW, Expected, find_slow


class Block(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.up, self.norm, self.down = (
            nn.Linear(width, 4 * width),
            nn.BatchNorm1d(4 * width),
            nn.Linear(4 * width, width),
        )
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(self.down(self.norm(self.up(x)).tanh()))


def build():
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(4)], nn.Linear(32, 1))


PLAN = ar.Plan(regions=tuple(Region(str(i)) for i in range(4)))
BATCH = torch.linspace(-1, 1, 256 * 32).view(256, 32)


def loss_of(out):
    return out.square().mean()


def train(model, optimizer, steps=4, *, accumulate=1, after=None):
    """Train; returns the losses."""
    torch.manual_seed(7)
    losses = []
    for number in range(1, steps + 1):
        optimizer.zero_grad()
        for _ in range(accumulate):
            loss = loss_of(model(BATCH)) / accumulate
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        if after is not None:
            after(number)
    return losses


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def watch(model, **options):
    return ar.Monitor(model, **{"console_every": None, "peak": "never", "warn": False} | options)


@pytest.fixture(scope="module")
def planned():
    """A plan with predictions for the model above."""
    graph = ar.trace(build(), BATCH, loss=loss_of)
    plan = ar.classic(graph, "every-block")
    return dataclasses.replace(plan, budget_bytes=plan.planned.peak_bytes + 8)


def test_a_training_that_is_watched_and_checked_is_the_same_to_the_bit(planned):
    seen = []
    for watched in (False, True):
        model = build()
        optimizer = adamw(model)
        with ar.apply(model, planned):
            if not watched:
                losses = train(model, optimizer)
            else:
                with watch(model, check_every=2, peak="always") as monitor:
                    losses = train(model, optimizer)
        state = [t.clone() for t in (*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters()))]
        seen.append((losses, state, torch.get_rng_state()))
    (plain, one, random), (other, two, other_random) = seen
    assert plain == other
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert torch.equal(random, other_random)
    checks = monitor.results.checks
    assert [check.step for check in checks] == [2, 4]
    assert all(check.equal and check.num_recomputes and check.norm == check.plain_norm > 0 for check in checks), checks
    assert checks[0].num_compared == len(list(model.parameters()))


def test_the_norm_is_that_of_the_gradients_and_the_check_finds_it_too():
    model = build()
    norms = []
    with ar.apply(model, PLAN), watch(model, check_every=1) as monitor:
        train(
            model,
            adamw(model),
            2,
            after=lambda _: norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters()]))),
        )
    found = [record.gradient_norm for record in monitor.results.records]
    assert found == pytest.approx(norms)
    assert [check.norm for check in monitor.results.checks] == pytest.approx(norms)


def test_a_check_that_cannot_switch_checkpointing_off_says_so(monkeypatch):
    monkeypatch.setattr(_monitor_check, "regions_off", contextlib.nullcontext)
    model = build()
    with ar.apply(model, PLAN), watch(model, check_every=1) as monitor:
        train(model, adamw(model), 1)
    (check,) = monitor.results.checks
    assert (check.equal, check.note) == (None, "checkpointing cannot be switched off")


def test_peaks_are_those_that_measure_finds_and_what_the_plan_promised(planned):
    gc.collect()  # what other tests have left may not go in the middle of a step
    model = build()
    with ar.apply(model, planned), watch(model, peak="always") as monitor:
        train(model, adamw(model))
    records = monitor.results.records
    assert records[0].peak_bytes is None, "what was there before cannot be told yet"
    measured = ar.measure(build(), BATCH, planned, loss=loss_of, plain=False, num_steps=1).planned.peak_bytes
    for record in records[1:]:
        assert abs(record.peak_bytes - measured) <= 4, "the loop keeps the loss of the step before; measure does not"
        assert record.predicted_peak_bytes == planned.planned.peak_bytes
        assert sum(record.peak_by_cause.values()) == record.peak_bytes
        assert record.peak_by_cause["parameter"] == sum(p.nbytes for p in model.parameters())
        assert record.peak_by_cause["activation"] > 0
        assert abs(record.peak_drift) < 0.001
    assert monitor.results.within_budget


def test_gradients_that_go_in_the_middle_of_a_step_are_counted_once():
    model = build()
    optimizer = adamw(model)
    peaks = []
    for early in (True, False):
        with watch(model, peak="always") as monitor:
            for _ in range(4):
                if early:
                    optimizer.zero_grad()
                loss = loss_of(model(BATCH))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        peaks.append(monitor.results.records[-1].peak_bytes)
    static = sum(p.nbytes for p in model.parameters())
    assert peaks[0] <= peaks[1] <= peaks[0] + static, "in forward they are alive; in backward they must be gone"


def test_the_meter_runs_as_often_as_it_is_worth(monkeypatch):
    model = build()
    with watch(model, peak="auto") as monitor:
        train(model, adamw(model), 6)
    metered = [record.step for record in monitor.results.records if record.peak_bytes]
    assert metered == [2], "a reading costs more than a hundredth of steps as small as these"
    with watch(model, peak="auto") as monitor, torch.profiler.profile():
        train(model, adamw(model), 3)
    assert monitor.results.peak_bytes is None, "another profiler runs on this thread"


def test_another_profiler_that_starts_within_a_step_voids_the_reading_alone(planned):
    model = build()
    with watch(model, peak="always") as monitor:
        optimizer = adamw(model)
        train(model, optimizer, 3)
        model.register_forward_pre_hook(
            lambda *_: ar.measure(build(), BATCH, loss=loss_of, optimizer=None, num_steps=1) and None
        )
        train(model, optimizer, 1)
    assert [record.peak_bytes is not None for record in monitor.results.records] == [False, True, True, False]


def test_recomputation_is_counted_and_timed(planned):
    model = build()
    with watch(model) as monitor, ar.apply(model, planned) as applied:
        train(model, adamw(model), 2)
        assert applied.executed[0].num_calls
        train(model, adamw(model), 1)
    records = monitor.results.records
    assert [record.num_recomputes for record in records] == [len(planned.regions)] * 3
    assert all(0 < record.recompute_s < record.step_s for record in records)
    overhead = planned.overhead_flops
    assert records[-1].recomputed_flops_share == pytest.approx(overhead / (1 + overhead))
    with watch(model) as monitor:
        train(model, adamw(model), 1)
    assert monitor.results.records[0].recompute_share == 0
    assert monitor.results.records[0].predicted_peak_bytes is None


def test_micro_steps_are_one_step_and_waits_are_told_apart():
    model = build()
    optimizer = adamw(model)
    started = time.perf_counter()
    with watch(model) as monitor:
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(2):
                time.sleep(0.02)
                loss_of(model(BATCH)).backward()
            optimizer.step()
    elapsed_s = time.perf_counter() - started
    records = monitor.results.records
    assert [record.num_micro_steps for record in records] == [2, 2, 2]
    assert all(record.wait_s >= 0.04 for record in records)
    assert sum(record.step_s + record.wait_s for record in records) <= elapsed_s, "waits are no part of a step's time"


def test_steps_that_a_scaler_leaves_out_are_told_and_evaluation_is_not_a_step():
    model = build()
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
    with watch(model) as monitor:
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(loss_of(model(BATCH)) * 1e10).backward()
            scaler.step(optimizer)
            scaler.update(1.0)
            with torch.no_grad():
                model(BATCH)
            model.eval()
            loss_of(model(BATCH))
            model.train()
    records = monitor.results.records
    assert [record.is_skipped for record in records] == [True, False]
    assert records[0].gradient_norm is None
    assert records[1].gradient_norm > 0


def test_a_gradient_that_differs_is_named():
    class Drifting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(32, 32)
            self.calls = 0

        def forward(self, x):
            numbers.append(len(numbers))  # what recompute cannot put back
            return self.linear(x) * (1 + numbers[-1])

    numbers = []
    model = nn.Sequential(Drifting(), nn.Tanh(), nn.Linear(32, 1))
    with (
        ar.apply(model, ar.Plan(regions=(Region("1"),))),
        watch(model, check_every=1) as monitor,
        pytest.warns(UserWarning, match="differ with checkpointing: 0.linear.weight"),
    ):
        train(model, adamw(model), 1)
    (check,) = monitor.results.checks
    assert check.equal is False
    assert "0.linear.weight" in check.differences
    assert check.norm != check.plain_norm


def test_a_check_says_why_it_cannot_be_made():
    model = build()
    with watch(model, check_every=1) as monitor:
        train(model, adamw(model), 1)
        assert monitor.results.checks[-1].note == "no plan is on the model"
        with ar.apply(model, PLAN):
            optimizer = adamw(model)
            batch = BATCH.clone()
            loss_of(model(batch)).backward()
            batch.add_(1)
            optimizer.step()
    assert monitor.results.checks[-1].note == "the batch has been changed in place since forward"
    assert monitor.results.checks[-1].equal is None


def test_checks_of_outputs_made_from_one_another_count_each_gradient_once():
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = build()

        def forward(self, x):
            out = self.body(x)
            return {"loss": loss_of(out), "logits": out}

    model = WithLoss()
    optimizer = adamw(model)
    plan = ar.Plan(regions=tuple(Region(f"body.{i}") for i in range(4)))
    with ar.apply(model, plan), watch(model, check_every=1) as monitor:
        model(BATCH)["loss"].backward()
        optimizer.step()
    (check,) = monitor.results.checks
    assert check.equal
    assert check.norm == pytest.approx(monitor.results.records[0].gradient_norm)


def test_records_go_to_the_console_a_file_and_tensorboard(tmp_path, capsys):
    tensorboard = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    model = build()
    options = {"console_every": 2, "jsonl": tmp_path / "steps.jsonl", "tensorboard": tmp_path / "board"}
    with ar.apply(model, PLAN), watch(model, check_every=3, **options) as monitor:
        train(model, adamw(model), 4)
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["step", "step", "check", "step", "step", "end"]
    assert lines[0]["gradient_norm"] == monitor.results.records[0].gradient_norm
    said = capsys.readouterr().err
    assert [word in said for word in ("step 1 ", "step 2 ", "step 3  recompute", "step 4 ")] == [
        True,
        True,
        False,
        True,
    ]
    assert "gradients equal with and without checkpointing" in said
    assert "4 steps" in said
    board = tensorboard.EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    assert [e.step for e in board.Scalars("autoremat/gradient_norm")] == [1, 2, 3, 4]
    found = json.loads(monitor.results.to_json())
    assert len(found["records"]) == 4
    assert "4 steps" in repr(monitor.results)


def _records(num=WINDOW, **changes):
    return [ar.StepRecord(i, **{"step_s": 1.0, "wait_s": 0.0} | changes) for i in range(1, num + 1)]


@pytest.mark.parametrize(
    ("changes", "expected", "reason"),
    [
        ({"wait_s": 0.9}, {}, "waiting between steps takes 47.4 %"),
        ({"step_s": 2.0, "recompute_s": 1.0}, {"recompute_share": 0.2}, "recomputation takes 50.0 % of a step"),
        ({"step_s": 2.0, "num_alloc_retries": 1}, {}, "gave back its cache 10 times"),
        ({"step_s": 2.0, "peak_bytes": 99}, {"capacity_bytes": 100}, "memory is nearly full"),
        ({"step_s": 2.0, "has_planned_shapes": False}, {}, "other shapes"),
        ({"step_s": 2.0, "cpu_share": 0.4}, {"is_cpu": True}, "other processes use this machine"),
        ({"step_s": 2.0}, {}, UNEXPLAINED),
    ],
)
def test_slow_steps_are_explained_by_what_the_records_say(changes, expected, reason):
    warning = find_slow(_records(**changes), Expected(1.0, "the plan's prediction", **expected))
    assert reason in warning.reasons[0]
    assert "the plan's prediction" in warning.message


def test_steps_as_fast_as_expected_and_few_steps_get_no_warning():
    assert find_slow(_records(step_s=1.15), Expected(1.0, "")) is None
    assert find_slow(_records(step_s=1.4), Expected(1.0, "", error=0.3)) is None
    assert find_slow(_records(WINDOW - 1, step_s=9.0), Expected(1.0, "")) is None


class Clock:
    """A clock that only reading it and sleeping move on: the machine may be as busy as it likes."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        self.now += 1e-4
        return self.now

    process_time = perf_counter

    def sleep(self, seconds):
        self.now += seconds


def test_a_training_that_gets_slower_is_warned_about_once(monkeypatch):
    monkeypatch.setattr(_monitor, "NUM_WARM_UP", 1)
    clock = Clock()
    monkeypatch.setattr(_monitor, "time", clock)
    monkeypatch.setattr(_monitor_step, "time", clock)
    model = nn.Linear(32, 1)
    with pytest.warns(UserWarning, match="waiting between steps") as caught, watch(model, warn=True) as monitor:
        train(model, adamw(model), 36, after=lambda number: clock.sleep(0.02 if number > 11 else 0))
    found = [w for w in caught if "by the first steps" in str(w.message)]
    assert len(found) == len(monitor.results.warnings)
    waits = [w for w in monitor.results.warnings if w.reasons[0].startswith("waiting")]
    assert len(waits) == 1


def test_several_gradients_of_one_step_and_a_loop_of_ones_own():
    model = build()
    with watch(model) as monitor:
        for _ in range(2):
            monitor.begin()
            loss_of(model(BATCH)).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(0.1 * parameter.grad)
                    parameter.grad = None
            monitor.step()
    assert [record.step for record in monitor.results.records] == [1, 2]


def test_wrong_arguments_and_a_second_monitor_are_refused(tmp_path):
    model = build()
    for options in ({"peak": "often"}, {"check_every": 0}, {"jsonl": tmp_path / "no" / "file"}, {"optimizer": 3}):
        with pytest.raises(ar.UsageError):
            watch(model, **options)
    with pytest.raises(ar.UsageError, match=r"torch\.nn\.Module"):
        watch(3)
    with watch(model), pytest.raises(ar.UsageError, match="watched already"), watch(model):
        pass
    with watch(model, console_every=1) as monitor:
        twin = copy.deepcopy(model)
        loss_of(twin(BATCH)).backward()
    assert monitor.results.records == (), "a copy is not watched, and can be made"
    before = copy.copy(model._forward_hooks)
    with watch(model):
        pass
    assert model._forward_hooks == before

"""The smallest script of each kind, plain and with its one added line: same bits, and within the budget."""

from __future__ import annotations

import functools
import importlib.util
from itertools import accumulate
from pathlib import Path

import pytest
import torch

import autoremat as ar
from autoremat._measure import record_memory
from test_retry import Device

EXAMPLES = Path(__file__).parents[2] / "examples"
ONE_LINE = "# <- this"
SCRIPTS = [
    ("train_loop", 0.8),
    ("lightning_module", 0.85),
    ("trainer", 0.8),
    ("accelerate_loop", 0.85),
    ("peft_lora", 0.75),
    ("trl_sft", 0.8),
]
DATASET_BYTES = {"accelerate_loop": 4 * 256 * (32 * 4 + 8)}
"""What a script holds on the device besides training: here that is the CPU, and a dataset made in one piece."""
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # those of the libraries themselves
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measured(train, budget):
    """What a whole training returns, with its peak: model, data and optimizer are made inside it."""
    result, events = record_memory(lambda: train(budget))
    return *result, max(accumulate(change for _, change in events))


@pytest.fixture(autouse=True)
def own_accelerator():
    """Accelerate keeps one state for a process."""
    yield
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)


@pytest.mark.parametrize(("name", "share"), SCRIPTS)
def test_a_script_with_one_more_line_does_the_same_within_the_budget(name, share):
    script = load(name)
    text = (EXAMPLES / f"{name}.py").read_text()
    assert text.count(ONE_LINE) == 1
    losses, plain, plain_peak = measured(script.train, None)
    budget = int(share * plain_peak)
    found, planned, peak = measured(script.train, budget)
    assert found == losses
    assert len(losses) >= 3
    ours, theirs = planned.state_dict(), plain.state_dict()
    assert [key for key in theirs if not torch.equal(ours[key], theirs[key])] == []
    assert peak - DATASET_BYTES.get(name, 0) <= budget < plain_peak


def test_the_trainers_precision_accumulation_and_clipping_are_counted():
    arguments = {"bf16": True, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
    train = functools.partial(load("trainer").train, **arguments)
    losses, plain, plain_peak = measured(train, None)
    found, planned, peak = measured(train, budget := int(0.8 * plain_peak))
    assert found == losses
    ours, theirs = planned.state_dict(), plain.state_dict()
    assert [key for key in theirs if not torch.equal(ours[key], theirs[key])] == []
    assert peak <= budget


@pytest.mark.parametrize("argument", ["activation_checkpointing", "gradient_checkpointing"])
def test_the_trainer_is_not_let_checkpoint_twice(argument):
    with pytest.raises(ar.PlanError, match=r"each recompute the layers. Set .*=False"):
        load("trainer").train("1GiB", **{argument: True})


def test_lightning_says_when_there_is_no_loss_to_plan_for():
    script = load("lightning_module")
    script.Classifier.automatic_optimization = False
    with pytest.raises(ar.UsageError, match="optimizes by hand"):
        script.train("1GiB")


def test_an_infeasible_budget_stops_the_training_with_one_error():
    with pytest.raises(ar.BudgetInfeasible, match="smallest budget that does"):
        load("lightning_module").train(10_000 + 2**16)


def test_a_policy_applies_a_saved_plan_or_plans_at_the_first_step(tmp_path):
    from autoremat.integrations.torchtitan import AutorematPolicy

    model, path = load("train_loop").build(), tmp_path / "plan.json"
    ar.Plan((ar.Region("0"), ar.Region("1"))).save(path)
    assert AutorematPolicy(plan=path).apply(model) is model
    output = model(torch.randn(4, 32))
    output.sum().backward()
    with pytest.raises(ar.PlanError, match="has a plan already"):
        ar.apply(model, ar.Plan(()))
    other = load("train_loop").build()
    AutorematPolicy(budget="1GiB", options={"optimizer": None}).apply(other)
    assert ar.enabled(other).budget_bytes == 2**30
    with pytest.raises(ar.UsageError, match="not both"):
        AutorematPolicy(plan=path, budget="1GiB").apply(other)


def run_out(tmp_path, device, *, retry, **arguments):
    """A training by the Trainer with a budget that the device does not have; losses and the callback."""
    script = load("trainer")
    callback = script.AutorematCallback("1GiB")
    settings = {
        "output_dir": tmp_path, "per_device_train_batch_size": 8, "max_steps": 3, "logging_steps": 1,
        "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "seed": 0,
    }  # fmt: skip
    trainer = script.Trainer(
        script.build(), script.TrainingArguments(**{**settings, **arguments}), train_dataset=script.data(),
        callbacks=[callback],
    )  # fmt: skip
    if retry:
        callback.retry(trainer)
    with device:
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], callback


@pytest.mark.parametrize("num_micro_steps", [1, 2])
def test_the_trainer_runs_steps_again_under_tighter_plans(tmp_path, num_micro_steps):
    """Of two micro-steps the second runs out, where gradients are there already."""
    options = {"gradient_accumulation_steps": num_micro_steps, "max_steps": 4 - num_micro_steps}
    roomy = Device()
    losses, _ = run_out(tmp_path, roomy, retry=False, **options)
    device = Device(int((0.8 if num_micro_steps == 1 else 0.97) * roomy.peak))
    found, callback = run_out(tmp_path, device, retry=True, **options)
    assert device.failures > 0
    assert found == losses
    assert callback.enabled.budget_bytes < 2**30
    assert callback.enabled.plan.regions


def test_without_that_the_trainers_error_says_what_was_alive_and_how_to_retry(tmp_path):
    with pytest.raises(torch.OutOfMemoryError) as error:
        run_out(tmp_path, Device(10**6), retry=False)
    notes = " ".join(error.value.__notes__)
    assert "BertForSequenceClassification ran out of memory" in notes
    assert "Alive all through the step: parameters" in notes
    assert "AutorematCallback.retry" in notes

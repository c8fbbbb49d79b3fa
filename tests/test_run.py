"""``autoremat run``: scripts as they are, under a budget: same losses, peak within it, exit codes, one message."""

from __future__ import annotations

import json
import re
import runpy
import signal
import subprocess
import sys
import time

import pytest
import torch

from autoremat import Plan, __main__, _monitor_peak

MODEL = """
import sys
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        block = lambda: nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32))
        self.blocks, self.head = nn.Sequential(*[block() for _ in range(3)]), nn.Linear(32, 1)

    def forward(self, x, labels=None):
        return {"loss": (self.head(self.blocks(x)).squeeze(-1) - labels).square().mean()}

torch.manual_seed(0)
LOSSES, ROWS = [], 256
data = [{"x": x, "labels": x.mean()} for x in torch.randn(4 * ROWS, 32)]
model = Net()
"""
LOOP = """
optimizer = torch.optim.AdamW(model.parameters())
for batch in torch.utils.data.DataLoader(data, batch_size=ROWS):
    optimizer.zero_grad()
    loss = model(**batch)["loss"]
    loss.backward()
    optimizer.step()
    LOSSES.append(loss.item())
"""
TRAINER = """
import tempfile
from transformers import Trainer, TrainingArguments
arguments = TrainingArguments(tempfile.mkdtemp(), max_steps=4, per_device_train_batch_size=ROWS, logging_steps=1,
    report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", dataloader_pin_memory=False, seed=0)
trainer = Trainer(model, arguments, train_dataset=data)
trainer.train()
LOSSES += [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry]
"""
LIGHTNING = """
import lightning.pytorch as lightning
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = model
    def training_step(self, batch, _index):
        loss = self.net(**batch)["loss"]
        LOSSES.append(loss.item())
        return loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
lightning.Trainer(max_steps=4, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False).fit(Module(), torch.utils.data.DataLoader(data, batch_size=ROWS))
"""
END = "import json, pathlib; pathlib.Path(sys.argv[1]).write_text(json.dumps(LOSSES))\n"
BUDGET = "1300KB"


@pytest.fixture
def run(monkeypatch, capfd, tmp_path):
    """Run the command line in this process; returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["autoremat", "run", *map(str, arguments)])
        code = 0
        try:
            __main__.main()
        except SystemExit as stop:
            code = stop.code
        return code or 0, *capfd.readouterr()

    return call


@pytest.fixture
def script(tmp_path):
    def write(text, name="train.py"):
        (tmp_path / name).write_text(text)
        return name

    return write


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["loop", "trainer", "lightning"])
def test_a_script_computes_the_same_and_keeps_the_budget(kind, run, script, tmp_path, monkeypatch):
    for package in {"loop": (), "trainer": ("transformers", "accelerate"), "lightning": ("lightning",)}[kind]:
        pytest.importorskip(package)
    name = script(MODEL + {"loop": LOOP, "trainer": TRAINER, "lightning": LIGHTNING}[kind] + END)
    monkeypatch.setattr(_monitor_peak, "METER_SHARE", 1e9)
    monkeypatch.setattr(sys, "argv", [name, "plain.json"])
    runpy.run_path(name, run_name="__main__")
    code, _, err = run("--budget", BUDGET, "--monitor", "jsonl", "--save-plan", "plan.json", name, "planned.json")
    assert code == 0, err
    plain, planned = (json.loads((tmp_path / f"{which}.json").read_text()) for which in ("plain", "planned"))
    assert plain == planned
    assert len(plain) == 4
    steps = [json.loads(line) for line in (tmp_path / "autoremat.jsonl").read_text().splitlines()]
    peaks = [step["peak_bytes"] for step in steps if step["kind"] == "step" and step["peak_bytes"]]
    assert peaks
    assert max(peaks) <= 1_300_000
    plan = Plan.load("plan.json")
    assert plan.regions
    said = (
        r"autoremat: \d plans? in [\d.]+ m?s; the largest step takes 1.\d\d MiB of 1.24 MiB \(predicted; plain 1.\d\d"
    )
    assert re.search(said, err)
    assert plan.plain.peak_bytes > 1_300_000
    if kind == "loop":
        code, _, _ = run("--plan", "plan.json", name, "again.json")
        assert code == 0
        assert json.loads((tmp_path / "again.json").read_text()) == plain


def test_a_script_sees_itself_as_main_and_its_exit_code_is_passed_on(run, script):
    name = script(
        MODEL
        + LOOP
        + "import __main__\nassert __main__.Net is Net and __file__ == sys.argv[0] == 'train.py'\n"
        + "print(sys.argv[1:])\nsys.exit(5)\n"
    )
    before = list(sys.path), torch.nn.Module.__call__, torch.optim.Optimizer.__init__
    code, out, _ = run("--budget", "1GiB", name, "--epochs", "1", "--budget", "3")
    assert code == 5
    assert "['--epochs', '1', '--budget', '3']" in out
    assert (list(sys.path), torch.nn.Module.__call__, torch.optim.Optimizer.__init__) == before


def test_an_exception_of_the_script_is_shown_as_python_shows_it(run, script):
    name = script("def inner():\n    raise ValueError('mine')\n\ninner()\n")
    code, _, err = run("--budget", "1GiB", name)
    assert code == 1
    assert err.startswith('Traceback (most recent call last):\n  File "train.py", line 4, in <module>')
    assert err.rstrip().endswith("ValueError: mine")
    assert "autoremat" not in err


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (None, ("--budget", "1GiB"), "No script"),
        ("", ("--budget", "many"), "Cannot read 'many'"),
        ("", ("--budget", "1GiB", "--plan", "plan.json"), "exclude each other"),
        ("", ("--plan", "no.json"), "no.json"),
        ("", ("--on-oom", "restart"), "needs --budget"),
        ("import torch\ntorch.nn.Linear(2, 2)(torch.ones(2))\n", ("--budget", "1GiB"), "called no module in training"),
        (MODEL + LOOP, ("--budget", "300KB"), "The smallest budget that does"),
        (
            "import torch\nraise torch.OutOfMemoryError('CUDA out of memory.')",
            ("--budget", "1GiB"),
            "ran out of memory",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_done_is_one_message_and_exit_code_two(run, script, text, options, message):
    if text is not None:
        script(text)
    code, _, err = run(*options, "train.py")
    assert code == 2
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err


def test_out_of_memory_starts_again_with_less_where_that_is_asked_for(script, tmp_path):
    script(
        "import os, pathlib, sys, torch\nseen = pathlib.Path('seen')\n"
        "seen.write_text(seen.read_text() + 'x' if seen.exists() else 'x')\n"
        "if len(seen.read_text()) < 3:\n    raise torch.OutOfMemoryError('CUDA out of memory.')\n"
        "model = torch.nn.Linear(4, 1)\noptimizer = torch.optim.SGD(model.parameters())\n"
        "model(torch.ones(2, 4)).sum().backward()\nsys.exit(len(sys.argv))\n"
    )
    command = [sys.executable, "-m", "autoremat", "run", "--budget=1GB", "--on-oom", "restart", "train.py", "a"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("starting again with") == 2
    assert "starting again with 772 MiB" in done.stderr


def test_ctrl_c_ends_a_run_with_130_and_without_a_traceback(script, tmp_path):
    script(
        "import pathlib, signal, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a job in the background has it ignored
        "pathlib.Path('started').touch()\ntime.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "autoremat", "run", "train.py"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    try:
        while not (tmp_path / "started").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=10)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in err

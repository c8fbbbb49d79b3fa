"""What the command line teaches: its options, an example in each help, completion, where errors say to read on."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from autoremat import __main__, _cli_complete, _cli_teach, target_names
from autoremat._cli import app
from autoremat._model_states import optimizer_factory
from autoremat._step import Precision

OPTIONS = {
    "plan": "--accumulate --allocator --batch --budget --budget-is --clip-grad-norm --ddp --dry-run --ema "
    "--for-compile --json --no-dry-run --objective --optimizer --output --precision --scaler --seq --shard --target "
    "-o model",
    "frontier": "--accumulate --batch --classic --ddp --ema --json --objective --optimizer --output --points "
    "--precision --scaler --seq --shard --target -o model",
    "why": "--accumulate --batch --budget --json --objective --optimizer --plan --precision --seq --step --target "
    "model",
    "verify": "--against-fp32 --batch --budget --ema --json --objective --optimizer --plan --precision --scaler --seq "
    "--target model",
    "measure": "--batch --budget --clip-grad-norm --ema --json --objective --optimizer --plan --precision --scaler "
    "--seq --target model",
    "report": "--accumulate --allocator --batch --budget --budget-is --clip-grad-norm --ddp --ema --format --frontier "
    "--no-frontier --objective --optimizer --output --plan --precision --scaler --seq --shard --target -o model",
    "export": "--batch --budget --json --optimizer --output --plan --precision --seq --target --to -o model",
    "advise": "--batch --budget --effective-batch --json --no-sizes --optimizer --picture --precision --seq --sizes "
    "--target model",
    "targets": "--json",
    "calibrate": "--dtypes --json",
    "presets": "",
    "demo": "--report --steps",
    "profile": "--accumulate --allocator --batch --budget --clip-grad-norm --dry-run --ema --json --optimizer --plan "
    "--precision --scaler --seq --target model",
    "run": "--budget --monitor --on-oom --plan --save-plan arguments script",
}


def test_the_commands_and_their_options_are_these():
    commands = typer.main.get_command(app).commands
    found = {
        name: " ".join(sorted(o for p in c.params for o in (*p.opts, *p.secondary_opts) if o != "--help"))
        for name, c in commands.items()
    }
    assert found == OPTIONS


def test_help_has_no_line_breaks_of_the_source(run):
    _, out, _ = run("run", "--help")
    lines = out[out.index(" The script runs") : out.index("autoremat could not")].splitlines()
    assert min(len(line.rstrip()) for line in lines[:-1]) > 60


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_help_has_an_example_that_parses_and_explains_words(run, name):
    code, out, _ = run(name, "--help")
    said = " ".join(out.split())
    assert code == 0
    example, words = _cli_teach.LESSONS[name]
    assert f"Example: {example}" in said
    assert all(word in _cli_teach.WORDS for word in words)
    assert all(f"{word}: " in said for word in words)
    command = typer.main.get_command(app).commands[name]
    arguments = shlex.split(example)
    assert arguments[:2] == ["autoremat", name]
    command.make_context(name, arguments[2:])


def test_the_shell_offers_models_functions_and_names(models, tmp_path, monkeypatch):
    assert "llama-3-8b" in _cli_complete.complete_model("llama")
    assert _cli_complete.complete_model(f"{models}:w") == [f"{models}:without_loss", f"{models}:wrong_batch"]
    monkeypatch.chdir(tmp_path)
    assert "cli_models.py:" in _cli_complete.complete_model("cli")
    assert _cli_complete.complete_model("none.py:") == []
    assert _cli_complete.complete_target("rtx30") == [n for n in target_names() if n.startswith("rtx30")] != []
    assert _cli_complete.complete_precision("amp") == ["amp-bf16", "amp-fp16"]
    assert "sgd-momentum" in _cli_complete.complete_optimizer("sgd")
    for name in _cli_complete.PRECISION_NAMES:
        Precision.parse(name)
    for name in _cli_complete.OPTIMIZER_NAMES[:-1]:
        optimizer_factory(name)


def test_a_wrong_option_exits_with_two():
    done = subprocess.run(
        [sys.executable, "-m", "autoremat", "plan", "gpt2", "--bugdet", "1"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "--budget" in done.stderr


def test_errors_say_where_to_read_on(run, models):
    _, _, err = run("plan", f"{models}:chain", "--budget", "1MB")
    assert err.rstrip().endswith("more: docs/memory.md")
    root = Path(__file__).parent.parent
    assert all((root / page).exists() for _, _, page in __main__.PAGES)

"""The documentation: its examples run, its commands exist, its maps match the code."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

import autoremat
from autoremat import get_target, preset_names
from autoremat._cli import app

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/design.md", "docs/memory.md", "docs/howto/watching.md"]


def _blocks(page: str, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


def test_the_example_in_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (example,) = _blocks("README.md", "python")
    exec(compile(example, "README.md", "exec"), {})
    assert (tmp_path / "plan.json").exists()


def test_the_example_about_memory_runs():
    (example,) = _blocks("docs/memory.md", "python")
    exec(compile(example, "docs/memory.md", "exec"), {})


def test_the_example_about_watching_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (example,) = _blocks("docs/howto/watching.md", "python")
    exec(compile(example, "docs/howto/watching.md", "exec"), {})


def test_the_two_commands_are_in_the_readme():
    blocks = _blocks("README.md", "sh")
    assert 'pip install -c constraints.txt -e ".[demo]" && autoremat demo\n' in blocks
    assert 'pip install -c constraints.txt -e ".[dev]" && scripts/check\n' in blocks


def _commands() -> list[str]:
    lines = [line for block in _blocks("README.md", "sh") for line in block.splitlines()]
    return [line.partition("#")[0].strip() for line in lines if line.startswith("autoremat ")]


@pytest.mark.parametrize("line", _commands())
def test_every_command_in_the_readme_parses(line):
    _, verb, *arguments = shlex.split(line)
    command = typer.main.get_command(app).commands[verb]
    context = command.make_context(verb, arguments)
    model, target = context.params.get("model"), context.params.get("target")
    assert model is None or ".py:" in model or model in preset_names()
    assert target is None or get_target(target)


def test_every_call_in_the_readme_is_public():
    names = set(re.findall(r"\bar\.(\w+)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert names <= set(autoremat.__all__)
    assert {"trace", "plan", "apply", "verify", "measure"} <= names


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("https://")]
    missing = [link for link in links if not ((ROOT / page).parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    named = re.findall(r"`((?:tests/)?\w+\.py)`", text)
    package = ROOT / "src" / "autoremat"
    homes = [ROOT, package, package / "runtime"]
    missing = [name for name in named if not any((home / name).exists() for home in homes)]
    assert missing == []

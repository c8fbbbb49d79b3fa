"""The documentation: its examples run, its commands exist, its maps match the code."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import autoremat
import browser
from autoremat import get_target, preset_names
from autoremat._cli import app

ROOT = Path(__file__).parent.parent
DOCS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *DOCS]
SLOW_PAGES = {"docs/howto/compile.md"}
"""Pages whose examples take more than ten seconds."""
NOT_RUN = "<!-- not run:"
"""Stands, with a reason, on the line before a block that cannot run in a test."""


def _blocks(page: str, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


def _run_blocks(page: str) -> list[str]:
    """The python blocks of a page that run."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [b.group(1) for b in blocks if NOT_RUN not in text[: b.start()].rstrip("\n").rpartition("\n")[2]]


def _pages_to_run() -> list:
    pages = [page for page in PAGES if _run_blocks(page)]
    return [pytest.param(page, marks=pytest.mark.slow if page in SLOW_PAGES else ()) for page in pages]


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's own import
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")  # Lightning's use
@pytest.mark.parametrize("page", _pages_to_run())
def test_the_examples_of_a_page_run_one_after_the_other(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for number, block in enumerate(_run_blocks(page), 1):
        exec(compile(block, f"{page}, example {number}", "exec"), names)


def test_the_two_commands_are_in_the_readme():
    blocks = _blocks("README.md", "sh")
    assert 'pip install -c constraints.txt -e ".[demo]" && autoremat demo\n' in blocks
    assert 'pip install -c constraints.txt -e ".[dev]" && scripts/check\n' in blocks


def _commands() -> list[str]:
    lines = [line for page in PAGES for block in _blocks(page, "sh") for line in block.splitlines()]
    found = [line.partition("#")[0].strip() for line in lines if line.startswith("autoremat ")]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("line", _commands())
def test_every_command_in_the_docs_parses(line):
    _, verb, *arguments = shlex.split(line)
    command = typer.main.get_command(app).commands[verb]
    context = command.make_context(verb, arguments)
    model, target = context.params.get("model"), context.params.get("target")
    assert model is None or ".py:" in model or model in preset_names()
    assert target is None or target == "here" or target.endswith(".toml") or get_target(target)


@pytest.mark.parametrize("page", PAGES)
def test_every_call_on_a_page_is_public(page):
    names = set(re.findall(r"\bar\.(\w+)", (ROOT / page).read_text(encoding="utf-8")))
    assert names <= {*autoremat.__all__, "integrations"}
    assert page != "README.md" or {"trace", "plan", "apply", "verify", "measure"} <= names


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("https://")]
    missing = [link for link in links if link and not ((ROOT / page).parent / link).exists()]
    assert set(missing) <= {"results.md", "contributing.md", "changelog.md"}, "these are made when the site is built"


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    named = re.findall(r"`((?:tests/)?\w+\.py)`", text)
    package = ROOT / "src" / "autoremat"
    homes = [ROOT, *(folder for folder in (package, *package.rglob("*")) if folder.is_dir())]
    missing = [name for name in named if not any((home / name).exists() for home in homes)]
    assert missing == []


def test_every_public_name_is_in_the_reference_once(hooks):
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "reference").glob("*.md"))
    listed = re.findall(r"^::: autoremat\.(\w+)$", pages, re.MULTILINE)
    assert sorted([*listed, *hooks.unlisted_names()]) == sorted(autoremat.__all__)
    assert len(listed) > 50


def _messages() -> list[str]:
    """Texts in the package's source, with … for what is put in."""
    found = []
    for path in (ROOT / "src" / "autoremat").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def _is_quoted(message: str, sources: list[str]) -> bool:
    pieces = [piece.strip() for piece in message.split("…") if piece.strip()]
    pattern = re.compile(".*".join(re.escape(piece) for piece in pieces), re.DOTALL)
    return any(pattern.search(source) for source in sources)


def test_messages_in_troubleshooting_are_those_of_the_source():
    messages = [" ".join(block.split()) for block in _blocks("docs/troubleshooting.md", "text")]
    assert len(messages) > 12
    sources = _messages()
    assert [message for message in messages if not _is_quoted(message, sources)] == []
    assert not _is_quoted("No plan for … fits into … at all", sources)


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "scripts" / "docs_hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("*.json")), ids=lambda path: path.stem)
def test_the_results_page_says_what_was_measured_and_where(hooks, path):
    page = hooks.results_page()
    found = json.loads(path.read_text(encoding="utf-8"))
    assert f"[All figures](results/{path.name})" in page
    start = page.index(f"(results/{path.name})")
    part = page[max(0, start - 2_000) :]
    if isinstance(found, dict):
        machine = found.get("machine", "not stated")
        stated = [machine] if isinstance(machine, str) else [v for v in machine.values() if isinstance(v, str | int)]
        assert all(str(value) in part for value in stated)
        rows = next((v for v in found.values() if isinstance(v, list) and v and isinstance(v[0], dict)), [])
        sizes = [value for row in rows for key, value in row.items() if key.endswith("_bytes") and value]
        assert all(f"{size:,} (" in part for size in sizes)


def test_the_results_page_reads_any_shape(hooks):
    found = {"machine": {"cores": 2}, "num_ok": 3, "rows": [{"a_bytes": 2048, "b_s": None}, {"a_bytes": 1, "deep": {}}]}
    text = "\n".join(hooks._tables(found | {"more": {"x": {"y": 0.25}}, "far": {"near": {"z": [1]}, "one": 1}}))
    for line in ("| num ok | 3 |", "| 2,048 (2.00 KiB) |", "| x | 0.25 |", "| one | 1 |"):
        assert line in text
    assert "deep" not in text


@pytest.mark.slow
def test_the_site_builds_without_warnings_and_shows_offline(tmp_path):
    site = tmp_path / "site"
    subprocess.run([ROOT / "scripts" / "docs", site], check=True, env=os.environ | {"PYTHON": sys.executable})
    reference = "".join(path.read_text(encoding="utf-8") for path in (site / "reference").glob("*.html"))
    assert [name for name in autoremat.__all__ if f'id="autoremat.{name}"' not in reference] == []
    if browser.CHROMIUM is None:
        return
    with browser.chromium() as chromium:
        for name in ("index", "tutorial", "results", "reference/plan"):
            with browser.opened(chromium, site / f"{name}.html") as (page, seen):
                page.wait_for_selector("article h1")
                assert seen.errors == []
                assert [url for url in seen.requests if not url.startswith("file://")] == []

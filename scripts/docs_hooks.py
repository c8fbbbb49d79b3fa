"""What mkdocs asks while it builds the site: pages that are made from other files, and where every page stands.

- How-tos, reference pages and whatever else is in ``docs/`` come into the navigation by themselves.
- ``results.md`` is made from ``benchmarks/results/*.json``, so that no figure can drift from what was measured.
- Links that lead out of ``docs/`` in the repository lead to the site's own copies.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import autoremat
from autoremat._units import format_bytes, format_flops, format_seconds

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
HOWTO_ORDER = ("own-loop", "trainer", "lightning", "compile", "out-of-memory", "watching", "run", "plan-for-a-cluster")
REFERENCE_ORDER = ("plan", "run", "watch", "evidence", "results", "targets", "errors")
COPIES = {"contributing.md": ROOT / "CONTRIBUTING.md", "changelog.md": ROOT / "CHANGELOG.md"}
"""Pages of the site that are files of the repository."""
HOMES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Where the site has what a link to the repository's root means."""
MORE = "reference/more.md"
"""Page of the public names that no page in ``docs/reference`` lists yet."""
LONG_TABLE = 12
"""Tables with more rows are closed at first."""
_PREFACE = (
    "Every figure on this page is read from `benchmarks/results/` when the site is built. Bytes and FLOPs are exact "
    "and tested; times are of the machine that is named, which did other work beside them."
)


def on_config(config: Any) -> Any:
    """Put every page into the navigation."""
    docs = Path(config["docs_dir"])
    sections = {name: value for item in config["nav"] if isinstance(item, dict) for name, value in item.items()}
    sections["How to"] += _ordered(docs / "howto", HOWTO_ORDER)
    sections["Reference"] += _ordered(docs / "reference", REFERENCE_ORDER) + ([MORE] if unlisted_names() else [])
    there = set(re.findall(r"[\w./-]+\.md", json.dumps(config["nav"])))
    sections["Project"] += sorted(path.name for path in docs.glob("*.md") if path.name not in there)
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and files that are made from elsewhere."""
    pages = {name: path.read_text(encoding="utf-8") for name, path in COPIES.items()}
    pages["results.md"] = results_page()
    if names := unlisted_names():
        pages[MORE] = "# More\n\n" + "".join(f"::: autoremat.{name}\n" for name in names)
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    for path in sorted(RESULTS.glob("*.json")):
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links to files of the repository into links to the site's copies."""
    up = "../" * page.file.src_uri.count("/")

    def site_link(match: re.Match[str]) -> str:
        target = match.group(2).removeprefix("docs/")
        if target.startswith("benchmarks/results/"):
            target = target.removeprefix("benchmarks/")
        return f"]({up}{HOMES.get(target, target)})"

    inside = r"(README\.md|CONTRIBUTING\.md|CHANGELOG\.md|benchmarks/results/[\w.-]+|docs/[\w./-]+)"
    way_out = "()" if page.file.src_uri in COPIES else r"((?:\.\./)+)"
    return re.sub(rf"\]\({way_out}{inside}\)", site_link, markdown)


def unlisted_names() -> list[str]:
    """Public names that no page of the reference lists."""
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "reference").glob("*.md"))
    listed = set(re.findall(r"^::: autoremat\.(\w+)$", pages, re.MULTILINE))
    return [name for name in autoremat.__all__ if name not in listed]


def _ordered(folder: Path, order: tuple[str, ...]) -> list[str]:
    names = sorted(path.stem for path in folder.glob("*.md"))
    names.sort(key=lambda name: order.index(name) if name in order else len(order))
    return [f"{folder.name}/{name}.md" for name in names]


def results_page() -> str:
    """The figures of all benchmarks, each with its machine and the command that made it."""
    parts = [f"# Results\n\n{_PREFACE}\n"]
    for path in sorted(RESULTS.glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        parts.append(f"## {path.stem.replace('_', ' ').capitalize()}\n\n{_about(path.stem)}\n")
        if isinstance(found, dict):
            parts.append(f"Machine: {_machine(found)}. [All figures](results/{path.name}).\n")
            parts += _tables(found)
        else:
            parts += [f"[All figures](results/{path.name}).\n", *_tables({"rows": found})]
    return "\n".join(parts)


def _about(name: str) -> str:
    """What a benchmark measures: the first paragraph of its docstring, and how to run it."""
    script = ROOT / "benchmarks" / f"{name}.py"
    if not script.exists():
        return ""
    text = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    first = " ".join(text.split("\n\n")[0].split()).replace("``", "`").rstrip(".")
    return f"{first}.\n\n`python benchmarks/{name}.py`"


def _machine(found: dict[str, Any]) -> str:
    machine = found.get("machine", "not stated")
    if isinstance(machine, dict):
        return ", ".join(f"{key.replace('_', ' ')} {_cell(key, value)}" for key, value in machine.items())
    return str(machine)


def _tables(found: dict[str, Any], title: str = "") -> list[str]:
    """Scalars as one table, lists of records as one each; what is nested deeper is in the file."""
    parts = []
    scalars = {key: value for key, value in found.items() if key != "machine" and _is_scalar(value)}
    if scalars:
        parts.append(_table(title, ["", "value"], [[_words(key), _cell(key, value)] for key, value in scalars.items()]))
    for key, value in found.items():
        if key == "machine" or _is_scalar(value) or not value:
            continue
        name = f"{title}, {_words(key)}" if title else _words(key)
        if isinstance(value, list) and all(isinstance(row, dict) for row in value):
            parts.append(_records(name, value))
        elif isinstance(value, dict) and all(isinstance(row, dict) and row for row in value.values()):
            rows = [{"": inner} | record for inner, record in value.items()]
            parts.append(_records(name, rows))
        elif isinstance(value, dict):
            parts += _tables(value, name)
    return parts


def _records(title: str, rows: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(key for row in rows for key, value in row.items() if _is_scalar(value)))
    columns = [c for c in columns if any(row.get(c) not in (None, "") for row in rows)]
    return _table(title, list(map(_words, columns)), [[_cell(c, row.get(c)) for c in columns] for row in rows])


def _table(title: str, head: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    if len(rows) <= LONG_TABLE:
        return "\n".join([*([f"**{title}**\n"] if title else []), *lines, ""])
    return "\n".join([f'??? note "{title or "figures"}: {len(rows)} rows"\n', *(f"    {line}" for line in lines), ""])


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _cell(name: str, value: Any) -> str:
    """A figure in words, by the suffix of its name."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("_bytes"):
        return f"{value:,} ({format_bytes(value)})" if isinstance(value, int) else format_bytes(value)
    if name.endswith("_s"):
        return format_seconds(value)
    plain = f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    return format_flops(value) if name.endswith("flops") and value > 1000 else plain

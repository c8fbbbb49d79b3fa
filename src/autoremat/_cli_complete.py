"""What the shell offers when Tab is pressed: presets, targets, functions of a file. Runs no code of the user's."""

from __future__ import annotations

import ast
from pathlib import Path

from autoremat._targets import target_names

PRECISION_NAMES = ("fp32", "bf16", "fp16", "amp-bf16", "amp-fp16")
OPTIMIZER_NAMES = ("adamw", "adam", "sgd", "sgd-momentum", "adafactor", "none")


def complete_model(incomplete: str) -> list[str]:
    """Presets, Python files, and behind the colon the functions of one."""
    path, colon, start = incomplete.rpartition(":")
    if colon and path.endswith(".py"):
        return [f"{path}:{name}" for name in functions_in(Path(path)) if name.startswith(start)]
    from autoremat._presets import preset_names

    found = [name for name in preset_names() if name.startswith(incomplete)]
    folder, _, begin = incomplete.rpartition("/")
    for file in sorted(Path(folder or ".").glob("*.py")):
        if file.name.startswith(begin):
            found.append(f"{folder}/{file.name}:" if folder else f"{file.name}:")
    return found


def functions_in(path: Path) -> list[str]:
    """Names of the functions that a file defines and that need no arguments but ``batch`` and ``seq``."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return []
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and _needs_nothing(node.args)]


def _needs_nothing(arguments: ast.arguments) -> bool:
    required = [*arguments.posonlyargs, *arguments.args]
    required = required[: len(required) - len(arguments.defaults)]
    return all(argument.arg in {"batch", "seq"} for argument in required)


def complete_target(incomplete: str) -> list[str]:
    """Names of targets."""
    return [name for name in ("here", *target_names()) if name.startswith(incomplete)]


def complete_precision(incomplete: str) -> list[str]:
    """Names of precisions."""
    return [name for name in PRECISION_NAMES if name.startswith(incomplete)]


def complete_optimizer(incomplete: str) -> list[str]:
    """Names of optimizers."""
    return [name for name in OPTIMIZER_NAMES if name.startswith(incomplete)]

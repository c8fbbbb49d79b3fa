"""Which line of the user's or a model library's code is running: the innermost frame that is not torch's or ours."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import CodeType, FrameType

import torch

_SKIPPED = ("<", *(f"{Path(module).parent}/" for module in (torch.__file__, __file__)))
_PYTHON = sysconfig.get_path("stdlib") + "/"
_INSTALLED = "site-packages/"

_names: dict[CodeType, str] = {}
_lines: dict[tuple[CodeType, int], str] = {}


def source_line() -> str:
    """``"transformers/models/gpt2/modeling_gpt2.py:310"``: file as it is imported, and line; "" if there is none.

    Example:
        >>> from autoremat import trace
        >>> trace(torch.nn.Linear(2, 2), torch.ones(1, 2), loss=lambda y: y.sum()).ops[0].line.endswith(".py:0")
        False
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        name = _names.get(code)
        if name is None:
            name = _names[code] = _name(code.co_filename)
        if name:
            key = code, frame.f_lineno
            return _lines.get(key) or _lines.setdefault(key, f"{name}:{frame.f_lineno}")
        frame = frame.f_back
    return ""


def _name(path: str) -> str:
    """A file's path below the entry of ``sys.path`` that it is imported from; "" for torch, this package and Python."""
    if path.startswith(_SKIPPED) or (path.startswith(_PYTHON) and _INSTALLED not in path):
        return ""
    roots = [root for entry in sys.path if entry and path.startswith(root := entry.rstrip("/") + "/")]
    return path[len(max(roots, key=len)) :] if roots else path

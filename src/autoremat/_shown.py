"""Gives results a table in terminals (``rich.print``) and in notebooks.

Tables live with the other renderers, far above the data. Which one shows a class is looked up by name when somebody
asks, as the package looks its own names up, so that data imports no renderer.
"""

from __future__ import annotations

import importlib
import io
from typing import Any


class Shown:
    """Makes a result show itself by the tables that `_show.py` has for its class; by its ``repr`` where it has none."""

    __slots__ = ()

    def __rich__(self) -> Any:
        """What ``rich`` prints."""
        tables = importlib.import_module("autoremat._show").shown(self)
        return importlib.import_module("rich.text").Text(repr(self)) if tables is None else tables

    def _repr_html_(self) -> str | None:
        """What notebooks show; None leaves it to ``repr``."""
        tables = self.__rich__()
        if isinstance(tables, importlib.import_module("rich.text").Text):
            return None
        console = importlib.import_module("rich.console").Console(
            record=True, file=io.StringIO(), width=110, color_system="truecolor", force_jupyter=False
        )
        console.print(tables)
        style = "white-space:pre;overflow-x:auto;line-height:normal;font-family:Menlo,'DejaVu Sans Mono',monospace"
        text: str = console.export_html(inline_styles=True, code_format=f'<pre style="{style}">{{code}}</pre>')
        return text

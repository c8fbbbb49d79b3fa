"""``autoremat`` and ``python -m autoremat``: the command line, with errors as one message and exit code 2."""

from __future__ import annotations

import os
import sys

from autoremat._cli import app
from autoremat._errors import AutorematError, BudgetError, BudgetInfeasible

EXIT_ERROR = 2


PAGES = (
    ("run", AutorematError, "docs/howto/run.md"),
    ("", BudgetInfeasible, "docs/memory.md"),
    ("", BudgetError, "docs/memory.md"),
    ("calibrate", AutorematError, "docs/targets.md"),
    ("targets", AutorematError, "docs/targets.md"),
)
"""Where to read on: for a command ("" for any) and a kind of error."""


def _page_for(error: AutorematError) -> str:
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    pages = (page for name, kind, page in PAGES if name in {"", command} and isinstance(error, kind))
    page = next(pages, None)
    return "" if page is None else f"more: {page}\n"


def main() -> None:
    """Run the command line and exit: 0 for success, 1 for a failed check, 2 for an error."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler reports to stderr otherwise
    try:
        app(prog_name="autoremat")
    except AutorematError as error:
        sys.stderr.write(f"error: {error}\n{_page_for(error)}")
        sys.exit(EXIT_ERROR)


if __name__ == "__main__":
    main()

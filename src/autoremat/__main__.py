"""``autoremat`` and ``python -m autoremat``: the command line, with errors as one message and exit code 2."""

from __future__ import annotations

import os
import sys

from autoremat._cli import app
from autoremat._errors import AutorematError

EXIT_ERROR = 2


def main() -> None:
    """Run the command line and exit: 0 for success, 1 for a failed check, 2 for an error."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler reports to stderr otherwise
    try:
        app(prog_name="autoremat")
    except AutorematError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(EXIT_ERROR)


if __name__ == "__main__":
    main()

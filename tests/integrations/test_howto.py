"""The code in the how-to pages runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HOWTO = Path(__file__).parents[2] / "docs" / "howto"
PAGES = ["own-loop", "trainer", "lightning", "out-of-memory"]


@pytest.mark.filterwarnings("ignore")  # those of the libraries
@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page):
    (code,) = re.findall(r"^```python\n(.*?)^```", (HOWTO / f"{page}.md").read_text(), re.MULTILINE | re.DOTALL)
    exec(compile(code, f"{page}.md", "exec"), {"__name__": "howto"})

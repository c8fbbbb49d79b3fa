"""A headless Chromium for tests of pages: offline, with everything that it complains about or asks for written down."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH: pages are not looked at in a browser")


@dataclass
class Seen:
    """What a page said and asked for.

    Attributes:
        errors: Console errors and warnings, and exceptions.
        requests: Addresses that were asked for, the page's own left out.
    """

    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@contextmanager
def chromium() -> Iterator[object]:
    """Yield a playwright browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@contextmanager
def opened(browser, path, *, scheme: str = "light", width: int = 1200, height: int = 900) -> Iterator[tuple]:
    """Yield a file as an open page, offline, and what is `Seen` of it."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, offline=True)
    page, seen = context.new_page(), Seen()
    page.on(
        "console", lambda message: seen.errors.append(message.text) if message.type in ("error", "warning") else None
    )
    page.on("pageerror", lambda error: seen.errors.append(str(error)))
    page.on("request", lambda request: seen.requests.append(request.url))
    page.goto(path.as_uri())
    seen.requests = [url for url in seen.requests if url != path.as_uri() and not url.startswith("data:")]
    yield page, seen
    context.close()


def scripts() -> list[str]:
    """The scripts of reports, as their files have them."""
    from importlib.resources import files

    return [
        file.read_text(encoding="utf-8") for file in (files("autoremat") / "_page").iterdir() if file.name[-3:] == ".js"
    ]

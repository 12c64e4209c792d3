"""For tests: somebody who looks at the live page in Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from browser import browsing
from page_person import watched as problems_of
from peers import plan_text
from playwright.sync_api import Page, expect
from web_sdk import FOLDER, node


@contextmanager
def page_at(address: str, folder: Path, **options: Any) -> Iterator[Page]:
    """A tab with the page. Errors of its scripts, and what its policy forbids, fail the test."""
    with browsing(folder / "profile", **options) as browser:
        page = browser.pages[0]
        problems = problems_of(page)
        page.goto(address)
        yield page
        assert problems == []


def sign_in(page: Page, token: str) -> None:
    page.get_by_label("Administrator's token").fill(token)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", name="Runs", level=1)).to_be_visible()


def axe_finds(page: Page) -> list[str]:
    """Return what axe finds wrong with what the page shows now."""
    node()
    page.evaluate((FOLDER / "node_modules/axe-core/axe.min.js").read_text("utf-8"))
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{each['id']}: {each['help']}: {node['html'][:200]} {node['failureSummary'][:300]}"
        for each in found["violations"]
        for node in each["nodes"]
    ]


def write_plans(folder: Path, bundle: Path, *names: str, **settings: Any) -> None:
    """Write a plan for each name, with a data directory of its own."""
    for name in names:
        text = plan_text(bundle, folder / f"{name}.run", **settings)
        (folder / f"{name}.toml").write_text(text.replace('"test"', f'"{name}"', 1))

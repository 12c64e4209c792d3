"""The live page in Chromium, on a coordinator whose devices speak by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from browser import browsing
from peers import PlanMaker, update_of
from playwright.sync_api import ConsoleMessage, Page, expect
from watched import Watched

pytestmark = pytest.mark.slow


@contextmanager
def page_of(watched: Watched, folder: Path, **options: Any) -> Iterator[Page]:
    """A tab with the page. Errors of scripts, and whatever the policy refuses, fail the test."""
    problems: list[str] = []

    def said(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            problems.append(message.text)

    with browsing(folder / "profile", **options) as browser:
        page = browser.pages[0]
        page.on("console", said)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(watched.address)
        yield page
        assert [text for text in problems if "401" not in text] == []


def sign_in(page: Page, token: str) -> None:
    page.get_by_label("Administrator's token").fill(token)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", name="Runs")).to_be_visible()


@pytest.fixture
def watched(make_plan: PlanMaker, tmp_path: Path) -> Iterator[Watched]:
    with Watched(tmp_path, make_plan(round__goal=2, round__minimum=1)) as found:
        yield found


def test_a_round_is_seen_as_it_goes(watched: Watched, tmp_path: Path) -> None:
    with page_of(watched, tmp_path) as page:
        page.get_by_label("Administrator's token").fill("x" * 43)
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("alert")).to_have_text(
            "this token is not known here, or it has expired"
        )
        sign_in(page, watched.token("ada"))
        page.get_by_role("link", name="test").click()
        expect(page.get_by_role("heading", name="test")).to_be_visible()
        expect(page.get_by_text("A round needs 1 device")).to_be_visible()
        first, second = watched.join("roof-1"), watched.join("roof-2")
        watched.do(first.do_round(update_of(1.0)))
        expect(page.get_by_text("1 of 2 reports", exact=True)).to_be_visible()
        watched.do(second.do_round(update_of(1.0)))
        expect(page.get_by_role("img", name="Loss; newest: loss 0.7")).to_be_visible()
        expect(page.get_by_text("ada (operates)")).to_be_visible()
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_label("Administrator's token")).to_be_visible()
        page.reload()
        expect(page.get_by_label("Administrator's token")).to_be_visible()

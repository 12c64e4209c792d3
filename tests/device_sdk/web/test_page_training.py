"""The page for people against a real coordinator, by somebody who has a keyboard and no mouse."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browser import browsing
from page_person import axe_problems, draw_with_keys, tab_to, watched
from page_site import page_site, public_status, write_service
from peers import plan_text
from playwright.sync_api import Page, expect
from processes import free_port, processes, wait_for


def shared_model_says(page: Page) -> str:
    """Ask. While a round's model is arriving, the one before is gone."""
    page.keyboard.press("Enter")
    hint = page.locator("#hint")
    expect(hint).to_have_text(re.compile("^The shared model "))
    return hint.inner_text()


@pytest.mark.slow
def test_a_person_with_a_keyboard_joins_draws_trains_and_erases(
    cases: Callable[[str], Any], tmp_path: Path
) -> None:
    port, plan, run_dir = free_port(), tmp_path / "plan.toml", tmp_path / "run"
    plan.write_text(
        plan_text(
            cases("cnn").path,
            run_dir,
            local__lr=0.1,
            local__epochs=30,
            local__batch_size=1,
            round__goal=1,
            round__grace=60.0,
            round__deadline=600.0,
            round__gather=0.5,
        )
    )
    with (
        page_site(f":{port}", lambda: public_status(run_dir)) as site,
        processes(tmp_path) as run,
        browsing(tmp_path / "profile", viewport={"width": 360, "height": 740}) as browser,
    ):
        token = write_service(tmp_path, port, site)
        run.coordinator(plan)
        page = browser.pages[0]
        problems = watched(page)

        page.goto(f"{site.origin}/#token={token}")
        expect(page.get_by_role("heading", name="Before you join")).to_be_visible()
        assert page.url == f"{site.origin}/"
        assert page.evaluate("indexedDB.databases().then(found => found.map(one => one.name))") == [
            "fleetlearn-page"
        ]
        assert (
            page.evaluate("navigator.serviceWorker.getRegistrations().then(found => found.length)")
            == 0
        )
        tab_to(page, "Agree and join")
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="Draw a digit")).to_be_focused()

        tab_to(page, "pad")
        for digit in (1, 7, 1, 7):
            draw_with_keys(page, digit)
        expect(page.locator("#start")).to_be_disabled()  # it is too early
        draw_with_keys(page, 7)
        tab_to(page, "Start training")
        page.keyboard.press("Enter")
        expect(page.locator("#pause")).to_be_focused()
        wait_for(
            lambda: int(page.locator("#accepted").inner_text()) >= 2,
            "two updates of the page's device",
        )
        count, sent = page.evaluate(
            "['accepted', 'sent'].map(id => document.getElementById(id).textContent)"
        )
        assert sent == f"{round(int(count) * 22_602 * 4 / 1024)} KiB"
        page.locator("#chart svg").wait_for()

        tab_to(page, "pad")
        page.keyboard.press("Space")
        for _ in range(5):
            page.keyboard.press("Shift+ArrowDown")
        tab_to(page, "Ask the shared model")
        wait_for(
            lambda: shared_model_says(page) == "The shared model says: 1.",
            "what the shared model says",
        )
        assert axe_problems(page) == []

        tab_to(page, "Pause")
        page.keyboard.press("Enter")
        expect(page.locator("#phase")).to_have_text("Paused")
        expect(page.locator("#resume")).to_be_focused()
        paused = int(page.locator("#accepted").inner_text())
        page.reload()  # a page that was paused stays so, and knows what it did
        expect(page.locator("#phase")).to_have_text("Paused")
        expect(page.locator("#accepted")).to_have_text(str(paused))

        tab_to(page, "Resume")
        page.keyboard.press("Enter")
        wait_for(
            lambda: int(page.locator("#accepted").inner_text()) > paused,
            "an update after the pause",
        )
        steps = page.locator("#steps-text")
        expect(steps).to_have_text(re.compile(" of 150$"))  # 30 epochs of five drawings
        tab_to(page, "pad")
        draw_with_keys(page, 1)
        expect(steps).to_have_text(re.compile(" of 180$"))
        for _ in range(2):
            tab_to(page, "gallery")
            page.keyboard.press("Enter")
        # four are too few
        expect(page.locator("#phase")).to_have_text("Draw 1 more digit to begin")
        tab_to(page, "pad")
        draw_with_keys(page, 1)
        tab_to(page, "Start training")
        page.keyboard.press("Enter")
        expect(steps).to_have_text(re.compile(" of 150$"))
        tab_to(page, "Leave")
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="Before you join")).to_be_focused()
        tab_to(page, "Agree and join")  # without a token: the device is enrolled
        page.keyboard.press("Enter")
        tab_to(page, "Start training")
        page.keyboard.press("Enter")
        wait_for(
            lambda: int(page.locator("#accepted").inner_text()) >= 1,
            "an update of who joined again",
        )

        tab_to(page, "Erase everything")
        page.keyboard.press("Enter")
        tab_to(page, "sure-yes")
        page.keyboard.press("Enter")
        expect(page.get_by_text("Everything was erased.")).to_be_visible()
        left = page.evaluate("indexedDB.databases().then(found => found.map(one => one.name))")
        assert left == ["fleetlearn-page"]  # the consent view's, empty
        page.get_by_role("button", name="Agree and join").click()
        expect(page.locator("#count")).to_have_text("0")
        assert problems == []

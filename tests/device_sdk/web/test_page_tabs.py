"""The page for people in two tabs: what one of them is told holds in the other too, also where that
one was frozen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from browser import browsing
from page_person import PATIENCE, draw, join, watched
from page_site import page_site, public_status, write_service
from peers import plan_text
from playwright.sync_api import BrowserContext, Page, expect
from processes import free_port, processes, status_of, wait_for

pytestmark = pytest.mark.slow

EPOCHS = 100
"""Steps are told a few times a second at most: with 10 epochs a task is over before the first."""
DATABASES = "indexedDB.databases().then(found => found.map(one => one.name).sort())"


class Tabs(NamedTuple):
    context: BrowserContext
    origin: str
    trains: Page
    """The tab that has the device."""
    other: Page
    version: Callable[[], int]
    """Return the newest model's version: each round has one update, of this device."""
    problems: list[str]

    def wait_for_update(self) -> None:
        before = self.version()
        wait_for(lambda: self.version() > before, "another update")


@pytest.fixture
def tabs(cases: Callable[[str], Any], tmp_path: Path) -> Iterator[Tabs]:
    """Two tabs of one person, with six drawings, of which one trains."""
    port, plan, run_dir = free_port(), tmp_path / "plan.toml", tmp_path / "run"
    plan.write_text(
        plan_text(
            cases("cnn").path,
            run_dir,
            local__lr=0.1,
            local__epochs=EPOCHS,
            local__batch_size=1,
            round__goal=1,
            round__grace=60.0,
            round__deadline=600.0,
            round__gather=0.2,
        )
    )

    def version() -> int:
        found = status_of(run_dir)
        return 0 if found is None else found.version

    with (
        page_site(f":{port}", lambda: public_status(run_dir)) as site,
        processes(tmp_path) as run,
        browsing(tmp_path / "profile") as context,
    ):
        token = write_service(tmp_path, port, site)
        run.coordinator(plan)
        trains = context.pages[0]
        problems = watched(trains)
        join(trains, f"{site.origin}/#token={token}")
        for digit in (1, 7, 4, 1, 7, 4):
            draw(trains, digit)
        trains.get_by_role("button", name="Start training").click()
        wait_for(lambda: version() >= 1, "an update")
        other = context.new_page()
        problems_of_other = watched(other)
        other.goto(site.origin)
        expect(other.locator("#pill-text")).to_have_text("Other tab")
        found = Tabs(context, site.origin, trains, other, version, problems)
        yield found
        assert [*problems, *problems_of_other] == []


def steps_of(page: Page) -> str:
    return page.locator("#steps-text").inner_text()


def has_no_worker(page: Page) -> bool:
    """Whether no device is in the tab."""
    page.evaluate("0")  # Playwright hears of workers' ends only while it is asked something
    return page.workers == []


def test_a_pause_and_its_end(tabs: Tabs) -> None:
    tabs.other.get_by_role("button", name="Pause").click()
    expect(tabs.trains.locator("#phase")).to_have_text("Paused")
    paused = tabs.version()
    expect(tabs.other.locator("#phase")).to_have_text("Paused")
    tabs.trains.reload()  # and it stays so
    expect(tabs.trains.locator("#phase")).to_have_text("Paused")
    assert tabs.version() == paused
    tabs.other.get_by_role("button", name="Resume").click()
    expect(tabs.trains.locator("#pause")).to_be_visible()
    tabs.wait_for_update()


def test_a_deleted_drawing_is_trained_on_no_more(tabs: Tabs) -> None:
    expect(tabs.trains.locator("#count")).to_have_text("6")
    tabs.other.get_by_role("button", name="Delete drawing 1 of 6").click()
    expect(tabs.trains.locator("#count")).to_have_text("5")
    # The device begins again with the five, and the tab that waited for it may get it.
    five = f" of {EPOCHS * 5}"
    wait_for(lambda: any(five in steps_of(page) for page in (tabs.trains, tabs.other)), five)
    tabs.wait_for_update()
    tabs.other.get_by_role("button", name="Delete drawing 1 of 5").click()
    expect(tabs.trains.locator("#phase")).to_have_text("Draw 1 more digit to begin")
    expect(tabs.other.locator("#start")).to_be_disabled()


def test_leaving(tabs: Tabs) -> None:
    tabs.other.get_by_role("button", name="Leave").click()
    expect(tabs.other.get_by_role("heading", name="Before you join")).to_be_visible()
    expect(tabs.trains.get_by_role("heading", name="Before you join")).to_be_visible()
    wait_for(lambda: has_no_worker(tabs.trains), "an end of the worker")


def test_erasing_leaves_nothing_and_nothing_comes_back(tabs: Tabs) -> None:
    tabs.other.get_by_role("button", name="Erase everything").click()
    tabs.other.get_by_role("button", name="Erase", exact=True).click()
    for page in (tabs.other, tabs.trains):
        expect(page.get_by_text("Everything was erased.")).to_be_visible()
        expect(page.get_by_role("heading", name="Before you join")).to_be_visible()
        assert has_no_worker(page)
    assert tabs.other.evaluate(DATABASES) == ["fleetlearn-page"]  # the consent view's, empty
    tabs.other.get_by_role("button", name="Agree and join").click()
    expect(tabs.other.locator("#count")).to_have_text("0")


def test_a_tab_that_was_frozen_sends_nothing_after_a_pause(tabs: Tabs) -> None:
    life = tabs.context.new_cdp_session(tabs.trains)
    life.send("Page.setWebLifecycleState", {"state": "frozen"})
    tabs.other.get_by_role("button", name="Pause").click()
    expect(tabs.other.locator("#phase")).to_have_text("Paused")
    paused = tabs.version()
    life.send("Page.setWebLifecycleState", {"state": "active"})
    expect(tabs.trains.locator("#phase")).to_have_text("Paused")
    assert tabs.version() == paused
    tabs.other.get_by_role("button", name="Resume").click()
    tabs.wait_for_update()


def test_a_tab_that_was_frozen_lets_go_of_what_was_erased(tabs: Tabs) -> None:
    life = tabs.context.new_cdp_session(tabs.trains)
    life.send("Page.setWebLifecycleState", {"state": "frozen"})
    tabs.other.get_by_role("button", name="Erase everything").click()
    tabs.other.get_by_role("button", name="Erase", exact=True).click()
    expect(tabs.other.get_by_text("Everything was erased.")).to_be_visible()
    erased = tabs.version()
    life.send("Page.setWebLifecycleState", {"state": "active"})
    expect(tabs.trains.get_by_role("heading", name="Before you join")).to_be_visible()
    wait_for(
        lambda: tabs.trains.evaluate(DATABASES) == ["fleetlearn-page"], "an end of the databases"
    )
    assert tabs.version() == erased


def test_a_second_tab_joins_the_training_and_takes_over(tabs: Tabs) -> None:
    tabs.trains.close()
    expect(tabs.other.locator("#pill-text")).not_to_have_text("Other tab", timeout=PATIENCE)
    tabs.wait_for_update()

"""A canary on the live page, in Chromium: what both of its runs show, each button, and how it
looks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Literal

import pytest
from fleetlearn_coordinator import read_model
from fleetlearn_coordinator.service.canary.about import CanaryAsked
from fleetlearn_coordinator.service.canary.begin import begin_canary
from fleetlearn_coordinator.service.several.operations import Operations
from fleetlearn_coordinator.storage.runs import Runs
from fleetlearn_protocol.errors import FleetError
from live_page_person import axe_finds, page_at, write_plans
from peers import update_of
from playwright.sync_api import expect
from processes import wait_for
from watched import Watched

pytestmark = pytest.mark.slow
SHOTS = os.environ.get("LIVE_PAGE_SHOTS")
STEPS = {"steps": [0.5, 1.0], "tasks": 100}


@pytest.fixture
def host(bundle_path: Path, tmp_path: Path) -> Iterator[Watched]:
    """A host with the run a, which has a canary that a device serves."""
    write_plans(tmp_path, bundle_path, "a", round__goal=1)
    runs = Runs(tmp_path / "runs")
    runs.add("a", tmp_path / "a.toml")
    with Watched(tmp_path, None) as found:
        wait_for(lambda: has_a_model(tmp_path / "a.run"), "the run's first model")
        with closing(Runs(tmp_path / "runs")) as runs:
            operations = Operations(found.service, runs, None, "ada")
            begin_canary(operations, "a", CanaryAsked(model="0", settings=STEPS))
        peer = found.join("roof-1")
        for _ in range(3):
            found.do(peer.do_round(update_of(1.0)))
        yield found


def has_a_model(data: Path) -> bool:
    try:
        return read_model(data)[0] == 0
    except FleetError:
        return False


def test_both_runs_show_it_and_each_button_asks_first(host: Watched, tmp_path: Path) -> None:
    link = f"{host.address}/#token={host.token('ada')}"
    with page_at(link, tmp_path) as page:
        page.get_by_role("link", name="a.canary").click()
        heading = page.get_by_role("heading", name="Canary", exact=True)
        expect(heading).to_be_visible()
        expect(page.get_by_text("1 of 2", exact=True)).to_be_visible()
        expect(page.get_by_role("row").filter(has_text="with the canary")).to_be_visible()
        expect(page.get_by_role("row").filter(has_text="lost: vanished")).to_be_visible()
        expect(page.get_by_role("button", name="Finish")).to_be_hidden()
        page.get_by_role("button", name="Widen").click()
        page.get_by_role("button", name="Cancel").click()
        expect(page.get_by_text("1 of 2", exact=True)).to_be_visible()
        page.get_by_role("button", name="Widen").click()
        page.get_by_role("dialog").get_by_role("button", name="Widen").click()
        expect(page.get_by_text("2 of 2", exact=True)).to_be_visible()
        expect(page.get_by_role("button", name="Widen")).to_be_hidden()
        expect(page.get_by_role("button", name="Finish")).to_be_visible()
        page.goto(f"{host.address}/#/run/a")
        expect(heading).to_be_visible()
        expect(page.get_by_text("2 of 2", exact=True)).to_be_visible()
        page.get_by_role("button", name="Go back").click()
        page.get_by_role("dialog").get_by_role("button", name="Go back").click()
        expect(page.get_by_text("It went back: asked by ada.")).to_be_visible()
        expect(page.get_by_role("button", name="Go back")).to_be_hidden()


def test_who_may_only_look_sees_the_same_without_buttons(host: Watched, tmp_path: Path) -> None:
    link = f"{host.address}/#token={host.token('victor', 'view')}"
    with page_at(link, tmp_path) as page:
        page.get_by_role("link", name="a", exact=True).click()
        expect(page.get_by_role("row").filter(has_text="of the old run")).to_be_visible()
        expect(page.get_by_role("button", name="Widen")).to_be_disabled()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_and_nothing_is_cut_off(
    host: Watched, tmp_path: Path, scheme: Literal["light", "dark"]
) -> None:
    link = f"{host.address}/#token={host.token('ada')}"
    with page_at(link, tmp_path, color_scheme=scheme) as page:
        expect(page.get_by_text("ada (operates)")).to_be_visible()
        for width in (360, 768, 1400):
            page.set_viewport_size({"width": width, "height": 900})
            page.goto(f"{host.address}/#/run/a.canary")
            expect(page.get_by_role("heading", name="Canary", exact=True)).to_be_visible()
            assert axe_finds(page) == []
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, f"{wide} pixels wide"
            if SHOTS:
                shot = Path(SHOTS) / f"canary-{width}-{scheme}.png"
                page.screenshot(path=shot, full_page=True)

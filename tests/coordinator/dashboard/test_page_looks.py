"""How the live page looks: at three widths, light and dark, with the longest names there are; and
what axe says of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from fleetlearn_coordinator.storage.runs import Runs
from fleetlearn_protocol.messages import Failed
from live_page_person import axe_finds, page_at, write_plans
from peers import update_of
from playwright.sync_api import Page, expect
from watched import Watched

pytestmark = pytest.mark.slow
LONG = "a-very-long-name-that-somebody-gave-to-it-because-nothing-forbids"[:64]
VIEWS = {
    "runs": ("", "Runs"),
    "run": (f"run/{LONG}", LONG),
    "quiet": ("run/quiet", "quiet"),
    "devices": ("devices", "Devices"),
    "device": (f"device/{LONG}", LONG),
    "audit": ("audit", "Audit log"),
}
SHOTS = os.environ.get("LIVE_PAGE_SHOTS")
"""A folder for pictures of all views, for a person who looks at them."""


@pytest.fixture
def host(bundle_path: Path, tmp_path: Path) -> Iterator[Watched]:
    """A host with runs that do, did and cannot do something, and devices with much to say."""
    write_plans(tmp_path, bundle_path, LONG, "quiet", "stopped", round__goal=2, round__minimum=1)
    write_plans(tmp_path, bundle_path, "finished", round__goal=1, stop__rounds=1)
    write_plans(tmp_path, bundle_path, "broken", "many-1", "many-2", "many-3", round__goal=3)
    runs = Runs(tmp_path / "runs")
    names = (LONG, "quiet", "stopped", "finished", "broken", "many-1", "many-2", "many-3")
    for name in names:
        runs.add(name, tmp_path / f"{name}.toml")
        if name not in (LONG, "broken"):
            runs.want(name, "stopped" if name == "stopped" else "paused")
    (tmp_path / "broken.toml").write_text("name = 3")
    with Watched(tmp_path, None) as found:
        peer = found.join(LONG, (LONG, "b" * 64), runtime="onnx 1.31.1", tier="c" * 64)
        for number in range(12):
            found.do(peer.do_round(update_of(1.0), loss=2.0 / (number + 1)))
        task = found.do(peer.task())
        found.do(peer.send(Failed(task.task, "runtime-error", "w" * 300 + " in data.py line 12")))
        other = found.join("roof-2")
        found.do(other.task())
        yield found


def show(page: Page, address: str, view: str) -> None:
    path, heading = VIEWS[view]
    page.goto(f"{address}/#/{path}")
    expect(page.get_by_role("heading", name=heading, level=1)).to_be_visible()
    if view in ("devices", "audit"):
        expect(page.get_by_role("row").nth(1)).to_be_visible()
    if view == "run":
        expect(page.get_by_role("img", name="Loss; newest")).to_be_visible()
        expect(page.get_by_role("button", name="Roll back").first).to_be_visible()
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_and_nothing_is_cut_off(
    host: Watched, tmp_path: Path, scheme: Literal["light", "dark"]
) -> None:
    link = f"{host.address}/#token={host.token('ada')}"
    with page_at(host.address, tmp_path, color_scheme=scheme) as page:
        expect(page.get_by_label("Administrator's token")).to_be_visible()
        assert axe_finds(page) == []
        page.goto(link)
        expect(page.get_by_text("ada (operates)")).to_be_visible()
        for width in (360, 768, 1400):
            page.set_viewport_size({"width": width, "height": 900})
            for view in VIEWS:
                show(page, host.address, view)
                if SHOTS is not None:
                    page.wait_for_timeout(700)
                    page.screenshot(path=f"{SHOTS}/{view}-{width}-{scheme}.png", full_page=True)
                assert axe_finds(page) == [], (view, width)
                assert page.evaluate("document.documentElement.scrollWidth") <= width, (view, width)
        show(page, host.address, "run")
        page.get_by_role("button", name="Stop").click()
        expect(page.get_by_role("dialog")).to_be_visible()
        assert axe_finds(page) == []


def test_the_keyboard_is_enough(host: Watched, tmp_path: Path) -> None:
    """From the sign in to a run that is stopped, without a mouse."""
    with page_at(host.address, tmp_path) as page:
        expect(page.get_by_label("Administrator's token")).to_be_focused()
        page.keyboard.type(host.token("ada"))
        page.keyboard.press("Enter")
        expect(page.get_by_role("link", name="quiet")).to_be_visible()
        for _ in range(40):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.textContent") == "quiet":
                break
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="quiet", level=1)).to_be_visible()
        expect(page.get_by_role("button", name="Stop")).to_be_visible()
        for _ in range(40):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.textContent") == "Stop":
                break
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid", "where the focus is can be seen"
        page.keyboard.press("Enter")
        expect(page.get_by_role("button", name="Cancel")).to_be_focused()
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        expect(page.get_by_text("stopped", exact=True)).to_be_visible()

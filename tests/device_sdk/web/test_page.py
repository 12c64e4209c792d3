"""The page for people as it looks: on phones upright and on their side, light and dark, and what
axe finds; its invitation; without a network; without what trains; its mistakes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from browser import browsing
from page_person import axe_problems, draw, fits, join, watched
from page_site import EXAMPLE, built_page, page_site
from peers import plan_text, write_test_bundle
from playwright.sync_api import Page, expect
from processes import free_port, processes

STATUS: dict[str, Any] = json.loads(EXAMPLE.read_text("utf-8"))
NOBODY = "ws://127.0.0.1:9"
TOKEN = "t" * 43


ROSTER_LINE = re.compile(r"^[A-Za-z0-9][\w.-]* [0-9a-f]{64}$")
"""The device's name and its public key."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "height", "scheme"),
    [(320, 568, "light"), (360, 740, "dark"), (844, 390, "light"), (1280, 800, "dark")],
)
def test_each_view_fits_and_axe_finds_nothing(
    width: int, height: int, scheme: Literal["light", "dark"], tmp_path: Path
) -> None:
    phone = {
        "viewport": {"width": width, "height": height},
        "color_scheme": scheme,
        "reduced_motion": "reduce",
    }
    status = dict(STATUS)
    with (
        page_site(NOBODY, lambda: status) as site,
        browsing(tmp_path / "profile", **phone) as browser,
    ):
        page = browser.pages[0]
        problems = watched(page)
        found = {}

        def look(view: str) -> None:
            found[view] = [*axe_problems(page), *([] if fits(page) else ["wider than the screen"])]

        page.goto(site.origin)
        expect(page.get_by_label("Token")).to_be_visible()
        look("consent")
        page.get_by_label("Token").fill("half a token")
        page.get_by_role("button", name="Agree and join").click()
        expect(page.get_by_text("not a whole token")).to_be_visible()
        look("a wrong token")
        page.get_by_label("Token").fill(f"{site.origin}/#token={TOKEN}")
        page.get_by_role("button", name="Agree and join").click()
        page.locator("#chart svg").wait_for()
        assert page.locator("#chart svg").get_attribute("aria-label") == (
            "Accuracy on the devices' own training examples in round 2: 38 %; in round 1 it was 10 "
            "%."
        )
        look("no drawings")
        side = page.locator("#pad").bounding_box()
        assert side is not None
        assert side["height"] <= height - 100, (
            "there is room beside the pad, by which the page is scrolled"
        )
        for digit in (1, 4, 7, 1, 4):
            draw(page, digit)
        kept = page.locator("#kept")
        expect(kept).to_have_text("Kept as 4. 5 drawings. Enough to start training.")
        page.locator("#pad").scroll_into_view_if_needed()
        expect(page.locator("#pill")).to_be_in_viewport()
        draw(page, 7, keep=False)
        for summary in page.locator("summary").all():
            summary.click()
        expect(page.locator("#rounds tr")).to_have_count(3)
        expect(page.locator("#roster-line")).to_have_text(ROSTER_LINE)
        look("drawings, and all that can be opened")
        page.get_by_role("button", name="Start training").click()
        expect(page.locator("#phase")).to_have_text("Connecting")
        page.get_by_label("on Wi-Fi or another unmetered network").check()
        expect(page.get_by_text("This browser does not say what the network costs")).to_be_visible()
        browser.set_offline(True)
        expect(page.locator("#phone").get_by_text("You are offline.")).to_be_visible()
        expect(page.locator("#pill-text")).to_have_text("Offline")
        page.evaluate("scrollTo(0, 1e6)")
        page.locator("#pill").click()
        expect(page.get_by_text("You are offline.")).to_be_in_viewport()
        look("offline")
        browser.set_offline(False)
        page.get_by_role("button", name="Erase everything").click()
        expect(page.get_by_role("dialog")).to_be_visible()
        look("the question before erasing")
        page.get_by_role("button", name="Keep everything").click()
        page.get_by_role("button", name="Delete drawing 1 of 5, a 4").click()
        expect(page.get_by_role("button", name="Delete drawing 1 of 4, a 1")).to_be_focused()
        status.update(state="finished")
        expect(page.locator("#round-text")).to_have_text("Finished after 4 rounds")
        expect(page.locator("#reports")).to_be_hidden()
        expect(page.locator("#pill-text")).to_have_text("Finished")
        expect(page.locator("#phase")).to_have_text("The training is finished")
        look("finished")
        settings, site.settings = site.settings, None
        page.evaluate(
            "caches.keys().then(names => Promise.all(names.map(name => caches.delete(name))))"
        )
        page.reload()
        expect(page.get_by_text("This page does not know whom to train with.")).to_be_visible()
        look("without page.json")
        site.settings = settings
        # without anybody's doing
        expect(page.get_by_role("heading", name="Draw a digit")).to_be_visible()
        expect(page.get_by_text("This page does not know whom to train with.")).to_be_hidden()
        assert {view: faults for view, faults in found.items() if faults} == {}
        assert problems == []


def wait_until_offline_works(page: Page) -> None:
    page.evaluate(
        """new Promise(resolve => {
          if (navigator.serviceWorker.controller) resolve();
          else navigator.serviceWorker.addEventListener("controllerchange", () => resolve());
        })"""
    )


@pytest.mark.slow
def test_it_opens_and_draws_without_a_network_and_takes_a_new_version(tmp_path: Path) -> None:
    folder = tmp_path / "page"
    shutil.copytree(built_page(), folder)
    with browsing(tmp_path / "profile") as browser:
        page = browser.pages[0]
        problems = watched(page)
        with page_site(NOBODY, lambda: STATUS, folder=folder) as site:
            port = int(site.origin.rpartition(":")[2])
            join(page, site.origin)
            draw(page, 1)
            wait_until_offline_works(page)
            expect(page.locator("#round-text")).to_have_text("Round 4 of 40")
        page.reload()  # right after the first visit
        expect(page.get_by_role("heading", name="Handwritten digits")).to_be_visible()
        draw(page, 7)
        expect(page.locator("#count")).to_have_text("2")
        copies = page.evaluate(
            """caches.keys()
            .then(names => names.map(name => caches.open(name).then(cache => cache.keys())))
            .then(keys => Promise.all(keys))
            .then(found => found.flat().map(request => new URL(request.url).pathname).sort())"""
        )
        assert "/page.json" in copies
        assert "/status.json" not in copies

        (folder / "style.css").write_text(
            "h1 { text-transform: uppercase }" + (folder / "style.css").read_text()
        )
        (folder / "sw.js").write_text(
            re.sub('"[0-9a-f]{16}"', '"another version"', (folder / "sw.js").read_text())
        )
        with page_site(NOBODY, lambda: STATUS, folder=folder, port=port):
            page.reload()
            title = page.locator("#title")
            expect(
                page.get_by_role("button", name="Use the new version of this page")
            ).to_be_in_viewport()
            expect(title).to_have_css("text-transform", "none")  # one version, as a whole
            page.get_by_role("button", name="Use the new version of this page").click()
            expect(title).to_have_css("text-transform", "uppercase")
            expect(page.locator("#count")).to_have_text("2")
        assert problems == []


@pytest.mark.slow
def test_what_masks_updates_is_fetched_when_it_is_needed(tmp_path: Path) -> None:
    """A visit without secure aggregation fetches none of it; the headers of the coordinator's own
    page allow it."""
    listed = re.search(r"\[\"ort-[^]]*\]", (built_page() / "sw.js").read_text())
    assert listed
    masking = {name for name in json.loads(listed[0]) if name.startswith("part-")}
    with page_site(NOBODY) as site, browsing(tmp_path / "profile") as browser:
        fetched: list[str] = []
        browser.on("request", lambda request: fetched.append(request.url.rpartition("/")[2]))
        page = browser.pages[0]
        join(page, site.origin)
        wait_until_offline_works(page)
        assert "page.js" in fetched
        assert not masking & {*fetched}
        given = set()
        for name in masking:
            given |= {*page.evaluate(f"import('./{name}').then(module => Object.keys(module))")}
        assert {"maskUpdate", "sign"} <= given
        assert masking <= {*fetched}


@pytest.mark.slow
def test_where_the_browser_keeps_nothing_the_page_says_so_and_works(tmp_path: Path) -> None:
    with page_site(NOBODY) as site, browsing(tmp_path / "profile") as browser:
        page = browser.pages[0]
        problems = watched(page)
        page.add_init_script(
            "indexedDB.open = () => { throw new DOMException('private', 'SecurityError'); }"
        )
        join(page, site.origin)
        expect(page.get_by_text("This browser keeps nothing for this page.")).to_be_visible()
        for digit in (1, 4, 7, 1, 4):
            draw(page, digit)
        expect(page.get_by_role("button", name="Ask the shared model")).to_be_hidden()
        # nobody publishes the rounds
        expect(page.get_by_role("heading", name="Together")).to_be_hidden()
        page.get_by_role("button", name="Start training").click()
        expect(page.locator("#phase")).to_have_text("Connecting")
        assert axe_problems(page) == []
        page.reload()
        expect(page.get_by_role("heading", name="Before you join")).to_be_visible()
        assert problems == []


@pytest.mark.slow
def test_a_token_that_is_refused_is_said_in_plain_words(tmp_path: Path) -> None:
    port, plan = free_port(), tmp_path / "plan.toml"
    plan.write_text(plan_text(write_test_bundle(tmp_path / "test.bundle"), tmp_path / "run"))
    with (
        page_site(f":{port}", lambda: STATUS) as site,
        processes(tmp_path) as run,
        browsing(tmp_path / "profile") as browser,
    ):
        (tmp_path / "service.toml").write_text(
            f'port = {port}\nidentities = "identities"\norigins = ["{site.origin}"]\n'
        )
        subprocess.run(
            [sys.executable, "-m", "fleetlearn_coordinator", "token", tmp_path / "service.toml"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        run.coordinator(plan)
        page = browser.pages[0]
        problems = watched(page)
        join(page, f"{site.origin}/#token={TOKEN}")
        for digit in (1, 4, 7, 1, 4):
            draw(page, digit)
        page.get_by_role("button", name="Start training").click()
        expect(page.get_by_text("The coordinator does not let this device in.")).to_be_visible()
        expect(page.locator("#pill-text")).to_have_text("Not let in")
        assert axe_problems(page) == []
        # Who leaves before the invitation was used, and joins again, still has it.
        page.get_by_role("button", name="Leave").click()
        expect(page.get_by_text("Your invitation is filled in.")).to_be_visible()
        page.get_by_role("button", name="Use another").click()
        expect(page.get_by_label("Token")).to_have_value(TOKEN)
        assert problems == []


@pytest.mark.slow
def test_a_broken_link_is_no_dead_end_and_an_invitation_outlives_a_reload(tmp_path: Path) -> None:
    with page_site(NOBODY) as site, browsing(tmp_path / "profile") as browser:
        page = browser.pages[0]
        problems = watched(page)
        page.goto(f"{site.origin}/#token={TOKEN[:30]}")
        expect(page.get_by_label("Token")).to_have_value(TOKEN[:30])
        expect(page.get_by_text("The link that you opened is cut off")).to_be_visible()
        page.get_by_role("button", name="Agree and join").click()
        expect(page.get_by_text("This is not a whole token.")).to_be_visible()
        page.get_by_label("Token").fill(f"{site.origin}/#token={TOKEN}")
        page.get_by_role("button", name="Agree and join").click()
        expect(page.locator("#joined")).to_be_visible()
        page.get_by_role("button", name="Leave").click()
        expect(page.get_by_text("Your invitation is filled in.")).to_be_visible()

        another = "u" * 43
        # in the same tab
        page.evaluate("address => { location = address; }", f"{site.origin}/#token={another}")
        page.wait_for_url(f"{site.origin}/")
        page.reload()
        expect(page.get_by_text("Your invitation is filled in.")).to_be_visible()
        page.get_by_role("button", name="Use another").click()
        expect(page.get_by_label("Token")).to_have_value(another)
        page.get_by_role("button", name="Agree and join").click()
        expect(page.locator("#joined")).to_be_visible()
        assert page.evaluate("history.state") is None
        page.goto("about:blank")
        page.goto(f"{site.origin}/#token={TOKEN[:30]}")  # by somebody who joined: it goes on
        expect(page.get_by_text("This device goes on as before.")).to_be_visible()
        assert problems == []


@pytest.mark.slow
def test_a_page_from_which_no_devices_are_taken_says_so_before_anybody_draws(
    tmp_path: Path,
) -> None:
    with page_site(NOBODY, lambda: STATUS) as site, browsing(tmp_path / "profile") as browser:
        assert site.settings is not None
        # a port that was forwarded
        site.settings["pages"] = {"origins": ["https://fleet.example"], "port": 8767}
        page = browser.pages[0]
        problems = watched(page)
        page.goto(f"{site.origin}/#token={TOKEN}")
        expect(
            page.get_by_text(f"The coordinator takes no devices from {site.origin}")
        ).to_be_in_viewport()
        assert axe_problems(page) == []
        page.get_by_role("button", name="Agree and join").click()
        for digit in (1, 4, 7, 1, 4):
            draw(page, digit)
        page.get_by_role("button", name="Start training").click()
        expect(page.locator("#pill-text")).to_have_text("Wrong address")
        expect(
            page.locator("#phone").get_by_text("The coordinator takes no devices from")
        ).to_be_visible()
        expect(page.get_by_text("used up")).to_be_hidden()
        assert problems == []


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["ort-wasm-simd-threaded.wasm", "ort-wasm-simd-threaded.mjs"])
def test_a_device_that_cannot_load_what_trains_takes_no_task_and_tries_again(
    missing: str, tmp_path: Path
) -> None:
    port, plan, folder = free_port(), tmp_path / "plan.toml", tmp_path / "page"
    plan.write_text(plan_text(write_test_bundle(tmp_path / "test.bundle"), tmp_path / "run"))
    shutil.copytree(built_page(), folder)
    for name in (missing, f"{missing}.gz"):
        (folder / name).unlink()
    with (
        page_site(f":{port}", lambda: STATUS, folder=folder) as site,
        processes(tmp_path) as run,
        browsing(tmp_path / "profile") as browser,
    ):
        (tmp_path / "service.toml").write_text(f'port = {port}\norigins = ["{site.origin}"]\n')
        run.coordinator(plan)
        page = browser.pages[0]
        watched(page)
        join(page, site.origin)
        for digit in (1, 4, 7, 1, 4):
            draw(page, digit)
        page.get_by_role("button", name="Start training").click()
        expect(page.locator("#phase")).to_have_text("This device cannot train now")
        expect(page.locator("#phase-detail")).to_contain_text("What computes could not be loaded: ")
        expect(page.locator("#pill-text")).to_have_text("Cannot train")
        assert axe_problems(page) == []
        assert "task" not in run.log("coordinator")
        (folder / missing).write_bytes((built_page() / missing).read_bytes())
        expect(page.locator("#phase")).not_to_have_text("This device cannot train now")
        expect(page.locator("#phase")).not_to_have_text("Loading what trains")


@pytest.mark.slow
def test_a_browser_without_webassembly_is_told_so(tmp_path: Path) -> None:
    with (
        page_site(NOBODY) as site,
        browsing(tmp_path / "profile", "--js-flags=--jitless") as browser,
    ):
        page = browser.pages[0]
        watched(page)
        join(page, site.origin)
        for digit in (1, 4, 7, 1, 4):
            draw(page, digit)
        page.get_by_role("button", name="Start training").click()
        expect(page.locator("#phase")).to_have_text("This device cannot train now")

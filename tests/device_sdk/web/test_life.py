"""A device in a tab, and what a browser and a phone do to tabs: each of it loses at most the
training under way."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import browsing, kill_tabs, tab_processes
from playwright.sync_api import BrowserContext, Page
from processes import wait_for
from web_page import Fleet, fleet

pytestmark = pytest.mark.slow

LONG = 2500
"""Epochs: a second of training, in which the tab can be caught."""
GRACE = 2.0
"""Seconds for which a round waits for a device that comes back under another name."""


@pytest.fixture
def context(tmp_path: Path) -> Iterator[BrowserContext]:
    with browsing(tmp_path / "profile") as found:
        yield found


def opened(context: BrowserContext, parts: Fleet) -> Page:
    page = context.new_page()
    page.goto(parts.site.page)
    page.wait_for_function("globalThis.device !== undefined")
    return page


def wait_for_phase(page: Page, phase: str, more: str = "true") -> None:
    """Wait until the device is in this phase, and ``more`` holds of its state ``s``."""
    page.wait_for_function(f"(s => s?.phase === '{phase}' && {more})(globalThis.states?.at(-1))")


def wait_for_step(page: Page) -> None:
    wait_for_phase(page, "training", "s.step > 0")


def test_a_paused_device_gives_its_task_back_and_goes_on(
    tmp_path: Path, context: BrowserContext
) -> None:
    with fleet(tmp_path, rounds=2, epochs=LONG) as parts:
        parts.start()
        page = opened(context, parts)
        wait_for_step(page)
        page.evaluate("device.pause()")
        wait_for_phase(page, "paused", "s.why === 'the device is paused'")
        assert parts.version() == 0
        page.evaluate("device.resume()")
        parts.finish()
        page.wait_for_function("states.at(-1).phase === 'stopped'")
        last = page.evaluate("states.at(-1)")
        assert (last["accepted"], last["why"]) == (2, "the training is finished")
        losses = page.evaluate(
            "states.filter(s => s.step).map(s => [s.round, s.step, s.steps, s.loss])"
        )
        assert {row[2] for row in losses} == {LONG}
        assert losses[0][3] > losses[-1][3]


def test_an_erased_device_comes_back_as_another(tmp_path: Path, context: BrowserContext) -> None:
    with fleet(tmp_path, rounds=2, epochs=LONG, grace=GRACE) as parts:
        parts.start()
        page = opened(context, parts)
        wait_for_step(page)
        page.evaluate("device.erase()")
        assert page.evaluate("states.at(-1).phase") == "stopped"
        page.reload()
        parts.finish()
        assert len(parts.site.names()) == 2


def test_two_tabs_of_one_device_take_turns(tmp_path: Path, context: BrowserContext) -> None:
    with fleet(tmp_path, rounds=5, epochs=LONG) as parts:
        parts.start()
        first = opened(context, parts)
        wait_for_step(first)
        second = opened(context, parts)
        wait_for_phase(second, "paused", "s.why.includes('another tab')")
        wait_for_step(first)
        first.close()
        wait_for_step(second)
        third = opened(context, parts)
        wait_for_phase(third, "paused", "s.why.includes('another tab')")
        third.evaluate("device.stop()")
        wait_for_phase(third, "stopped")
        parts.finish()
        assert len(parts.site.names()) == 1
        assert not any("replaced" in line for line in parts.site.lines)


def test_a_waiting_tab_takes_over_from_one_that_died(
    tmp_path: Path, context: BrowserContext
) -> None:
    with fleet(tmp_path, rounds=5, epochs=LONG) as parts:
        parts.start()
        first = opened(context, parts)
        wait_for_step(first)
        before = tab_processes()
        second = opened(context, parts)
        wait_for_phase(second, "paused", "s.why.includes('another tab')")
        kill_tabs(before)
        wait_for_step(second)
        parts.finish()
        assert len(parts.site.names()) == 1


def test_another_tab_erases_a_device_that_works(tmp_path: Path, context: BrowserContext) -> None:
    with fleet(tmp_path, rounds=2, epochs=LONG, grace=GRACE) as parts:
        parts.start()
        first = opened(context, parts)
        wait_for_step(first)
        second = opened(context, parts)
        wait_for_phase(second, "paused")
        second.evaluate("device.erase()")
        wait_for_phase(first, "stopped", "s.why.includes('another tab erased')")
        second.evaluate("void device.serve()")
        parts.finish()
        assert len(parts.site.names()) == 2


def test_a_frozen_tab_goes_on(tmp_path: Path, context: BrowserContext) -> None:
    """Its worker stands still too; what it holds is sent when it is active again."""
    with fleet(tmp_path, rounds=2, epochs=LONG) as parts:
        parts.start()
        page = opened(context, parts)
        wait_for_step(page)
        life = context.new_cdp_session(page)
        life.send("Page.setWebLifecycleState", {"state": "frozen"})
        parts.relay.cut()
        life.send("Page.setWebLifecycleState", {"state": "active"})
        parts.finish()
        assert len(parts.site.names()) == 1


def test_no_network_and_a_network_again(tmp_path: Path, context: BrowserContext) -> None:
    with fleet(tmp_path, rounds=2, epochs=LONG) as parts:
        parts.start()
        page = opened(context, parts)
        wait_for_step(page)
        context.set_offline(True)
        parts.relay.cut()
        wait_for_phase(page, "connecting", "s.why === 'there is no network'")
        tries = parts.relay.connections
        context.set_offline(False)
        parts.finish()
        assert parts.relay.connections == tries + 1
        assert len(parts.site.names()) == 1


def test_a_store_that_is_evicted_ends_the_device_and_a_new_visit_makes_another(
    tmp_path: Path, context: BrowserContext
) -> None:
    with fleet(tmp_path, rounds=2, epochs=LONG, grace=GRACE) as parts:
        parts.start()
        page = opened(context, parts)
        wait_for_step(page)
        clear = {"origin": parts.site.origin, "storageTypes": "all"}
        context.new_cdp_session(page).send("Storage.clearDataForOrigin", clear)
        wait_for_phase(page, "stopped", "s.why.includes('the browser deleted')")
        page.reload()
        parts.finish()
        assert len(parts.site.names()) == 2


def test_a_device_whose_store_is_gone_needs_a_token_again(
    tmp_path: Path, context: BrowserContext
) -> None:
    with fleet(tmp_path, rounds=1) as parts:
        url = parts.relay.target  # a relay takes any device
        service = tmp_path / "service.toml"
        service.write_text(service.read_text() + 'identities = "identities"\n')
        parts.run.coordinator(parts.plan)
        wait_for(lambda: "listening" in parts.run.log("coordinator"), "the coordinator")
        parts.give(url=url, token=make_token(tmp_path))
        page = opened(context, parts)
        wait_for_phase(page, "waiting")
        parts.give(url=url)
        page.reload()
        wait_for_phase(page, "waiting")  # its credential is in the store
        page.goto("about:blank")
        clear = {"origin": parts.site.origin, "storageTypes": "all"}
        context.new_cdp_session(page).send("Storage.clearDataForOrigin", clear)
        page.goto(parts.site.page)
        page.wait_for_function("globalThis.states?.at(-1)?.why?.includes('needs a token')")
        parts.give(url=url, token=make_token(tmp_path))
        page.reload()
        wait_for_phase(page, "waiting")
        assert len(parts.site.names()) == 2


def make_token(folder: Path) -> str:
    command = [sys.executable, "-m", "fleetlearn_coordinator", "token", "service.toml"]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_a_task_is_given_back_where_there_is_no_room_for_its_update(
    tmp_path: Path, context: BrowserContext
) -> None:
    with fleet(tmp_path, rounds=1, epochs=LONG) as parts:
        storage = context.new_cdp_session(context.pages[0])
        # Before the page is there: the browser remembers for a while that there was room.
        quota = {"origin": parts.site.origin, "quotaSize": 40_000}
        storage.send("Storage.overrideQuotaForOrigin", quota)
        parts.start()
        page = opened(context, parts)
        wait_for_phase(page, "stopped", "s.why.includes('room')")
        assert not any("trained" in line for line in parts.site.lines)
        wait_for(
            lambda: "disk-full" in parts.run.log("coordinator"), "what the coordinator says of it"
        )


@pytest.mark.parametrize(
    "options", [{}, {"store": None}], ids=["in the browser's memory", "in the page's"]
)
def test_a_private_window_serves_until_it_is_closed(
    tmp_path: Path, context: BrowserContext, options: dict[str, None]
) -> None:
    assert context.browser is not None
    with fleet(tmp_path, rounds=1) as parts:
        parts.give(**options)
        parts.start()
        page = opened(context.browser.new_context(), parts)
        assert page.evaluate("keepStorage()") is False
        parts.finish()


@pytest.mark.parametrize("hours", [24, -24])
def test_a_clock_that_jumps_changes_nothing(
    tmp_path: Path, context: BrowserContext, hours: int
) -> None:
    with fleet(tmp_path, rounds=2, epochs=LONG) as parts:
        parts.start()
        page = opened(context, parts)
        wait_for_step(page)
        (worker,) = page.workers
        worker.evaluate(
            f"() => {{ const now = Date.now; Date.now = () => now() + {hours} * 3600e3; }}"
        )
        parts.finish()
        assert len(parts.site.names()) == 1


def test_it_trains_only_while_it_charges(tmp_path: Path, context: BrowserContext) -> None:
    context.add_init_script(
        """const battery = Object.assign(new EventTarget(), { charging: true });
        navigator.getBattery = async () => battery;
        globalThis.plug = charging => {
          battery.charging = charging;
          battery.dispatchEvent(new Event("chargingchange"));
        };"""
    )
    with fleet(tmp_path, rounds=2, epochs=LONG) as parts:
        parts.give(only={"charging": True, "unmetered": True})
        parts.relay.hold("check-in")
        parts.start()
        page = opened(context, parts)
        parts.relay.wait_held("the check-in")
        parts.relay.let_go()
        assert parts.relay.last["charging"] is True
        wait_for_step(page)
        page.evaluate("plug(false)")
        wait_for_phase(page, "paused", "s.why === 'the device waits until it charges'")
        assert page.evaluate("states.at(-1).cannotTell") == ["network"], (
            "a computer's browser does not tell"
        )
        page.evaluate("plug(true)")
        parts.finish()


def test_the_screen_is_kept_on_while_the_page_wants_it(
    tmp_path: Path, context: BrowserContext
) -> None:
    with fleet(tmp_path, rounds=1) as parts:
        page = opened(context, parts)
        page.evaluate(
            """() => {
              globalThis.locks = [];
              const request = navigator.wakeLock.request.bind(navigator.wakeLock);
              navigator.wakeLock.request = async kind => {
                const lock = await request(kind);
                locks.push(lock);
                return lock;
              };
            }"""
        )
        held = "locks.filter(lock => !lock.released).length"
        page.evaluate("screenLock.want(true)")
        page.wait_for_function(f"{held} === 1")
        page.evaluate("locks[0].release()")  # as the browser does when the page is hidden
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        page.wait_for_function(f"locks.length === 2 && {held} === 1")
        page.evaluate("screenLock.want(false)")
        page.wait_for_function(f"{held} === 0")
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        assert page.evaluate("locks.length") == 2

"""The live page in Chromium, on a coordinator whose devices speak by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from firefox import firefox
from fleetlearn_coordinator import read_status
from fleetlearn_coordinator.storage.runs import Runs
from fleetlearn_protocol.messages import Failed
from live_page_person import page_at, sign_in, write_plans
from peers import PlanMaker, update_of
from playwright.sync_api import Page, expect
from processes import wait_for
from watched import Browser, Watched

pytestmark = pytest.mark.slow
EVIL = "<script>hacked = 1</script><img src=x onerror='hacked = 1'>"


@pytest.fixture
def watched(make_plan: PlanMaker, tmp_path: Path) -> Iterator[Watched]:
    with Watched(tmp_path, make_plan(round__goal=2, round__minimum=1)) as found:
        yield found


@pytest.fixture
def host(bundle_path: Path, tmp_path: Path) -> Iterator[Watched]:
    """A host with the runs a and b, of which b is paused."""
    write_plans(tmp_path, bundle_path, "a", "b", round__goal=1)
    runs = Runs(tmp_path / "runs")
    for name in ("a", "b"):
        runs.add(name, tmp_path / f"{name}.toml")
    runs.want("b", "paused")
    with Watched(tmp_path, None) as found:
        yield found


def test_a_round_is_seen_as_it_goes(watched: Watched, tmp_path: Path) -> None:
    with page_at(watched.address, tmp_path) as page:
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
        page.get_by_label("Against").select_option("bytes")
        expect(page.get_by_role("img", name="Loss; newest: loss 0.7")).to_be_visible()
        page.get_by_label("Over").select_option("the last day")
        expect(page.get_by_text("ada (operates)")).to_be_visible()
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_label("Administrator's token")).to_be_visible()
        page.reload()
        expect(page.get_by_label("Administrator's token")).to_be_visible()


def test_the_budget_of_a_private_run_is_seen_as_it_is_spent(
    make_plan: PlanMaker, tmp_path: Path
) -> None:
    plan = make_plan(
        "dp-fedavg",
        round__goal=1,
        privacy__noise=4.0,
        privacy__epsilon=2.3,
        privacy__delta=1e-6,
        privacy__population=100,
        privacy__clip=1.0,
    )
    with Watched(tmp_path, plan) as watched:
        link = f"{watched.address}/#token={watched.token('ada')}"
        peer = watched.join("roof-1")
        with page_at(link, tmp_path) as page:
            page.get_by_role("link", name="test").click()
            expect(page.get_by_role("heading", name="Privacy")).to_be_visible()
            expect(page.get_by_text("Epsilon 0 of 2.3 (delta 1e-6)")).to_be_visible()
            expect(page.get_by_text("0 releases, 4 left")).to_be_visible()
            evaluate = page.get_by_role("button", name="Evaluate", include_hidden=True)
            expect(evaluate).to_have_count(1)
            expect(evaluate).to_be_hidden()
            watched.do(peer.do_round(update_of(1.0), evaluation=None))
            expect(page.get_by_text("Epsilon 1.07 of 2.3 (delta 1e-6)")).to_be_visible()
            expect(page.get_by_text("1 release, 3 left")).to_be_visible()
            for _ in range(3):
                watched.do(peer.do_round(update_of(1.0), evaluation=None))
            spent = page.get_by_text("The privacy budget is spent: epsilon 2.26 of 2.3 after")
            expect(spent).to_be_visible()
            expect(page.get_by_text("4 releases, 0 left")).to_be_visible()
            said = "Devices take no part in evaluations here: what they measure could tell"
            expect(page.get_by_text(said)).to_be_visible()
            empty = page.get_by_text("The model was not evaluated on devices yet.")
            expect(empty).to_be_hidden()
            words = "What devices measure is not shown: it could tell about their data."
            expect(page.get_by_text(words).first).to_be_visible()
            expect(page.get_by_text("No round has measured it yet.")).to_have_count(0)
            versions = page.get_by_role("table", name="The versions of the model that are kept")
            expect(versions.get_by_role("row")).to_have_count(5)
            expect(versions.get_by_text("round:")).to_have_count(0)


def test_a_run_that_is_not_private_has_no_budget_to_see(watched: Watched, tmp_path: Path) -> None:
    with page_at(f"{watched.address}/#token={watched.token('ada')}", tmp_path) as page:
        page.get_by_role("link", name="test").click()
        expect(page.get_by_role("heading", name="The open round")).to_be_visible()
        expect(page.get_by_role("heading", name="Privacy")).to_be_hidden()
        expect(page.get_by_role("button", name="Evaluate")).to_be_visible()


def test_a_link_signs_in_and_its_token_is_seen_no_more(watched: Watched, tmp_path: Path) -> None:
    with page_at(f"{watched.address}/#token={watched.token('ada')}", tmp_path) as page:
        expect(page.get_by_role("link", name="test")).to_be_visible()
        assert page.url == f"{watched.address}/"
        assert page.evaluate("document.cookie") == "", "no script can read the cookie"


def test_what_devices_say_is_text(watched: Watched, tmp_path: Path) -> None:
    """A device's error, runtime and software are whatever it sends."""
    evil = EVIL
    peer = watched.join("roof-1", ("north",), runtime=evil, software=evil, tier="board")
    task = watched.do(peer.task())
    watched.do(peer.send(Failed(task.task, "runtime-error", evil)))
    link = f"{watched.address}/#token={watched.token('ada')}"
    with page_at(link, tmp_path) as page:
        page.get_by_role("link", name="test").click()
        said = page.get_by_role("cell", name=evil)
        expect(said).to_be_visible()
        page.get_by_role("link", name="Devices").click()
        expect(page.get_by_role("cell", name=f"runtime-error: {evil}")).to_be_visible()
        page.get_by_role("link", name="roof-1").click()
        expect(page.locator("pre")).to_have_text(f"runtime-error: {evil}")
        expect(page.get_by_text(evil, exact=True).first).to_be_visible()
        expect(page.get_by_text("north")).to_be_visible()
        assert page.evaluate("typeof hacked") == "undefined"
        assert page.locator("main img, main script").count() == 0


def wanted(browser: Browser, name: str) -> str:
    return {run["name"]: run["wanted"] for run in browser.ask("GET", "/v1/runs")[1]}[name]  # type: ignore[no-any-return]


def test_each_button_of_a_run(host: Watched, tmp_path: Path) -> None:
    """What each does is seen in the API and in the run's records. Where it asks, Cancel changes
    nothing."""
    api = Browser(host.address)
    token = host.token("ada")
    api.sign_in(token)
    peer = host.join("roof-1")
    for value in (1.0, 2.0):
        host.do(peer.do_round(update_of(value)))
    name, data = "a", tmp_path / "a.run"

    def audit() -> list[tuple[str, str]]:
        rows = api.ask("GET", "/v1/audit?last=1000")[1]
        return [(row["what"], row["about"].get("who")) for row in rows]

    with page_at(f"{host.address}/#token={token}", tmp_path) as page:
        page.get_by_role("link", name=name, exact=True).click()
        page.get_by_role("button", name="Pause").click()
        expect(page.get_by_text("paused", exact=True)).to_be_visible()
        assert wanted(api, name) == "paused"
        page.get_by_role("button", name="Start").click()
        expect(page.get_by_text("running", exact=True)).to_be_visible()
        assert wanted(api, name) == "running"

        page.get_by_role("button", name="Stop").click()
        page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
        assert page.get_by_role("dialog").count() == 0
        assert wanted(api, name) == "running"
        _confirm(page, "Stop")
        expect(page.get_by_text("stopped", exact=True)).to_be_visible()
        assert wanted(api, name) == "stopped"
        page.get_by_role("button", name="Start").click()
        expect(page.get_by_text("running", exact=True)).to_be_visible()

        page.get_by_role("button", name="Evaluate").click()
        expect(page.get_by_text("an evaluation of the newest model begins")).to_be_visible()
        assert ("evaluation", "ada") in audit()

        version = read_status(data).version
        row = page.get_by_role("row").filter(
            has=page.get_by_role("rowheader", name="1", exact=True)
        )
        row.get_by_role("button", name="Roll back").click()
        page.get_by_role("dialog").press("Escape")
        row.get_by_role("button", name="Roll back").click()
        page.get_by_role("dialog").get_by_role("button", name="Roll back").click()
        expect(page.get_by_role("cell", name="roll back to 1")).to_be_visible()
        assert read_status(data).version == version + 1

        _confirm(page, "Drain")
        wait_for(lambda: wanted(api, name) in ("draining", "stopped"), "the drain")
    done = audit()
    for what in ("paused", "resumed", "stopped", "drained", "rolled back"):
        assert (what, "ada") in done


def _confirm(page: Page, verb: str) -> None:
    page.get_by_role("button", name=verb).click()
    page.get_by_role("dialog").get_by_role("button", name=verb).click()


def test_a_device_is_found_and_revoked(watched: Watched, tmp_path: Path) -> None:
    for number in range(60):
        watched.identities.certified(f"shed-{number:02d}", 0.0, 0.0)
    peer = watched.join("roof-1", ("north",))
    task = watched.do(peer.task())
    token = watched.token("ada")
    api = Browser(watched.address)
    api.sign_in(token)
    with page_at(f"{watched.address}/#token={token}", tmp_path) as page:
        page.get_by_role("link", name="Devices").click()
        expect(page.get_by_text("1 to 50 of 61")).to_be_visible()
        page.get_by_role("button", name="Next").click()
        expect(page.get_by_text("51 to 61 of 61")).to_be_visible()
        expect(page.get_by_role("button", name="Next")).to_be_disabled()
        page.get_by_role("button", name="Previous").click()
        expect(page.get_by_text("1 to 50 of 61")).to_be_visible()
        page.get_by_label("Show").select_option("connected")
        expect(page.get_by_text("61 devices, 1 of them connected; 1 fit")).to_be_visible()
        page.get_by_label("Show").select_option("all")
        page.get_by_label("Search").fill("NORTH")
        expect(page.get_by_text("61 devices, 1 of them connected; 1 fit")).to_be_visible()
        page.wait_for_url("**/#/devices?search=NORTH")
        page.reload()
        expect(page.get_by_label("Search")).to_have_value("NORTH")
        page.get_by_role("link", name="roof-1").click()
        expect(page.get_by_text("connected", exact=True)).to_be_visible()
        expect(page.get_by_role("row", name=f"{task.task} test 1 assigned")).to_be_visible()
        page.get_by_role("button", name="Revoke").click()
        page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
        assert api.ask("GET", "/v1/devices/roof-1")[1]["revoked"] is None
        _confirm(page, "Revoke")
        expect(page.get_by_text("revoked", exact=True)).to_be_visible()
        assert watched.do(peer.closed()) is not None
        page.get_by_role("link", name="Audit log").click()
        expect(page.get_by_role("row").nth(1)).to_contain_text("revoked")
    assert api.ask("GET", "/v1/devices/roof-1")[1]["revoked"] is not None


def test_who_may_view_sees_the_same_and_changes_nothing(watched: Watched, tmp_path: Path) -> None:
    peer = watched.join("roof-1")
    watched.do(peer.do_round(update_of(1.0)))
    with page_at(f"{watched.address}/#token={watched.token('vera', 'view')}", tmp_path) as page:
        expect(page.get_by_text("vera (views)")).to_be_visible()
        page.get_by_role("link", name="test").click()
        expect(page.get_by_role("button", name="Evaluate")).to_be_disabled()
        page.goto(f"{watched.address}/#/device/roof-1")
        expect(page.get_by_role("button", name="Revoke")).to_be_disabled()


def test_the_page_goes_on_by_itself_after_a_restart(make_plan: PlanMaker, tmp_path: Path) -> None:
    plan = make_plan(round__goal=1)
    with Watched(tmp_path, plan) as first:
        port = int(first.address.rpartition(":")[2])
        token = first.token("ada")
        peer = first.join("roof-1")
        first.do(peer.do_round(update_of(1.0)))
        with page_at(f"{first.address}/#token={token}", tmp_path) as page:
            page.get_by_role("link", name="test").click()
            expect(page.get_by_text("live", exact=True)).to_be_visible()
            first.__exit__()
            expect(page.get_by_text("no connection; trying again")).to_be_visible()
            # What was known stays.
            expect(page.get_by_role("img", name="Loss; newest: loss 0.7")).to_be_visible()
            with Watched(tmp_path, plan, admin={"port": port}) as second:
                expect(page.get_by_text("live", exact=True)).to_be_visible()
                expect(page.get_by_role("img", name="Loss; newest: loss 0.7")).to_be_visible()
                assert second.address == first.address


def test_a_run_that_is_not_there_is_named_until_it_is(host: Watched, tmp_path: Path) -> None:
    """Before, the page showed an empty run, and that it had no connection."""
    (tmp_path / "late.toml").write_text((tmp_path / "a.toml").read_text().replace('"a"', '"late"'))
    text = (tmp_path / "late.toml").read_text().replace("a.run", "late.run")
    (tmp_path / "late.toml").write_text(text)
    with page_at(f"{host.address}/#token={host.token('ada')}", tmp_path) as page:
        expect(page.get_by_role("link", name="a", exact=True)).to_be_visible()
        page.goto(f"{host.address}/#/run/late")
        expect(page.get_by_text("There is no run called late.")).to_be_visible()
        expect(page.get_by_text("not there", exact=True)).to_be_visible()
        for name in ("The open round", "Versions"):
            expect(page.get_by_role("heading", name=name)).to_be_hidden()
        Runs(tmp_path / "runs").add("late", tmp_path / "late.toml")
        expect(page.get_by_role("heading", name="The open round")).to_be_visible()
        expect(page.get_by_text("live", exact=True)).to_be_visible()
        expect(page.get_by_text("There is no run called late.")).to_be_hidden()


def test_a_device_that_is_not_there_has_no_facts(watched: Watched, tmp_path: Path) -> None:
    with page_at(f"{watched.address}/#token={watched.token('ada')}", tmp_path) as page:
        expect(page.get_by_role("link", name="test")).to_be_visible()
        page.goto(f"{watched.address}/#/device/nobody")
        expect(page.get_by_text("no device called nobody is enrolled, or was seen")).to_be_visible()
        expect(page.get_by_text("Last seen")).to_be_hidden()
        expect(page.get_by_role("button", name="Revoke")).to_be_hidden()


def test_firefox(watched: Watched, tmp_path: Path) -> None:
    peer = watched.join("roof-1")
    watched.do(peer.do_round(update_of(1.0)))
    with firefox(tmp_path) as tab:
        tab.goto(f"{watched.address}/#token={watched.token('ada')}")
        tab.wait_for("document.querySelector('.card a')?.textContent === 'test'")
        tab.evaluate("document.querySelector('.card a').click()")
        tab.wait_for("document.querySelector('h1').textContent === 'test'")
        tab.wait_for("document.querySelectorAll('.chart path').length > 3")
        tab.wait_for("document.getElementById('connection').textContent === 'live'")
        tab.evaluate("[...document.querySelectorAll('nav a')][1].click()")
        tab.wait_for("document.querySelector('tbody a')?.textContent === 'roof-1'")

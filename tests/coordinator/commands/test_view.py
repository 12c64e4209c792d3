"""``view``: the live page over the records of a run that nobody serves."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from answering import Fleet, leases
from browser import browsing
from fleetlearn_coordinator import Plan
from fleetlearn_coordinator.dashboard.run_history import FleetNow
from fleetlearn_coordinator.service.fleet_minutes import FleetMinutes
from fleetlearn_coordinator.service.recorded_runs import recorded_runs
from fleetlearn_coordinator.service.views.local_views import LocalViews
from hand_written_run import write_computation_run
from live_page_person import axe_finds
from page_person import watched as problems_of
from peers import plan_text, update_of
from playwright.sync_api import expect
from processes import processes, wait_for
from watched import Browser

NOON = 43_200
COMMAND = str(Path(sys.executable).with_name("fleetlearn-coordinator"))


@pytest.fixture
def plan(tmp_path: Path, bundle_path: Path) -> Plan:
    """A run that stopped at version 2, of which one was measured on held-out data."""
    (tmp_path / "plan.toml").write_text(plan_text(bundle_path, tmp_path / "run", round__goal=1))
    plan = Plan.load(tmp_path / "plan.toml")
    fleet = Fleet(plan)
    commands = fleet.check_in("a", "b")
    for _ in range(2):
        (lease,) = leases(commands)
        commands = fleet.report(lease, update_of(1.0))
    minutes = FleetMinutes(now=lambda: NOON)
    minutes.sample(FleetNow(2, 1, 0, 0), 2, 0, 0)
    fleet.store.write(minutes.take_rows(ended=True))
    fleet.store.storage.held_out.write(1, {"examples": 8, "metrics": {"loss": 0.4, "error": 0.1}})
    fleet.store.close()
    return plan


@contextmanager
def viewing(folder: Path, *words: str) -> Iterator[str]:
    """The link of a page over these records."""
    with processes(folder) as run:
        run.start("view", COMMAND, "view", *words)
        wait_for(lambda: "#token=" in run.log("view"), "the link")
        yield run.log("view").split()[-1]


def test_the_records_are_read_and_not_changed(plan: Plan, tmp_path: Path) -> None:
    with viewing(tmp_path, str(plan.data_dir)) as link:
        address, _, token = link.partition("/#token=")
        somebody = Browser(address)
        assert somebody.ask("GET", "/v1/runs")[0] == 401
        assert somebody.ask("POST", "/v1/session", {"token": "x"})[0] == 401
        answer = somebody.sign_in(token)
        assert (answer["replay"], answer["models"], answer["role"]) == (True, False, "view")
        with somebody.look("host", "run/run") as look:
            look.until(lambda: "run/run" in look.values)
            assert [row["number"] for row in look.lists["run/run"]["rounds"]] == [1, 2]
            assert [row["version"] for row in look.lists["run/run"]["rounds"]] == [1, 2]
            assert look.lists["run/run"]["held_out"] == [[1, {"loss": 0.4, "error": 0.1}]]
            minute = [NOON + 60, 2, 1, 0, 0, 0, 0, 0, {}, 2]
            assert look.lists["run/run"]["minutes"] == [minute]
            assert look.values["run/run"]["version"] == 2
            assert look.values["host"]["run/run"]["recorded"] is True
        assert somebody.ask("GET", "/v1/runs/run/rounds?last=1")[1][0]["number"] == 2
        held_out = somebody.ask("GET", "/v1/runs/run")[1]["held_out"]
        assert held_out == {"1": {"examples": 8, "metrics": {"loss": 0.4, "error": 0.1}}}
        assert somebody.ask("GET", "/v1/nothing")[0] == 404
        for path in ("runs/run/evaluate", "runs/run/roll-back", "devices/a/revoke"):
            assert somebody.ask("POST", f"/v1/{path}", {})[0] == 405
        with somebody.look("run/nowhere") as look:
            look.until(lambda: look.ended == {"run/nowhere"})


def test_records_of_a_computation_have_no_loss(tmp_path: Path) -> None:
    data = write_computation_run(tmp_path / "people")
    (run,) = recorded_runs(LocalViews(data=data)).values()
    assert run.values["about"]["computes"] == "statistics"
    assert run.values["about"]["rounds"] is None
    assert run.glance["of"] is None
    assert run.glance["spark"] == []


@pytest.mark.slow
def test_the_page_over_records_of_a_computation_shows_its_progress(tmp_path: Path) -> None:
    data = write_computation_run(tmp_path / "people")
    with (
        viewing(tmp_path, str(data)) as link,
        browsing(tmp_path / "profile") as browser,
    ):
        page = browser.pages[0]
        problems = problems_of(page)
        page.goto(link)
        page.get_by_role("link", name="people").click()
        text = "This run computes statistics and trains no model: exchange 2 of 2."
        expect(page.get_by_text(text)).to_be_visible()
        expect(page.get_by_text("Loss", exact=True)).to_have_count(0)
        assert problems == []


@pytest.mark.parametrize("where", ["", "nowhere", "https://127.0.0.1:1"])
def test_what_cannot_be_shown(where: str, tmp_path: Path) -> None:
    command = [COMMAND, "view", where or str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
    )
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_page_over_records(plan: Plan, tmp_path: Path) -> None:
    with (
        viewing(tmp_path, str(plan.file)) as link,
        browsing(tmp_path / "profile") as browser,
    ):
        page = browser.pages[0]
        problems = problems_of(page)
        page.goto(link)
        expect(page.get_by_text(f"the records of {plan.file}")).to_be_visible()
        page.get_by_role("link", name="test").click()
        loss = "Loss; newest: loss 0.7, on held-out data 0.4"
        expect(page.get_by_role("img", name=loss)).to_be_visible()
        expect(page.get_by_role("img", name="Error; newest: on held-out data 0.1")).to_be_visible()
        expect(page.get_by_role("img", name="Devices; newest: connected 2")).to_be_visible()
        assert axe_finds(page) == []
        expect(page.get_by_role("rowheader", name="2", exact=True)).to_be_visible()
        for name in ("Roll back", "Stop", "Evaluate", "Sign out"):
            expect(page.get_by_role("button", name=name)).to_have_count(0)
        page.get_by_role("link", name="Devices").click()
        expect(page.get_by_role("heading", name="Devices", level=1)).to_be_visible()
        assert problems == []

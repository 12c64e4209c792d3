"""A simulation's folder as the live page shows it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
import virtual
from browser import browsing
from fleetlearn_coordinator.dashboard.live_feed import Topic, Viewer
from fleetlearn_coordinator.dashboard.replay import ReplayedRun
from fleetlearn_simulator import Scenario, simulate
from fleetlearn_simulator.results.replayed_run import replayed_run, replayed_runs
from live_page_person import axe_finds
from live_schema import check_event
from page_person import watched as problems_of
from playwright.sync_api import expect
from processes import processes, wait_for
from runs_folder import row, write_rows, write_run

PHONES = {
    "phone": {"share": 3.0, "latency": 0.1, "download": 1e6, "upload": 5e5},
    "board": {"share": 1.0, "latency": 0.1, "download": 1e7, "upload": 5e6},
}


def test_a_computation_has_no_loss_to_show(tmp_path: Path) -> None:
    scenario = 'name = "s"\n[plan]\nrecipe = "statistics"\n[plan.stop]\nrounds = 1000000\n'
    write_rows(tmp_path, [row(1, reports=5)], scenario=scenario)
    run = replayed_run(tmp_path)
    assert run.values["about"]["computes"] == "statistics"
    assert (run.values["about"]["rounds"], run.glance["of"]) == (None, None)


def test_rounds_in_virtual_time(tmp_path: Path) -> None:
    rows = [
        row(
            number, reports=5, train={"loss": 2.0 / number}, test={"loss": 3.0, "error": None},
            causes={"train": number}, accepted={"0": 3, "1": 2}, bytes={"up": 10, "down": 20},
            connected=6 + number,
        )
        for number in (1, 2)
    ]  # fmt: skip
    rows.append(row(3, how="abandoned", reports=1, dropped={"vanished": 4}, connected=7))
    scenario = 'name = "s"\n[plan.round]\ngoal = 5\n[tiers.phone]\nshare = 1\n'
    events = [
        {"time": 1.0, "event": "assigned", "device": 1, "task": "a"},
        {"time": 2.0, "event": "assigned", "device": 2, "task": "b"},
        {"time": 61.0, "event": "accepted", "device": 1, "task": "a", "steps": 3},
        {"time": 90.0, "event": "lost", "device": 2, "task": "b", "cause": "train"},
        {"time": 180.0, "event": "abandoned", "round": 3},
    ]
    write_rows(tmp_path, rows, scenario=scenario)
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (tmp_path / "events.jsonl").write_text(lines + '{"time": 200.0, "eve')
    found = replayed_run(tmp_path)
    first, second, third = found.history.rounds.rows
    assert (first["opened"], first["closed"], first["metrics"]) == (
        0.0,
        60.0,
        {"loss": 2.0, "test.loss": 3.0},
    )
    assert (second["dropped"], third["dropped"]) == ({"train": 2}, {"vanished": 4})
    assert third["outcome"] == "abandoned"
    assert found.values["tiers"] == {"phone": 6, "1": 4}
    assert found.values["bytes"] == [20, 40]
    assert (found.values["version"], found.values["finished"]) == (2, None)
    check_document(found)
    samples = {sample[0]: sample for sample in found.history.samples.rows}
    assert [samples[at][2] for at in (1.6, 3, 60, 62, 91)] == [1, 2, 2, 1, 0]
    assert (samples[50][1], samples[130][1]) == (7, 8)
    assert sum(sample[5] for sample in found.history.samples.rows) == 1


@pytest.mark.parametrize("budget", [2.3, None])
def test_a_private_run_shows_what_it_has_spent(tmp_path: Path, budget: float | None) -> None:
    """As a coordinator's page does: of the last release, of none before it, and nothing of a run
    that is not private."""
    left = None if budget is None else 3
    one = {"release": 1, "epsilon": 1.06, "delta": 1e-6, "of": budget, "left": left, "clip": 1.0}
    scenario = 'name = "s"\n[plan.stop]\nrounds = 5\n[plan.privacy]\ndelta = 1e-6\nnoise = 4\n'
    scenario += "" if budget is None else f"epsilon = {budget}\n"
    shown = {"budget": budget, "delta": 1e-6}
    for name, rows, known in [
        ("none", [row(1, how="abandoned")], {"epsilon": 0.0, "releases": 0, "left": None}),
        ("one", [row(1, privacy=one), row(2, how="abandoned")],
         {"epsilon": 1.06, "releases": 1, "left": left}),
    ]:  # fmt: skip
        write_rows(tmp_path / name, rows, scenario=scenario)
        found = replayed_run(tmp_path / name)
        assert found.values["privacy"] == found.glance["privacy"] == shown | known
        assert found.values["about"]["private"] == "none"
        check_document(found)
    assert "privacy" not in replayed_run(write_run(tmp_path / "public", 3)).values


def check_document(run: ReplayedRun) -> None:
    """Hold what the page is told of a run to its schema."""
    values, lists = run.values, run.history.lists
    host = {"time": 0.0, "run/s": run.glance}
    for topic in (Topic("run/s", lambda: values, lists), Topic("host", lambda: host, {})):
        viewer = Viewer()
        topic.join(viewer)
        content = asyncio.run(viewer.next())
        assert content is not None
        check_event(json.loads(content.removeprefix(b"data: ")))


def test_several_runs_have_their_folders_names(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name, 3)
    assert list(replayed_runs(tmp_path)) == ["a", "b"]
    assert list(replayed_runs(tmp_path / "b")) == ["b"]


def test_a_run_of_many_rounds_is_thinned_and_keeps_its_end(tmp_path: Path) -> None:
    found = replayed_run(write_run(tmp_path / "run", 2500))
    rows = found.history.rounds.rows
    assert len(rows) <= 1000
    assert rows[-1]["number"] == 2499
    assert not found.history.samples.rows, "there is no event log"


@pytest.mark.slow
def test_the_page_of_a_private_simulation_shows_what_is_spent(tmp_path: Path) -> None:
    one = {"release": 1, "epsilon": 1.5449, "delta": 1e-6, "of": 7.9999, "left": 3, "clip": 1.0}
    scenario = 'name = "s"\n[plan.stop]\nrounds = 5\n'
    scenario += "[plan.privacy]\ndelta = 1e-6\nepsilon = 7.9999\n"
    write_rows(tmp_path / "s.sim", [row(1, privacy=one)], scenario=scenario)
    with processes(tmp_path) as run:
        command = Path(sys.executable).with_name("fleetlearn-simulate")
        run.start("view", str(command), "view", str(tmp_path / "s.sim"))
        wait_for(lambda: "#token=" in run.log("view"), "the link")
        with browsing(tmp_path / "profile") as browser:
            page = browser.pages[0]
            page.goto(run.log("view").split()[-1])
            page.get_by_role("link", name="s", exact=True).click()
            expect(page.get_by_text("Epsilon 1.55 of 7.9999 (delta 1e-6)")).to_be_visible()
            expect(page.get_by_text("1 release, 3 left")).to_be_visible()


@pytest.mark.slow
def test_a_fleet_of_a_hundred_thousand_is_replayed(
    line: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(virtual, "MODULE", virtual.MODULE.replace("10 * (device + 1)", "20"))
    scenario: Scenario = virtual.make_scenario(
        tmp_path, line, 100_000, population__connected=5000, plan__round__goal=1000,
        plan__round__over_selection=1.3, plan__stop__rounds=8, tiers=PHONES,
        failures={"train": 0.002, "upload": 0.01},
    )  # fmt: skip
    simulate(scenario, tmp_path / "big.sim")
    with processes(tmp_path) as run:
        command = Path(sys.executable).with_name("fleetlearn-simulate")
        run.start("view", str(command), "view", str(tmp_path / "big.sim"))
        wait_for(lambda: "#token=" in run.log("view"), "the link")
        link = run.log("view").split()[-1]
        with browsing(tmp_path / "profile") as browser:
            page = browser.pages[0]
            problems = problems_of(page)
            page.goto(link)
            page.get_by_role("link", name="scenario").click()
            expect(page.get_by_role("img", name="Loss; newest")).to_be_visible()
            expect(page.get_by_role("img", name="Devices; newest: connected")).to_be_visible()
            expect(page.get_by_role("rowheader", name="surplus")).to_be_visible()
            assert axe_finds(page) == []
            expect(page.get_by_role("button", name="Revoke")).to_have_count(0)
            page.get_by_label("Moment").fill("500")
            expect(page.get_by_role("img", name="Bytes of a round")).to_be_visible()
            half = page.get_by_role("img", name="Loss; newest").get_attribute("aria-label")
            page.get_by_role("button", name="Play").click()
            expect(page.get_by_label("Moment")).to_have_value("1000")
            assert page.get_by_role("img", name="Loss; newest").get_attribute("aria-label") != half
            assert problems == []


@pytest.mark.slow
def test_a_private_run_has_charts_of_the_test_data_alone(tmp_path: Path) -> None:
    """Its devices' own measurements have neither a chart nor a name in one."""
    spent = {"release": 1, "epsilon": 1.06, "delta": 1e-6, "of": 8.0, "left": 3, "clip": 1.0}
    scenario = 'name = "s"\n[plan.privacy]\ndelta = 1e-6\nnoise = 4\n'
    test = {"loss": 3.0, "error": 0.5}
    write_rows(tmp_path / "run", [row(1, test=test, privacy=spent)], scenario=scenario)
    with processes(tmp_path) as run:
        command = Path(sys.executable).with_name("fleetlearn-simulate")
        run.start("view", str(command), "view", str(tmp_path / "run"))
        wait_for(lambda: "#token=" in run.log("view"), "the link")
        with browsing(tmp_path / "profile") as browser:
            page = browser.pages[0]
            page.goto(run.log("view").split()[-1])
            page.get_by_role("link", name="s", exact=True).click()
            for name, value in (("Loss", 3), ("Error", 0.5)):
                words = f"{name}; newest: on the test data {value}"
                expect(page.get_by_role("img", name=words, exact=True)).to_be_visible()
            legends = page.locator(".legend").filter(has_text="on the test data")
            expect(legends).to_have_text(["on the test data"] * 2)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("fleetlearn-simulate")), "view", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "holds no run" in done.stderr

"""Where people see what a private run has spent: log, status, rounds, page, metrics, results, and
the devices' owners."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from fleetlearn_coordinator.commands.show import privacy_words, rounds_table, run_lines
from fleetlearn_coordinator.dashboard.live_records import PrivacySpent
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.plan.service_settings import AlertSettings
from fleetlearn_coordinator.results.run_results import RunResults
from fleetlearn_coordinator.service.live_run import LiveRun, stopped_state
from fleetlearn_coordinator.service.live_schema import schema
from fleetlearn_coordinator.service.monitoring.alert_rules import RULES
from fleetlearn_coordinator.service.monitoring.gauges import run_gauges
from fleetlearn_coordinator.service.recorded_runs import recorded_runs
from fleetlearn_coordinator.service.views.local_views import LocalViews
from fleetlearn_coordinator.service.views.run_views import RunPlace, run_view
from fleetlearn_protocol.epsilon_text import budget_text, spent_text
from fleetlearn_protocol.messages import Held, PrivacyNote
from fleetlearn_simulator.results.private_runs import privacy_words as simulated_words
from jsonschema import validate
from peers import PlanMaker, fleet, update_of

PRIVATE: dict[str, Any] = {
    "privacy__noise": 4.0,
    "privacy__delta": 1e-6,
    "privacy__population": 100,
    "privacy__clip": 1.0,
    "privacy__participations": 1000,
    "round__goal": 1,
    "local__evaluate": False,
}
"""mu^2 = releases / 16: at delta 1e-6 epsilon is 2.25411 after four releases, 1.93 after three."""
RULE = next(rule for rule in RULES if rule.name == "PrivacySpent")


def train(plan: Plan, releases: int) -> dict[str, Any]:
    """Make releases by a device at a socket. Returns what is shown of the run then."""

    async def test() -> dict[str, Any]:
        async with fleet(plan) as (server, join):
            live = LiveRun("test", server)
            server.run.observers.add(live)
            peer = await join("a")
            notes = []
            for _ in range(releases):
                task = await peer.do_round(update_of(0.1), evaluation=None)
                notes.append(task.privacy)
            while server.engine.releases < releases:
                await asyncio.sleep(0.01)
            gauges = {
                name.removeprefix("fleetlearn_privacy_"): sample.value
                for name, sample in run_gauges("test", server, server.live())
                if name.startswith("fleetlearn_privacy_")
            }
            return {
                "notes": notes,
                "state": live.state(),
                "glance": live.glance(),
                "gauges": gauges,
            }

    return asyncio.run(test())


def test_a_private_run_is_seen_everywhere(
    make_plan: PlanMaker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fleetlearn")
    plan = make_plan("dp-fedavg", **PRIVATE, privacy__epsilon=2.3)
    found = train(plan, 3)
    view = run_view(RunPlace("test", plan.data_dir))
    assert view.privacy is not None
    epsilon = view.privacy.epsilon
    assert epsilon == pytest.approx(1.93, abs=0.005)
    assert (view.privacy.budget, view.privacy.delta) == (2.3, 1e-6)
    assert (view.privacy.releases, view.privacy.left) == (3, 1)
    # on the page
    spent = {"epsilon": epsilon, "budget": 2.3, "delta": 1e-6, "releases": 3, "left": 1}
    assert found["state"]["privacy"] == found["glance"]["privacy"] == spent
    assert stopped_state("test", plan)["privacy"] == spent
    (recorded,) = recorded_runs(LocalViews(plan=plan)).values()
    assert recorded.values["privacy"] == recorded.glance["privacy"] == spent
    for values in (found["state"], recorded.values):
        assert values["about"]["private"] == "none", "what its devices measure has no chart"
    for kind, values in (("RunValues", found["state"]), ("Glance", found["glance"])):
        validate(json.loads(json.dumps(values)), {**schema(), "$ref": f"#/$defs/{kind}"})
    # in metrics, and the alert at 90 %
    share = epsilon / 2.3
    gauges = {"epsilon": epsilon, "budget": 2.3, "releases": 3, "releases_left": 1}
    assert found["gauges"] == gauges | {"spent_ratio": pytest.approx(share)}
    limit = RULE.limit_of(AlertSettings())
    assert (limit, RULE.is_beyond(share, limit), RULE.is_beyond(0.91, limit)) == (0.9, False, True)
    # for devices' owners
    assert found["notes"][0] == PrivacyNote(0.0, 1e-6, 2.3)
    assert found["notes"][2].spent == pytest.approx(1.54, abs=0.01)
    # in words
    words = "epsilon 1.93 of 2.3 (delta 1e-06), 3 releases, 1 left"
    assert privacy_words(view.privacy, 100) == privacy_words(view.privacy, None) == words
    assert privacy_words(view.privacy, 0).endswith(", 0 left"), "stop.rounds ends it earlier"
    assert f"privacy: {words}" in run_lines(view, time.time())
    table = rounds_table(view.rounds, time.time(), 200)
    (column,) = (each for each in table.columns if each.header == "epsilon")
    assert [*column.cells][-1] == spent_text(epsilon, 2.3, 4)
    row = RunResults.load(plan.data_dir).round_rows[-1]
    assert (row["privacy/epsilon"], row["privacy/release"]) == (epsilon, 3)
    said = [text for text in caplog.messages if text.startswith(("privacy:", "83.8 %"))]
    assert said == [
        "privacy: epsilon 1.07 of 2.3 at delta 1e-06 after 1 release, 3 left",
        "privacy: epsilon 1.55 of 2.3 at delta 1e-06 after 2 releases, 2 left",
        "privacy: epsilon 1.93 of 2.3 at delta 1e-06 after 3 releases, 1 left",
        "83.8 % of the privacy budget is spent: epsilon 1.93 of 2.3, 1 left; the run finishes "
        "before the release that would go past it",
    ]


@pytest.mark.parametrize(
    ("epsilon", "budget", "shown"),
    [
        (1.5449, 8.0, "epsilon 1.55 of 8 "),
        (7.9999, 8.0, "epsilon 8 of 8 "),
        (1.5449, 1.5451, "epsilon 1.545 of 1.5451 "),
    ],
)
def test_epsilon_is_rounded_up_and_a_budget_is_as_it_was_given(
    epsilon: float, budget: float, shown: str
) -> None:
    spent = PrivacySpent(epsilon=epsilon, budget=budget, delta=1e-6, releases=2, left=1)
    assert privacy_words(spent, None).startswith(shown)
    found = {"epsilon": epsilon, "of": budget, "delta": 1e-6, "release": 2, "clip": 1.0}
    told = spent_text(epsilon, budget, 4)
    words = f"epsilon {told} of {budget_text(budget)} at delta 1e-06 after 2 releases; clip norm 1"
    assert simulated_words(found) == words
    assert epsilon <= float(told) <= budget


def test_a_run_without_a_budget_says_so(make_plan: PlanMaker) -> None:
    plan = make_plan("dp-fedavg", **PRIVATE)
    found = train(plan, 1)
    left = found["gauges"]["releases_left"]
    assert {*found["gauges"]} == {"epsilon", "releases", "releases_left"}
    assert left == plan.stop.rounds - 1
    view = run_view(RunPlace("test", plan.data_dir))
    assert view.privacy is not None
    assert privacy_words(view.privacy, None) == "epsilon 1.07 (delta 1e-06), 1 release"
    words = "privacy: epsilon 1.07 (delta 1e-06), 1 release, 999 left"
    assert words in run_lines(view, time.time())


def test_a_run_that_is_not_private_shows_nothing_of_it(make_plan: PlanMaker) -> None:
    plan = make_plan(round__goal=1)
    found = train(plan, 1)
    assert found["gauges"] == {}
    assert found["notes"] == [None]
    assert "privacy" not in found["state"].keys() | found["glance"].keys()
    view = run_view(RunPlace("test", plan.data_dir))
    assert view.privacy is None
    table = rounds_table(view.rounds, time.time(), 200)
    assert "epsilon" not in [each.header for each in table.columns]
    assert not any(line.startswith("privacy") for line in run_lines(view, time.time()))
    assert not any(
        name.startswith("privacy") for name in RunResults.load(plan.data_dir).round_rows[0]
    )


@pytest.mark.parametrize("private", [True, False])
def test_a_data_directory_that_was_set_back_is_warned_of_once(
    make_plan: PlanMaker, caplog: pytest.LogCaptureFixture, private: bool
) -> None:
    plan = make_plan("dp-fedavg", **PRIVATE) if private else make_plan(round__goal=1)

    async def test() -> None:
        async with fleet(plan) as (server, join):
            prefix = f"{server.run.store.run}-"
            for name, task, number in (
                ("a", f"{prefix}1-0", 1),  # a round that may be here
                ("b", "other-9-0", 9),  # of another run
                ("c", f"{prefix}7-0", 7),
                ("d", f"{prefix}8-0", 8),
            ):
                server.engine.round = 2
                await join(name, held=Held(task, number))
                await asyncio.sleep(0)
            await (await join("e")).connection.ping()

    asyncio.run(test())
    warned = [text for text in caplog.messages if "this data directory was set back" in text]
    assert len(warned) == private
    if private:
        assert warned[0].startswith("a device has an update for round 7 of this private run, whose")
        assert f"count-releases {plan.data_dir} NUMBER" in warned[0]

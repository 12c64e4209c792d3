"""What the log says of events: tasks that ended, exchanges, metrics beyond their bounds."""

from __future__ import annotations

import pytest
from answering import Fleet, leases
from fleetlearn_coordinator.rounds.commands import Ended, ExchangeOpened
from fleetlearn_coordinator.service.event_log import EventLog
from fleetlearn_coordinator.service.observers import ExchangeSummarised
from fleetlearn_coordinator.service.run_log import RunLog
from peers import PlanMaker, update_of


def test_each_cause_has_a_line_with_its_devices(
    make_plan: PlanMaker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fleetlearn")
    late = [Ended(f"d{number}", f"t-2-{number}", 2, "late") for number in range(11)]
    EventLog(RunLog("digits"), make_plan())(
        [
            Ended("roof-3", "t-2-11", 2, "lost"),
            *late,
            Ended("a", "t-2-12", 2, "failed: diverged"),
            Ended("b", "t-2-13", 2, "rejected: not-finite"),
        ]
    )
    EventLog(RunLog(), make_plan())(
        [Ended("c", "t-3-1", 3, "surplus"), Ended("d", "t-3-2", 3, "surplus")]
    )
    assert caplog.messages == [
        (
            "run digits: round 2: device roof-3 is lost: the connection ended, and the device was "
            "not back in time"
        ),
        (
            "run digits: round 2: d0, d1, d10, d2, d3 and 6 more are late: the time was over "
            "before the report was here"
        ),
        "round 3: c, d are surplus: the round had its reports without it",
    ], "failures and what is rejected are logged where the devices' messages are read"


def test_exchanges_of_any_kind_and_phase_have_their_lines(
    make_plan: PlanMaker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fleetlearn")
    answered = {"devices": 3, "dropped": {"lost": 1}}
    measured = {"devices": 2, "examples": 20, "dropped": {}, "metrics": {}}
    EventLog(RunLog(), make_plan())(
        [
            ExchangeOpened(1, 4, "roll-call"),
            ExchangeSummarised("roll-call", 1, 1, 4, True, answered),
            ExchangeOpened(1, 4, "roll-call", 2, ("a", "b", "c")),
            ExchangeSummarised("evaluation", 7, 1, 5, False, measured),
        ]
    )
    assert caplog.messages == [
        "roll-call 1 of model version 4 begins",
        "roll-call 1 of model version 4 is valid: 3 devices answered, dropped: 1 lost",
        "roll-call 1, phase 2, of model version 4 begins",
        (
            "evaluation 7 of model version 5 is invalid: 2 devices, 20 examples, dropped: none; "
            "no metrics"
        ),
    ]


def test_a_round_is_logged_when_it_is_durable(
    make_plan: PlanMaker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fleetlearn")
    fleet = Fleet(
        make_plan(
            round__goal=1,
            round__minimum=1,
            stop__metric="loss",
            stop__target=0.1,
            stop__bounds=[0.0, 5.0],
        )
    )
    (lease,) = leases(fleet.check_in("a"))
    caplog.clear()
    fleet.report(lease, update_of(1.0), loss=7.0)
    fleet.store.close()
    assert caplog.messages[0] == (
        "1 devices measured a loss beyond its bounds, 0 to 5, and are left out of it"
    )
    assert caplog.messages[1].startswith("round 1 committed: ")

"""Lines about one of several runs, and about the tasks that ended."""

from __future__ import annotations

import pytest
from fleetlearn_coordinator.rounds.commands import Ended
from fleetlearn_coordinator.service.run_log import RunLog


def test_lines_name_the_run_where_there_are_several(caplog: pytest.LogCaptureFixture) -> None:
    RunLog("digits").warning("round %d abandoned: %s", 3, "100 % lost")
    RunLog().warning("round %d abandoned", 4)
    assert caplog.messages == ["run digits: round 3 abandoned: 100 % lost", "round 4 abandoned"]


def test_each_cause_has_a_line_with_its_devices(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "fleetlearn")
    late = [Ended(f"d{number}", f"t-2-{number}", 2, "late") for number in range(11)]
    RunLog("digits").say_ended(
        [
            Ended("roof-3", "t-2-11", 2, "lost"),
            *late,
            Ended("a", "t-2-12", 2, "failed: diverged"),
            Ended("b", "t-2-13", 2, "rejected: not-finite"),
        ]
    )
    RunLog().say_ended([Ended("c", "t-3-1", 3, "surplus"), Ended("d", "t-3-2", 3, "surplus")])
    assert caplog.messages == [
        "run digits: round 2: device roof-3 is lost: the connection ended, and the device was not back in time",
        "run digits: round 2: d0, d1, d10, d2, d3 and 6 more are late: the time was over before the report was here",
        "round 3: c, d are surplus: the round had its reports without it",
    ], "failures and what is rejected are logged where the devices' messages are read"

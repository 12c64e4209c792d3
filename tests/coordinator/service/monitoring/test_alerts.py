"""When alerts fire and are over, against values by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fleetlearn_coordinator.plan.service_settings import AlertSettings
from fleetlearn_coordinator.service.monitoring.alerts import FILE, OVER, AlertNotice, Alerts
from fleetlearn_coordinator.service.monitoring.catalogue import Sample, Samples

AGE, DISK = "fleetlearn_round_age_seconds", "fleetlearn_disk_free_bytes"
SETTINGS = AlertSettings(command=("true",), no_round=10.0, disk_free=1.0)


class Told:
    """Alerts with a clock that stands still, and what was told."""

    def __init__(self, folder: Path | None = None, settings: AlertSettings = SETTINGS) -> None:
        self.now, self.notices = 1000.0, list[AlertNotice]()
        self.alerts = Alerts(settings, folder, self.notices.append)

    def look(self, metric: str = AGE, **values: float) -> list[str]:
        """Evaluate, with a value for each run. Returns what is told."""
        samples: Samples = {metric: [Sample((run,), value) for run, value in values.items()]}
        before = len(self.notices)
        self.alerts.evaluate(samples, self.now)
        return [f"{n.alert} {n.run} {n.state}" for n in self.notices[before:]]

    def look_for(self, seconds: float, **values: float) -> list[str]:
        told = self.look(**values)
        for _ in range(int(seconds // 10)):
            self.now += 10
            told += self.look(**values)
        return told


def test_it_fires_once_and_is_over_once() -> None:
    told = Told()
    assert told.look_for(60, a=599.0) == []
    assert told.look_for(20, a=601.0) == [], "for less than half a minute"
    assert told.look_for(600, a=700.0) == ["NoRound a firing"]
    assert told.look_for(OVER - 10, a=0.0) == []
    assert told.look_for(20, a=700.0) == [], "it was within its limit too shortly to be over"
    assert told.look_for(600, a=0.0) == ["NoRound a resolved"]
    assert told.look_for(40, a=601.0) == ["NoRound a firing"]
    first, over, _ = told.notices
    assert first.text == "run a: no round was committed for 12 minutes"
    assert (first.value, first.limit, first.severity) == (700.0, 600.0, "warning")
    assert over.since == first.since == first.at
    assert over.at > first.at
    assert over.text == "run a: NoRound is over"


def test_runs_have_their_own_alerts() -> None:
    told = Told()
    assert told.look_for(60, a=601.0, b=1.0) == ["NoRound a firing"]
    assert told.look_for(60, a=601.0, b=999.0) == ["NoRound b firing"]
    assert told.look_for(OVER, a=601.0) == ["NoRound b resolved"], "b was removed"
    assert told.notices[-1].value is None


def test_below_is_as_good_as_above() -> None:
    told = Told()
    for free, expected in ((2**30, []), (2**30 - 1, ["DiskLow a firing"])):
        told.now += 100
        assert told.look(DISK, a=free) == []
        told.now += 100
        assert told.look(DISK, a=free) == expected


def test_what_is_off_is_not_told() -> None:
    told = Told(settings=AlertSettings(command=("true",), no_round=10.0, off=("NoRound",)))
    assert told.look_for(100, a=10_000.0) == []


def test_a_restart_tells_nothing_again(tmp_path: Path) -> None:
    first = Told(tmp_path)
    first.look_for(60, a=601.0)
    second = Told(tmp_path)
    second.now = first.now + 5
    assert second.alerts.is_firing("NoRound", "a")
    assert second.look_for(600, a=900.0) == []
    third = Told(tmp_path)
    third.now = second.now
    assert third.look_for(600, a=0.0) == ["NoRound a resolved"]
    assert third.notices[0].since == first.notices[0].since
    assert not Told(tmp_path).alerts.is_firing("NoRound", "a")


def test_a_run_that_fails_at_each_start_is_one_alert(tmp_path: Path) -> None:
    now, told = 1000.0, []
    for _ in range(5):
        process = Told(tmp_path)
        process.now = now
        for failed in (0.0, 0.0, 1.0):  # some seconds, until the error comes again
            told += process.look("fleetlearn_run_failed", a=failed)
            process.now += 10
        now = process.now
    assert told == ["RunFailed a firing"]


def test_a_file_that_cannot_be_used_costs_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE).write_text("{")
    told = Told(tmp_path)
    assert "cannot be read" in caplog.messages[0]
    (tmp_path / f"{FILE}.draft").mkdir()
    assert told.look_for(60, a=601.0) == ["NoRound a firing"]
    assert any("cannot be written" in message for message in caplog.messages)
    (tmp_path / f"{FILE}.draft").rmdir()
    assert told.look_for(600, a=0.0) == ["NoRound a resolved"]
    assert json.loads((tmp_path / FILE).read_bytes()) == {"NoRound": {}}

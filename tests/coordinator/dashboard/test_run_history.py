"""A run's history: worked by hand."""

from __future__ import annotations

import msgspec
from fleetlearn_coordinator.dashboard.run_history import (
    MOST_NAMES,
    NOTES,
    OTHERS,
    SECONDS,
    FleetNow,
    RunHistory,
    round_row,
)

IDLE = FleetNow(0, 0, 0, 0)


def test_a_second_has_what_happened_in_it() -> None:
    history = RunHistory()
    history.counted(0, "phone")
    history.counted(2, "")
    history.ended("lost")
    history.moved(100, 50)
    history.sample(1000, FleetNow(5, 2, 1, 1))
    history.ended("late")
    history.moved(10, 0)
    history.sample(1001, FleetNow(4, 1, 0, 2))
    assert list(history.samples.rows) == [
        [1000, 5, 2, 1, 1, 2, 100, 50, {"lost": 1}],
        [1001, 4, 1, 0, 2, 0, 10, 0, {"late": 1}],
    ]
    assert history.totals() == {
        "causes": {"lost": 1, "late": 1},
        "refusals": {},
        "staleness": {"0": 1, "2": 1},
        "tiers": {"phone": 1, "": 1},
        "bytes": [110, 50],
    }


def test_a_revived_task_is_lost_no_more() -> None:
    history = RunHistory()
    history.ended("lost")
    history.revived()
    history.revived()
    assert history.totals()["causes"] == {"lost": 0}


def test_what_devices_say_is_bounded() -> None:
    """However many tiers, causes, refusals and words they think of."""
    history = RunHistory()
    for number in range(1000):
        history.counted(number, f"tier-{number}")
        history.failed(1.0, "a", "failed: diverged", "x" * 100_000)
        history.refused(1.0, "a", f"code-{number}", "y" * 100_000)
    for second in range(2 * SECONDS):
        history.sample(second, IDLE)
    assert len(history.tiers) == MOST_NAMES + 1
    assert history.tiers[OTHERS] == 1000 - MOST_NAMES
    assert sum(history.staleness.values()) == 1000
    assert len(history.refusals) == MOST_NAMES + 1
    assert len(history.notes.rows) == NOTES
    assert len(history.samples.rows) == SECONDS
    assert len(msgspec.json.encode([[*each.rows] for each in history.lists.values()])) < 250_000


def test_rounds_of_earlier_versions_lack_some_of_the_summary() -> None:
    row = round_row(3, "committed", 10.0, 12.5, {"reports": 2, "dropped": {"lost": 1}})
    assert (row["number"], row["reports"], row["metrics"], row["staleness"]) == (3, 2, {}, None)
    assert "members" not in row, "the run has one model"
    small = {"reports": 2, "metrics": {"loss": 0.5}, "change": 0.25, "partial": 1, "behind": {}}
    row = round_row(3, "committed", 10.0, 12.5, {"members": {"small": small}})
    assert row["members"] == {"small": {"reports": 2, "metrics": {"loss": 0.5}, "change": 0.25}}

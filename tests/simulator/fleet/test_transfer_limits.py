"""Transfers at a time: queues worked out by hand, alone and in rounds."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_simulator.fleet.transfer_limits import DownloadQueue, UploadQueue
from virtual import Driven, drive, make_scenario


def test_downloads_wait_for_the_place_that_is_free_first() -> None:
    downloads = DownloadQueue(2)
    waits = downloads.wait(100.0, np.array([10.0, 4.0, 5.0, 1.0, 0.0]))
    assert waits.tolist() == [0, 0, 4, 9, 10], "until 110 and 104; 104 to 109; 109 to 110; at 110"
    assert downloads.wait(105.0, np.array([3.0, 3.0])).tolist() == [5, 5], (
        "both places are taken until 110"
    )
    assert downloads.wait(112.0, np.array([1.0, 1.0, 1.0])).tolist() == [1, 1, 2]
    downloads.clear()
    assert downloads.wait(112.0, np.array([1.0])).tolist() == [0]


@pytest.mark.parametrize("places", [1, 3, 64])
def test_downloads_are_those_of_a_queue_that_is_walked_through(places: int) -> None:
    """Against a list of the places' ends, looked through for each device."""
    random, downloads, ends = np.random.default_rng(places), DownloadQueue(places), [0.0] * places
    now = 0.0
    for _ in range(50):
        now += random.exponential(20.0)
        seconds = random.exponential(10.0, random.integers(0, 40))
        expected = []
        for taken in seconds.tolist():
            place = ends.index(min(ends))
            begin = max(now, ends[place])
            ends[place] = begin + taken
            expected.append(begin - now)
        np.testing.assert_allclose(downloads.wait(now, seconds), expected, atol=1e-9)


def test_uploads_begin_in_the_order_in_which_they_are_asked_for() -> None:
    uploads: UploadQueue[str] = UploadQueue(2)
    uploads.expect({task: float(ord(task)) for task in "abcdef"})
    assert uploads.ask("b", "B") == [(98.0, "B")]
    assert uploads.ask("a", "A") == [(97.0, "A")]
    assert uploads.ask("c", "C") == []
    assert uploads.ask("d", "D") == []
    assert uploads.ask("e", "E") == []
    assert uploads.end("c") == [], "it waited, and is gone"
    assert uploads.end("f") == [], "it had not asked"
    assert uploads.end("a") == [(100.0, "D")]
    assert uploads.end("b") == [(101.0, "E")]
    assert uploads.end("d") == []
    assert "f" not in uploads.expected
    uploads.clear()
    uploads.expect({"g": 1.0})
    assert uploads.ask("g", "G") == [(1.0, "G")]


def limited(
    folder: Path, line: Path, size: int, *, downloads: int, uploads: int, **settings: Any
) -> Driven:
    """Each device trains for 10 seconds, and transfers for 5 each way."""
    given = {
        "plan__local__batch_size": 0,
        "tiers": {"device": {"latency": 5.0, "download": 1e12, "upload": 1e12}},
        "service": {"downloads": downloads, "uploads": uploads},
        "coordinator__limits": True,
    }
    return drive(make_scenario(folder, line, size, **{**given, **settings}))


def times(run: Driven, *kinds: str) -> list[float]:
    return [time for time, *_ in run.told(*kinds)]


def test_who_finds_no_place_to_download_begins_later(tmp_path: Path, line: Path) -> None:
    run = limited(tmp_path, line, 5, downloads=2, uploads=16)
    assert times(run, "accepted") == [20, 20, 25, 25, 30]


def test_who_finds_no_place_to_upload_reports_later(tmp_path: Path, line: Path) -> None:
    run = limited(tmp_path, line, 5, downloads=64, uploads=2, plan__stop__rounds=2)
    assert times(run, "accepted") == [20, 20, 25, 25, 30, 50, 50, 55, 55, 60], (
        "the next round finds all places free"
    )
    (row, _) = run.rounds
    assert row["device_seconds"]["useful"] == pytest.approx(20 + 20 + 25 + 25 + 30)


def test_without_the_limits_all_transfer_at_once(tmp_path: Path, line: Path) -> None:
    run = limited(tmp_path, line, 5, downloads=2, uploads=2, coordinator__limits=False)
    assert times(run, "accepted") == [20] * 5


def test_a_place_is_not_kept_by_who_trains(tmp_path: Path, line: Path) -> None:
    """Device k trains 10 (k + 1) seconds, so that they ask at 22, 32 and 42; each upload takes 12
    seconds."""
    tiers = {"device": {"latency": 12.0, "download": 1e12, "upload": 1e12}}
    run = limited(
        tmp_path, line, 3, downloads=64, uploads=1, tiers=tiers, plan__local__batch_size=10
    )
    assert run.told("accepted") == [
        (34, "accepted", 0, None),
        (46, "accepted", 1, None),
        (58, "accepted", 2, None),
    ]


def test_who_is_gone_leaves_its_place_to_the_next(tmp_path: Path, line: Path) -> None:
    """All ask at 15; who is first goes offline at 17."""
    found = limited(tmp_path, line, 3, downloads=64, uploads=1).told("accepted")
    assert [time for time, *_ in found] == [20, 25, 30]
    order = [device for _, _, device, _ in found]
    rows = "".join(f"{device},0,{17 if device == order[0] else 10**6}\n" for device in range(3))
    (tmp_path / "trace.csv").write_text(f"device,on,off\n{rows}")
    run = limited(
        tmp_path,
        line,
        3,
        downloads=64,
        uploads=1,
        availability={"kind": "trace", "file": "trace.csv"},
    )
    assert run.told("accepted", "lost") == [
        (17, "lost", order[0], "offline"),
        (22, "accepted", order[1], None),
        (27, "accepted", order[2], None),
    ]


def test_a_wait_leaves_less_time_to_train(tmp_path: Path, line: Path) -> None:
    """Of 60 seconds 6 are kept for the upload. The first trains 4 steps of 5, from 5 to 45; the
    second may from 10 on, and the third from 15 on: it has 39 seconds."""
    run = limited(
        tmp_path,
        line,
        3,
        downloads=1,
        uploads=16,
        plan__local__epochs=4,
        plan__round__deadline=60.0,
    )
    steps = [row["steps"] for row in run.events if row["event"] == "accepted"]
    assert (times(run, "accepted"), steps) == ([50, 50, 55], [4, 3, 4])


def test_more_than_the_goal_asks_for_places_in_vain(tmp_path: Path, line: Path) -> None:
    """Who waits when the round has its goal is one too many."""
    settings = {"plan__round__goal": 2, "plan__round__over_selection": 2.0}
    run = limited(tmp_path, line, 4, downloads=64, uploads=1, **settings)
    assert times(run, "accepted") == [20, 25]
    assert [row[3] for row in run.told("lost")] == ["surplus", "surplus"]
    assert times(run, "lost") == [25, 25]


def test_uploads_wait_for_a_coordinator_that_is_down(tmp_path: Path, line: Path) -> None:
    """It dies before they ask and is back at 21; each is there again within 30 seconds more."""
    run = limited(
        tmp_path, line, 3, downloads=64, uploads=1, coordinator={"limits": True, "crashes": [11.0]}
    )
    at = times(run, "accepted")
    assert len(at) == 3
    assert at[0] >= 26
    assert all(later - earlier >= 5 - 1e-3 for earlier, later in pairwise(at)), "one at a time"

from __future__ import annotations

from pathlib import Path

import pytest
from fleetlearn_device.storage import update_counts
from fleetlearn_device.storage.errors import StateError
from fleetlearn_device.storage.update_counts import UpdateCounts


def test_updates_are_counted_for_each_run_over_restarts(tmp_path: Path) -> None:
    path = tmp_path / "updates.json"
    counts = UpdateCounts(path)
    assert counts.of("a") == 0
    assert not path.exists()
    for run in ("a", "b", "a"):
        counts.add(run, f"{run}-1-1")
    again = UpdateCounts(path)
    assert [again.of(run) for run in "abc"] == [2, 1, 0]
    assert all(again.made(task) for task in ("a-1-1", "b-1-1"))
    assert not again.made("a-1-2")
    again.check()
    again.add("a", "a-2-1")
    assert UpdateCounts(path).of("a") == 3


@pytest.mark.parametrize("content", [b"", b"{", b'{"updates":{"a":1},"format":1,"crc32":7}'])
def test_a_damaged_file_stops_a_device_that_is_limited(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """A count that is lost would let it take part as often again. Others count from 0."""
    path = tmp_path / "updates.json"
    path.write_bytes(content)
    counts = UpdateCounts(path)
    assert counts.of("a") == 0
    assert "it counts from 0" in caplog.text
    with pytest.raises(StateError, match=r"is damaged .* Delete the file"):
        counts.check()
    counts.add("a", "a-1-1")
    assert UpdateCounts(path).of("a") == 1


def test_a_count_that_could_not_be_written_does_not_count(tmp_path: Path) -> None:
    counts = UpdateCounts(tmp_path / "gone" / "updates.json")
    with pytest.raises(StateError):
        counts.add("a", "a-1-1")
    assert counts.of("a") == 0
    assert not counts.made("a-1-1")


def test_the_last_tasks_are_remembered_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(update_counts, "REMEMBERED", 3)
    counts = UpdateCounts(tmp_path / "updates.json")
    for number in range(5):
        counts.add("a", f"a-{number}-1")
    again = UpdateCounts(tmp_path / "updates.json")
    assert [again.made(f"a-{number}-1") for number in range(5)] == [False] * 2 + [True] * 3


def test_the_file_of_an_earlier_version_knows_its_last_task(tmp_path: Path) -> None:
    (tmp_path / "updates.json").write_text('{"updates":{"a":2},"last":"a-2-1"}')
    counts = UpdateCounts(tmp_path / "updates.json")
    assert counts.made("a-2-1")
    counts.add("a", "a-3-1")
    assert counts.of("a") == 3

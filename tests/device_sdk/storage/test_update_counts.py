from __future__ import annotations

from pathlib import Path

import pytest
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
    assert again.is_last("a-1-1")
    assert not again.is_last("b-1-1")
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
    assert not counts.is_last("a-1-1")

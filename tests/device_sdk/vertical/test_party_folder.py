"""What a party keeps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fleetlearn_device.vertical.party_folder import ROWS, KnownRows, PartyFolder
from fleetlearn_protocol.vertical.kept_part import KeptPart, PartKey

KEY = PartKey("run", "a" * 64, "b" * 64)
STATE = np.zeros(0, np.float32)


def part(step: int) -> KeptPart:
    return KeptPart(step, np.full(3, step, np.float32), STATE)


def test_the_newest_two_are_kept_and_those_of_a_given_up_attempt_are_not(tmp_path: Path) -> None:
    folder = PartyFolder(tmp_path / "state")
    for step in (10, 20, 30):
        folder.keep(KEY, part(step))
    assert folder.checkpoints(KEY) == [20, 30]
    folder.keep(KEY, part(25))
    assert folder.checkpoints(KEY) == [20, 25]
    found = folder.load(KEY, 25)
    assert found is not None
    assert found.local.tolist() == [25, 25, 25]
    newest = folder.newest(KEY.bundle)
    assert newest is not None
    assert newest.step == 25
    assert folder.newest("c" * 64) is None


def test_a_damaged_or_missing_bottom_is_none(tmp_path: Path) -> None:
    folder = PartyFolder(tmp_path)
    folder.keep(KEY, part(10))
    (path,) = tmp_path.glob("bottom-*.part")
    assert folder.load(KEY, 20) is None
    path.write_bytes(path.read_bytes()[:-1])
    assert folder.load(KEY, 10) is None
    assert folder.checkpoints(KEY) == []
    assert folder.newest(KEY.bundle) is None


def test_rows_are_known_for_this_run_and_these_rows_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, rows = PartyFolder(tmp_path), KnownRows("run", "own", "d" * 64, b"\x07")
    assert folder.known_rows("run", "own") is None
    folder.keep_rows(rows)
    assert folder.known_rows("run", "own") == rows
    assert folder.known_rows("other", "own") is None
    assert folder.known_rows("run", "other") is None
    (tmp_path / ROWS).write_bytes(b"{")
    assert folder.known_rows("run", "own") is None
    assert "is damaged: which rows are common is asked for again" in caplog.text

"""Which row is whose: rows are used again, except those that a checkpoint or the open round
needs."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from fleetlearn_simulator.fleet.device_rows import DeviceRows
from fleetlearn_simulator.training.kept_rows import NO_ROW, RowFile


@pytest.fixture
def rows(tmp_path: Path) -> DeviceRows:
    return DeviceRows(RowFile(tmp_path / "rows", 3), 10)


def put(rows: DeviceRows, **values: int) -> None:
    """``put(rows, d7=1)``: device 7 keeps ones."""
    for name, value in values.items():
        rows.put(int(name[1:]), np.full(3, value, np.float32))


def held(rows: DeviceRows) -> dict[int, float]:
    """Device -> the value that it keeps."""
    found = enumerate(rows.of(list(range(10))))
    return {device: float(rows.file.read(row)[0]) for device, row in found if row != NO_ROW}


def test_a_device_has_what_it_kept_last(rows: DeviceRows) -> None:
    assert rows.of([3, 0]) == [NO_ROW, NO_ROW]
    put(rows, d3=1, d7=2)
    put(rows, d3=3)
    assert held(rows) == {3: 3.0, 7: 2.0}


def test_a_row_is_used_again_when_its_round_is_over(rows: DeviceRows) -> None:
    put(rows, d3=1)
    (before,) = rows.of([3])
    put(rows, d3=2, d4=3)
    assert rows.file.read(before).tolist() == [1.0] * 3, "the round's evaluation reads it"
    assert rows.used == 3
    rows.end_round()
    put(rows, d5=4)
    assert rows.of([5]) == [before]
    assert rows.used == 3


def test_a_checkpoint_is_as_it_was_until_the_next_one(rows: DeviceRows) -> None:
    put(rows, d0=1, d1=2)
    rows.end_round()
    saved = rows.state()
    # rounds after the checkpoint, of which a crash leaves nothing but the file
    for value in range(5):
        put(rows, d0=10 + value, d2=20 + value)
        rows.end_round()
    assert rows.used == 6, "two for the checkpoint, and two for each of two rounds in turn"

    again = DeviceRows(RowFile(rows.file.path, 3), 10)
    again.restore(saved)
    assert held(again) == {0: 1.0, 1: 2.0}
    put(again, d0=30, d2=40, d3=50)
    again.end_round()
    assert held(again) == {0: 30.0, 1: 2.0, 2: 40.0, 3: 50.0}
    third = DeviceRows(RowFile(rows.file.path, 3), 10)
    third.restore(saved)
    assert held(third) == {0: 1.0, 1: 2.0}, "it can be gone back to any number of times"
    assert again.used == 6, "what the run that was stopped left is used again"

    again.state()
    put(again, d4=60)
    assert again.used == 6, "the rows of the checkpoint before are free"


def test_a_million_devices_of_which_hundreds_take_part(tmp_path: Path) -> None:
    """Memory and disk are for those that take part."""
    file = RowFile(tmp_path / "rows", 1000)
    tracemalloc.start()
    rows = DeviceRows(file, 1_000_000)
    for turn in range(3):
        for device in range(0, 1_000_000, 2500):
            rows.put(device, np.full(1000, device + turn, np.float32))
        rows.end_round()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4.5e6, (
        "an array of 4 bytes for each device, which takes no memory where nobody writes"
    )
    assert file.path.stat().st_size <= 2 * 400 * 4000
    assert [float(file.read(row)[0]) for row in rows.of([0, 997_500])] == [2.0, 997_502.0]
    saved = rows.state()
    assert len(saved["devices"]) == len(saved["rows"]) == 400

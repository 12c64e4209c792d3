"""The sets of tied vectors: made by a task, and chosen by the coordinator for a later one."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest
from fleetlearn_device.storage.state_directory import StateDirectory
from fleetlearn_device.storage.tied_vectors import file_size
from fleetlearn_protocol.encodings import FLOAT32
from fleetlearn_protocol.messages import Report
from fleetlearn_protocol.vector import Vector

UPDATE = b"1234"
REPORT = Report("t1", 3, (FLOAT32.part("update", UPDATE),), 7, 3, 2.0, True, 0.5)
BUNDLE, OTHER = "b" * 64, "c" * 64


def made_by(number: int) -> dict[str, Vector]:
    return {
        "control": np.array([number, 2], np.float32),
        "residual": np.array([-number, 3], np.float32),
    }


def save(state: StateDirectory, number: int, bundle: str = BUNDLE) -> None:
    report = msgspec.structs.replace(REPORT, task=f"t{number}")
    state.outbox.save(report, (UPDATE,), bundle, None, made_by(number))


def values(found: Mapping[str, Vector]) -> dict[str, list[float]]:
    return {name: vector.tolist() for name, vector in found.items()}


def sets(state: StateDirectory) -> list[str]:
    return sorted(path.name.removeprefix(f"{BUNDLE}.") for path in (state.path / "tied").iterdir())


@pytest.mark.parametrize("restarts", [False, True])
def test_a_task_goes_on_from_the_set_that_it_names(tmp_path: Path, restarts: bool) -> None:
    state = StateDirectory(tmp_path)
    assert state.tied_vectors.begin(BUNDLE, None, 2) == {}
    steps = [
        (1, None, ["t1"]),
        (2, "t1", ["t1", "t2"]),  # t1 was counted
        (3, "t1", ["t1", "t3"]),  # t2 was not
        (4, "t3", ["t3", "t4"]),
        (5, None, ["t5"]),  # another run
    ]
    for number, kept, after in steps:
        found = state.tied_vectors.begin(BUNDLE, kept, 2)
        assert values(found) == ({} if kept is None else values(made_by(int(kept[1:]))))
        save(state, number)
        if number % 2:
            state.outbox.drop(f"t{number}")
        assert sets(state) == after
        if restarts:
            state.close()
            state = StateDirectory(tmp_path)
            assert sets(state) == after
    state.close()


def test_the_bytes_of_a_file(state: StateDirectory) -> None:
    save(state, 1)
    names = json.dumps(["control", "residual"], separators=(",", ":")).encode()
    content = b"".join(vector.tobytes() for vector in made_by(1).values()) + names
    expected = (
        content + len(names).to_bytes(4, "little") + zlib.crc32(content).to_bytes(4, "little")
    )
    assert (state.path / "tied" / f"{BUNDLE}.t1").read_bytes() == expected
    assert file_size(["control", "residual"], 2) == len(expected)
    assert file_size([], 2) == 0


def test_another_bundle_s_sets_stay(state: StateDirectory) -> None:
    save(state, 1)
    save(state, 2, OTHER)
    assert state.tied_vectors.begin(BUNDLE, None, 2) == {}
    assert [path.name for path in (state.path / "tied").iterdir()] == [f"{OTHER}.t2"]


def test_a_lost_set_is_told_of(state: StateDirectory, caplog: pytest.LogCaptureFixture) -> None:
    """The coordinator counts t1's update; this is a new disk."""
    assert state.tied_vectors.begin(BUNDLE, "t1", 2) == {}
    assert "t1 is lost" in caplog.text


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b[:-1],
        lambda b: b"\x01" + b[1:],
        lambda b: b[:18] + b"C" + b[19:],
        lambda b: b[:-8] + b"\xff" * 8,
        # the length of the names, which the CRC does not cover
        lambda b: b[:-8] + bytes([b[-8] - 1]) + b[-7:],
        lambda b: b + b"\0",
        lambda b: b[:5],
        lambda b: b"",
    ],
)
def test_a_damaged_set_is_put_aside(
    state: StateDirectory, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    save(state, 1)
    path = state.path / "tied" / f"{BUNDLE}.t1"
    damaged = damage(path.read_bytes())
    path.write_bytes(damaged)
    assert state.tied_vectors.begin(BUNDLE, "t1", 2) == {}
    assert "is damaged; it is put aside" in caplog.text
    aside = path.with_name(f"{BUNDLE}.damaged")
    assert aside.read_bytes() == damaged
    save(state, 2)
    assert values(state.tied_vectors.begin(BUNDLE, "t2", 2)) == values(made_by(2))
    assert aside.exists()


def test_a_set_of_another_size_is_no_set_of_this_bundle(state: StateDirectory) -> None:
    save(state, 1)
    assert state.tied_vectors.begin(BUNDLE, "t1", 3) == {}
    assert sets(state) == ["damaged"]

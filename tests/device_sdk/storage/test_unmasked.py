"""An update that is masked later: it waits durably, is never what is sent, and makes way for the
masked one whatever dies when."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from fleetlearn_device.storage import outbox as outbox_module
from fleetlearn_device.storage.errors import StateError
from fleetlearn_device.storage.outbox import Outbox
from fleetlearn_device.storage.state_directory import StateDirectory, describe
from fleetlearn_device.storage.unmasked import UnmaskedUpdate, report_of_unmasked
from fleetlearn_protocol.encodings import MASKED
from fleetlearn_protocol.frames import unpack_chunk
from fleetlearn_protocol.messages import Part, Report, SecureTask, Task, VectorReference
from killed import killed_after

BUNDLE = "b" * 64
SECURE = SecureTask("helper", 3, 20, least_factor=0.5, helper="0a" * 32)
VECTORS = (VectorReference("model", "c" * 64, 8, "float32"),)
TASK = Task(
    "t1", 3, BUNDLE, VECTORS, {"update": "masked"}, {"lr": 0.1}, 1, 8, 5, 60.0, clip=1.0,
    secure=SECURE,
)  # fmt: skip
UPDATE = np.array([0.25, -0.5, 0.125], np.float32)
CONTENT = UPDATE.tobytes()
MASKED_CONTENT = bytes(range(16))
KEPT = np.array([1, 2], np.float32)
BASE = Report("t1", 3, (Part("update", "float32", 12, 0),), 1, 1, 1.0, True, 0.0)
LATER = UnmaskedUpdate(TASK, 0.75, report_of_unmasked(BASE, CONTENT))
REPORT = msgspec.structs.replace(
    BASE, parts=(MASKED.part("update", MASKED_CONTENT),), sealed="0b" * 80, signature="0c" * 64
)
PLAIN = msgspec.structs.replace(BASE, task="t0", parts=(Part("update", "float32", 12, 0),))


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is synced is counted (killed.py), and no test here cuts the power."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


def save(state: StateDirectory) -> None:
    state.outbox.reserve(len(MASKED_CONTENT), 8, 0, 0, len(CONTENT))
    state.outbox.save(LATER.report, (CONTENT,), BUNDLE, KEPT, None, None, LATER)


def names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "pending").iterdir()}


def test_it_waits_over_restarts_and_is_in_no_report(tmp_path: Path) -> None:
    state = StateDirectory(tmp_path)
    save(state)
    state.close()
    again = StateDirectory(tmp_path)
    assert again.outbox.load() is None
    assert again.outbox.load_unmasked() == LATER
    found, update = again.outbox.unmasked_update("t1")
    assert found == LATER
    assert update.tolist() == UPDATE.tolist()
    with pytest.raises(StateError, match="holds no finished update"):
        next(again.outbox.chunks(1, 0))
    kept = again.kept_states.load(BUNDLE, 2)
    assert kept is not None
    assert kept.tolist() == KEPT.tolist()
    again.close()
    held = describe(tmp_path)
    assert held.unmasked
    assert held.pending == LATER.report


def chunks(state: StateDirectory) -> bytes:
    return b"".join(unpack_chunk(frame).payload for frame in state.outbox.chunks(1, 0))


def test_the_masked_one_takes_its_place_and_its_room(tmp_path: Path) -> None:
    state = StateDirectory(tmp_path)
    save(state)
    room = {"update.reserved", "report.reserved"}
    assert names(tmp_path) == {"unmasked.json", "unmasked.bin", *room}
    state.outbox.save_masked(REPORT, MASKED_CONTENT)
    assert names(tmp_path) == {"report.json", f"{REPORT.parts[0].crc32:08x}.bin"}
    assert state.outbox.load() == REPORT
    assert chunks(state) == MASKED_CONTENT
    with pytest.raises(StateError, match="does not hold the update of task t1 any more"):
        state.outbox.unmasked_update("t1")
    state.outbox.drop("t1")
    assert names(tmp_path) == set()
    state.close()


def test_another_update_replaces_it_and_it_replaces_another(tmp_path: Path) -> None:
    state = StateDirectory(tmp_path)
    state.outbox.save(PLAIN, (bytes(12),))
    save(state)
    assert state.outbox.load() is None
    assert state.outbox.load_unmasked() == LATER
    later = msgspec.structs.replace(REPORT, task="t2")
    state.outbox.save(later, (MASKED_CONTENT,))
    assert state.outbox.load_unmasked() is None
    assert state.outbox.load() == later
    state.close()


def test_it_is_dropped_by_its_own_task_alone(tmp_path: Path) -> None:
    state = StateDirectory(tmp_path)
    save(state)
    state.outbox.drop("t2")
    assert state.outbox.load_unmasked() == LATER
    state.outbox.drop("t1")
    assert state.outbox.load_unmasked() is None
    assert names(tmp_path) == set()
    state.close()


@pytest.mark.parametrize("file", ["unmasked.json", "unmasked.bin"])
@pytest.mark.parametrize("how", ["cut short", "another byte", "gone"])
def test_a_damaged_one_is_dropped_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, how: str
) -> None:
    state = StateDirectory(tmp_path)
    save(state)
    state.close()
    path = tmp_path / "pending" / file
    content = path.read_bytes()
    match how:
        case "gone":
            path.unlink()
        case "cut short":
            path.write_bytes(content[:-1])
        case _:
            path.write_bytes(content[:5] + bytes([content[5] ^ 1]) + content[6:])
    with caplog.at_level(logging.WARNING):
        again = StateDirectory(tmp_path)
        assert again.outbox.load_unmasked() is None
        assert names(tmp_path) == set()
        again.close()
    assert ("damaged" in caplog.text) == (file == "unmasked.bin" or how != "gone")


def died_at(tmp_path: Path, step: Callable[[StateDirectory], None], changes: int) -> StateDirectory:
    """The directory that the next process opens, of a process with an unmasked update that died
    after so many changes of the directory in a step."""
    state = StateDirectory(tmp_path / str(changes))
    save(state)
    with killed_after(changes):
        step(state)
    state.close()
    return StateDirectory(tmp_path / str(changes))


def test_whatever_dies_while_it_is_saved_all_is_there_or_nothing(tmp_path: Path) -> None:
    found = set()
    for changes in range(40):
        folder = tmp_path / str(changes)
        state = StateDirectory(folder)
        with killed_after(changes):
            save(state)
        state.close()
        again = StateDirectory(folder)
        later, kept = again.outbox.load_unmasked(), again.kept_states.load(BUNDLE, 2)
        assert again.outbox.load() is None
        assert (later is None) == (kept is None)
        assert later in (None, LATER)
        found.add(later is None)
        again.close()
    assert found == {True, False}, "it died before and after"


def masked_or_not(tmp_path: Path) -> set[str]:
    """Return what is left in all the ways that a process can die while it puts the masked update in
    the place of the unmasked one; and, again, when it is dropped."""
    found = set()
    for changes in range(30):
        state = died_at(
            tmp_path / "mask", lambda s: s.outbox.save_masked(REPORT, MASKED_CONTENT), changes
        )
        report, later = state.outbox.load(), state.outbox.load_unmasked()
        found.add(f"masked {report is not None}, unmasked {later is not None}")
        if report is not None:
            assert chunks(state) == MASKED_CONTENT
        state.close()
    for changes in range(12):
        state = StateDirectory(tmp_path / "drop" / str(changes))
        save(state)
        state.outbox.save_masked(REPORT, MASKED_CONTENT)
        # As after a power cut that brought a deleted file back.
        (state.path / "pending" / "unmasked.json").write_bytes(msgspec.json.encode(LATER))
        (state.path / "pending" / "unmasked.bin").write_bytes(CONTENT)
        with killed_after(changes):
            state.outbox.drop("t1")
        state.close()
        state = StateDirectory(tmp_path / "drop" / str(changes))
        report, later = state.outbox.load(), state.outbox.load_unmasked()
        found.add(f"dropped: masked {report is not None}, unmasked {later is not None}")
        state.close()
    return found


ALLOWED = {
    "masked True, unmasked False",
    "masked False, unmasked True",
    "dropped: masked True, unmasked False",
    "dropped: masked False, unmasked False",
}


def test_whatever_dies_while_it_is_masked_one_of_both_is_there(tmp_path: Path) -> None:
    assert masked_or_not(tmp_path) == ALLOWED


def _report_first(self: Outbox, task_id: str) -> None:
    """A drop in the other order."""
    (self._path / "report.json").unlink(missing_ok=True)
    (self._path / "unmasked.json").unlink(missing_ok=True)
    self._settle()


def _both_stay(self: Outbox, report: Report, content: bytes) -> None:
    """A masked update beside the unmasked one, which makes way too early."""
    (self._path / "unmasked.json").unlink()
    outbox_module.write_durably(self._update(report), content)
    self._write_report(report)
    self._settle()


@pytest.mark.parametrize(
    ("name", "mistake", "wrong"),
    [
        ("drop", _report_first, "dropped: masked False, unmasked True"),
        ("save_masked", _both_stay, "masked False, unmasked False"),
    ],
)
def test_planted_mistakes_are_found(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    mistake: Callable[..., None],
    wrong: str,
) -> None:
    monkeypatch.setattr(Outbox, name, mistake)
    assert wrong in masked_or_not(tmp_path)

"""The outbox: an update and what the device keeps of its task are all there, or nothing of them
is."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest
from fleetlearn_device.storage.state_directory import StateDirectory
from fleetlearn_protocol.encodings import FLOAT32, find_encoding
from fleetlearn_protocol.frames import unpack_chunk
from fleetlearn_protocol.messages import Report
from fleetlearn_protocol.vector import Vector

UPDATE = bytes(range(256)) * 4
REPORT = Report(
    "t1", 3, (FLOAT32.part("update", UPDATE),), 7, 3, 2.0, True, 0.5, {"accuracy": 0.25}
)
BUNDLE = "b" * 64
BEFORE, AFTER = np.array([1, 2], np.float32), np.array([3, 4], np.float32)
LATER = msgspec.structs.replace(REPORT, task="t2")


def test_a_saved_update_is_there_after_a_restart(tmp_path: Path) -> None:
    first = StateDirectory(tmp_path)
    first.outbox.save(REPORT, (UPDATE,))
    first.close()
    second = StateDirectory(tmp_path)
    assert second.outbox.load() == REPORT
    chunks = [unpack_chunk(frame) for frame in second.outbox.chunks(5, 100, 64)]
    assert [(chunk.transfer, chunk.offset) for chunk in chunks[:2]] == [(5, 100), (5, 164)]
    assert b"".join(chunk.payload for chunk in chunks) == UPDATE[100:]
    assert list(second.outbox.chunks(5, len(UPDATE), 64)) == []
    second.close()


def test_an_update_is_dropped_by_its_own_task_alone(state: StateDirectory) -> None:
    state.outbox.save(REPORT, (UPDATE,))
    state.outbox.drop("another")
    assert state.outbox.load() == REPORT
    state.outbox.drop("t1")
    assert state.outbox.load() is None
    assert not list((state.path / "pending").iterdir())


def test_a_later_update_replaces_an_earlier_one(state: StateDirectory) -> None:
    state.outbox.save(REPORT, (UPDATE,))
    later = Report("t2", 4, (FLOAT32.part("update", b"later..."),), 7, 3, 2.0, True, 0.5)
    state.outbox.save(later, (b"later...",))
    assert state.outbox.load() == later
    names = {path.name for path in (state.path / "pending").iterdir()}
    assert names == {"report.json", f"{later.parts[0].crc32:08x}.bin"}


def test_an_update_that_the_version_before_left_is_reported_in_parts(tmp_path: Path) -> None:
    StateDirectory(tmp_path).close()
    crc32 = zlib.crc32(UPDATE)
    before = {
        "type": "report",
        "task": "t1",
        "round": 3,
        "crc32": crc32,
        "size": len(UPDATE),
        "examples": 7,
        "steps": 3,
        "epochs": 2.0,
        "complete": True,
        "loss": 0.5,
        "metrics": {"accuracy": 0.25},
        "seconds": 0.0,
        "encoding": "float32",
        "evaluation": None,
    }
    (tmp_path / "pending" / "report.json").write_text(json.dumps(before))
    (tmp_path / "pending" / f"{crc32:08x}.bin").write_bytes(UPDATE)
    state = StateDirectory(tmp_path)
    assert state.outbox.load() == REPORT
    assert b"".join(unpack_chunk(frame).payload for frame in state.outbox.chunks(5, 0)) == UPDATE
    state.close()


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="/proc says which files are open")
def test_an_upload_that_waits_holds_no_file_open(state: StateDirectory) -> None:
    """Windows would not delete it."""
    report = Report("t2", 4, (FLOAT32.part("update", bytes(12)),), 7, 3, 2.0, True, 0.5)
    state.outbox.save(report, (bytes(12),))
    chunks = state.outbox.chunks(5, 0, 4)
    assert unpack_chunk(next(chunks)).payload == bytes(4)
    opened = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # that of the loop itself is closed
            opened.append(link.readlink())
    assert not [path for path in opened if path.parent == state.path / "pending"]
    assert [unpack_chunk(frame).payload for frame in chunks] == [bytes(4), bytes(4)]


def test_each_chunk_holds_bytes_of_one_part(state: StateDirectory) -> None:
    parts = bytes(range(12)), b"8 bytes!"
    report = Report(
        "t2",
        4,
        tuple(FLOAT32.part(f"p{n}", part) for n, part in enumerate(parts)),
        7,
        3,
        2.0,
        True,
        0.5,
    )
    state.outbox.save(report, parts)
    assert state.outbox.load() == report
    for offset, sizes in [(0, [8, 4, 8]), (8, [4, 8]), (12, [8]), (16, [4]), (20, [])]:
        chunks = [unpack_chunk(frame) for frame in state.outbox.chunks(5, offset, 8)]
        assert [len(chunk.payload) for chunk in chunks] == sizes
        assert b"".join(chunk.payload for chunk in chunks) == b"".join(parts)[offset:]
    name = "-".join(f"{part.crc32:08x}" for part in report.parts)
    (state.path / "pending" / f"{name}.bin").write_bytes(parts[0] + b"8 Bytes!")
    assert state.outbox.load() is None


@pytest.mark.parametrize(
    "damage", ["update cut short", "other bytes", "update missing", "report cut short"]
)
def test_a_damaged_update_is_not_sent(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = StateDirectory(tmp_path)
    first.outbox.save(REPORT, (UPDATE,))
    first.close()
    update, report = (
        tmp_path / "pending" / f"{REPORT.parts[0].crc32:08x}.bin",
        tmp_path / "pending" / "report.json",
    )
    match damage:
        case "update cut short":
            update.write_bytes(UPDATE[:-4])
        case "other bytes":
            update.write_bytes(UPDATE[::-1])
        case "update missing":
            update.unlink()
        case _:
            report.write_bytes(report.read_bytes()[:-9])
    second = StateDirectory(tmp_path)
    assert second.outbox.load() is None
    assert "damaged" in caplog.text
    second.close()


@pytest.mark.parametrize(
    ("name", "chunk_bytes"), [("int8", 1000), ("int8", 100), ("topk-0.01-int8", 131072)]
)
def test_chunks_hold_whole_blocks(tmp_path: Path, name: str, chunk_bytes: int) -> None:
    """And one block where ``chunk_bytes`` is less."""
    vector, encoding = np.linspace(-1, 1, 1_000_001, dtype=np.float32), find_encoding(name)
    parts = [encoding.encode(vector, seed) for seed in (1, 2)]
    report = Report(
        "t1",
        4,
        tuple(encoding.part(f"p{n}", part) for n, part in enumerate(parts)),
        7,
        3,
        2.0,
        True,
        0.5,
    )
    state = StateDirectory(tmp_path)
    state.outbox.save(report, parts)
    for offset in (0, parts[0].nbytes - encoding.size(1_000_001 % encoding.block), parts[0].nbytes):
        chunks = [unpack_chunk(frame) for frame in state.outbox.chunks(9, offset, chunk_bytes)]
        assert b"".join(chunk.payload for chunk in chunks) == b"".join(parts)[offset:]
        ends = {parts[0].nbytes, report.size}
        for chunk in chunks:
            assert len(chunk.payload) <= max(chunk_bytes, encoding.block_bytes)
            size, end = len(chunk.payload), chunk.offset + len(chunk.payload)
            assert (
                end in ends
                or size == max(1, chunk_bytes // encoding.block_bytes) * encoding.block_bytes
            )
    state.close()


KILLED_IN_SAVE = """
import os, pathlib, signal, sys
import msgspec, numpy as np
from fleetlearn_protocol.encodings import FLOAT32
from fleetlearn_protocol.messages import Report
from fleetlearn_device.storage.state_directory import StateDirectory
state, left = StateDirectory(sys.argv[1]), [int(sys.argv[2])]
def killing(function):
    def call(*arguments, **named):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **named)
    return call
for name in ("open", "replace", "unlink"):
    setattr(pathlib.Path, name, killing(getattr(pathlib.Path, name)))
os.fsync = killing(os.fsync)
report = msgspec.json.decode(sys.argv[3], type=Report)
kept = np.array(msgspec.json.decode(sys.argv[4]), np.float32)
tied = {"control": kept, "residual": -kept} if kept.size else None
personal = 2 * kept if kept.size else None
state.outbox.save(report, (bytes(range(256)) * 4,), "b" * 64, kept, tied, personal)
print("saved", flush=True)
"""


def killed_in_save(
    folder: Path, calls: int, report: Report, kept: Vector
) -> subprocess.CompletedProcess[bytes]:
    """A process that saves, and dies at the call after ``calls`` of those that change the
    directory."""
    arguments = [str(folder), str(calls), msgspec.json.encode(report).decode(), str(kept.tolist())]
    return subprocess.run(
        [sys.executable, "-c", KILLED_IN_SAVE, *arguments], capture_output=True, check=False
    )


def test_a_process_killed_while_it_saves_leaves_the_update_or_nothing(tmp_path: Path) -> None:
    """SIGKILL at each system call that changes the directory, in a process of its own."""
    outcomes = []
    for calls in range(30):
        folder = tmp_path / f"state{calls}"
        run = killed_in_save(folder, calls, REPORT, np.zeros(0, np.float32))
        state = StateDirectory(folder)
        held = state.outbox.load()
        assert held in (None, REPORT)
        if run.returncode == 0:
            assert held == REPORT
            break
        assert run.returncode == -9, run.stderr
        outcomes.append(held is not None)
        assert {path.suffix for path in (folder / "pending").iterdir()} <= {".json", ".bin"}
        state.close()
    else:
        pytest.fail("Outbox.save makes more than 30 calls?")
    state.close()
    assert len(outcomes) >= 5
    assert outcomes == sorted(outcomes), "once it is there it stays"
    assert not outcomes[0]


def test_only_the_report_s_own_part_is_moved_to_its_place(tmp_path: Path) -> None:
    """A process that died before it wrote t1.later's report left that task's part; t1's report
    stands."""
    first = StateDirectory(tmp_path)
    first.outbox.save(REPORT, (UPDATE,))
    first.close()
    (tmp_path / "pending" / f"kept-t1.later.{BUNDLE}").write_bytes(b"of no task that is done")
    second = StateDirectory(tmp_path)
    assert second.outbox.load() == REPORT
    assert not list((tmp_path / "kept").iterdir())
    assert len(list((tmp_path / "pending").iterdir())) == 2
    second.close()


def test_a_process_killed_while_it_saves_leaves_all_of_a_task_or_nothing(tmp_path: Path) -> None:
    """SIGKILL at each system call that changes the directory: the second task's report, kept state,
    tied vectors and personal model appear together; the first task's tied vectors stay, since a
    later task may go on from them."""
    outcomes = []
    for calls in range(90):
        folder = tmp_path / f"state{calls}"
        before = StateDirectory(folder)
        before.outbox.save(
            REPORT, (UPDATE,), BUNDLE, BEFORE, {"control": BEFORE, "residual": -BEFORE}, 2 * BEFORE
        )
        before.close()
        run = killed_in_save(folder, calls, LATER, AFTER)
        state = StateDirectory(folder)
        held, kept = state.outbox.load(), state.kept_states.load(BUNDLE, 2)
        sets = {path.name for path in (folder / "tied").iterdir()}
        personal = state.kept_states.load(f"{BUNDLE}.personal", 2)
        assert kept is not None
        assert personal is not None
        assert (held, kept.tolist()) in [(REPORT, BEFORE.tolist()), (LATER, AFTER.tolist())]
        assert personal.tolist() == (2 * kept).tolist()
        assert sets == ({f"{BUNDLE}.t1", f"{BUNDLE}.t2"} if held == LATER else {f"{BUNDLE}.t1"})
        chosen, values = ("t2", AFTER) if held == LATER and calls % 2 else ("t1", BEFORE)
        tied = state.tied_vectors.begin(BUNDLE, chosen, 2)
        assert {name: vector.tolist() for name, vector in tied.items()} == {
            "control": values.tolist(), "residual": (-values).tolist()
        }  # fmt: skip
        state.close()
        if run.returncode == 0:
            break
        assert run.returncode == -9, run.stderr
        outcomes.append(held == LATER)
        assert {path.suffix for path in (folder / "pending").iterdir()} == {".json", ".bin"}
        assert {path.name for path in (folder / "kept").iterdir()} == {BUNDLE, f"{BUNDLE}.personal"}
    else:
        pytest.fail("Outbox.save makes more than 90 calls?")
    assert len(outcomes) >= 16
    assert outcomes == sorted(outcomes), "once it is there it stays"
    assert not outcomes[0]
    assert outcomes[-1]

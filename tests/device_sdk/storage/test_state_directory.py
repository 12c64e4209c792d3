"""The state directory as a whole: one process uses it, and it is described for people."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from fleetlearn_device.storage.errors import StateError
from fleetlearn_device.storage.state_directory import StateDirectory, describe, is_running
from fleetlearn_protocol.encodings import FLOAT32
from fleetlearn_protocol.frames import unpack_chunk
from fleetlearn_protocol.messages import Report, Task, VectorReference
from line_bundle import write_line_bundle

BUNDLE = "b" * 64


def test_one_process_uses_a_directory(tmp_path: Path) -> None:
    held = StateDirectory(tmp_path)
    program = (
        "from fleetlearn_device.storage.state_directory import StateDirectory; "
        f"StateDirectory({str(tmp_path)!r})"
    )
    other = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert other.returncode == 1
    assert "in use by another process" in other.stderr
    held.close()
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_path_that_cannot_be_a_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="a part of the path is a file"):
        StateDirectory(tmp_path / "file" / "state")


def test_a_directory_is_described_while_it_is_in_use(state: StateDirectory, tmp_path: Path) -> None:
    bundle = write_line_bundle(tmp_path / "line.bundle")
    state.contents.bundle_path(bundle.sha256).mkdir()
    (state.contents.bundle_path(bundle.sha256) / "manifest.json").write_bytes(
        bundle.read("manifest.json")
    )
    report = Report("t1", 3, (FLOAT32.part("update", b"1234"),), 7, 3, 2.0, True, 0.5)
    zeros = np.zeros(2, np.float32)
    state.outbox.save(report, (b"1234",), BUNDLE, zeros, {"control": zeros})
    expected = (
        state.device,
        [(bundle.sha256, bundle.manifest.name)],
        report,
        [(BUNDLE, 12)],
        [(BUNDLE, "t1", 8 + len(b'["control"]') + 8)],
        (),
        True,
        None,
        False,
        False,
    )
    assert describe(state.path) == expected
    state.checkpoint.save("t2", b"", {})
    state.close()
    assert describe(state.path) == (*expected[:6], False, None, True, False)


def test_a_look_at_a_directory_does_not_keep_a_device_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``info`` holds the lock for a moment, to see whether somebody else does."""
    StateDirectory(tmp_path).close()
    with (tmp_path / "lock").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        monkeypatch.setattr(time, "sleep", lambda _: fcntl.flock(file, fcntl.LOCK_UN))
        StateDirectory(tmp_path).close()
        fcntl.flock(file, fcntl.LOCK_SH)
        assert not is_running(tmp_path)  # two looks at the same moment


def test_what_is_no_state_directory_is_not_described(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="is not a state directory"):
        describe(tmp_path)


def test_a_directory_that_the_version_before_left_is_used_further(tmp_path: Path) -> None:
    """Its files, byte for byte: a finished update, half a download, a kept state, and a training
    that was killed."""
    model, update, kept = (
        b"model of the round..",
        bytes(range(16)),
        np.array([1, 2], np.float32).tobytes(),
    )
    name = hashlib.sha256(model).hexdigest()
    for folder in ("bundles", "models", "partial", "pending", "kept"):
        (tmp_path / folder).mkdir()
    (tmp_path / "lock").touch()
    (tmp_path / "identity.json").write_text('{"device":"sensor-7"}')
    (tmp_path / "training.json").write_text('{"task":"t2","starts":2}')
    (tmp_path / "partial" / name).write_bytes(model[:8])
    (tmp_path / "kept" / BUNDLE).write_bytes(kept + zlib.crc32(kept).to_bytes(4, "little"))
    (tmp_path / "pending" / f"{zlib.crc32(update):08x}.bin").write_bytes(update)
    (tmp_path / "pending" / "report.json").write_text(
        f'{{"type":"report","task":"t1","round":3,"crc32":{zlib.crc32(update)},"size":16,"examples":7,"steps":3,'
        '"epochs":2.0,"complete":true,"loss":0.5,"metrics":{},"seconds":1.5,"encoding":"float32","evaluation":null}'
    )

    state = StateDirectory(tmp_path)
    assert state.device == "sensor-7"
    assert (state.training_starts.count("t2"), state.training_starts.count("t3")) == (2, 0)
    part = FLOAT32.part("update", update)
    assert state.outbox.load() == Report("t1", 3, (part,), 7, 3, 2.0, True, 0.5, {}, 1.5)
    assert [unpack_chunk(frame).payload for frame in state.outbox.chunks(5, 4)] == [update[4:]]
    own = state.kept_states.load(BUNDLE, 2)
    assert own is not None
    assert own.tolist() == [1, 2]
    reference = VectorReference("model", name, len(model), "float32")
    task = Task("t2", 4, "a" * 64, (reference,), {"update": "float32"}, {}, 1, 0, 0, 10.0)
    wanted = state.contents.lacking(task, "onnx")[1]
    assert (wanted.name, wanted.have) == ("the model", 8)
    state.contents.append(wanted, 8, model[8:])
    assert state.contents.finish(wanted)
    state.outbox.drop("t1")
    assert not list((tmp_path / "pending").iterdir())
    state.close()


def test_the_names_of_its_folders_are_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss of power may take names that were not synced, and all that is below them."""
    synced: list[int] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr("os.fsync", note)
    folder = tmp_path / "new" / "state"
    StateDirectory(folder).close()
    own = [path.stat().st_ino for path in (folder, folder.parent, tmp_path)]
    begin = len(synced) - 1 - synced[::-1].index(own[0])
    assert synced[begin : begin + 3] == own, "the last time, with all folders in it"

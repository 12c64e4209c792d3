"""The state directory: what is in it is whole, or it is not there."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from fleetlearn_device.session.commands import Wanted
from fleetlearn_device.storage.state import KEEP, State, StateError, describe, needed_files
from fleetlearn_protocol.encodings import FLOAT32
from fleetlearn_protocol.errors import BundleError, Code
from fleetlearn_protocol.frames import unpack_chunk
from fleetlearn_protocol.manifest import (
    EVAL,
    INFER,
    ORT_TRAINING,
    PARAMETERS,
    TRAIN,
    File,
    Hyper,
    Input,
    LocalStep,
    Manifest,
    Parameter,
    write_manifest,
)
from fleetlearn_protocol.messages import Report, Task, VectorReference
from fleetlearn_protocol.vector import Vector


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


UPDATE = bytes(range(256)) * 4
REPORT = Report("t1", 3, (FLOAT32.part("update", UPDATE),), 7, 3, 2.0, True, 0.5, {"accuracy": 0.25})
FILES = {TRAIN: b"train" * 9, EVAL: b"eval" * 9, INFER: b"infer", PARAMETERS: b"parameters"}
MODEL = b"model of the round.."


def manifest(name: str = "linear", files: dict[str, bytes] = FILES) -> bytes:
    return write_manifest(
        Manifest(
            "fleetlearn.bundle",
            1,
            name,
            (Parameter("w", (5,), 0),),
            (Input("x", "float32", (5,)),),
            (Input("output", "float32", (1,)),),
            (Hyper("lr"),),
            LocalStep("sgd"),
            (),
            {path: File(sha(content), len(content)) for path, content in files.items()},
        )
    )


def task(bundle: bytes, model: bytes = MODEL) -> Task:
    return Task(
        "t1",
        1,
        sha(bundle),
        (VectorReference("model", sha(model), len(model), "float32"),),
        {"update": "float32"},
        {},
        1,
        0,
        0,
        10.0,
    )


@pytest.fixture
def state(tmp_path: Path) -> Iterator[State]:
    opened = State(tmp_path / "state")
    yield opened
    opened.close()


def bring(state: State, wanted: Wanted, content: bytes) -> bool:
    half = len(content) // 2
    state.append(wanted, 0, content[:half])
    state.append(wanted, half, content[half:])
    return state.finish(wanted)


def bring_all(state: State, given: Task, bundle: bytes) -> list[str]:
    """Answer what is lacking until nothing is. Returns the names in their order."""
    contents = {sha(content): content for content in (*FILES.values(), bundle, MODEL)}
    names = []
    while lacking := state.lacking(given, "onnx"):
        for wanted in lacking:
            names.append(wanted.name)
            assert bring(state, wanted, contents[wanted.sha256])
    return names


def test_the_manifest_says_what_else_is_lacking(state: State) -> None:
    bundle = manifest()
    given = task(bundle)
    first = state.lacking(given, "onnx")
    assert [(wanted.name, wanted.size) for wanted in first] == [("manifest.json", None), ("the model", len(MODEL))]
    assert bring(state, first[0], bundle)
    second = {wanted.name: wanted for wanted in state.lacking(given, "onnx")}
    assert set(second) == {TRAIN, EVAL, "the model"}
    assert (second[TRAIN].sha256, second[TRAIN].size) == (sha(FILES[TRAIN]), len(FILES[TRAIN]))
    bring_all(state, given, bundle)
    assert (state.bundle(sha(bundle)) / TRAIN).read_bytes() == FILES[TRAIN]
    assert state.vector(sha(MODEL)).read_bytes() == MODEL
    assert not list((state.path / "partial").iterdir())


def test_each_runtime_has_its_files() -> None:
    from fleetlearn_protocol.manifest import read_manifest

    read = read_manifest(manifest())
    assert needed_files(read, "onnx") == needed_files(read, "auto") == [TRAIN, EVAL]
    assert needed_files(read, "ort-training") == [EVAL, *(f"ort_training/{file}" for file in ORT_TRAINING)]


def test_a_bundle_without_the_runtime_is_refused(state: State) -> None:
    bundle = manifest()
    given = task(bundle)
    bring(state, state.lacking(given, "onnx")[0], bundle)
    with pytest.raises(BundleError, match="no ort_training/"):
        state.lacking(given, "ort-training")


def test_a_second_round_lacks_the_model_alone(state: State) -> None:
    bundle = manifest()
    bring_all(state, task(bundle), bundle)
    after = task(bundle, b"model of round two..")
    assert [wanted.name for wanted in state.lacking(after, "onnx")] == ["the model"]
    assert not state.vector(sha(MODEL)).exists()


def test_a_content_with_other_bytes_is_deleted(state: State) -> None:
    wanted = state.lacking(task(manifest()), "onnx")[1]
    assert not bring(state, wanted, b"not what it should be")
    assert state.lacking(task(manifest()), "onnx")[1].have == 0


def test_a_download_goes_on_after_a_restart(tmp_path: Path) -> None:
    given = task(manifest())
    first = State(tmp_path)
    first.append(first.lacking(given, "onnx")[1], 0, MODEL[:8])
    first.close()
    second = State(tmp_path)
    wanted = second.lacking(given, "onnx")[1]
    assert (wanted.name, wanted.have) == ("the model", 8)
    second.append(wanted, 8, MODEL[8:])
    assert second.finish(wanted)
    second.close()


def test_what_is_longer_than_it_may_be_is_fetched_anew(state: State) -> None:
    wanted = state.lacking(task(manifest()), "onnx")[1]
    state.append(wanted, 0, MODEL + b"!")
    assert state.lacking(task(manifest()), "onnx")[1].have == 0


def test_parts_that_no_task_wants_are_deleted(state: State) -> None:
    state.append(state.lacking(task(manifest()), "onnx")[1], 0, MODEL[:8])
    state.lacking(task(manifest(), b"another model......."), "onnx")
    assert not list((state.path / "partial").iterdir())


def test_a_damaged_file_of_the_cache_is_fetched_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bundle = manifest()
    first = State(tmp_path)
    bring_all(first, task(bundle), bundle)
    (first.bundle(sha(bundle)) / TRAIN).write_bytes(FILES[TRAIN].replace(b"t", b"x"))
    first.close()
    second = State(tmp_path)
    assert [wanted.name for wanted in second.lacking(task(bundle), "onnx")] == [TRAIN]
    assert "damaged" in caplog.text
    second.close()


def test_the_cache_keeps_the_bundles_used_last(state: State) -> None:
    bundles = [manifest(f"model{number}") for number in range(KEEP + 2)]
    clock = iter(range(10, 100))
    for bundle in [*bundles[:KEEP], bundles[0], *bundles[KEEP:]]:
        bring_all(state, task(bundle), bundle)
        os.utime(state.bundle(sha(bundle)), (0, next(clock)))  # file systems' clocks are coarser than this test
    kept = {path.name for path in (state.path / "bundles").iterdir()}
    assert kept == {sha(bundle) for bundle in (bundles[0], *bundles[KEEP:])}
    assert describe(state.path).bundles[0] == (sha(bundles[-1]), f"model{KEEP + 1}")


def test_a_bundle_can_be_forgotten(state: State) -> None:
    bundle = manifest()
    bring_all(state, task(bundle), bundle)
    state.forget_bundle(sha(bundle))
    assert [wanted.name for wanted in state.lacking(task(bundle), "onnx")] == ["manifest.json"]


def test_a_newer_manifest_is_refused(state: State) -> None:
    content = manifest().replace(b'"version": 1', b'"version": 7')
    wanted = state.lacking(task(content), "onnx")[0]
    assert bring(state, wanted, content)
    with pytest.raises(BundleError) as caught:
        state.lacking(task(content), "onnx")
    assert caught.value.code is Code.BAD_VERSION


def test_a_saved_update_is_there_after_a_restart(tmp_path: Path) -> None:
    first = State(tmp_path)
    first.save_pending(REPORT, UPDATE)
    first.close()
    second = State(tmp_path)
    assert second.load_pending() == REPORT
    chunks = [unpack_chunk(frame) for frame in second.update_chunks(5, 100, 64)]
    assert [(chunk.transfer, chunk.offset) for chunk in chunks[:2]] == [(5, 100), (5, 164)]
    assert b"".join(chunk.payload for chunk in chunks) == UPDATE[100:]
    assert list(second.update_chunks(5, len(UPDATE), 64)) == []
    second.close()


def test_an_update_is_dropped_by_its_own_task_alone(state: State) -> None:
    state.save_pending(REPORT, UPDATE)
    state.drop_pending("another")
    assert state.load_pending() == REPORT
    state.drop_pending("t1")
    assert state.load_pending() is None
    assert not list((state.path / "pending").iterdir())


def test_a_later_update_replaces_an_earlier_one(state: State) -> None:
    state.save_pending(REPORT, UPDATE)
    later = Report("t2", 4, (FLOAT32.part("update", b"later..."),), 7, 3, 2.0, True, 0.5)
    state.save_pending(later, b"later...")
    assert state.load_pending() == later
    names = {path.name for path in (state.path / "pending").iterdir()}
    assert names == {"report.json", f"{later.parts[0].crc32:08x}.bin"}


def test_an_update_that_the_version_before_left_is_reported_in_parts(tmp_path: Path) -> None:
    State(tmp_path).close()
    crc32 = zlib.crc32(UPDATE)
    before = {
        "type": "report", "task": "t1", "round": 3, "crc32": crc32, "size": len(UPDATE), "examples": 7, "steps": 3,
        "epochs": 2.0, "complete": True, "loss": 0.5, "metrics": {"accuracy": 0.25}, "seconds": 0.0,
        "encoding": "float32", "evaluation": None,
    }  # fmt: skip
    (tmp_path / "pending" / "report.json").write_text(json.dumps(before))
    (tmp_path / "pending" / f"{crc32:08x}.bin").write_bytes(UPDATE)
    state = State(tmp_path)
    assert state.load_pending() == REPORT
    assert b"".join(unpack_chunk(frame).payload for frame in state.update_chunks(5, 0)) == UPDATE
    state.close()


def test_each_chunk_holds_bytes_of_one_part(state: State) -> None:
    parts = bytes(range(12)), b"8 bytes!"
    report = Report("t2", 4, tuple(FLOAT32.part(f"p{n}", part) for n, part in enumerate(parts)), 7, 3, 2.0, True, 0.5)
    state.save_pending(report, b"".join(parts))
    assert state.load_pending() == report
    for offset, sizes in [(0, [8, 4, 8]), (8, [4, 8]), (12, [8]), (16, [4]), (20, [])]:
        chunks = [unpack_chunk(frame) for frame in state.update_chunks(5, offset, 8)]
        assert [len(chunk.payload) for chunk in chunks] == sizes
        assert b"".join(chunk.payload for chunk in chunks) == b"".join(parts)[offset:]
    name = "-".join(f"{part.crc32:08x}" for part in report.parts)
    (state.path / "pending" / f"{name}.bin").write_bytes(parts[0] + b"8 Bytes!")
    assert state.load_pending() is None


@pytest.mark.parametrize("damage", ["update cut short", "other bytes", "update missing", "report cut short"])
def test_a_damaged_update_is_not_sent(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    first = State(tmp_path)
    first.save_pending(REPORT, UPDATE)
    first.close()
    update, report = tmp_path / "pending" / f"{REPORT.parts[0].crc32:08x}.bin", tmp_path / "pending" / "report.json"
    match damage:
        case "update cut short":
            update.write_bytes(UPDATE[:-4])
        case "other bytes":
            update.write_bytes(UPDATE[::-1])
        case "update missing":
            update.unlink()
        case _:
            report.write_bytes(report.read_bytes()[:-9])
    second = State(tmp_path)
    assert second.load_pending() is None
    assert "damaged" in caplog.text
    second.close()


KILLED_IN_SAVE = """
import os, pathlib, signal, sys
import msgspec, numpy as np
from fleetlearn_protocol.messages import Report
from fleetlearn_device.storage.state import State
state, left = State(sys.argv[1]), [int(sys.argv[2])]
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
state.save_pending(report, bytes(range(256)) * 4, "b" * 64, kept)
print("saved", flush=True)
"""


def killed_in_save(folder: Path, calls: int, report: Report, kept: Vector) -> subprocess.CompletedProcess[bytes]:
    """A process that saves, and dies at the call after ``calls`` of those that change the directory."""
    arguments = [str(folder), str(calls), msgspec.json.encode(report).decode(), str(kept.tolist())]
    return subprocess.run([sys.executable, "-c", KILLED_IN_SAVE, *arguments], capture_output=True, check=False)


def test_a_process_killed_while_it_saves_leaves_the_update_or_nothing(tmp_path: Path) -> None:
    """SIGKILL at each system call that changes the directory, in a process of its own."""
    outcomes = []
    for calls in range(30):
        folder = tmp_path / f"state{calls}"
        run = killed_in_save(folder, calls, REPORT, np.zeros(0, np.float32))
        state = State(folder)
        held = state.load_pending()
        assert held in (None, REPORT)
        if run.returncode == 0:
            assert held == REPORT
            break
        assert run.returncode == -9, run.stderr
        outcomes.append(held is not None)
        assert {path.suffix for path in (folder / "pending").iterdir()} <= {".json", ".bin"}
        state.close()
    else:
        pytest.fail("save_pending makes more than 30 calls?")
    state.close()
    assert len(outcomes) >= 5
    assert outcomes == sorted(outcomes), "once it is there it stays"
    assert not outcomes[0]


BUNDLE = "b" * 64
BEFORE, AFTER = np.array([1, 2], np.float32), np.array([3, 4], np.float32)
LATER = msgspec.structs.replace(REPORT, task="t2")


def test_what_is_kept_comes_with_the_update(tmp_path: Path) -> None:
    first = State(tmp_path)
    assert first.load_kept(BUNDLE, 2) is None
    first.save_pending(REPORT, UPDATE, BUNDLE, BEFORE)
    first.drop_pending("t1")
    assert first.load_kept("c" * 64, 2) is None
    first.close()
    second = State(tmp_path)
    kept = second.load_kept(BUNDLE, 2)
    assert kept is not None
    assert kept.tolist() == BEFORE.tolist()
    second.save_pending(LATER, UPDATE, BUNDLE, AFTER)
    assert (tmp_path / "kept" / BUNDLE).read_bytes() == AFTER.tobytes() + zlib.crc32(AFTER.tobytes()).to_bytes(
        4, "little"
    )
    second.forget_bundle(BUNDLE)
    kept = second.load_kept(BUNDLE, 2)
    assert kept is not None
    assert kept.tolist() == AFTER.tolist()
    assert second.load_kept(BUNDLE, 0) is None
    second.close()


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b"\x01" + b[1:], lambda b: b + b"\0", lambda b: b""])
def test_what_is_kept_and_damaged_is_put_aside(
    state: State, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    state.save_pending(REPORT, UPDATE, BUNDLE, BEFORE)
    path = state.path / "kept" / BUNDLE
    damaged = damage(path.read_bytes())
    path.write_bytes(damaged)
    assert state.load_kept(BUNDLE, 2) is None
    assert "damaged" in caplog.text
    assert path.with_name(f"{BUNDLE}.damaged").read_bytes() == damaged
    state.save_pending(LATER, UPDATE, BUNDLE, AFTER)
    kept = state.load_kept(BUNDLE, 2)
    assert kept is not None
    assert kept.tolist() == AFTER.tolist()


def test_only_the_report_s_own_part_is_moved_to_its_place(tmp_path: Path) -> None:
    """A process that died before it wrote t1.later's report left that task's part; t1's report stands."""
    first = State(tmp_path)
    first.save_pending(REPORT, UPDATE)
    first.close()
    (tmp_path / "pending" / f"kept-t1.later.{BUNDLE}").write_bytes(b"of no task that is done")
    second = State(tmp_path)
    assert second.load_pending() == REPORT
    assert not list((tmp_path / "kept").iterdir())
    assert len(list((tmp_path / "pending").iterdir())) == 2
    second.close()


def test_a_process_killed_while_it_saves_leaves_both_of_a_task_or_neither(tmp_path: Path) -> None:
    """SIGKILL at each system call that changes the directory: the first task's report and part, or the second's."""
    outcomes = []
    for calls in range(60):
        folder = tmp_path / f"state{calls}"
        before = State(folder)
        before.save_pending(REPORT, UPDATE, BUNDLE, BEFORE)
        before.close()
        run = killed_in_save(folder, calls, LATER, AFTER)
        state = State(folder)
        held, kept = state.load_pending(), state.load_kept(BUNDLE, 2)
        state.close()
        assert kept is not None
        assert (held, kept.tolist()) in [(REPORT, BEFORE.tolist()), (LATER, AFTER.tolist())]
        if run.returncode == 0:
            break
        assert run.returncode == -9, run.stderr
        outcomes.append(held == LATER)
        assert {path.suffix for path in (folder / "pending").iterdir()} == {".json", ".bin"}
        assert [path.name for path in (folder / "kept").iterdir()] == [BUNDLE]
    else:
        pytest.fail("save_pending makes more than 60 calls?")
    assert len(outcomes) >= 12
    assert outcomes == sorted(outcomes), "once it is there it stays"
    assert not outcomes[0]
    assert outcomes[-1]


def test_the_identity_is_made_once(tmp_path: Path) -> None:
    first = State(tmp_path)
    first.close()
    second = State(tmp_path)
    second.close()
    assert first.device == second.device
    other = State(tmp_path / "other")
    other.close()
    assert other.device != first.device


def test_a_name_is_given_once(tmp_path: Path) -> None:
    State(tmp_path, "sensor-7").close()
    assert json.loads((tmp_path / "identity.json").read_text()) == {"device": "sensor-7"}
    State(tmp_path, "sensor-7").close()
    State(tmp_path).close()
    with pytest.raises(StateError, match="sensor-7, not sensor-8"):
        State(tmp_path, "sensor-8")
    State(tmp_path).close()  # the failed attempt left no lock


@pytest.mark.parametrize("name", ["", "a b", ".hidden", "x" * 65, "../up"])
def test_a_name_that_cannot_be_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(StateError, match="1 to 64 letters"):
        State(tmp_path, name)
    assert not (tmp_path / "identity.json").exists()


@pytest.mark.parametrize("content", [b"", b"{", b'{"device":""}', b'{"name":"x"}', b"\xff"])
def test_a_damaged_identity_says_what_to_do(tmp_path: Path, content: bytes) -> None:
    State(tmp_path).close()
    (tmp_path / "identity.json").write_bytes(content)
    with pytest.raises(StateError, match="delete it and the device gets a new name"):
        State(tmp_path)


def test_one_process_uses_a_directory(tmp_path: Path) -> None:
    held = State(tmp_path)
    program = f"from fleetlearn_device.storage.state import State; State({str(tmp_path)!r})"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert other.returncode == 1
    assert "in use by another process" in other.stderr
    held.close()
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_path_that_cannot_be_a_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="a part of the path is a file"):
        State(tmp_path / "file" / "state")


def test_a_full_disk_is_named(state: State) -> None:
    """A real write that the system refuses: the limit on a file's size stands in for the disk's."""
    import signal

    wanted = state.lacking(task(manifest()), "onnx")[1]
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        with pytest.raises(StateError, match="cannot use the state directory") as caught:
            state.append(wanted, 0, bytes(4096))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize(
    ("number", "advice"), [(errno.ENOSPC, "free some space"), (errno.EROFS, "read-only"), (errno.EACCES, "permissions")]
)
def test_what_the_system_says_becomes_advice(number: int, advice: str) -> None:
    from fleetlearn_device.storage.state import _clear_errors

    with pytest.raises(StateError, match=advice), _clear_errors(Path("/somewhere")):
        raise OSError(number, os.strerror(number), "/somewhere/partial/x")


def test_a_directory_is_described_while_it_is_in_use(state: State) -> None:
    bundle = manifest()
    bring(state, state.lacking(task(bundle), "onnx")[0], bundle)
    state.save_pending(REPORT, UPDATE, BUNDLE, BEFORE)
    assert describe(state.path) == (state.device, [(sha(bundle), "linear")], REPORT, [(BUNDLE, 12)])


def test_what_is_no_state_directory_is_not_described(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="is not a state directory"):
        describe(tmp_path)

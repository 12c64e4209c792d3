"""The cache of contents: what is in it is whole, and a download goes on where it stopped."""

from __future__ import annotations

import hashlib
import os
import resource
import signal
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest
from fleetlearn_device.session.commands import Wanted
from fleetlearn_device.storage import vectors_in_memory
from fleetlearn_device.storage.content_cache import MAX_BUNDLES, needed_files
from fleetlearn_device.storage.errors import CacheFullError, StateError
from fleetlearn_device.storage.state_directory import StateDirectory, describe
from fleetlearn_protocol.deltas import encode_delta
from fleetlearn_protocol.errors import BundleError, Code
from fleetlearn_protocol.manifest import (
    EVAL,
    FROZEN,
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
)
from fleetlearn_protocol.manifest_file import read_manifest, write_manifest
from fleetlearn_protocol.messages import Delta, Task, VectorReference

FILES = {TRAIN: b"train" * 9, EVAL: b"eval" * 9, INFER: b"infer", PARAMETERS: b"parameters"}
MODEL = b"model of the round.."


@pytest.fixture(params=["in memory", "on disk"])
def either_place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A test of vectors wherever they are held."""
    if request.param == "on disk":
        monkeypatch.setattr(vectors_in_memory, "LIMIT", 0)
    return str(request.param)


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the tests' vectors were too large to be held in memory."""
    monkeypatch.setattr(vectors_in_memory, "LIMIT", 0)


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def manifest(name: str = "linear", files: dict[str, bytes] = FILES, version: int = 1) -> bytes:
    return write_manifest(
        Manifest(
            "fleetlearn.bundle",
            version,
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


def bring(state: StateDirectory, wanted: Wanted, content: bytes) -> bool:
    half = len(content) // 2
    state.contents.append(wanted, 0, content[:half])
    state.contents.append(wanted, half, content[half:])
    return state.contents.finish(wanted)


def bring_all(state: StateDirectory, given: Task, bundle: bytes) -> list[str]:
    """Answer what is lacking until nothing is. Returns the names in their order."""
    contents = {sha(content): content for content in (*FILES.values(), bundle, MODEL)}
    names = []
    while lacking := state.contents.lacking(given, "onnx"):
        for wanted in lacking:
            names.append(wanted.name)
            assert bring(state, wanted, contents[wanted.sha256])
    return names


BASE = np.linspace(-1, 1, 5, dtype=np.float32)
NEXT = BASE + np.float32(0.01)
DELTA = encode_delta(BASE, NEXT)


def with_delta(bundle: bytes, content: bytes = DELTA) -> Task:
    """A task of the model NEXT, which may be fetched as a difference from BASE."""
    given = task(bundle, NEXT.tobytes())
    delta = Delta(sha(BASE.tobytes()), sha(content), len(content))
    return msgspec.structs.replace(
        given, vectors=(msgspec.structs.replace(given.vectors[0], delta=delta),)
    )


def holding(state: StateDirectory, bundle: bytes) -> None:
    """Bring what a task of the model BASE needs."""
    contents = {sha(content): content for content in (*FILES.values(), bundle, BASE.tobytes())}
    given = task(bundle, BASE.tobytes())
    while lacking := state.contents.lacking(given, "onnx"):
        for wanted in lacking:
            assert bring(state, wanted, contents[wanted.sha256])
    assert state.contents.models() == (sha(BASE.tobytes()),)


@pytest.mark.usefixtures("either_place")
def test_a_model_comes_as_the_difference_from_the_one_before(state: StateDirectory) -> None:
    bundle = manifest()
    holding(state, bundle)
    given = with_delta(bundle)
    (wanted,) = state.contents.lacking(given, "onnx")
    assert (wanted.sha256, wanted.size, wanted.base) == (
        sha(DELTA),
        len(DELTA),
        sha(BASE.tobytes()),
    )
    assert wanted.instead == Wanted(
        sha(NEXT.tobytes()), "the model", f"models/{sha(NEXT.tobytes())}", 20, 20
    )
    assert bring(state, wanted, DELTA)
    assert state.contents.lacking(given, "onnx") == []
    assert state.contents.vector(sha(NEXT.tobytes())) == NEXT.tobytes()
    assert set(state.contents.models()) == {sha(BASE.tobytes()), sha(NEXT.tobytes())}
    assert state.contents.lacking(task(bundle, NEXT.tobytes()), "onnx") == []
    assert state.contents.models() == (sha(NEXT.tobytes()),), (
        "the base is deleted when no task names it"
    )


@pytest.mark.usefixtures("on_disk")
@pytest.mark.parametrize("lost", ["deleted", "damaged"])
def test_without_the_base_all_of_the_model_is_fetched(tmp_path: Path, lost: str) -> None:
    bundle = manifest()
    with closing(StateDirectory(tmp_path)) as state:
        holding(state, bundle)
    with closing(StateDirectory(tmp_path)) as state:
        base = state.contents.vector_path(sha(BASE.tobytes()))
        if lost == "deleted":
            base.unlink()
        else:
            base.write_bytes(bytes(20))
        (wanted,) = state.contents.lacking(with_delta(bundle), "onnx")
        assert (wanted.sha256, wanted.base) == (sha(NEXT.tobytes()), None)


@pytest.mark.usefixtures("either_place")
@pytest.mark.parametrize(
    "content", [encode_delta(BASE, BASE), b"nonsense"], ids=["another vector's", "no difference"]
)
def test_a_difference_that_gives_another_vector_is_deleted(
    state: StateDirectory, content: bytes
) -> None:
    bundle = manifest()
    holding(state, bundle)
    given = with_delta(bundle, content)
    (wanted,) = state.contents.lacking(given, "onnx")
    assert not bring(state, wanted, content)
    assert state.contents.models() == (sha(BASE.tobytes()),)
    assert wanted.instead is not None
    assert bring(state, wanted.instead, NEXT.tobytes())
    assert state.contents.lacking(given, "onnx") == []


@pytest.mark.usefixtures("either_place")
def test_the_manifest_says_what_else_is_lacking(state: StateDirectory) -> None:
    bundle = manifest()
    given = task(bundle)
    first = state.contents.lacking(given, "onnx")
    assert [(wanted.name, wanted.size) for wanted in first] == [
        ("manifest.json", None),
        ("the model", len(MODEL)),
    ]
    assert bring(state, first[0], bundle)
    second = {wanted.name: wanted for wanted in state.contents.lacking(given, "onnx")}
    assert set(second) == {TRAIN, EVAL, "the model"}
    assert (second[TRAIN].sha256, second[TRAIN].size) == (sha(FILES[TRAIN]), len(FILES[TRAIN]))
    bring_all(state, given, bundle)
    assert (state.contents.bundle_path(sha(bundle)) / TRAIN).read_bytes() == FILES[TRAIN]
    assert state.contents.vector(sha(MODEL)) == MODEL
    assert not list((state.path / "partial").iterdir())


def versions(*names: str) -> list[tuple[Task, bytes]]:
    """Tasks of bundles that differ in train.onnx alone."""
    made = []
    for name in names:
        bundle = manifest(name, FILES | {TRAIN: name.encode(), FROZEN: b"weights" * 1000}, 2)
        made.append((task(bundle), bundle))
    return made


def fetched(state: StateDirectory, given: Task, bundle: bytes) -> list[str]:
    """Bring what is lacking. Returns the names of what was fetched."""
    read = read_manifest(bundle)
    contents = {
        sha(content): content
        for content in (*FILES.values(), b"weights" * 1000, read.name.encode(), bundle, MODEL)
    }
    names = []
    while lacking := state.contents.lacking(given, "onnx"):
        for wanted in lacking:
            names.append(wanted.name)
            assert bring(state, wanted, contents[wanted.sha256])
    return names


def test_what_two_bundles_have_in_common_is_fetched_once_and_kept_once(
    state: StateDirectory,
) -> None:
    (first, one), (second, two) = versions("first", "second")
    assert sorted(fetched(state, first, one)) == sorted(
        ["manifest.json", "the model", TRAIN, EVAL, FROZEN]
    )
    assert sorted(fetched(state, second, two)) == sorted(["manifest.json", TRAIN])
    files = [state.contents.bundle_path(given.bundle) / FROZEN for given in (first, second)]
    assert files[0].samefile(files[1])
    state.contents.delete_bundle(first.bundle)
    assert files[1].read_bytes() == b"weights" * 1000
    assert not state.contents.lacking(second, "onnx")


def test_a_damaged_file_is_not_taken_from_another_bundle(tmp_path: Path) -> None:
    (first, one), (second, two) = versions("first", "second")
    opened = StateDirectory(tmp_path / "state")
    fetched(opened, first, one)
    (opened.contents.bundle_path(first.bundle) / FROZEN).write_bytes(b"weightz" * 1000)
    opened.close()
    # another process does not know that the file was intact
    opened = StateDirectory(tmp_path / "state")
    assert FROZEN in fetched(opened, second, two)
    assert FROZEN in fetched(opened, first, one) or not opened.contents.lacking(first, "onnx")
    opened.close()


def test_a_file_system_without_links(
    state: StateDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    (first, one), (second, two) = versions("first", "second")
    fetched(state, first, one)
    assert sorted(fetched(state, second, two)) == sorted(["manifest.json", TRAIN])
    files = [state.contents.bundle_path(given.bundle) / FROZEN for given in (first, second)]
    assert not files[0].samefile(files[1])
    assert files[1].read_bytes() == b"weights" * 1000
    assert not list((state.path / "partial").iterdir())


def test_another_bundle_whose_manifest_cannot_be_read_is_passed_over(state: StateDirectory) -> None:
    (first, one), (second, two) = versions("first", "second")
    fetched(state, first, one)
    (state.contents.bundle_path(first.bundle) / "manifest.json").write_bytes(b"{}")
    assert FROZEN in fetched(state, second, two)


def test_each_runtime_has_its_files() -> None:
    read = read_manifest(manifest())
    assert needed_files(read, "onnx") == needed_files(read, "auto") == [TRAIN, EVAL]
    assert needed_files(read, "ort-training") == [
        EVAL,
        *(f"ort_training/{file}" for file in ORT_TRAINING),
    ]


def test_a_bundle_without_the_runtime_is_refused(state: StateDirectory) -> None:
    bundle = manifest()
    given = task(bundle)
    bring(state, state.contents.lacking(given, "onnx")[0], bundle)
    with pytest.raises(BundleError, match="no ort_training/"):
        state.contents.lacking(given, "ort-training")


@pytest.mark.usefixtures("either_place")
def test_a_second_round_lacks_the_model_alone(state: StateDirectory) -> None:
    bundle = manifest()
    bring_all(state, task(bundle), bundle)
    after = task(bundle, b"model of round two..")
    assert [wanted.name for wanted in state.contents.lacking(after, "onnx")] == ["the model"]
    with pytest.raises(FileNotFoundError):
        state.contents.vector(sha(MODEL))


def test_a_small_vector_is_never_on_the_disk(state: StateDirectory) -> None:
    wanted = state.contents.lacking(task(manifest()), "onnx")[1]
    state.contents.append(wanted, 0, MODEL[:8])
    assert state.contents.lacking(task(manifest()), "onnx")[1].have == 8
    assert not list((state.path / "partial").iterdir())
    state.contents.append(wanted, 8, MODEL[8:])
    assert state.contents.finish(wanted)
    assert state.contents.vector(sha(MODEL)) == MODEL
    assert not list((state.path / "models").iterdir())


def test_a_large_vector_is_on_the_disk(
    state: StateDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vectors_in_memory, "LIMIT", len(MODEL) - 1)
    assert bring(state, state.contents.lacking(task(manifest()), "onnx")[1], MODEL)
    assert state.contents.vector_path(sha(MODEL)).read_bytes() == MODEL


@pytest.mark.usefixtures("on_disk")
def test_what_is_known_of_a_vector_goes_with_it(state: StateDirectory) -> None:
    bundle = manifest()
    bring_all(state, task(bundle), bundle)
    known = len(state.contents._intact)
    for number in range(3):
        model = b"model of round %04d.." % number
        (wanted,) = state.contents.lacking(task(bundle, model), "onnx")
        assert bring(state, wanted, model)
        assert len(state.contents._intact) == known


@pytest.mark.usefixtures("either_place")
def test_a_content_with_other_bytes_is_deleted(state: StateDirectory) -> None:
    wanted = state.contents.lacking(task(manifest()), "onnx")[1]
    assert not bring(state, wanted, b"not what it should be")
    assert state.contents.lacking(task(manifest()), "onnx")[1].have == 0


@pytest.mark.usefixtures("on_disk")
def test_a_download_goes_on_after_a_restart(tmp_path: Path) -> None:
    given = task(manifest())
    first = StateDirectory(tmp_path)
    first.contents.append(first.contents.lacking(given, "onnx")[1], 0, MODEL[:8])
    first.close()
    second = StateDirectory(tmp_path)
    wanted = second.contents.lacking(given, "onnx")[1]
    assert (wanted.name, wanted.have) == ("the model", 8)
    second.contents.append(wanted, 8, MODEL[8:])
    assert second.contents.finish(wanted)
    second.close()


@pytest.mark.usefixtures("either_place")
def test_what_is_longer_than_it_may_be_is_fetched_anew(state: StateDirectory) -> None:
    wanted = state.contents.lacking(task(manifest()), "onnx")[1]
    state.contents.append(wanted, 0, MODEL + b"!")
    assert state.contents.lacking(task(manifest()), "onnx")[1].have == 0


@pytest.mark.usefixtures("either_place")
def test_parts_that_no_task_wants_are_deleted(state: StateDirectory) -> None:
    state.contents.append(state.contents.lacking(task(manifest()), "onnx")[1], 0, MODEL[:8])
    state.contents.lacking(task(manifest(), b"another model......."), "onnx")
    assert not list((state.path / "partial").iterdir())
    assert state.contents.lacking(task(manifest()), "onnx")[1].have == 0


def test_a_damaged_file_of_the_cache_is_fetched_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bundle = manifest()
    first = StateDirectory(tmp_path)
    bring_all(first, task(bundle), bundle)
    (first.contents.bundle_path(sha(bundle)) / TRAIN).write_bytes(FILES[TRAIN].replace(b"t", b"x"))
    first.close()
    second = StateDirectory(tmp_path)
    lacking = second.contents.lacking(task(bundle), "onnx")
    assert [wanted.name for wanted in lacking] == [TRAIN, "the model"]
    assert "damaged" in caplog.text
    second.close()


def test_the_cache_keeps_the_bundles_used_last(state: StateDirectory) -> None:
    bundles = [manifest(f"model{number}") for number in range(MAX_BUNDLES + 2)]
    clock = iter(range(10, 100))
    for bundle in [*bundles[:MAX_BUNDLES], bundles[0], *bundles[MAX_BUNDLES:]]:
        bring_all(state, task(bundle), bundle)
        os.utime(
            state.contents.bundle_path(sha(bundle)), (0, next(clock))
        )  # file systems' clocks are coarser than this test
    kept = {path.name for path in (state.path / "bundles").iterdir()}
    assert kept == {sha(bundle) for bundle in (bundles[0], *bundles[MAX_BUNDLES:])}
    assert describe(state.path).bundles[0] == (sha(bundles[-1]), f"model{MAX_BUNDLES + 1}")


def bundle_files(number: int, size: int = 1000) -> dict[str, bytes]:
    return {**FILES, TRAIN: bytes([number]) * size}


def bring_bundle(state: StateDirectory, number: int, size: int = 1000) -> str:
    """Do a task of the bundle of this number, and return its hash. The bundles have their other
    files in common."""
    files = bundle_files(number, size)
    bundle = manifest(f"bundle-{number}", files)
    contents = {sha(content): content for content in (*files.values(), bundle, MODEL)}
    while lacking := state.contents.lacking(task(bundle), "onnx"):
        for wanted in lacking:
            assert bring(state, wanted, contents[wanted.sha256])
    folder = state.contents.bundle_path(sha(bundle))
    os.utime(folder, ns=(number, number))
    return sha(bundle)


def test_with_a_quota_the_bundles_go_that_were_not_used_for_longest(state: StateDirectory) -> None:
    """Each takes about 1.9 kB; what they have in common is on the disk once."""
    state.contents.quota = 10_000
    names = [bring_bundle(state, number) for number in range(1, 7)]
    kept = {path.name for path in (state.path / "bundles").iterdir()}
    own = sum(path.stat().st_size for path in state.path.glob("bundles/*/manifest.json"))
    assert kept == {*names[-len(kept) :]}
    assert 4 <= len(kept) < 6, "more than without a quota, and not all"
    assert own + 1000 * len(kept) <= 10_000


def test_a_bundle_that_was_used_again_stays(state: StateDirectory) -> None:
    state.contents.quota = 10_000
    first, second, *_ = [bring_bundle(state, number) for number in range(1, 5)]
    os.utime(state.contents.bundle_path(first), ns=(9, 9))
    bring_bundle(state, 10, 3000)
    assert state.contents.bundle_path(first).exists()
    assert not state.contents.bundle_path(second).exists()


def test_what_the_task_itself_needs_is_never_deleted_and_a_larger_bundle_is_refused(
    state: StateDirectory,
) -> None:
    state.contents.quota = 10_000
    bring_bundle(state, 1)
    with pytest.raises(CacheFullError, match=r"the task's bundle takes .* MiB .*limits.cache"):
        bring_bundle(state, 2, 20_000)
    assert [*(state.path / "partial").iterdir()] == [], "nothing of it was fetched but the manifest"
    bring_bundle(state, 3)  # the device goes on with what fits


def test_a_bundle_is_fetched_once_for_all_runs_of_a_host(state: StateDirectory) -> None:
    """Two runs of one bundle, and a third of another, in turns."""
    bundles = {"a": manifest(), "b": manifest(), "c": manifest("other", bundle_files(9))}
    contents = {sha(each): each for each in (*FILES.values(), *bundle_files(9).values())}
    contents |= {sha(each): each for each in bundles.values()}
    fetched = []
    for turn in range(3):
        for run, bundle in bundles.items():
            model = f"model of {run} in round {turn}".encode()
            given = msgspec.structs.replace(task(bundle, model), task=f"{run}-{turn}")
            while lacking := state.contents.lacking(given, "onnx"):
                for wanted in lacking:
                    content = {**contents, sha(model): model}[wanted.sha256]
                    assert bring(state, wanted, content)
                    fetched.append(wanted.name)
    assert fetched.count("manifest.json") == 2
    assert fetched.count(TRAIN) == 2
    assert fetched.count(EVAL) == 1, "the two bundles have it in common"
    assert fetched.count("the model") == 9


def test_a_bundle_can_be_forgotten(state: StateDirectory) -> None:
    bundle = manifest()
    bring_all(state, task(bundle), bundle)
    state.contents.delete_bundle(sha(bundle))
    assert [wanted.name for wanted in state.contents.lacking(task(bundle), "onnx")] == [
        "manifest.json"
    ]


def test_a_newer_manifest_is_refused(state: StateDirectory) -> None:
    content = manifest().replace(b'"version": 1', b'"version": 7')
    wanted = state.contents.lacking(task(content), "onnx")[0]
    assert bring(state, wanted, content)
    with pytest.raises(BundleError) as caught:
        state.contents.lacking(task(content), "onnx")
    assert caught.value.code is Code.BAD_VERSION


@pytest.mark.usefixtures("on_disk")
def test_a_full_disk_is_named(state: StateDirectory) -> None:
    """A real write that the system refuses: the limit on a file's size stands in for the disk's."""
    wanted = state.contents.lacking(task(manifest()), "onnx")[1]
    before, handler = (
        resource.getrlimit(resource.RLIMIT_FSIZE),
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        with pytest.raises(StateError, match="cannot use the state directory") as caught:
            state.contents.append(wanted, 0, bytes(4096))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert isinstance(caught.value.__cause__, OSError)

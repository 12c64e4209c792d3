from __future__ import annotations

import json
import os
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fleetlearn_protocol import open_bundle, pack_bundle, write_bundle, write_inference_model
from fleetlearn_protocol.bundle import Bundle
from fleetlearn_protocol.errors import BundleError, Code, ProtocolError
from fleetlearn_protocol.manifest import (
    EVAL,
    INFER,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    PARAMETERS,
    STATE,
    TRAIN,
    VERSIONS,
    File,
    Hyper,
    Input,
    LocalStep,
    Manifest,
    Parameter,
    State,
)
from fleetlearn_protocol.manifest_file import write_manifest
from fleetlearn_protocol.vector import digest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

WEIGHT = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
BIAS = np.array([7, 8], np.float32)
TABLE = (
    Parameter("w", (2, 3), 0, infer_offset=4),
    Parameter("b", (2,), 6, infer_offset=36),
    Parameter("n", (), 8),
)
TENSORS = {"w": WEIGHT, "b": BIAS, "n": np.array(9, np.float32)}
CONTENTS = {
    TRAIN: b"train",
    EVAL: b"",
    INFER: b"head" + WEIGHT.tobytes() + b"----more" + BIAS.tobytes() + b"tail",
    PARAMETERS: save(TENSORS),
}


def manifest_of(contents: dict[str, bytes], **changes: Any) -> Manifest:
    return Manifest(
        **{
            "format": "fleetlearn.bundle",
            "version": 1,
            "name": "m",
            "parameters": TABLE,
            "batch": (Input("x", "float32", (3,)),),
            "outputs": (Input("y", "float32", (2,)),),
            "hyper": (Hyper("lr"),),
            "step": LocalStep("sgd"),
            "metrics": (),
            "files": {
                path: File(digest(content), len(content)) for path, content in contents.items()
            },
        }
        | changes
    )


def write_folder(
    folder: Path, contents: dict[str, bytes] = CONTENTS, manifest: bytes | None = None
) -> Path:
    for path, content in contents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    (folder / MANIFEST).write_bytes(
        write_manifest(manifest_of(contents)) if manifest is None else manifest
    )
    return folder


def write_zip(path: Path, contents: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "m.bundle")


@pytest.fixture(params=["folder", "zip"])
def bundle(request: pytest.FixtureRequest, folder: Path) -> Bundle:
    return open_bundle(
        folder if request.param == "folder" else pack_bundle(folder, folder.with_name("m.zip"))
    )


def refused(act: Callable[[], Any], code: Code, *words: str) -> None:
    with pytest.raises(BundleError) as caught:
        act()
    assert caught.value.code is code, caught.value
    for word in words:
        assert word in caught.value.text


def test_what_is_written_can_be_opened(tmp_path: Path) -> None:
    """Byte for byte what this file writes by hand; the manifest's own table of files does not
    matter."""
    by_hand = write_folder(tmp_path / "by-hand")
    written = write_bundle(tmp_path / "written", manifest_of(CONTENTS, files={}), CONTENTS)
    assert open_bundle(written).manifest == open_bundle(by_hand).manifest
    assert [(written / path).read_bytes() for path in (MANIFEST, *CONTENTS)] == [
        (by_hand / path).read_bytes() for path in (MANIFEST, *CONTENTS)
    ]


def test_a_file_is_moved_into_the_bundle(tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    moved.write_bytes(CONTENTS[INFER])
    written = write_bundle(tmp_path / "written", manifest_of(CONTENTS), {**CONTENTS, INFER: moved})
    assert open_bundle(written).manifest == manifest_of(CONTENTS)
    assert (written / INFER).read_bytes() == CONTENTS[INFER]
    assert not moved.exists()


def test_a_bundle(bundle: Bundle) -> None:
    assert bundle.manifest == manifest_of(CONTENTS)
    assert bundle.sha256 == digest(write_manifest(bundle.manifest)) == digest(bundle.read(MANIFEST))
    assert {path: bundle.read(path) for path in CONTENTS} == CONTENTS
    assert bundle.parameters().tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert bundle.parameters().dtype == np.float32
    refused(
        lambda: bundle.read("graphs/other.onnx"),
        Code.UNKNOWN_CONTENT,
        "bundle m has no graphs/other.onnx",
    )


def test_a_path_may_be_text_or_begin_at_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert open_bundle("~/m.bundle").path == open_bundle(str(folder)).path == folder


def test_what_is_not_a_bundle(tmp_path: Path) -> None:
    refused(lambda: open_bundle(tmp_path / "none"), Code.UNKNOWN_CONTENT, "none does not exist")
    refused(
        lambda: open_bundle(tmp_path),
        Code.UNKNOWN_CONTENT,
        "has no manifest.json: not a bundle, or damaged",
    )
    (tmp_path / "text").write_text("hello")
    refused(
        lambda: open_bundle(tmp_path / "text"),
        Code.BAD_MESSAGE,
        "neither a bundle's folder nor its zip",
    )
    refused(lambda: open_bundle(tmp_path / "text" / "x"), Code.UNKNOWN_CONTENT, "does not exist")
    refused(
        lambda: open_bundle(write_zip(tmp_path / "empty.zip", {})),
        Code.UNKNOWN_CONTENT,
        "has no manifest.json",
    )
    folder = write_folder(tmp_path / "b", manifest=b"{}")
    refused(lambda: open_bundle(folder), Code.BAD_MESSAGE, str(folder), "not a bundle's manifest")
    newer = write_manifest(manifest_of(CONTENTS, version=VERSIONS[-1] + 1))
    refused(
        lambda: open_bundle(write_folder(folder, manifest=newer)),
        Code.BAD_VERSION,
        "Update fleetlearn",
    )


def test_a_missing_a_changed_a_short_and_a_long_file(folder: Path) -> None:
    (folder / TRAIN).write_bytes(b"Train")
    refused(lambda: open_bundle(folder), Code.WRONG_HASH, TRAIN, "was changed")
    (folder / TRAIN).write_bytes(b"trai")
    refused(lambda: open_bundle(folder), Code.WRONG_LENGTH, "has 4 bytes; the manifest says 5")
    (folder / TRAIN).write_bytes(b"train!")
    refused(lambda: open_bundle(folder), Code.WRONG_LENGTH, "has 6 bytes; the manifest says 5")
    (folder / TRAIN).unlink()
    refused(lambda: open_bundle(folder), Code.UNKNOWN_CONTENT, "has no graphs/train.onnx")
    (folder / TRAIN).mkdir()
    refused(lambda: open_bundle(folder), Code.UNKNOWN_CONTENT, "has no graphs/train.onnx")


def test_only_the_files_asked_for_are_checked(folder: Path) -> None:
    (folder / TRAIN).write_bytes(b"Train")
    bundle = open_bundle(folder, files=[EVAL, PARAMETERS])
    refused(lambda: bundle.read(TRAIN), Code.WRONG_HASH)
    refused(lambda: open_bundle(folder, files=[EVAL, TRAIN]), Code.WRONG_HASH)
    refused(lambda: open_bundle(folder, files=["x"]), Code.UNKNOWN_CONTENT)


def test_files_that_change_after_opening_are_seen(bundle: Bundle) -> None:
    if bundle.path.is_dir():
        write_folder(bundle.path, CONTENTS | {TRAIN: b"other"})
        refused(lambda: bundle.read(MANIFEST), Code.WRONG_HASH)
    else:
        write_zip(
            bundle.path,
            {MANIFEST: write_manifest(manifest_of({**CONTENTS, TRAIN: b"other"})), TRAIN: b"other"},
        )
        refused(lambda: bundle.read(MANIFEST), Code.WRONG_HASH)
    refused(lambda: bundle.read(TRAIN), Code.WRONG_HASH)


def test_a_pipe_in_place_of_a_file_does_not_block(folder: Path) -> None:
    for path in (TRAIN, MANIFEST):
        (folder / path).unlink()
        os.mkfifo(folder / path)
        refused(lambda: open_bundle(folder), Code.UNKNOWN_CONTENT, f"has no {path}")
    refused(lambda: open_bundle(folder / MANIFEST), Code.UNKNOWN_CONTENT)


def test_links_to_files_are_files_and_endless_ones_are_not(folder: Path, tmp_path: Path) -> None:
    (folder / TRAIN).rename(tmp_path / "elsewhere")
    (folder / TRAIN).symlink_to(tmp_path / "elsewhere")
    assert open_bundle(folder).read(TRAIN) == b"train"
    (folder / TRAIN).unlink()
    (folder / TRAIN).symlink_to("/dev/zero")
    refused(lambda: open_bundle(folder), Code.UNKNOWN_CONTENT)
    (folder / TRAIN).unlink()
    (folder / TRAIN).symlink_to(folder / TRAIN)
    refused(lambda: open_bundle(folder), Code.UNKNOWN_CONTENT)


def test_a_file_that_may_not_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / MANIFEST).chmod(0)
    # the superuser reads everything: let the system say no
    if os.access(folder / MANIFEST, os.R_OK):
        monkeypatch.setattr(
            Path, "open", lambda *_: (_ for _ in ()).throw(PermissionError(13, "Permission denied"))
        )
    refused(
        lambda: open_bundle(folder),
        Code.BAD_MESSAGE,
        "manifest.json cannot be read",
        "permission denied",
    )


def test_lengths_are_compared_before_anything_is_read(folder: Path) -> None:
    """A sparse file of 1 TiB, and a manifest that claims 8 TiB of a small one."""
    with (folder / TRAIN).open("wb") as stream:
        stream.truncate(2**40)
    files = manifest_of(CONTENTS).files | {EVAL: File("0" * 64, 2**43)}
    (folder / MANIFEST).write_bytes(write_manifest(manifest_of(CONTENTS, files=files)))
    bundle = open_bundle(folder, files=())
    tracemalloc.start()
    refused(
        lambda: bundle.read(TRAIN),
        Code.WRONG_LENGTH,
        "has 1099511627776 bytes; the manifest says 5",
    )
    refused(
        lambda: bundle.read(EVAL), Code.WRONG_LENGTH, "has 0 bytes; the manifest says 8796093022208"
    )
    with (folder / MANIFEST).open("wb") as stream:
        stream.truncate(MAX_MANIFEST_BYTES + 1)
    refused(
        lambda: open_bundle(folder),
        Code.TOO_LARGE,
        "manifest.json has 16777217 bytes; the limit is 16777216",
    )
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_compressed_zip_is_refused_unread(tmp_path: Path, method: int) -> None:
    bomb = {MANIFEST: b" " * 2**22}
    path = write_zip(tmp_path / "m.zip", bomb, method)
    refused(
        lambda: open_bundle(path),
        Code.BAD_MESSAGE,
        "is compressed or encrypted",
        "pack_bundle writes it",
    )


def patched(path: Path, *changes: tuple[int, bytes]) -> Path:
    """The zip with bytes of its first entry in the central directory replaced."""
    content = bytearray(path.read_bytes())
    start = content.index(b"PK\x01\x02")
    for place, change in changes:
        content[start + place : start + place + len(change)] = change
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([(8, b"\x01")], "compressed or encrypted"),
        ([(24, b"\xff\xff\xff\x7f")], "claims 2147483647 bytes"),
        ([(20, b"\xff\xff\xff\x7f"), (24, b"\xff\xff\xff\x7f")], "claims 2147483647 bytes"),
        ([(20, b"\x01\0\0\0"), (24, b"\x01\0\0\0")], "damaged"),
        ([(16, b"\0\0\0\0")], "Bad CRC-32"),
        ([(42, b"\xff\xff\xff\x7f")], "damaged"),
        ([(46, b"\xff")], "has no manifest.json"),
    ],
)
def test_a_zip_that_lies_of_itself(
    folder: Path, changes: list[tuple[int, bytes]], words: str
) -> None:
    path = patched(pack_bundle(folder, folder.with_name("m.zip")), *changes)
    code = Code.UNKNOWN_CONTENT if words.startswith("has no") else Code.BAD_MESSAGE
    refused(lambda: open_bundle(path), code, words)


def test_a_zip_cut_short_anywhere(folder: Path) -> None:
    path = pack_bundle(folder, folder.with_name("m.zip"))
    content = path.read_bytes()
    for size in range(0, len(content), 7):
        path.write_bytes(content[:size])
        with pytest.raises(BundleError):
            open_bundle(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 2500), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_zip_with_changed_bytes_is_the_same_or_refused(
    folder: Path, changes: list[tuple[int, int]]
) -> None:
    path = pack_bundle(folder, folder.with_name("m.zip"))
    content = bytearray(path.read_bytes())
    for place, value in changes:
        content[-1 - place % len(content)] = value
    path.write_bytes(content)
    try:
        bundle = open_bundle(path)
    except BundleError:
        return
    assert {name: bundle.read(name) for name in CONTENTS} == CONTENTS


def test_packing_gives_the_same_bytes_each_time(folder: Path, tmp_path: Path) -> None:
    first = pack_bundle(folder, tmp_path / "a.zip").read_bytes()
    for path in folder.rglob("*"):
        os.utime(path, (10**9, 10**9))
    assert pack_bundle(folder, str(tmp_path / "b.zip")).read_bytes() == first
    other = write_folder(tmp_path / "other", dict(reversed(CONTENTS.items())))
    (other / "surplus.txt").write_text("not in the manifest")
    assert pack_bundle(other, tmp_path / "c.zip").read_bytes() == first
    assert pack_bundle(tmp_path / "a.zip", tmp_path / "d.zip").read_bytes() == first
    assert open_bundle(tmp_path / "d.zip").sha256 == open_bundle(folder).sha256


def test_any_unzip_gives_the_folder_back(folder: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(pack_bundle(folder, tmp_path / "m.zip")) as archive:
        assert archive.testzip() is None
        assert archive.namelist() == [MANIFEST, *sorted(CONTENTS)]
        assert all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist())
        archive.extractall(tmp_path / "again")
    assert open_bundle(tmp_path / "again").sha256 == open_bundle(folder).sha256


def test_packing_onto_itself_and_over_a_failure(folder: Path, tmp_path: Path) -> None:
    path = pack_bundle(folder, tmp_path / "m.zip")
    before = path.read_bytes()
    assert pack_bundle(path, path).read_bytes() == before
    (folder / TRAIN).write_bytes(b"Train")
    refused(lambda: pack_bundle(folder, path), Code.WRONG_HASH)
    assert path.read_bytes() == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["m.bundle", "m.zip"]


@pytest.mark.parametrize(
    ("content", "code", "words"),
    [
        (b"", Code.BAD_MESSAGE, "does not fit"),
        (b"\xff" * 100, Code.BAD_MESSAGE, "does not fit"),
        (save(TENSORS)[:-1], Code.BAD_MESSAGE, "does not fit"),
        (save(TENSORS) + bytes(4), Code.BAD_MESSAGE, "not its tensors' bytes"),
        (
            save(TENSORS).replace(b"[2]", b"[3]"),
            Code.BAD_MESSAGE,
            "tensor b of shape (3,) is said to be at bytes",
        ),
        (save(TENSORS).replace(b"[2]", b"-12"), Code.BAD_MESSAGE, "does not fit"),
        (
            (10**9).to_bytes(8, "little") + save(TENSORS)[8:],
            Code.BAD_MESSAGE,
            "its header alone 1000000008",
        ),
        (save({"w": WEIGHT, "b": BIAS}), Code.BAD_MESSAGE, "missing ['n']"),
        (save(TENSORS | {"z": BIAS}), Code.BAD_MESSAGE, "not in it ['z']"),
        (save(TENSORS | {"w": WEIGHT.T.copy()}), Code.BAD_MESSAGE, "tensor w has shape (3, 2)"),
        (
            save(TENSORS | {"w": WEIGHT.astype(np.float64)}),
            Code.BAD_MESSAGE,
            "tensor w is of F64; expected F32",
        ),
        (
            save(TENSORS | {"w": WEIGHT.astype(np.int32)}),
            Code.BAD_MESSAGE,
            "tensor w is of I32; expected F32",
        ),
        (
            save(TENSORS | {"b": np.array([1, np.nan], np.float32)}),
            Code.NOT_FINITE,
            "element 7 of the vector is nan",
        ),
        (
            b"\x48\0\0\0\0\0\0\0"
            + b'{"w":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}'.ljust(72)
            + b"\0\0\0\0",
            Code.BAD_MESSAGE,
            "does not fit",
        ),
    ],
)
def test_parameters_that_do_not_fit(tmp_path: Path, content: bytes, code: Code, words: str) -> None:
    bundle = open_bundle(write_folder(tmp_path / "b", CONTENTS | {PARAMETERS: content}))
    refused(bundle.parameters, code, PARAMETERS, words)


def test_tensors_on_each_other(tmp_path: Path) -> None:
    content = save(TENSORS)
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    name = max(header, key=lambda row: header[row]["data_offsets"][0])
    begin, end = header[name]["data_offsets"]
    header[name]["data_offsets"] = [0, end - begin]
    changed = (
        content[:8]
        + json.dumps(header, separators=(",", ":")).encode().ljust(size)
        + content[8 + size :]
    )
    bundle = open_bundle(write_folder(tmp_path / "b", CONTENTS | {PARAMETERS: changed}))
    refused(bundle.parameters, Code.BAD_MESSAGE, PARAMETERS, "begins at byte 0, where")


def test_parameters_that_were_changed_meanwhile(folder: Path) -> None:
    """Whether what is there now fits or not."""
    bundle = open_bundle(folder)
    content = (folder / PARAMETERS).read_bytes()
    for other in (
        content[:-4] + bytes([content[-4] ^ 1]) + content[-3:],
        b"\0" + content[1:],
        bytes(len(content)),
    ):
        (folder / PARAMETERS).write_bytes(other)
        refused(bundle.parameters, Code.WRONG_HASH, PARAMETERS)


def test_parameters_with_a_note_in_the_file(tmp_path: Path) -> None:
    contents = CONTENTS | {PARAMETERS: save(TENSORS, {"made by": "somebody else"})}
    bundle, plain = (
        open_bundle(write_folder(tmp_path / name, rows))
        for name, rows in (("b", contents), ("c", CONTENTS))
    )
    assert bundle.parameters().tolist() == plain.parameters().tolist()


STATES = (State("m.w", (2, 3), 0), State("t", (), 6))
INITIAL = {"m.w": WEIGHT, "t": np.array(5, np.float32)}


def test_the_initial_state(tmp_path: Path) -> None:
    contents = CONTENTS | {STATE: save(INITIAL)}
    bundle = open_bundle(
        write_bundle(tmp_path / "b", manifest_of(contents, state=STATES), contents)
    )
    assert bundle.state().tolist() == [1, 2, 3, 4, 5, 6, 5]
    assert bundle.state().dtype == np.float32


def test_without_its_file_the_initial_state_is_zeros(tmp_path: Path) -> None:
    for states, zeros in (STATES, [0.0] * 7), ((), []):
        bundle = open_bundle(
            write_bundle(tmp_path / f"{len(zeros)}", manifest_of(CONTENTS, state=states), CONTENTS)
        )
        assert bundle.state().tolist() == zeros
        assert bundle.state().dtype == np.float32


def test_a_state_that_does_not_fit(tmp_path: Path) -> None:
    contents = CONTENTS | {STATE: save({"m.w": WEIGHT})}
    bundle = open_bundle(
        write_bundle(tmp_path / "b", manifest_of(contents, state=STATES), contents)
    )
    refused(bundle.state, Code.BAD_MESSAGE, STATE, "missing ['t']")


def test_an_inference_model_with_and_without_what_is_personal(tmp_path: Path) -> None:
    """A vector of what travels leaves the personal bytes as they were exported; a device's own
    replaces all."""
    head = (
        msgspec.structs.replace(TABLE[1], personal=True),
        msgspec.structs.replace(TABLE[2], personal=True),
    )
    manifest = manifest_of(CONTENTS, parameters=(TABLE[0], *head))
    bundle = open_bundle(write_bundle(tmp_path / "b", manifest, CONTENTS))
    assert (manifest.size, bundle.parameters().shape) == (6, (9,))
    own = np.arange(10, 19, dtype=np.float32)
    body = b"head" + own[:6].tobytes() + b"----more"
    assert write_inference_model(bundle, own[:6]) == body + BIAS.tobytes() + b"tail"
    assert write_inference_model(bundle, own) == body + own[6:8].tobytes() + b"tail"
    with pytest.raises(
        ValueError, match=r"a float32 vector of shape \(8,\); expected float32 \(6,\) or \(9,\)"
    ):
        write_inference_model(bundle, own[:8])


def test_the_inference_model_by_hand(bundle: Bundle) -> None:
    vector = np.arange(10, 19, dtype=np.float32)
    expected = b"head" + vector[:6].tobytes() + b"----more" + vector[6:8].tobytes() + b"tail"
    assert write_inference_model(bundle, vector) == expected
    assert write_inference_model(bundle, bundle.parameters()) == CONTENTS[INFER]


def test_vectors_that_are_no_model(bundle: Bundle) -> None:
    for wrong in (np.zeros(8, np.float32), np.zeros((9, 1), np.float32), np.zeros(9)):
        with pytest.raises(ValueError, match=r"expected float32 \(9,\)"):
            write_inference_model(bundle, wrong)
    with pytest.raises(ProtocolError, match="element 3 of the vector is inf") as caught:
        write_inference_model(bundle, np.array([0, 0, 0, np.inf, 0, 0, 0, 0, 0], np.float32))
    assert caught.value.code is Code.NOT_FINITE


def test_an_inference_model_of_other_bytes(folder: Path) -> None:
    bundle = open_bundle(folder)
    (folder / INFER).write_bytes(CONTENTS[INFER][:-1] + b"!")
    refused(lambda: write_inference_model(bundle, bundle.parameters()), Code.WRONG_HASH, INFER)


def test_a_bundle_is_plain_data(bundle: Bundle) -> None:
    assert msgspec.structs.asdict(bundle.manifest)["parameters"] == TABLE


def test_a_file_is_checked_without_being_held(folder: Path, tmp_path: Path) -> None:
    for path in (folder, pack_bundle(folder, tmp_path / "packed.zip")):
        bundle = open_bundle(path, files=())
        bundle.check(TRAIN)
        bundle.check(MANIFEST)
        refused(lambda bundle=bundle: bundle.check("graphs/other.onnx"), Code.UNKNOWN_CONTENT)
    (folder / TRAIN).write_bytes(b"Train")
    refused(
        lambda: open_bundle(folder, files=()).check(TRAIN), Code.WRONG_HASH, TRAIN, "was changed"
    )

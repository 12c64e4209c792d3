"""A flipped bit anywhere in a state directory: it is found, said by the file's name, and costs no
more than that file."""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_device.session.history import History
from fleetlearn_device.storage import vectors_in_memory
from fleetlearn_device.storage.credential import make_credential, read_credential
from fleetlearn_device.storage.device_key import device_key, read_device_key
from fleetlearn_device.storage.errors import StateError
from fleetlearn_device.storage.kept_states import personal_name
from fleetlearn_device.storage.state_directory import StateDirectory
from fleetlearn_device.storage.status import DeviceStatus, read_status, write_status
from fleetlearn_device.storage.trusted_keys import read_trusted_keys, write_trusted_keys
from fleetlearn_protocol import Bundle
from fleetlearn_protocol.encodings import FLOAT32
from fleetlearn_protocol.messages import Report, Task
from fleetlearn_protocol.vector import digest
from line_bundle import write_line_bundle

B = "b" * 64
ONE, TWO, THREE = (np.arange(3, dtype=np.float32) + number for number in range(3))
MODEL = np.array([1, 2, 3, 4], np.float32)
UPDATE = (np.arange(5, dtype=np.float32) * 1e3).tobytes()
EMPTY = {"lock", "let-in"}
"""Files without a byte."""
NOT_KEPT = {"partial/half"}
"""A content that is still arriving is checked when it is complete (test_content_cache)."""


@pytest.fixture(scope="module", autouse=True)
def models_on_disk() -> Iterator[None]:
    """Have small models written to disk as well, as large ones are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vectors_in_memory, "LIMIT", 0)
        yield


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return write_line_bundle(tmp_path_factory.mktemp("line") / "line", personal=True)


def task(bundle: Bundle) -> Task:
    vectors = (FLOAT32.reference("model", MODEL),)
    parts = {"update": "float32", "buffers": "float32"}
    return Task("t9", 9, bundle.sha256, vectors, parts, {}, 1, 0, 7, 100.0)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory, bundle: Bundle) -> Path:
    """A state directory with everything that a device can have."""
    folder = tmp_path_factory.mktemp("template") / "state"
    state = StateDirectory(folder, "sensor-7")
    make_credential(folder)
    device_key(folder)
    (folder / "let-in").touch()
    write_trusted_keys(folder, ["a" * 64, "c" * 64])
    contents = {entry.sha256: bundle.read(path) for path, entry in bundle.manifest.files.items()}
    contents |= {bundle.sha256: bundle.read("manifest.json"), digest(MODEL): MODEL.tobytes()}
    while lacking := state.contents.lacking(task(bundle), "onnx"):
        for wanted in lacking:
            state.contents.append(wanted, 0, contents[wanted.sha256])
            assert state.contents.finish(wanted)
    (folder / "partial" / "half").write_bytes(b"half of it")
    report = Report("t1", 3, (FLOAT32.part("update", UPDATE),), 7, 3, 2.0, True, 0.5)
    state.outbox.save(report, (UPDATE,), B, ONE, {"control": TWO}, THREE)
    state.training_starts.add("t2")
    state.checkpoint.save("t2", b"\xc0", {"local": ONE, "state": TWO})
    write_status(folder, DeviceStatus(1.0, "no", 2.0, None, False, "", 3.0, History(4), 5.0))
    state.close()
    return folder


def found(folder: Path, bundle: Bundle) -> dict[str, Any]:
    """Read everything as a device that starts does. An item that cannot be had is None."""
    state = StateDirectory(folder)
    try:
        starts = state.training_starts.count("t2")
        stored = state.checkpoint.load("t2")
        vectors = stored and {name: vector.tolist() for name, vector in stored.vectors.items()}
        kept, personal = (state.kept_states.load(name, 3) for name in (B, personal_name(B)))
        tied = state.tied_vectors.begin(B, "t1", 3)
        status = read_status(folder)
        return {
            "identity.json": state.device,
            "credential.json": read_credential(folder),
            "device_key.json": read_device_key(folder),
            "trusted.json": read_trusted_keys(folder),
            "training.json": starts or None,
            "checkpoint": vectors,
            "pending": state.outbox.load(),
            "kept": None if kept is None else kept.tolist(),
            "personal": None if personal is None else personal.tolist(),
            "tied": {name: vector.tolist() for name, vector in tied.items()} or None,
            "status.json": status,
            "lacking": [wanted.name for wanted in state.contents.lacking(task(bundle), "onnx")],
        }
    finally:
        state.close()


ITEMS: dict[str, str] = {
    "identity.json": "identity.json",
    "credential.json": "credential.json",
    "device_key.json": "device_key.json",
    "trusted.json": "trusted.json",
    "training.json": "training.json",
    "checkpoint": "checkpoint",
    "pending/report.json": "pending",
    "pending/*.bin": "pending",
    f"kept/{B}": "kept",
    f"kept/{B}.personal": "personal",
    f"tied/{B}.t1": "tied",
    "status.json": "status.json",
    "version.json": "version.json",
    "bundles/*/manifest.json": "lacking",
    "bundles/*/graphs/train.onnx": "lacking",
    "bundles/*/graphs/eval.onnx": "lacking",
    "bundles/*/parameters.safetensors": "lacking",
    "models/*": "lacking",
}
"""File -> what is lost with it."""
FATAL = {"identity.json", "credential.json", "device_key.json", "trusted.json"}
"""The device must not go on as another one, or trust others: it ends, and says what to do."""
SILENT = {"training.json", "status.json"}
"""Counts deaths, and is for people: nothing is lost that anybody would miss."""


def test_every_file_has_a_row(template: Path) -> None:
    files = {str(path.relative_to(template)) for path in template.rglob("*") if path.is_file()}
    rows = {str(path.relative_to(template)) for pattern in ITEMS for path in template.glob(pattern)}
    assert files - EMPTY - NOT_KEPT == rows


@pytest.mark.parametrize("pattern", ITEMS)
def test_a_flipped_bit(
    template: Path,
    bundle: Bundle,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    pattern: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    shutil.copytree(template, tmp_path / "whole")
    whole = found(tmp_path / "whole", bundle)
    assert None not in whole.values()
    (file,) = template.glob(pattern)
    size, dice = file.stat().st_size, random.Random(pattern)
    places = {0, size // 2, size - 1, *(dice.randrange(size) for _ in range(3))}
    said = 0
    for place in sorted(places):
        folder = tmp_path / str(place)
        shutil.copytree(template, folder)
        damaged = folder / file.relative_to(template)
        content = bytearray(damaged.read_bytes())
        content[place] ^= 1 << dice.randrange(7)
        damaged.write_bytes(content)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            said += check(folder, damaged, bundle, whole, ITEMS[pattern], caplog)
    assert said or ITEMS[pattern] in SILENT


def check(
    folder: Path,
    damaged: Path,
    bundle: Bundle,
    whole: dict[str, Any],
    item: str,
    caplog: pytest.LogCaptureFixture,
) -> bool:
    """Assert that the damage changes nothing, or the item alone, which is said. Returns whether it
    was said."""
    try:
        now = found(folder, bundle)
    except StateError as error:
        if item in FATAL and str(damaged) in str(error):
            return True
        raise
    # What tells an item from its checksum may be hit itself: then nothing is lost.
    lost = {name for name, value in now.items() if value != whole[name]}
    assert lost <= {item}
    if item == "lacking":
        assert lost, "the file is fetched again"
        assert any("damaged" in message for message in caplog.messages)
        return True
    assert not lost or now[item] is None, "nothing wrong is taken for right"
    if lost and item not in SILENT:
        assert any("damaged" in message for message in caplog.messages)
    return bool(caplog.messages)

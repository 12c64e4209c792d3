"""Which uploads of an earlier process go on: those whose checkpoint says the truth."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from fleetlearn_coordinator.conversation.begun import BegunUpload, BegunUploads, encode_begun
from fleetlearn_coordinator.service.training_run.take_up_uploads import take_up_uploads
from fleetlearn_coordinator.storage.file_blobs import checkpoint_path, spool_path
from fleetlearn_coordinator.storage.store import Store, open_store
from fleetlearn_protocol.encodings import FLOAT32
from fleetlearn_protocol.vector import checksum

FIRST, SECOND = np.arange(300, dtype=np.float32), np.arange(500, dtype=np.float32) / 8
PARTS = FLOAT32.part("update", FIRST), FLOAT32.part("buffers", SECOND)
CONTENT = FIRST.tobytes() + SECOND.tobytes()
TASKS = {"a": "t1-1"}


def begun_at(offset: int) -> BegunUpload:
    """An upload of both parts, of which ``offset`` bytes are here."""
    first, second = CONTENT[: min(offset, FIRST.nbytes)], CONTENT[FIRST.nbytes : offset]
    crc32 = {"update": checksum(first)} | ({"buffers": checksum(second)} if second else {})
    return BegunUpload("a", "t1-1", PARTS, 0, offset, crc32, dict.fromkeys(crc32, 7.0))


def leave(folder: Path, begun: BegunUpload, content: bytes = CONTENT) -> None:
    """An earlier process wrote these bytes and this checkpoint."""
    store = open_store(folder, "bundle")
    number = store.blobs.take_spool_file()
    store.blobs.write_spool_file(number, 0, content)
    store.blobs.write_checkpoint(number, encode_begun(begun))
    store.close()


def take_up(folder: Path) -> tuple[Store, BegunUploads, int]:
    store = open_store(folder, "bundle", uploads=4)
    kept = BegunUploads(store.uploads, store.blobs.free_spool_file)
    return store, kept, take_up_uploads(store, kept, TASKS)


@pytest.mark.parametrize("offset", [4, FIRST.nbytes, FIRST.nbytes + 8, len(CONTENT)])
def test_an_upload_whose_bytes_are_here_goes_on(tmp_path: Path, offset: int) -> None:
    leave(tmp_path / "run", begun_at(offset))
    store, kept, here = take_up(tmp_path / "run")
    assert here == offset
    assert store.blobs.take_spool_file() == 1, "its file is taken"
    assert kept.take("t1-1", PARTS) == begun_at(offset)
    store.close()


def _cut(folder: Path) -> None:
    path = checkpoint_path(folder, 0)
    path.write_bytes(path.read_bytes()[:-3])


def _lost_bytes(folder: Path) -> None:
    """As after a loss of power: the checkpoint is there, and what it is of is zeros."""
    spool_path(folder, 0).write_bytes(bytes(len(CONTENT)))


def _short(folder: Path) -> None:
    spool_path(folder, 0).write_bytes(CONTENT[:50])


def _changed(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = encode_begun(msgspec.structs.replace(begun_at(1000), **changes))
        checkpoint_path(folder, 0).write_bytes(content)

    return change


@pytest.mark.parametrize(
    "harm",
    [
        pytest.param(_cut, id="torn"),
        pytest.param(_lost_bytes, id="zeros"),
        pytest.param(_short, id="short file"),
        pytest.param(_changed(spool_file=3), id="another file's"),
        pytest.param(_changed(task="t1-2"), id="a task that is over"),
        pytest.param(_changed(device="b"), id="a device without a task"),
        pytest.param(_changed(crc32={"update": 1}), id="another checksum"),
        pytest.param(_changed(crc32={}), id="no checksum"),
        pytest.param(_changed(offset=1004), id="beyond what it knows"),
        pytest.param(_changed(offset=2**33), id="beyond the update"),
        pytest.param(lambda folder: spool_path(folder, 0).unlink(), id="no file"),
    ],
)
def test_any_other_begins_again_and_leaves_nothing(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    leave(tmp_path / "run", begun_at(1000))
    harm(tmp_path / "run")
    store, kept, here = take_up(tmp_path / "run")
    assert here == 0
    assert kept.take("t1-1", PARTS) is None
    number = store.blobs.take_spool_file()
    assert number == 0, "its file is free"
    store.blobs.free_spool_file(number)
    store.close()
    assert list((tmp_path / "run" / "uploads").glob("*.begun")) == []


def test_of_too_many_those_with_the_most_bytes_go_on(tmp_path: Path) -> None:
    """The service may have fewer places than before."""
    store = open_store(tmp_path / "run", "bundle")
    tasks = {}
    taken = [store.blobs.take_spool_file() for _ in range(6)]
    for number in taken:
        name, size = f"t1-{number}", 100 + 4 * number
        store.blobs.write_spool_file(number, 0, CONTENT)
        crc32 = {"update": checksum(CONTENT[:size])}
        begun = BegunUpload(f"d{number}", name, PARTS, number, size, crc32, {})
        store.blobs.write_checkpoint(number, encode_begun(begun))
        tasks[f"d{number}"] = name
    store.close()
    store = open_store(tmp_path / "run", "bundle", uploads=4)
    kept = BegunUploads(store.uploads, store.blobs.free_spool_file)
    assert take_up_uploads(store, kept, tasks) == sum(100 + 4 * number for number in range(2, 6))
    assert sorted(store.blobs.checkpoints()) == [2, 3, 4, 5]
    assert sorted(store.blobs.take_spool_file() for _ in range(3)) == [0, 1, 6]
    store.close()

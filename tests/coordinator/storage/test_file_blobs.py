"""Files: what is written whole, what is named when it is not, and which spool files are free."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fleetlearn_coordinator.storage.errors import StoreError, StoreUnavailableError
from fleetlearn_coordinator.storage.file_blobs import PARAMETERS, PART_BYTES, FileBlobs, model_path
from fleetlearn_protocol.vector import digest
from full_disk import largest_file


def test_half_a_chunk_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    blobs = FileBlobs(tmp_path)
    spool_file = blobs.take_spool_file()
    with largest_file(1000), pytest.raises(OSError, match=r"File too large: .*slot-0000"):
        blobs.write_spool_file(spool_file, 0, bytes(4000))


@pytest.mark.parametrize("size", [1, PART_BYTES, 3 * PART_BYTES + 4])
def test_a_spool_file_is_read_in_parts(tmp_path: Path, size: int) -> None:
    """An earlier, longer update has left bytes in the file."""
    blobs, content = FileBlobs(tmp_path), np.random.default_rng(0).bytes(4 * PART_BYTES)
    spool_file = blobs.take_spool_file()
    blobs.write_spool_file(spool_file, 0, content)
    parts = [bytes(part) for part in blobs.read_spool_file(spool_file, size)]
    assert max(map(len, parts)) <= PART_BYTES
    assert b"".join(parts) == content[:size]


def test_a_spool_file_of_an_earlier_process_is_not_given_away(tmp_path: Path) -> None:
    blobs = FileBlobs(tmp_path)
    blobs.reserve_spool_file(2)
    assert sorted(blobs.take_spool_file() for _ in range(3)) == [0, 1, 3]
    blobs.free_spool_file(2)
    assert blobs.take_spool_file() == 2


def test_a_checkpoint_is_gone_with_its_spool_file(tmp_path: Path) -> None:
    blobs = FileBlobs(tmp_path)
    first, second = blobs.take_spool_file(), blobs.take_spool_file()
    blobs.write_checkpoint(first, b"old")
    blobs.write_checkpoint(first, b"new")
    blobs.write_checkpoint(second, b"other")
    assert FileBlobs(tmp_path).checkpoints() == {first: b"new", second: b"other"}
    blobs.free_spool_file(first)
    later = FileBlobs(tmp_path)
    assert later.checkpoints() == {second: b"other"}
    later.reserve_spool_file(second)
    later.free_spool_file(second)
    assert FileBlobs(tmp_path).checkpoints() == {}


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    blobs = FileBlobs(tmp_path)
    spool_file = blobs.take_spool_file()
    blobs.write_checkpoint(spool_file, b"old")
    with largest_file(1000):
        blobs.write_checkpoint(spool_file, bytes(4000))
    assert FileBlobs(tmp_path).checkpoints() == {spool_file: b"old"}


def test_there_is_room_until_all_spool_files_are_in_use(tmp_path: Path) -> None:
    blobs = FileBlobs(tmp_path, spool_files=2)
    blobs.reserve_spool_file(1)
    assert blobs.has_room()
    taken = blobs.take_spool_file()
    assert not blobs.has_room()
    blobs.free_spool_file(taken)
    assert blobs.has_room()


def test_a_model_that_cannot_be_written_or_read_is_named(tmp_path: Path) -> None:
    blobs, vector = FileBlobs(tmp_path), np.zeros(1000, np.float32)
    with largest_file(1000), pytest.raises(StoreError, match=r"v00000001\.\w+\.draft cannot be"):
        blobs.save_model(1, {PARAMETERS: vector})
    blobs.save_model(1, {PARAMETERS: vector})
    path = model_path(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(StoreError, match=r"v00000001.safetensors is damaged"):
        blobs.load_model(1, digest(vector))


def test_an_open_tensor_outlives_its_file(tmp_path: Path) -> None:
    """A commit in another thread may remove the model after it was found."""
    blobs, vector = FileBlobs(tmp_path), np.arange(1000, dtype=np.float32)
    blobs.save_model(1, {PARAMETERS: vector, "state.m": vector * 2})
    found, state = blobs.open_tensor(1), blobs.open_tensor(1, "state.m")
    blobs.drop_models([1])
    assert (found.size, state.size) == (4000, 4000)
    assert found.read(8, 12) == vector[2:5].tobytes()
    assert state.read(3988, 12) == (2 * vector[-3:]).tobytes()
    with pytest.raises(StoreError, match=r"v00000001\.safetensors is missing"):
        blobs.open_tensor(1)


def test_a_tensor_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    blobs = FileBlobs(tmp_path)
    blobs.save_model(1, {PARAMETERS: np.zeros(10, np.float32)})
    with pytest.raises(StoreError, match=r"has no tensor state\.m: an earlier version wrote it"):
        blobs.open_tensor(1, "state.m")
    model_path(tmp_path, 1).write_bytes(b"\x08" + bytes(7) + b'{"x": 1')
    with pytest.raises(StoreError, match=r"v00000001\.safetensors is damaged"):
        blobs.open_tensor(1)
    model_path(tmp_path, 1).unlink()
    model_path(tmp_path, 1).mkdir()
    with pytest.raises(StoreUnavailableError, match=r"v00000001\.safetensors cannot be opened"):
        blobs.open_tensor(1)

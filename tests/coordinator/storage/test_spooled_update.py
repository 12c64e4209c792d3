"""A report's part in its spool file: read in any blocks, it is what was uploaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.spooled_update import PART, SpooledUpdate
from fleetlearn_protocol.encodings import find_encoding

SIZE = 3 * PART + 100


@pytest.fixture(params=["float32", "float16", "int8"])
def spooled(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[SpooledUpdate]:
    """Behind another part of 400 bytes."""
    encoding = find_encoding(request.param)
    content = encoding.encode(np.arange(SIZE, dtype=np.float32) % 1000)
    storage = find_storage(tmp_path / "run")
    with storage.lock(), closing(storage.open_blobs(power=False, spool_files=2)) as blobs:
        number = blobs.take_spool_file()
        blobs.write_spool_file(number, 0, bytes(400) + content)
        yield SpooledUpdate(blobs, number, encoding.part("update", content), 400, SIZE)


def test_blocks_of_any_length_are_what_was_uploaded(spooled: SpooledUpdate) -> None:
    """A block may be longer than what is read of a file at a time: the values of 32,769 BatchNorm
    statistics were, and came out as those of the file's end."""
    whole = np.concatenate([part.copy() for part in spooled])
    assert whole.size == SIZE
    assert np.abs(whole - np.arange(SIZE) % 1000).max() < 10
    for start in (0, 4096, PART):
        for stop in (start + 1, PART + 4096, 2 * PART + 7, SIZE):
            np.testing.assert_array_equal(spooled.read(start, stop), whole[start:stop])

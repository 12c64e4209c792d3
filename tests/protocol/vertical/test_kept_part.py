"""Checkpoints as bytes."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from fleetlearn_protocol.vertical.kept_part import (
    KeptPart,
    PartKey,
    key_of,
    read_part,
    write_part,
)

KEY = PartKey("run", "a" * 64, "b" * 64)
PART = KeptPart(7, np.arange(5, dtype=np.float32), np.ones(2, np.float32))


def test_a_part_comes_back() -> None:
    content = write_part(KEY, PART)
    found = read_part(content, KEY)
    assert found is not None
    assert found.step == 7
    assert np.array_equal(found.local, PART.local)
    assert np.array_equal(found.state, PART.state)
    assert key_of(content) == KEY


@pytest.mark.parametrize("field", ["run", "bundle", "alignment"])
def test_a_part_of_another_run_is_no_part_of_this_one(field: str) -> None:
    other = msgspec.structs.replace(KEY, **{field: "c" * 64})
    assert read_part(write_part(KEY, PART), other) is None


def test_any_changed_byte_is_found_and_so_is_a_short_file() -> None:
    content = write_part(KEY, PART)
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1
        assert read_part(bytes(damaged), KEY) is None, place
    for length in range(0, len(content), 7):
        assert read_part(content[:length], KEY) is None
        assert key_of(content[:length]) is None

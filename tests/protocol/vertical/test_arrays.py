"""Arrays that follow a message."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from fleetlearn_protocol.errors import ProtocolError
from fleetlearn_protocol.manifest import Input
from fleetlearn_protocol.vertical.arrays import decode_arrays, encode_arrays

ROWS = [Input("h", "float32", (3,)), Input("y", "int64", ())]
H = np.arange(6, dtype=np.float32).reshape(2, 3)
Y = np.array([5, -7])


@pytest.mark.parametrize("encoding", ["float32", "float16"])
def test_arrays_come_back(encoding: str) -> None:
    parts, content = encode_arrays([("h", H), ("y", Y)], encoding)
    h, y = decode_arrays(parts, content, ROWS, 2, encoding)
    assert np.array_equal(h, H)
    assert np.array_equal(y, Y)
    assert [part.encoding for part in parts] == [encoding, "plain"]


def changed(number: int, **fields: Any) -> Any:
    def change(parts: Any, content: bytes) -> Any:
        rows = [*parts]
        rows[number] = msgspec.structs.replace(rows[number], **fields)
        return tuple(rows), content

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (changed(0, name="g"), "the arrays"),
        (lambda parts, content: (parts[:1], content), "the arrays"),
        (changed(0, encoding="float16"), "expected float32"),
        (changed(1, encoding="float32"), "expected plain"),
        (changed(0, size=20), "2 rows of it have 24"),
        (changed(0, crc32=1), "another CRC-32"),
        (lambda parts, content: (parts, content[:-1]), "2 rows of it have 16"),
        (lambda parts, content: (parts, content + b"x"), "the parts have 40"),
    ],
)
def test_other_arrays_than_expected_are_refused(change: Any, said: str) -> None:
    parts, content = change(*encode_arrays([("h", H), ("y", Y)], "float32"))
    with pytest.raises(ProtocolError, match=said):
        decode_arrays(parts, content, ROWS, 2, "float32")


def test_nan_is_neither_sent_nor_taken() -> None:
    bad = np.full((2, 3), np.nan, np.float32)
    with pytest.raises(ProtocolError, match="finite"):
        encode_arrays([("h", bad)], "float32")
    parts, content = encode_arrays([("h", H)], "float32")
    sent = bad.tobytes()
    wrong = (msgspec.structs.replace(parts[0], crc32=__import__("zlib").crc32(sent)),)
    with pytest.raises(ProtocolError, match="not-finite"):
        decode_arrays(wrong, sent, ROWS[:1], 2, "float32")
    assert content != sent

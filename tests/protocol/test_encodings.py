from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from fleetlearn_protocol.encodings import (
    ENCODINGS,
    FAMILIES,
    FLOAT32,
    INT8,
    SLAB,
    Encoding,
    family,
    find_encoding,
)
from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.messages import Part, VectorReference
from fleetlearn_protocol.vector import checksum, digest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
MODERATE = st.floats(-60000, 60000, width=32)
ALL = [
    find_encoding(name)
    for name in (*ENCODINGS, "topk-0.01", "topk-0.3-float16", "topk-0.0005-int8")
]
every_encoding = pytest.mark.parametrize("encoding", ALL, ids=[encoding.name for encoding in ALL])


def test_names() -> None:
    assert list(ENCODINGS) == ["float32", "float16", "bfloat16", "int8", "int4"]
    assert list(FAMILIES) == [*ENCODINGS, "topk"]
    for encoding in ALL:
        assert find_encoding(encoding.name) == encoding
        assert family(encoding.name) in FAMILIES


@pytest.mark.parametrize(
    "name",
    [
        "float64",
        "int8-1",
        "topk",
        "topk-0",
        "topk-0.0",
        "topk-1",
        "topk-0.010",
        "topk-0.01-int4",
        "topk-1e-3",
        "topk-0.0000001",
        "topk-.1",
        "Topk-0.1",
        "topk-0.1 ",
        "topk-0.1\n",
        "topk-0.\u0661",
    ],
)
def test_a_name_that_is_none(name: str) -> None:
    with pytest.raises(
        ProtocolError, match="expected float32, float16, bfloat16, int8, int4, or top-k"
    ) as caught:
        find_encoding(name)
    assert caught.value.code is Code.BAD_ENCODING


@every_encoding
def test_blocks_divide_what_aggregators_read_and_fit_into_a_chunk(encoding: Encoding) -> None:
    assert 4096 % encoding.block == 0
    assert encoding.block_bytes == encoding.size(encoding.block) <= 2**17


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("float16", 0.5),
        ("bfloat16", 0.5),
        ("int8", 0.27),
        ("int4", 0.15),
        ("topk-0.01", 0.016),
        ("topk-0.01-int8", 0.008),
    ],
)
def test_bytes_beside_float32(name: str, most: float) -> None:
    assert find_encoding(name).size(10**6) <= most * FLOAT32.size(10**6)


@every_encoding
@given(
    hnp.arrays(np.float32, st.integers(1, 5000), elements=MODERATE, fill=MODERATE),
    st.integers(0, 20),
)
def test_runs_of_whole_blocks_are_the_whole(encoding: Encoding, vector: Any, cut: int) -> None:
    """The coordinator relies on this: it checks and decodes an update run by run."""
    content = encoding.encode(vector, 3)
    assert content.nbytes == encoding.size(len(vector))
    start = min(cut, len(vector) // encoding.block) * encoding.block
    runs = [
        (content[: encoding.size(start)], start),
        (content[encoding.size(start) :], len(vector) - start),
    ]
    whole = encoding.decode(content, len(vector))
    assert whole.dtype == np.float32
    assert whole.shape == vector.shape
    assert np.concatenate([encoding.decode(*run) for run in runs]).tobytes() == whole.tobytes()
    assert encoding.decode(runs[0][0]).tobytes() == whole[:start].tobytes()
    assert (
        max(encoding.check(*run) for run in runs)
        == encoding.check(content, len(vector))
        == np.abs(whole).max()
    )


@every_encoding
def test_slabs_are_the_whole(encoding: Encoding) -> None:
    """Vectors of several slabs, with a last block that is not full: each draw is the place's
    own."""
    vector = np.random.default_rng(1).standard_normal(2 * SLAB + 4096 + 77).astype(np.float32)
    content = encoding.encode(vector, 9)
    assert encoding.encode(vector, 9) == content
    head = encoding.encode(vector[: SLAB + 4096], 9)
    assert content[: head.nbytes] == head
    assert (encoding.encode(vector, 10) != content) == ("int" in encoding.name)
    error = encoding.decode(content, len(vector)) - vector
    assert np.abs(error).max() < {"float32": 1e-9, "float16": 0.002, "bfloat16": 0.02}.get(
        encoding.name, 5.0
    )


@every_encoding
@pytest.mark.parametrize("elements", [1, 2, 3, 63, 257])
def test_a_vector_of_zeros(encoding: Encoding, elements: int) -> None:
    content = encoding.encode(np.zeros(elements, np.float32))
    assert encoding.check(content, elements) == 0
    assert encoding.decode(content, elements).tolist() == [0] * elements


@every_encoding
def test_no_elements(encoding: Encoding) -> None:
    content = encoding.encode(np.zeros(0, np.float32))
    assert content.nbytes == encoding.size(0) == 0
    assert encoding.decode(content, 0).tolist() == encoding.decode(b"").tolist() == []
    assert encoding.check(content, 0) == 0


@every_encoding
@pytest.mark.parametrize("elements", [1, 300, 4096, 5001])
def test_bytes_of_another_length(encoding: Encoding, elements: int) -> None:
    content = bytes(encoding.size(elements) + 1)
    for given_bytes in (content, content[:-2]):
        for read in (encoding.decode, encoding.check):
            with pytest.raises(
                ProtocolError, match=f"{elements} elements take {len(content) - 1}"
            ) as caught:
                read(given_bytes, elements)
            assert caught.value.code is Code.WRONG_LENGTH
    with pytest.raises(
        ProtocolError, match=f"expected a multiple of {encoding.block_bytes}"
    ) as caught:
        encoding.check(bytes(encoding.block_bytes + 1))
    assert caught.value.code is Code.WRONG_LENGTH


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("encoding", ALL[1:], ids=[encoding.name for encoding in ALL[1:]])
def test_a_vector_that_is_not_finite_is_not_encoded(encoding: Encoding, value: float) -> None:
    with pytest.raises(ProtocolError, match="element 1 of the vector is") as caught:
        encoding.encode(np.array([0, value], np.float32))
    assert caught.value.code is Code.NOT_FINITE


@given(hnp.arrays(np.float32, st.integers(1, 20), elements=FINITE))
def test_float32_is_exact(vector: Any) -> None:
    content = vector.tobytes()
    for same in (content, bytearray(content), memoryview(content), vector.data):
        assert FLOAT32.decode(same).tobytes() == content
    assert FLOAT32.encode(vector).tobytes() == content


def test_float32_by_hand() -> None:
    assert FLOAT32.encode(np.array([1, -2], np.float32)).hex() == "0000803f000000c0"
    assert FLOAT32.encode(np.arange(4, dtype=np.float32)[::2]).hex() == "0000000000000040"
    assert FLOAT32.size(3) == 12


def test_decoding_float32_copies_nothing() -> None:
    content = bytearray(8)
    vector = FLOAT32.decode(content)
    content[3] = 0x40
    assert vector.tolist() == [2, 0]
    assert vector.flags.writeable
    assert not FLOAT32.decode(bytes(content)).flags.writeable


def test_bytes_that_are_not_aligned() -> None:
    content = b"x" + np.array([1, 2], "<f4").tobytes()
    assert FLOAT32.decode(memoryview(content)[1:]).tolist() == [1, 2]
    content = b"x" + INT8.encode(np.array([127, -1], np.float32)).tobytes()
    assert INT8.decode(memoryview(content)[1:], 2).tolist() == [127, -1]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite(value: float) -> None:
    with pytest.raises(ProtocolError, match="element 1 of the vector is") as caught:
        FLOAT32.check(np.array([0, value], np.float32).tobytes())
    assert caught.value.code is Code.NOT_FINITE


@every_encoding
def test_what_messages_say_of_a_vector(encoding: Encoding) -> None:
    vector = np.array([1, 2, 3], np.float32)
    content = encoding.encode(vector)
    size = encoding.size(3)
    assert encoding.reference("model", vector) == VectorReference(
        "model", digest(content), size, encoding.name
    )
    assert encoding.part("update", content) == Part(
        "update", encoding.name, size, checksum(content)
    )


def test_sizes_of_parts_by_hand() -> None:
    """Of a vector of 5 elements: sums may be cut off after any, masked words have the weight
    beside them, and no more than float32 is let through for an encoding that is shorter."""
    sums, masked = find_encoding("int64"), find_encoding("masked")
    assert [size for size in range(50) if sums.accepts_size(size, 5)] == [8, 16, 24, 32, 40]
    assert [size for size in range(50) if masked.accepts_size(size, 5)] == [24]
    assert [size for size in range(50) if FLOAT32.accepts_size(size, 5)] == [20]
    names = ("int64", "masked", "float32", "float16", "topk-0.5")
    assert [find_encoding(name).most_bytes(5) for name in names] == [40, 24, 20, 20, 20]

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import pytest
from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.manifest import Parameter
from fleetlearn_protocol.vector import check_finite, checksum, digest, flatten, views
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

TABLE = (Parameter("w", (2, 3), 0), Parameter("scale", (), 6), Parameter("b", (2,), 7))
TENSORS = {
    "w": np.array([[1, 2, 3], [4, 5, 6]], np.float32),
    "scale": np.array(7, np.float32),
    "b": np.array([8, 9], np.float32),
}
FLOATS = st.floats(width=32)


def test_flatten_by_hand() -> None:
    vector = flatten(TENSORS, TABLE)
    assert vector.dtype == np.float32
    assert vector.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_views_are_the_vector_s_memory() -> None:
    vector = flatten(TENSORS, TABLE)
    tensors = views(vector, TABLE)
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        "w": (2, 3),
        "scale": (),
        "b": (2,),
    }
    tensors["w"][1, 2] = -6
    tensors["scale"][...] = -7
    vector[8] = -9
    assert vector.tolist() == [1, 2, 3, 4, 5, -6, -7, 8, -9]
    assert tensors["b"].tolist() == [8, -9]


@given(hnp.arrays(np.float32, 9, elements=FLOATS))
def test_flatten_undoes_views_bit_for_bit(vector: Any) -> None:
    assert flatten(views(vector, TABLE), TABLE).tobytes() == vector.tobytes()


def test_views_of_a_part_of_the_table() -> None:
    assert views(flatten(TENSORS, TABLE), TABLE[2:])["b"].tolist() == [8, 9]
    assert views(np.empty(0, np.float32), ()) == {}


@pytest.mark.parametrize("shape", [(8,), (0,), (3, 3), ()])
def test_views_of_a_vector_that_is_too_short_or_not_flat(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="needs 9 elements"):
        views(np.zeros(shape, np.float32), TABLE)


def test_flatten_takes_other_layouts_and_numbers() -> None:
    tensors = TENSORS | {
        "w": np.asfortranarray(TENSORS["w"].astype(np.float64)),
        "b": np.array([8, 9]),
    }
    assert flatten(tensors, TABLE).tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_flatten_copies() -> None:
    tensors = {name: tensor.copy() for name, tensor in TENSORS.items()}
    vector = flatten(tensors, TABLE)
    tensors["w"][...] = 0
    assert vector[0] == 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"w": None}, r"missing \['w'\], not in it \[\]"),
        ({"x": np.zeros(1)}, r"missing \[\], not in it \['x'\]"),
        ({"w": np.zeros((3, 2))}, r"tensor w has shape \(3, 2\); the table says \(2, 3\)"),
        ({"w": np.zeros((1, 3))}, r"tensor w has shape \(1, 3\)"),
        ({"w": np.zeros(6)}, r"tensor w has shape \(6,\)"),
        ({"scale": np.zeros(1)}, r"tensor scale has shape \(1,\); the table says \(\)"),
    ],
)
def test_flatten_refuses_what_does_not_fit(change: dict[str, Any], text: str) -> None:
    tensors = {name: tensor for name, tensor in (TENSORS | change).items() if tensor is not None}
    with pytest.raises(ValueError, match=text):
        flatten(tensors, TABLE)


def test_digest() -> None:
    # FIPS 180-2, appendix B.1
    assert digest(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    vector = np.arange(12, dtype=np.float32)
    expected = hashlib.sha256(vector.tobytes()).hexdigest()
    for same in (
        vector,
        vector.tobytes(),
        bytearray(vector.tobytes()),
        vector.data,
        vector.reshape(3, 4),
    ):
        assert digest(same) == expected
    assert digest(np.empty(0, np.float32)) == hashlib.sha256().hexdigest()
    assert digest(vector[::2]) == hashlib.sha256(vector[::2].tobytes()).hexdigest()


def test_the_checksum_is_the_common_crc_32() -> None:
    """The check value of CRC-32/ISO-HDLC: the nine bytes 123456789 have cbf43926."""
    assert checksum(b"123456789") == 0xCBF43926
    assert checksum(b"6789", checksum(b"12345")) == 0xCBF43926
    vector = np.arange(9, dtype=np.float32)
    assert checksum(vector[::2]) == checksum(vector[::2].tobytes())


def test_digest_tells_minus_0_from_0() -> None:
    assert digest(np.array([-0.0], np.float32)) != digest(np.array([0.0], np.float32))


@pytest.mark.parametrize(
    ("values", "largest"),
    [
        ([], 0.0),
        ([0.0], 0.0),
        ([-0.0], 0.0),
        ([1, -3, 2], 3.0),
        ([-1, -2], 2.0),
        ([1, 2], 2.0),
        ([1e-45], 2.0**-149),
        ([3.4028235e38, -1], float(np.finfo(np.float32).max)),
        ([-3.4028235e38, 1], float(np.finfo(np.float32).max)),
    ],
)
def test_the_largest_magnitude(values: list[float], largest: float) -> None:
    assert check_finite(np.array(values, np.float32)) == largest


@given(
    hnp.arrays(np.float32, st.integers(0, 40), elements=FLOATS)
    | hnp.arrays(
        np.float32, 3, elements=st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0])
    )
)
def test_the_first_place_that_is_not_finite(vector: Any) -> None:
    bad = [place for place, value in enumerate(vector.tolist()) if not math.isfinite(value)]
    if bad:
        with pytest.raises(ProtocolError, match=f"element {bad[0]} of the vector is") as caught:
            check_finite(vector)
        assert caught.value.code is Code.NOT_FINITE
    else:
        assert check_finite(vector) == max(map(abs, vector.tolist()), default=0)

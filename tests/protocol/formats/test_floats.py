from __future__ import annotations

import numpy as np
import pytest
from fleetlearn_protocol.encodings import BFLOAT16, FLOAT16, Encoding
from fleetlearn_protocol.errors import Code, ProtocolError


def test_all_halves_are_decoded_as_numpy_does() -> None:
    halves = np.arange(2**16, dtype="<u2")
    finite = halves[(halves & 0x7FFF) < 0x7C00]
    assert FLOAT16.decode(finite.tobytes()).tobytes() == finite.view("<f2").astype("<f4").tobytes()
    assert FLOAT16.check(finite.tobytes()) == 65504


def test_by_hand() -> None:
    assert FLOAT16.encode(np.array([1, -2, 2**-24, 65504], np.float32)).hex() == "003c00c00100ff7b"
    assert (
        BFLOAT16.encode(np.array([1, -2, 3.140625, 1e-45], np.float32)).hex() == "803f00c049400000"
    )
    assert BFLOAT16.decode(bytes.fromhex("803f00c04940")).tolist() == [1, -2, 3.140625]


def test_ties_go_to_even() -> None:
    between = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF], "<u4").view(np.float32)
    assert BFLOAT16.encode(between).hex() == "803f823f813f803f"
    assert FLOAT16.encode(np.array([1 + 2**-11, 1 + 3 * 2**-11], np.float32)).hex() == "003c023c"


@pytest.mark.parametrize(
    ("encoding", "fits", "limit"),
    [(FLOAT16, 65519.0, "65504"), (BFLOAT16, 3.3961e38, "3.38953e\\+38")],
)
def test_what_is_too_large_is_refused_by_name(encoding: Encoding, fits: float, limit: str) -> None:
    for sign in (1, -1):
        assert encoding.check(encoding.encode(np.array([sign * fits], np.float32))) > 0
        with pytest.raises(ProtocolError, match=f"{encoding.name} holds up to {limit}") as caught:
            encoding.encode(np.array([0, sign * fits * 1.0002], np.float32))
        assert caught.value.code is Code.OUT_OF_RANGE


@pytest.mark.parametrize(
    ("content", "what"),
    [("00000100007c", "infinite"), ("0000000000fc", "infinite"), ("00000000017e", "NaN")],
)
def test_bytes_that_are_not_finite(content: str, what: str) -> None:
    with pytest.raises(ProtocolError, match=f"element 2 of the vector is {what}") as caught:
        FLOAT16.check(bytes.fromhex(content))
    assert caught.value.code is Code.NOT_FINITE
    with pytest.raises(ProtocolError, match="element 0 of the vector is infinite"):
        BFLOAT16.check(bytes.fromhex("80ff"))

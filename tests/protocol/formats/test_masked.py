"""Masked words: any are valid, and nobody takes them for floats."""

from __future__ import annotations

import numpy as np
import pytest
from fleetlearn_protocol.encodings import (
    ENCODINGS,
    FAMILIES,
    FLOATS,
    MASKED,
    MASKED24,
    MASKED_NAMES,
    find_encoding,
    is_known,
    masked_encoding,
)
from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.formats.masked import words_from_bytes, words_to_bytes

WORDS = np.array([0, 1, 0x7F800000, 0x7FC00000, 0xFF800001, 2**32 - 1], np.uint32)
"""Among them the bits of an infinity and of NaNs."""


def test_any_words_pass_and_come_back() -> None:
    content = words_to_bytes(WORDS)
    assert content[4:8].tobytes() == b"\1\0\0\0"
    assert MASKED.check(content, len(WORDS)) == 0.0
    found = words_from_bytes(content)
    assert found.dtype == np.uint32
    np.testing.assert_array_equal(found, WORDS)


def test_a_part_has_the_weight_beside_the_vector() -> None:
    assert find_encoding("masked") is MASKED
    assert MASKED.elements(10) == 11
    assert MASKED.size(MASKED.elements(10)) == 44
    assert all(encoding.elements(10) == 10 for encoding in ENCODINGS.values())


def test_nobody_takes_them_for_floats() -> None:
    with pytest.raises(ProtocolError, match="masked words have no floats") as refused:
        MASKED.decode(words_to_bytes(WORDS))
    assert refused.value.code is Code.BAD_ENCODING
    with pytest.raises(ProtocolError, match="floats were given for the encoding masked"):
        MASKED.encode(np.ones(3, np.float32))
    with pytest.raises(ProtocolError, match="masked"):
        MASKED.reference("model", np.ones(3, np.float32))


def test_no_device_says_that_it_knows_them_and_no_model_travels_so() -> None:
    assert not is_known("masked", FAMILIES)
    assert not {*MASKED_NAMES} & {*FAMILIES, *FLOATS}


def test_short_words_travel_in_their_lower_three_bytes() -> None:
    content = words_to_bytes(np.array([0x01020304, 0xFFFFFF00, 7], np.uint32), 3)
    assert content.tobytes() == bytes([4, 3, 2, 0, 255, 255, 7, 0, 0])
    assert MASKED24.check(content, 3) == 0.0
    found = words_from_bytes(content, 3)
    assert (found.dtype, found.tolist()) == (np.uint32, [0x020304, 0xFFFF00, 7])
    assert words_from_bytes(b"", 3).shape == (0,)
    assert find_encoding("masked24") is MASKED24
    assert MASKED24.size(MASKED24.elements(10)) == 33
    assert [masked_encoding(bits).name for bits in (8, 12, 16, 24)] == [
        "masked24",
        "masked24",
        "masked",
        "masked",
    ]
    assert not is_known("masked24", (*FAMILIES, "masked"))
    with pytest.raises(ProtocolError, match=r"7 bytes of masked words .* takes 3"):
        words_from_bytes(bytes(7), 3)


def test_half_a_word_is_refused() -> None:
    with pytest.raises(ProtocolError, match="7 bytes of masked words"):
        words_from_bytes(bytes(7))
    with pytest.raises(ProtocolError, match="7 bytes of masked"):
        MASKED.check(bytes(7))

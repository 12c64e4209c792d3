"""What is said in the exchanges of pairwise masks: it fits into messages, and signatures say
everything."""

from __future__ import annotations

import struct

import pytest
from fleetlearn_protocol.exchanges import content_of, fields_of
from fleetlearn_protocol.messages import MAX_SIGNED, MOST_NEIGHBOURS, Question, Reply, encode
from fleetlearn_protocol.secure import shamir
from fleetlearn_protocol.secure.pairwise_messages import (
    PAIRWISE,
    SEALED_BYTES,
    SHARE_BYTES,
    PairwiseAnswer,
    PairwiseQuestion,
    bytes_of,
    hex_of,
    signed_keys,
)

LONGEST = "x" * 64
NAMES = [f"{number:064}" for number in range(MOST_NEIGHBOURS)]


@pytest.mark.parametrize(
    "content",
    [
        PairwiseQuestion(2**31, "ab" * 32, 96, dict.fromkeys(NAMES, "ab" * 128)),
        PairwiseQuestion(2**31, "ab" * 32, survivors=tuple(NAMES), dropped=tuple(NAMES)),
    ],
    ids=["shares", "unmasking"],
)
def test_what_the_most_neighbours_are_asked_fits_into_a_signed_message(
    content: PairwiseQuestion,
) -> None:
    question = Question(LONGEST, PAIRWISE, 31622400.0, 2, fields_of(content))
    assert len(encode(question)) <= MAX_SIGNED
    assert content_of(question) == content


def test_what_they_answer_fits_into_a_message() -> None:
    sealed = hex_of(dict.fromkeys(NAMES, bytes(SEALED_BYTES)))
    shares = hex_of(dict.fromkeys(NAMES, bytes(SHARE_BYTES)))
    for content in (
        PairwiseAnswer(shares=sealed, commitment="ab" * 32),
        PairwiseAnswer(seeds=shares, masking_keys=shares),
    ):
        reply = Reply(LONGEST, PAIRWISE, fields_of(content), 1.5)
        encode(reply)
        assert content_of(reply) == content


def test_a_share_is_as_long_as_shamirs() -> None:
    assert SHARE_BYTES == shamir.SHARE_BYTES
    assert SEALED_BYTES == 2 * SHARE_BYTES + 16


def test_bytes_by_name_are_hexadecimal_digits() -> None:
    assert hex_of({"a": b"\x01\xff"}) == {"a": "01ff"}
    assert bytes_of({"a": "01ff"}) == {"a": b"\x01\xff"}


def test_what_a_device_signs_of_its_keys() -> None:
    parts = [b"fleetlearn.v1 pairwise keys", b"0123abcd", b"12", b"roof", bytes(range(64))]
    expected = b"".join(struct.pack(">I", len(part)) + part for part in parts)
    assert signed_keys("0123abcd", 12, "roof", bytes(range(64))) == expected

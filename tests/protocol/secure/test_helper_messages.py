"""The bounds of what coordinator and helper say to each other."""

from __future__ import annotations

import msgspec
import pytest
from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.messages import MOST_REPORTS
from fleetlearn_protocol.secure.fixed_point import BITS, most_updates
from fleetlearn_protocol.secure.helper_messages import (
    MOST_ELEMENTS,
    REPORT_BYTES,
    TRY_AGAIN,
    WITHOUT_THEM,
    MaskSumAnswer,
    MaskSumRequest,
    RefusalName,
    SealedReport,
    read_message,
    write_message,
)

LONGEST = SealedReport("d" * 64, "t" * 64, 2**53 - 1, "a" * 64, bytes(80), bytes(64))
REQUEST = MaskSumRequest(
    bytes(32), "r" * 64, "b" * 64, MOST_ELEMENTS, MOST_REPORTS, "a" * 64, True, (LONGEST,)
)


def test_what_is_written_is_read() -> None:
    assert read_message(write_message(REQUEST), MaskSumRequest) == REQUEST


def test_the_longest_report_fits_its_bound() -> None:
    assert len(msgspec.msgpack.encode(LONGEST)) <= REPORT_BYTES
    assert len(write_message(REQUEST)) <= 2 * REPORT_BYTES


@pytest.mark.parametrize(
    "change",
    [
        {"helper": bytes(31)},
        {"helper": bytes(33)},
        {"run": ""},
        {"run": "r" * 65},
        {"bundle": "B" * 64},
        {"size": 0},
        {"size": MOST_ELEMENTS + 1},
        {"minimum": 1},
        {"minimum": MOST_REPORTS + 1},
        {"training": "A" * 64},
        {"one_model": 1},
        {"reports": ()},
        {"reports": (LONGEST,) * (MOST_REPORTS + 1)},
        {"reports": (msgspec.structs.replace(LONGEST, device="a b"),)},
        {"reports": (msgspec.structs.replace(LONGEST, round=-1),)},
        {"reports": (msgspec.structs.replace(LONGEST, round=2**53),)},
        {"reports": (msgspec.structs.replace(LONGEST, sealed=bytes(79)),)},
        {"reports": (msgspec.structs.replace(LONGEST, sealed=bytes(81)),)},
        {"reports": (msgspec.structs.replace(LONGEST, signature=bytes(63)),)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_field_outside_its_bounds_is_refused(change: dict[str, object]) -> None:
    body = write_message(msgspec.structs.replace(REQUEST, **change))
    with pytest.raises(ProtocolError) as refused:
        read_message(body, MaskSumRequest)
    assert refused.value.code is Code.BAD_MESSAGE


def test_more_masked_updates_than_can_be_added_are_in_no_request() -> None:
    assert most_updates(BITS[-1]) == MOST_REPORTS


def test_another_message_is_refused() -> None:
    with pytest.raises(ProtocolError, match="no MaskSumAnswer"):
        read_message(write_message(REQUEST), MaskSumAnswer)


def test_each_refusal_is_final_or_says_what_can_be_done() -> None:
    assert not TRY_AGAIN & WITHOUT_THEM
    assert {*RefusalName} > TRY_AGAIN | WITHOUT_THEM

"""Sums as words: their total modulo 2^64 comes out whole, and what can be none is refused."""

from __future__ import annotations

import numpy as np
import pytest
from fleetlearn_protocol.computations.fixed_point import MOST
from fleetlearn_protocol.messages import MOST_REPORTS
from fleetlearn_protocol.secure.fixed_point import PART_BITS, most_updates
from fleetlearn_protocol.secure.masks import mask_of
from fleetlearn_protocol.secure.whole_words import (
    WORDS,
    largest_sum,
    sums_to_words,
    words_to_sums,
)


def test_words_of_one_number_by_hand() -> None:
    """0x0000_0005_0007_0009 is 5, 7 and 9; -1 has all bits set."""
    sums = np.array([0x0000_0005_0007_0009, -1, 0, -(2**62)], np.int64)
    words = sums_to_words(sums)
    assert words.dtype == np.uint32
    expected = [9, 7, 5, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0, 0, 0, 0, 0, 0xC0000000]
    assert words.tolist() == expected


def test_rows_of_devices_are_the_words_of_each() -> None:
    rows = np.random.default_rng(1).integers(-(2**50), 2**50, (5, 7))
    expected = np.stack([sums_to_words(row) for row in rows])
    np.testing.assert_array_equal(sums_to_words(rows), expected)
    np.testing.assert_array_equal(sums_to_words(np.asfortranarray(rows)), expected)
    assert sums_to_words(rows[:0]).shape == (0, 7 * WORDS)


@pytest.mark.parametrize("devices", [2, 3, 100])
def test_with_masks_the_total_is_the_same_to_the_last_bit(devices: int) -> None:
    draw = np.random.default_rng(devices)
    most = largest_sum(devices)
    sums = draw.integers(-most, most, (devices, 40), endpoint=True)
    sums[:, 0], sums[:, 1] = most, -most
    masked, masks = np.zeros(40 * WORDS, np.uint32), np.zeros(40 * WORDS, np.uint32)
    for row in sums:
        mask = mask_of(draw.bytes(32), 40 * WORDS)
        masked += sums_to_words(row) + mask
        masks += mask
    total = words_to_sums(masked - masks, devices, most)
    assert total.dtype == np.int64
    np.testing.assert_array_equal(total, sums.sum(axis=0))


@pytest.mark.parametrize("sign", [-1, 1])
def test_the_most_devices_with_the_largest_sums_still_fit(sign: int) -> None:
    assert most_updates(PART_BITS) == MOST_REPORTS
    most = largest_sum(MOST_REPORTS)
    # the lower words are largest where all their bits are set
    for value in (sign * most, sign * (most >> 32 << 32) - 1):
        words = sums_to_words(np.array([value])).astype(np.uint64) * MOST_REPORTS
        total = words_to_sums((words % 2**32).astype(np.uint32), MOST_REPORTS, most)
        assert total.tolist() == [MOST_REPORTS * value]
    assert MOST_REPORTS * most <= MOST


def test_a_mask_that_was_not_taken_off_is_found() -> None:
    words = sums_to_words(np.arange(10)) + mask_of(bytes(32), 30)
    with pytest.raises(ValueError, match="A mask was not taken off"):
        words_to_sums(words, 3, largest_sum(3))


@pytest.mark.parametrize("value", [largest_sum(4) + 1, -largest_sum(4) - 1, -(2**63)])
def test_a_total_beyond_what_devices_may_say_is_refused(value: int) -> None:
    words = sums_to_words(np.array([value], np.int64))
    with pytest.raises(ValueError, match="a device added up what it may not"):
        words_to_sums(words, 1, largest_sum(4))
    most = largest_sum(4)
    assert words_to_sums(sums_to_words(np.array([most])), 1, most).tolist() == [most]

"""An update and its weight as whole numbers, and their sum: what it is on average, how far it may
be off, and which sums are refused. (Elements alone: test_secure_core.py.)"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from fleetlearn_protocol.secure.fixed_point import (
    excess_of,
    modulus_bits,
    most_updates,
    weighted_sum,
    weighted_words,
)
from hypothesis import given
from hypothesis import strategies as st

BOUND = 2.0


def step(bits: int) -> float:
    return 2 * BOUND / (2**bits - 1)


def test_by_hand() -> None:
    """With 16 bits and C = 2 a step is 4 / 65535; (x + 2) / step is 32767.5 for 0."""
    words = weighted_words(np.array([1, -1, 0], np.float32), 0.5, 2.0, 16, np.full(4, 0.5))
    assert words.tolist() == [49151, 16384, 32768, 32768]
    assert weighted_words(np.zeros(1, np.float32), 1.0, 2.0, 16, np.full(2, 0.999))[-1] == 65535
    found = weighted_sum(words, 1, 2.0, 16)
    assert found.total.tolist() == pytest.approx([1 - 1 / 65535, -1 + 1 / 65535, 2 / 65535])
    assert found.weight == 32768 / 65535


@given(st.lists(st.integers(0, 2**24 - 1)), st.sampled_from([8, 16, 20, 24]))
def test_how_much_longer_than_the_bound_words_are(drawn: list[int], bits: int) -> None:
    words, most = [word % 2**bits for word in drawn], 2**bits - 1
    expected = sum((2 * word - most) ** 2 for word in words) - most**2
    assert excess_of(np.array(words, np.uint32), bits) == expected


def test_no_square_overflows() -> None:
    words = np.full(2**15 + 1, 2**24 - 1, np.uint32)
    assert excess_of(words, 24) == 2**15 * (2**24 - 1) ** 2


@given(st.integers(0, 2**32), st.sampled_from([12, 16, 18, 20]), st.integers(1, 40))
def test_the_sum_is_the_floats_up_to_a_step_each(seed: int, bits: int, count: int) -> None:
    draw = np.random.default_rng(seed)
    shares = draw.uniform(0.01, 1, count)
    updates = (draw.uniform(-BOUND, BOUND, (count, 7)) * shares[:, None]).astype(np.float32)
    total = np.zeros(8, np.uint32)
    for update, share in zip(updates, shares, strict=True):
        total += weighted_words(update, share, BOUND, bits, draw.random(8))
    found = weighted_sum(total, count, BOUND, bits)
    exact = updates.astype(np.float64).sum(axis=0)
    assert np.abs(found.total - exact).max() < count * step(bits)
    assert abs(found.weight - shares.sum()) < count / (2**bits - 1)


@pytest.mark.parametrize("bits", [12, 16])
def test_the_rounding_is_right_on_average(bits: int) -> None:
    """Of n independent roundings, each by less than a step, the mean is off by less than five
    standard deviations, of at most half a step each: nearest rounding is off by more."""
    count, draw = 40_000, np.random.default_rng(5)
    update = np.float32([0.3, -1.7, 0.0, 1.99999])
    exact = (update.astype(np.float64) + BOUND) / step(bits)
    words = np.array(
        [weighted_words(update, 0.3, BOUND, bits, draw.random(5)) for _ in range(count)], np.float64
    )
    allowed = 5 * 0.5 / np.sqrt(count)
    off = words.mean(axis=0) - [*exact, 0.3 * (2**bits - 1)]
    assert np.abs(off).max() < allowed
    nearest = np.rint(exact) - exact
    assert np.abs(nearest).max() > allowed, "a rounding that is not random would be found"


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01, float("nan"), float("inf")])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="a weight's share of"):
        weighted_words(np.zeros(1, np.float32), share, BOUND, 16, np.zeros(2))


@pytest.mark.parametrize(
    ("words", "updates", "equal", "said"),
    [
        ([0, 65535], 0, False, "the sum of no updates"),
        ([131071, 65535], 2, False, "at most 131070 was expected"),
        ([32768, 0], 1, False, "add up to 0 shares"),
        ([32768, 65536], 1, False, "add up to 1.00002 shares; expected above 0 and at most 1"),
        ([65535, 131069], 2, True, "shares; expected 2"),
        ([65535, 32000], 1, False, "an element of the sum is 2;"),
        ([0, 0], most_updates(16) + 1, False, "of the sum of"),
    ],
)
def test_a_sum_that_cannot_be_is_refused(
    words: list[int], updates: int, equal: bool, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        weighted_sum(np.array(words, np.uint32), updates, BOUND, 16, equal=equal)


def test_the_largest_sum_that_can_be_passes() -> None:
    """Each update as long as its share allows, each rounded up, each weight rounded down."""
    count = most_updates(16)
    update = np.array([BOUND * 0.3], np.float32)
    one = weighted_words(update, 0.3, BOUND, 16, np.array([0.9999, 0.0]))
    total = one * np.uint32(count)
    assert weighted_sum(total, count, BOUND, 16).weight == pytest.approx(0.3 * count, rel=1e-4)


def test_short_words_are_added_modulo_2_to_the_24() -> None:
    """4097 (2^12 - 1) is 2^24 - 1: one more update has no room."""
    assert [modulus_bits(bits) for bits in (8, 12, 13, 16, 20)] == [24, 24, 32, 32, 32]
    assert most_updates(12) == 4097
    words = np.array([2**24 - 1, 0, 4095, 4097 * 4095], np.uint32)
    found = weighted_sum(words, 4097, BOUND, 12, equal=True)
    assert found.weight == 4097
    assert found.total.tolist() == pytest.approx([4097 * BOUND, -4097 * BOUND, BOUND * (2 - 4097)])
    with pytest.raises(ValueError, match="of the sum of 4098 updates of 12 bits"):
        weighted_sum(words, 4098, BOUND, 12)


@given(st.integers(0, 2**32), st.integers(1, 30))
def test_what_is_above_the_24_bits_of_a_sum_says_nothing(seed: int, count: int) -> None:
    """Masks are words of 32 bits. Only their lower 24 travel, so a sum minus the masks' sum is any
    multiple of 2^24 off."""
    draw = np.random.default_rng(seed)
    plain, total = np.zeros(6, np.uint32), np.zeros(6, np.uint32)
    for _ in range(count):
        words = weighted_words(np.zeros(5, np.float32), 1.0, BOUND, 12, draw.random(6))
        mask = draw.integers(0, 2**32, 6, np.uint32)
        plain += words
        total += (words + mask & np.uint32(0xFFFFFF)) - mask
    expected = weighted_sum(plain, count, BOUND, 12, equal=True)
    found = weighted_sum(total, count, BOUND, 12, equal=True)
    assert found.total.tolist() == expected.total.tolist()
    with pytest.raises(ValueError, match="A mask was not taken off"):
        weighted_sum(total + np.uint32(1 << 23), count, BOUND, 12, equal=True)


def test_a_sum_is_exact_up_to_one_rounding() -> None:
    """Noise of differential privacy is raised by what arithmetic may change in a sum, which is
    2^-52 of it at most: a difference of two large numbers would be off by more."""
    count, most, bound = most_updates(16), 2**16 - 1, 0.1
    words = np.random.default_rng(4).integers(0, count * most, 1001).astype(np.uint32)
    words[-1] = np.uint32(count * most)
    found = weighted_sum(words, count, bound, 16).total
    exact = [(2 * int(word) - count * most) * Fraction(bound) / most for word in words[:-1]]
    for value, true in zip(found.tolist(), exact, strict=True):
        assert abs(Fraction(value) - true) <= abs(true) / 2**52

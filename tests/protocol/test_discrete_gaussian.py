"""Normal noise in whole numbers: its law, and that nothing but the secret decides."""

from __future__ import annotations

from collections.abc import Callable
from math import erfc, exp, sqrt

import numpy as np
import pytest
from fleetlearn_protocol import discrete_gaussian
from fleetlearn_protocol.discrete_gaussian import CHUNK, TAIL, cells_of, sample
from numpy.typing import NDArray

SECRET = bytes(range(32))


def above(x: float, sigma: float) -> float:
    """The probability that Y > x."""
    return erfc(x / sigma / sqrt(2)) / 2


def probability(n: int, sigma: float) -> float:
    """P[rint(Y) = n], in closed form."""
    return above(abs(n) - 0.5, sigma) - above(abs(n) + 0.5, sigma)


def chi_square(found: NDArray[np.int64], sigma: float) -> tuple[float, int]:
    """The chi-square statistic of numbers against the closed form, over the values that are
    expected ten times or more; all others are one class. Returns its degrees of freedom too."""
    most = int(6 * sigma) + 2
    expected = np.array([probability(n, sigma) for n in range(-most, most + 1)]) * found.size
    counts = np.bincount(np.clip(found, -most, most) + most, minlength=expected.size)
    often = expected >= 10
    classes = np.append(expected[often], found.size - expected[often].sum())
    seen = np.append(counts[often], counts[~often].sum())
    if classes[-1] < 1:  # a class that is hardly ever seen says nothing
        classes, seen = classes[:-1], seen[:-1]
    return float(((seen - classes) ** 2 / classes).sum()), classes.size - 1


@pytest.mark.parametrize("sigma", [0.0625, 0.3, 0.5, 1.0, 1.7, 3.0, 10.0, 63.5, 64.0, 200.0])
def test_the_law_is_that_of_a_rounded_normal_number(sigma: float) -> None:
    found, freedom = chi_square(sample(sigma, 200_000, SECRET), sigma)
    # Six standard deviations of chi-square, which are sqrt(2 d).
    assert found < freedom + 6 * sqrt(2 * freedom) + 6


def test_the_chi_square_test_sees_a_standard_deviation_that_is_two_percent_off() -> None:
    found, freedom = chi_square(sample(3.06, 200_000, SECRET), 3.0)
    assert found > freedom + 6 * sqrt(2 * freedom) + 6


@pytest.mark.parametrize("sigma", [2.0**12, 1.5 * 2**30, 2.0**31 - 1, 2.0**40, 2.0**45])
def test_large_standard_deviations_follow_the_normal_law(sigma: float) -> None:
    """Kolmogorov's distance of n numbers: above 2.5 / sqrt(n) with probability 8e-6."""
    count = 100_000
    found = np.sort(sample(sigma, count, SECRET)) / sigma
    law = np.array([1 - erfc(x / sqrt(2)) / 2 for x in found.tolist()])
    ranks = np.arange(count + 1) / count
    distance = max(np.abs(law - ranks[1:]).max(), np.abs(law - ranks[:-1]).max())
    assert distance < 2.5 / sqrt(count)
    # Moments of n normal numbers, each within five standard deviations of its estimate.
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((found**power).mean() - moment) < 5 * sqrt(variance / count)


@pytest.mark.parametrize("sigma", [3.0, 1.5 * 2**30])
def test_tails_are_as_often_reached_as_they_should_be(sigma: float) -> None:
    found = np.abs(sample(sigma, 1_000_000, SECRET)) / sigma
    for far in (3.0, 4.0, 4.5):
        expected = 2 * above(far * sigma, sigma) * found.size
        if sigma < 10:  # rounded: from the first whole number on
            expected = 2 * above(np.ceil(far * sigma) - 0.5, sigma) * found.size
        assert abs((found >= far).sum() - expected) < 6 * sqrt(expected)


def test_the_last_cell_has_the_right_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond six standard deviations nobody looks often. With cells up to one alone, all that is
    further comes from the last one."""
    monkeypatch.setattr(discrete_gaussian, "INNER", 1)
    monkeypatch.setattr(discrete_gaussian, "WIDE_BITS", 9)
    cells_of.cache_clear()
    try:
        found, freedom = chi_square(sample(10.0, 100_000, SECRET), 10.0)
    finally:
        cells_of.cache_clear()
    assert found < freedom + 6 * sqrt(2 * freedom) + 6


@pytest.mark.parametrize("sigma", [1.0, 1000.0, 1.5 * 2**30, 2.0**45])
def test_decimal_arithmetic_and_float64_decide_the_same(
    sigma: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = sample(sigma, 3000, SECRET)
    monkeypatch.setattr(discrete_gaussian, "CLOSE", 2.0**1000)  # nothing is far enough apart
    assert np.array_equal(sample(sigma, 3000, SECRET), plain)


@pytest.mark.parametrize("sigma", [0.0625, 1.0, 63.9, 64.0, 1000.0, 1.9 * 2**30, 2.0**45])
def test_a_table_never_asks_for_a_probability_above_one(sigma: float) -> None:
    cells = cells_of(sigma)
    last = cells.accepted.size - 1
    width = 2.0 ** (cells.width_bits - 1)
    near = np.arange(last + 1) * width / sigma
    chance = float(cells.scale) * np.exp(-(near**2) / 2) / cells.counts
    chance[last] *= 2**discrete_gaussian.WIDE_BITS
    assert cells.table.size == 2**15 == cells.counts.sum()
    assert chance.max() < 1
    # What accepts without a look is below the density at the cell's far end.
    far = near[1:]
    least = float(cells.scale) * np.exp(-(far**2) / 2) / cells.counts[:-1]
    assert (cells.accepted[:-1] / 2.0**cells.fine_bits <= least).all()
    assert cells.accepted[last] == 0


@pytest.mark.parametrize("sigma", [0.0625, 1.0, 63.9, 64.0, 1000.0, 1.9 * 2**30, 2.0**45])
def test_the_distribution_ends_beyond_38_standard_deviations(sigma: float) -> None:
    cells = cells_of(sigma)
    width = 2.0 ** (cells.width_bits - 1)
    end = (cells.accepted.size - 1 + 2**discrete_gaussian.WIDE_BITS) * width
    assert end > 38 * sigma
    assert 2 * exp(-700) * exp(-22) < 2.0**-1040 < TAIL


def most_delta(
    law: Callable[[int, float], float], sigma: float, shift: int, epsilon: float
) -> float:
    """The least delta with which noise of this law on whole numbers that differ by ``shift`` is
    (epsilon, delta)-private: sum over n of max(0, P[n] - exp(epsilon) P[n - shift])."""
    found = np.array([law(n, sigma) for n in range(-200, 201)])
    found /= found.sum()
    return float(np.maximum(found[shift:] - exp(epsilon) * found[:-shift], 0).sum())


def gaussian_delta(mu: float, epsilon: float) -> float:
    """The Gaussian mechanism's: Balle and Wang, "Improving the Gaussian Mechanism for Differential
    Privacy" (2018), arXiv 1805.06530, theorem 8."""
    parts = above(epsilon / mu - mu / 2, 1.0), above(epsilon / mu + mu / 2, 1.0)
    return parts[0] - exp(epsilon) * parts[1]


CASES = [
    (sigma, shift, epsilon)
    for sigma in (0.5, 1.0, 2.0, 5.0)
    for shift in (1, 2, 3)
    for epsilon in (0.1, 0.5, 1.0, 2.0)
]


def test_it_is_as_private_as_the_gaussian_mechanism() -> None:
    for sigma, shift, epsilon in CASES:
        allowed = gaussian_delta(shift / sigma, epsilon)
        assert most_delta(probability, sigma, shift, epsilon) <= allowed + 1e-13


def test_the_other_discrete_gaussian_is_not() -> None:
    """P[n] in proportion to exp(-n^2 / (2 sigma^2)): the check above can fail."""
    worse = [
        most_delta(lambda n, sigma: exp(-n * n / (2 * sigma**2)), *case)
        > gaussian_delta(case[1] / case[0], case[2]) * 1.01
        for case in CASES
    ]
    assert sum(worse) >= 10


def test_the_same_secret_gives_the_same_numbers_whatever_the_size_is() -> None:
    sigma, most = 1.5 * 2**30, CHUNK + 1000
    whole = sample(sigma, most, SECRET)
    for size in (0, 1, 999, CHUNK - 1, CHUNK, CHUNK + 1, most):
        assert np.array_equal(sample(sigma, size, SECRET), whole[:size])
    assert whole.dtype == np.int64


def test_numbers_of_two_secrets_and_of_two_chunks_are_not_correlated() -> None:
    sigma = 1.5 * 2**30
    one, other = sample(sigma, 2 * CHUNK, SECRET), sample(sigma, 2 * CHUNK, SECRET + b"\0")
    for a, b in ((one, other), (one[:CHUNK], one[CHUNK:]), (one[:-1], one[1:])):
        assert abs(np.mean(a / sigma * (b / sigma))) < 6 / sqrt(a.size)


def test_numbers_are_what_they_were() -> None:
    """They follow from the secret on every machine: a restart elsewhere makes the same model."""
    assert sample(3.0, 8, SECRET).tolist() == [-4, -6, 1, -6, -2, -3, 1, 4]
    found = sample(1.5 * 2**30, 4, SECRET).tolist()
    assert found == [-2536134064, -2747578631, 9905176, -3011821566]


@pytest.mark.parametrize("sigma", [0.0, 0.06, 2.0**46, float("nan"), -1.0])
def test_a_standard_deviation_out_of_range_is_refused(sigma: float) -> None:
    with pytest.raises(ValueError, match=r"grid steps was given; it takes 0\.0625 to"):
        sample(sigma, 1, SECRET)

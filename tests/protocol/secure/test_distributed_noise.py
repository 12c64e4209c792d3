"""Noise that devices add before they mask: what it adds up to, how long an update may be, and what
of it goes wrong where it is made for other devices than the fewest."""

from __future__ import annotations

from math import erfc, exp, sqrt

import numpy as np
import pytest
from fleetlearn_protocol.secure import distributed_noise
from fleetlearn_protocol.secure.distributed_noise import (
    LEAST_NOISE,
    MOST_STEPS,
    departure,
    has_room,
    honest_of,
    largest_step,
    largest_sum,
    multiplier_of,
    noise_of_device,
    noisy_sum,
    noisy_words,
    rounded_update,
)
from fleetlearn_protocol.secure.fixed_point import Words
from fleetlearn_protocol.vector import Vector
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

Law = NDArray[np.float64]


def above(x: float, sigma: float) -> float:
    return erfc(x / sigma / sqrt(2)) / 2


def law_of_one(sigma: float, most: int) -> Law:
    """P[rint(Y) = n] for n from -most to most, in closed form."""
    half = [above(n - 0.5, sigma) - above(n + 0.5, sigma) for n in range(most + 1)]
    return np.array([*half[:0:-1], *half])


def law_of_sum(sigma: float, devices: int, most: int) -> Law:
    """The law of the sum, by adding up all the ways to come to it: a convolution."""
    found = one = law_of_one(sigma, most)
    for _ in range(devices - 1):
        found = np.convolve(found, one)
    return found


def ideal_law(sigma: float, devices: int, places: NDArray[np.int64]) -> Law:
    """The law of rint(Z - E_1 - ... - E_(n-1)) with independent, even E_i: the density of Z and n
    even numbers at whole numbers, from its Fourier transform."""
    times = np.linspace(-3, 3, 60_001)
    transform = np.exp(-2 * devices * (np.pi * sigma * times) ** 2) * np.sinc(times) ** devices
    waves = np.cos(2 * np.pi * np.outer(places, times))
    return np.asarray(waves @ transform * (times[1] - times[0]), np.float64)


def gaussian_delta(epsilon: float, mu: float) -> float:
    """delta of the Gaussian mechanism with sensitivity / noise = mu (Balle and Wang, theorem 8)."""
    return above(epsilon / mu - mu / 2, 1.0) - exp(epsilon) * above(epsilon / mu + mu / 2, 1.0)


def delta_of(law: Law, shift: int, epsilon: float) -> float:
    """delta of a mechanism that adds numbers with this law to whole numbers."""
    without = np.concatenate([law, np.zeros(shift)])
    with_it = np.concatenate([np.zeros(shift), law])
    return float(np.maximum(with_it - exp(epsilon) * without, 0).sum())


@pytest.mark.parametrize(("sigma", "devices"), [(1.0, 2), (1.0, 5), (1.2, 3), (1.5, 8)])
def test_the_law_of_a_sum_is_that_of_the_rounded_gaussian_as_far_as_is_proved(
    sigma: float, devices: int
) -> None:
    most = round(9 * sigma)
    law = law_of_sum(sigma, devices, most)
    middle = len(law) // 2
    places = np.arange(-int(3 * sigma), int(3 * sigma) + 1)
    quotient = law[middle + places] / ideal_law(sigma, devices, places)
    proved = departure(sigma, devices, 1)
    assert np.abs(np.log(quotient)).max() <= proved + 1e-12
    if sigma == 1 and devices == 2:
        assert np.abs(np.log(quotient)).max() > proved / 50  # and the law is another one


@pytest.mark.parametrize(("devices", "shift"), [(2, 5), (3, 20), (10, 4)])
def test_a_sum_has_no_more_delta_than_the_gaussian_mechanism(devices: int, shift: int) -> None:
    """The closed form of the Gaussian with sqrt(n) sigma, against all sums of n rounded numbers."""
    law = law_of_sum(LEAST_NOISE, devices, 45)
    mu = shift / (sqrt(devices) * LEAST_NOISE)
    for epsilon in (0.0, 0.1, 0.5, 1.0, 3.0):
        found, bound = delta_of(law, shift, epsilon), gaussian_delta(epsilon, mu)
        assert found <= bound * (1 + 1e-9) + 1e-15
        assert found > bound / 2  # what is compared is near
    # Noise for one device more than there are does not pass.
    fewer = law_of_sum(LEAST_NOISE * sqrt(devices / (devices + 1)), devices, 45)
    assert delta_of(fewer, shift, 0.5) > gaussian_delta(0.5, mu)


def test_how_far_the_law_is_from_the_ideal_one() -> None:
    by_hand = 2 * 2.001 * exp(-(np.pi**2) * 16)
    assert departure(4, 2, 1) == pytest.approx(by_hand)
    assert departure(4, 200, 1000) == pytest.approx(by_hand * 100 * 1000)
    assert 0 < departure(LEAST_NOISE, 65_536, 2**28) < 1e-54


@pytest.mark.parametrize(
    ("minimum", "colluding", "honest"),
    [(10, 0, 10), (10, 0.3, 7), (10, 0.25, 8), (7, 0.5, 4), (2, 0.99, 1), (1000, 0.001, 999)],
)
def test_devices_that_collude_are_left_out(minimum: int, colluding: float, honest: int) -> None:
    assert honest_of(minimum, colluding) == honest


@given(
    st.floats(0.3, 20),
    st.sampled_from([16, 18, 20]),
    st.integers(2, 4000),
    st.floats(0, 0.9),
)
def test_noise_for_a_multiplier_and_the_multiplier_of_a_noise(
    multiplier: float, bits: int, minimum: int, colluding: float
) -> None:
    noise = noise_of_device(multiplier, bits, minimum, colluding)
    # By hand: the variances of those who keep their noise to themselves add up.
    total = sqrt(honest_of(minimum, colluding) * noise**2) / (2 ** (bits - 1) - 1)
    assert multiplier <= multiplier_of(noise, bits, minimum, colluding)
    assert total == pytest.approx(multiplier)


def test_what_is_out_of_the_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"deviation of 3\.28 words, of which 32767 are"):
        noise_of_device(0.001, 16, 100)
    for share in (-0.1, 1.0):
        with pytest.raises(ValueError, match=r"expected 0 to below 1"):
            honest_of(10, share)


def updates_of(count: int, size: int, bound: float, seed: int = 1) -> list[Vector]:
    draw = np.random.default_rng(seed)
    directions = draw.normal(size=(count, size))
    directions *= bound / np.linalg.norm(directions, axis=1, keepdims=True)
    return [*(directions * draw.uniform(0.2, 1, (count, 1)) * (1 - 1e-6)).astype(np.float32)]


@given(
    st.integers(0, 2**32), st.sampled_from([8, 10, 16, 20]), st.integers(1, 4000), st.floats(0, 1)
)
def test_a_rounded_update_is_never_longer_than_the_clip_norm(
    seed: int, bits: int, size: int, length: float
) -> None:
    draw = np.random.default_rng(seed)
    update = draw.normal(size=size) * (draw.random(size) < draw.random())
    update *= 3.0 * length / max(float(np.linalg.norm(update)), 1e-9)
    steps = rounded_update(update.astype(np.float32), 3.0, bits, draw.bytes(32))
    assert sum(int(each) ** 2 for each in steps) <= (2 ** (bits - 1) - 1) ** 2


def test_without_the_check_rounding_makes_updates_longer() -> None:
    """That the test above can fail: most draws of a long update are too long."""
    update = updates_of(1, 4000, 1.0)[0]
    update *= np.float32(0.999999 / np.linalg.norm(update))
    scaled = update.astype(np.float64) * largest_step(10)
    steps = np.floor(scaled + np.random.default_rng(1).random(4000))
    assert float(steps @ steps) > largest_step(10) ** 2


def test_rounding_is_exact_on_average_and_zeros_stay_zeros() -> None:
    update = np.array([0.25, -0.1, 0.3331, 0.0], np.float32)
    found = [rounded_update(update, 1.0, 8, bytes([n]) * 32) for n in range(250)]
    assert {tuple(each - np.floor(update * 127)) for each in found} <= {
        (a, b, c, 0) for a in (0, 1) for b in (0, 1) for c in (0, 1)
    }
    # Five standard deviations of the mean of 250 such draws, at most 1/2 each.
    assert np.abs(np.mean(found, axis=0) - update * 127).max() < 5 * 0.5 / sqrt(250)
    assert not rounded_update(np.zeros(5, np.float32), 1.0, 8, bytes(32)).any()


def test_an_update_that_nobody_clipped_is_refused() -> None:
    for bad in (2.0, np.inf, np.nan):
        with pytest.raises(ValueError, match=r"the bound is 1"):
            noisy_words(np.array([bad, 0], np.float32), 1.0, 16, 50.0, bytes(32))


SIZE, GOAL, MINIMUM, BITS, MULTIPLIER, BOUND = 20_000, 40, 20, 16, 0.7, 2.5


def sum_of_words(updates: list[Vector], noise: float) -> Words:
    total = np.zeros(SIZE + 1, np.uint32)
    for number, update in enumerate(updates):
        total += noisy_words(update, BOUND, BITS, noise, number.to_bytes(32, "big"))
    return total


def noise_found(count: int, noise: float) -> float:
    """The standard deviation of what is in a sum beside the updates, in clip norms."""
    updates = updates_of(count, SIZE, BOUND)
    found = noisy_sum(sum_of_words(updates, noise), count, BOUND, BITS, noise)
    assert found.weight == count
    beside = found.total - np.sum(updates, axis=0, dtype=np.float64)
    assert abs(beside.mean()) < 5 * beside.std() / sqrt(SIZE)
    return float(beside.std()) / BOUND


def is_enough(found: float) -> bool:
    """Whether a standard deviation of SIZE numbers is the promised one or more, to within five
    standard deviations of such a figure."""
    return found > MULTIPLIER * (1 - 5 / sqrt(2 * SIZE))


def test_exactly_the_minimum_of_survivors_has_the_plans_noise_and_more_have_more() -> None:
    noise = noise_of_device(MULTIPLIER, BITS, MINIMUM)
    fewest = noise_found(MINIMUM, noise)
    assert is_enough(fewest)
    assert fewest < MULTIPLIER * (1 + 5 / sqrt(2 * SIZE))
    assert noise_found(GOAL, noise) == pytest.approx(
        MULTIPLIER * sqrt(GOAL / MINIMUM), rel=5 / sqrt(2 * SIZE)
    )


def test_noise_for_the_goal_is_found_to_be_too_little() -> None:
    planted = noise_of_device(MULTIPLIER, BITS, GOAL)
    assert is_enough(noise_found(GOAL, planted))  # as long as nobody drops out
    assert not is_enough(noise_found(MINIMUM, planted))


def test_where_some_collude_the_others_noise_is_enough() -> None:
    noise = noise_of_device(MULTIPLIER, BITS, MINIMUM, 0.4)
    assert is_enough(noise_found(12, noise))
    assert not is_enough(noise_found(12, noise_of_device(MULTIPLIER, BITS, MINIMUM)))


def test_the_same_secret_makes_the_same_words_and_another_one_others() -> None:
    update = updates_of(1, 1000, 1.0)[0]
    first, again = (noisy_words(update, 1.0, 18, 90.0, bytes(32)) for _ in range(2))
    other = noisy_words(update, 1.0, 18, 90.0, bytes(31) + b"1")
    assert (first == again).all()
    assert (first[:-1] != other[:-1]).mean() > 0.9


def test_slabs_have_different_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed_noise, "_SLAB", 500)
    words = noisy_words(np.zeros(1100, np.float32), 1.0, 18, 90.0, bytes(32))[:-1]
    assert (words[:500] != words[500:1000]).mean() > 0.9
    assert np.abs(words.view(np.int32)).max() < 90 * 6


def test_which_sums_have_room_and_which_are_refused() -> None:
    noise = noise_of_device(1.0, 20, 2048)
    assert has_room(4000, 20, noise)
    assert not has_room(4096, 20, noise)  # there is room for the updates alone
    assert 4096 * largest_step(20) < MOST_STEPS
    largest = int(largest_sum(3, 16, 50.0))
    words = np.array([largest, 2**32 - largest, 3], np.uint32)
    found = noisy_sum(words, 3, 2.0, 16, 50.0)
    assert found.total.tolist() == [largest * 2 / 32767, -largest * 2 / 32767]
    words[0] += 1
    with pytest.raises(ValueError, match=r"A mask was not taken off, or a device did not clip"):
        noisy_sum(words, 3, 2.0, 16, 50.0)
    with pytest.raises(ValueError, match=r"of 3 updates by its last word; 2 were added"):
        noisy_sum(words, 2, 2.0, 16, 50.0)
    with pytest.raises(ValueError, match=r"add one first"):
        noisy_sum(words, 0, 2.0, 16, 50.0)

"""The orders of devices' examples: against SplitMix64 written out, and those of many against those
of one."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from fleetlearn_device.training.shuffling import permutation, permutations

MASK = 2**64 - 1


def mixed(z: int) -> int:
    """Return SplitMix64's output as in the paper's figure 17, with Python's integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def splitmix64(state: int, count: int) -> list[int]:
    return [mixed((state + place * 0x9E3779B97F4A7C15) & MASK) for place in range(1, count + 1)]


def test_the_reference_is_splitmix64() -> None:
    """The first numbers from seed 1234567 are those that the implementations of Rosetta Code
    print."""
    assert splitmix64(1234567, 3) == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize(
    ("examples", "seed", "epoch"), [(8, 3, 1), (1000, 2**53 - 1, 7), (5, 0, 0), (3, 2**64 - 1, 2)]
)
def test_the_order_is_the_same_for_ever_and_everywhere(
    examples: int, seed: int, epoch: int
) -> None:
    numbers = splitmix64(mixed((mixed(seed) + epoch) & MASK), examples)
    expected = sorted(range(examples), key=lambda place: (numbers[place] >> 32, place))
    assert permutation(examples, seed, epoch).tolist() == expected


def test_seeds_that_are_none_are_refused() -> None:
    for seed in (-1, 2**64):
        with pytest.raises(ValueError, match="expected 0 to"):
            permutation(3, seed, 0)


def test_orders_are_uniform() -> None:
    counts = Counter(tuple(permutation(3, seed, 0).tolist()) for seed in range(3000))
    assert len(counts) == 6
    # 500 expected of each; five standard deviations of a binomial with p = 1/6.
    assert all(abs(count - 500) < 5 * (3000 * 5 / 36) ** 0.5 for count in counts.values())


SEEDS = np.array([0, 1, 2**32, 2**53 - 1, 987654321])


@pytest.mark.parametrize(
    "examples", [[1] * 5, [3] * 5, [50] * 5, [257] * 5, [4, 1, 4, 7, 2], [1, 1, 1, 1, 300]], ids=str
)
def test_each_device_orders_its_examples_itself(examples: list[int]) -> None:
    """Devices have equal or different numbers of examples. A row is 0 beyond its device's
    examples."""
    for epoch in (0, 1, 19):
        found = permutations(np.array(examples), SEEDS, epoch)
        assert found.dtype == np.int64
        assert found.shape == (5, max(examples))
        for row, count, seed in zip(found, examples, SEEDS.tolist(), strict=True):
            np.testing.assert_array_equal(row[:count], permutation(count, seed, epoch))
            assert sorted(row[:count].tolist()) == list(range(count))
            assert not row[count:].any()


def test_other_seeds_and_other_epochs_are_other_orders() -> None:
    found = {permutation(50, seed, epoch).tobytes() for seed in range(20) for epoch in range(20)}
    assert len(found) == 400

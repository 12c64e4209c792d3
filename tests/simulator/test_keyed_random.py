"""Random numbers by name: what they depend on, and how they are distributed."""

import math

import numpy as np
import pytest
from fleetlearn_simulator import keyed_random

MANY = np.arange(200_000)


def test_the_hash_is_splitmix64() -> None:
    """Against the generator as its authors wrote it, in Python's integers, from the same start."""
    mask = 2**64 - 1
    state, expected = keyed_random._start(7, "x"), []
    for _ in range(5):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        expected.append(((z ^ (z >> 31)) >> 11) * 2.0**-53)
    assert keyed_random.uniform(7, "x", np.arange(5)).tolist() == expected


def test_the_numbers_stay_what_they_are() -> None:
    """Runs of one version must be had again by the next."""
    assert keyed_random.uniform(7, "fate", 3, 5) == 0.45937643134248607
    assert keyed_random.normal(7, "fate", 3, 5) == pytest.approx(-0.30870602090990484, rel=1e-12)
    assert keyed_random.generator(7, "data", 3).integers(2**32) == 1146506054


@pytest.mark.parametrize(
    "kind", [keyed_random.uniform, keyed_random.normal, keyed_random.exponential]
)
def test_a_number_depends_on_its_keys_alone(kind: object) -> None:
    assert callable(kind)
    bulk = kind(1, "a", MANY[:1000], 9)
    shuffled = np.random.default_rng(0).permutation(1000)
    assert np.array_equal(kind(1, "a", shuffled, 9), bulk[shuffled])
    assert [float(kind(1, "a", int(i), 9)) for i in range(50)] == bulk[:50].tolist()
    assert np.array_equal(kind(1, "a", MANY[:1000:3], 9), bulk[::3])
    for other in (
        kind(2, "a", MANY[:1000], 9),
        kind(1, "b", MANY[:1000], 9),
        kind(1, "a", MANY[:1000], 8),
    ):
        assert not np.intersect1d(bulk, other).size


def test_keys_broadcast_and_a_column_gives_several_numbers() -> None:
    many = keyed_random.uniform(1, "a", np.arange(4), 2, keyed_random.COLUMN[:3])
    assert many.shape == (3, 4)
    assert many[1].tolist() == keyed_random.uniform(1, "a", np.arange(4), 2, 1).tolist()
    assert keyed_random.uniform(1, "a").shape == keyed_random.normal(1, "a", 5).shape == ()
    assert keyed_random.uniform(1, "a", -1) != keyed_random.uniform(1, "a", 1)


def test_the_order_of_keys_counts() -> None:
    assert keyed_random.uniform(1, "a", 2, 3) != keyed_random.uniform(1, "a", 3, 2)


def kolmogorov(sample: np.ndarray, distribution: object) -> float:
    """The largest distance from a distribution function, times the root of the sample's size: above
    2 with probability 2 exp(-8) = 0.0007."""
    assert callable(distribution)
    expected = np.array([distribution(x) for x in np.sort(sample)])
    steps = np.arange(len(sample) + 1) / len(sample)
    return float(
        max((steps[1:] - expected).max(), (expected - steps[:-1]).max()) * math.sqrt(len(sample))
    )


@pytest.mark.parametrize(
    "keys", [(MANY[:20_000],), (5, MANY[:20_000]), (MANY[:20_000], 5), (MANY[:20_000] << 20,)]
)
def test_distributions(keys: tuple[object, ...]) -> None:
    assert kolmogorov(keyed_random.uniform(3, "d", *keys), lambda x: x) < 2
    assert (
        kolmogorov(keyed_random.normal(3, "d", *keys), lambda x: 0.5 * math.erfc(-x / math.sqrt(2)))
        < 2
    )
    assert kolmogorov(keyed_random.exponential(3, "d", *keys), lambda x: 1 - math.exp(-x)) < 2


def test_neighbouring_keys_purposes_and_seeds_are_not_related() -> None:
    """Correlations of 200,000 pairs are within 4.5 standard deviations of 0."""
    base = keyed_random.uniform(3, "d", MANY, 1)
    others = [
        keyed_random.uniform(3, "d", MANY + 1, 1),
        keyed_random.uniform(3, "d", MANY, 2),
        keyed_random.uniform(4, "d", MANY, 1),
        keyed_random.uniform(3, "e", MANY, 1),
        keyed_random.uniform(3, "d", MANY, 1, 0),
        keyed_random.uniform(3, "d", MANY),
    ]
    for other in others:
        assert abs(np.corrcoef(base, other)[0, 1]) < 4.5 / math.sqrt(len(MANY))


def test_a_generator_is_its_own_for_each_name() -> None:
    first = keyed_random.generator(1, "data", 5).standard_normal(4)
    assert np.array_equal(first, keyed_random.generator(1, "data", 5).standard_normal(4))
    for other in (
        keyed_random.generator(1, "data", 6),
        keyed_random.generator(2, "data", 5),
        keyed_random.generator(1, "date", 5),
    ):
        assert not np.array_equal(first, other.standard_normal(4))

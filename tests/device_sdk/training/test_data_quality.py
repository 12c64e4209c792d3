"""What a device says of its features, beside NumPy on the whole array."""

from __future__ import annotations

import numpy as np
import pytest
from fleetlearn_device.training.data_quality import feature_moments, features_of
from fleetlearn_device.training.train import NoExamplesError
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray


def moments(x: NDArray[np.floating]) -> list[NDArray[np.floating]]:
    away = x - np.nanmean(x, axis=0)
    return [np.nanmean(x, axis=0), np.nanmean(away**2, axis=0), np.nanmean(away**4, axis=0)]


@given(st.integers(1, 60), st.integers(1, 7), st.integers(0, 2**32 - 1))
def test_batches_of_any_size_give_the_moments_of_the_whole(rows: int, size: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    x = generator.normal(generator.normal(size=3) * 100, [0.01, 1, 30], (rows, 3))
    found = feature_moments((x[at : at + size],) for at in range(0, rows, size))
    assert (found.rows, found.missing) == (rows, (0, 0, 0))
    told = found.means, found.variances, found.fourths
    for numbers, expected in zip(told, moments(x), strict=True):
        assert numbers == pytest.approx(expected.tolist(), rel=1e-9, abs=1e-9)


def test_a_small_spread_of_large_values_is_kept() -> None:
    """Unix times: with sums of squares nothing would be left of a spread of a second."""
    x = 1.7e9 + np.random.default_rng(1).normal(size=(1000, 1))
    found = feature_moments([(x[:300],), (x[300:],)])
    assert found.variances[0] == pytest.approx(x.var(), rel=1e-6)


def test_values_that_are_not_finite_are_counted() -> None:
    x = np.array([[1.0, np.nan], [3.0, np.inf], [5.0, 7.0]], np.float32)
    found = feature_moments([(x,)])
    assert found.missing == (0, 2)
    assert found.means == (3.0, 7.0)
    assert found.variances == (pytest.approx(8 / 3), 0.0)
    nothing = feature_moments([(np.full((2, 1), np.nan),)])
    assert (nothing.missing, nothing.means, nothing.variances) == ((2,), (0.0,), (0.0,))


def test_many_values_of_an_example_are_four_features() -> None:
    image = np.arange(2 * 3 * 20 * 20, dtype=np.float32).reshape(2, 3, 20, 20)
    flat = image.reshape(2, -1).astype(float)
    expected = [flat.mean(1), flat.std(1), flat.min(1), flat.max(1)]
    assert features_of(image) == pytest.approx(np.stack(expected, 1))
    assert features_of(image[:, :, :4, :4]).shape == (2, 48)


def test_no_examples() -> None:
    with pytest.raises(NoExamplesError):
        feature_moments([])

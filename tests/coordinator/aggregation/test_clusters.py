"""Which model a device takes, what clusters begin with, and what is said of devices' answers."""

from __future__ import annotations

import numpy as np
import pytest
from fleetlearn_coordinator.aggregation.clusters import best_of, starting_models, summarise_fit
from fleetlearn_protocol.manifest import LocalStep, Manifest, Parameter
from hypothesis import given
from hypothesis import strategies as st


def manifest(*rows: tuple[str, tuple[int, ...], bool]) -> Manifest:
    table, place = [], 0
    for name, shape, buffer in rows:
        table.append(Parameter(name, shape, place, buffer=buffer))
        place += int(np.prod(shape))
    return Manifest(
        format="fleetlearn.bundle", version=1, name="x", parameters=tuple(table), batch=(),
        outputs=(), hyper=(), metrics=(), files={}, step=LocalStep(),
    )  # fmt: skip


NET = manifest(
    ("w", (40, 50), False), ("b", (40,), False), ("v", (3, 4), False), ("m", (2, 2), True)
)


def test_the_least_loss_and_of_equal_ones_the_first() -> None:
    assert best_of([2.0, 0.5, 1.0]) == 1
    assert best_of([1.0, 1.0, 1e30]) == 0


@given(spread=st.floats(0.01, 30), seed=st.integers(0, 2**32))
def test_clusters_begin_apart_and_with_weights_of_the_same_size(spread: float, seed: int) -> None:
    """The correlation with the bundle's weights is 1 / sqrt(1 + spread^2), and their root mean
    square stays. Biases, zeros that have one dimension, and buffers are the bundle's."""
    model = np.random.default_rng(1).normal(0, 0.3, NET.size).astype(np.float32)
    model[2040:2052] = 0
    first, second, third = starting_models(model, NET, 3, seed, spread)
    assert first is model
    for other in (second, third):
        w = other[:2000]
        assert np.corrcoef(w, model[:2000])[0, 1] == pytest.approx((1 + spread**2) ** -0.5, abs=0.1)
        size = np.sqrt(np.mean(w**2)) / np.sqrt(np.mean(model[:2000] ** 2))
        assert size == pytest.approx(1, abs=0.1)
        np.testing.assert_array_equal(other[2000:2040], model[2000:2040])
        assert np.abs(other[2040:2052]).max() > 0, "zeros of a matrix would all stay alike"
        np.testing.assert_array_equal(other[2052:], model[2052:])
    assert (second != third).any()
    np.testing.assert_array_equal(starting_models(model, NET, 3, seed, spread)[2], third)
    assert (starting_models(model, NET, 2, seed + 1, spread)[1] != second).any()


def test_a_model_without_matrices_differs_in_all_its_tensors() -> None:
    table, model = manifest(("w", (2,), False), ("mean", (2,), True)), np.float32([3, 4, 5, 6])
    _, other = starting_models(model, table, 2, 0, 1.0)
    assert (other[:2] != model[:2]).all()
    np.testing.assert_array_equal(other[2:], model[2:])
    with pytest.raises(ValueError, match="no tensor in which the clusters' models could differ"):
        starting_models(model[:1], manifest(("s", (), False)), 2, 0, 1.0)


def test_what_devices_answers_say_together() -> None:
    """Margins of 1, 0.05 and 0.5; and a device without a loss above 0."""
    losses = [(1.0, 2.0, 9.0), (4.2, 4.0, 8.0), (3.0, 2.0, 3.5), (0.0, 1.0, 1.0)]
    assert summarise_fit(["c1", "c2", "c3"], losses) == {
        "chosen": {"c1": 2, "c2": 2, "c3": 0},
        "in_doubt": 1,
        "margin": 0.5,
    }
    assert summarise_fit(["c1", "c2"], [])["margin"] is None

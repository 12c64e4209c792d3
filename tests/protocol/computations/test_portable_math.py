from __future__ import annotations

import math

import numpy as np
import pytest
from fleetlearn_protocol.computations.portable_math import (
    logistic_losses,
    portable_exp,
    portable_log,
    sigmoid,
    softmax,
)


def units_off(found: np.ndarray, expected: list[float]) -> float:
    """Return how many units of the last place the worst value is off."""
    exact = np.array(expected)
    return float((np.abs(found - exact) / np.spacing(np.abs(exact))).max())


def test_exp_is_right_to_two_units_of_the_last_place() -> None:
    values = np.concatenate([np.linspace(-700, 700, 4001), np.linspace(-1, 1, 4001)])
    assert units_off(portable_exp(values), [math.exp(value) for value in values]) <= 2


def test_log_is_right_to_two_units_of_the_last_place() -> None:
    values = np.concatenate([np.geomspace(1e-300, 0.9, 4000), np.geomspace(1.1, 1e300, 4000)])
    assert units_off(portable_log(values), [math.log(value) for value in values]) <= 2
    near = np.linspace(0.9, 1.1, 1001)
    assert np.abs(portable_log(near) - np.log(near)).max() < 1e-16 * 2


def test_ends() -> None:
    found = portable_exp(np.array([0.0, 1e9, -1e9, np.inf, -np.inf]))
    far = math.exp(700), math.exp(-700)
    assert found[0] == 1
    assert found[1:] == pytest.approx([*far, *far], rel=1e-15)
    assert np.isnan(portable_exp(np.array([np.nan]))).all()
    assert portable_log(np.array([1.0]))[0] == 0


def test_every_machine_gets_these_bits() -> None:
    """Boosting rounds what comes of them: a device with other bits would break 'the same trees'."""
    values = np.array([-17.25, -0.3, 0.1, 3.0, 55.5])
    assert [value.hex() for value in portable_exp(values).tolist()] == [
        "0x1.14f49dbc5078cp-25",
        "0x1.7b4c869c37c05p-1",
        "0x1.1aec7b35a00d4p+0",
        "0x1.415e5bf6fb106p+4",
        "0x1.0ca5f56995724p+80",
    ]
    assert [value.hex() for value in portable_log(np.array([1e-9, 0.3, 7.0, 1e20])).tolist()] == [
        "-0x1.4b927f32bffb8p+4",
        "-0x1.34378fcbda721p+0",
        "0x1.f2272ae325a57p+0",
        "0x1.7069e2aa2aa5bp+5",
    ]


def test_chances_and_losses() -> None:
    scores = np.array([-800.0, -2.0, 0.0, 2.0, 800.0])
    assert sigmoid(scores) == pytest.approx(
        [0, 1 / (1 + math.e**2), 0.5, 1 / (1 + math.e**-2), 1], abs=1e-15
    )
    many = softmax(np.array([[0.0, math.log(2), math.log(5)], [900.0, 0.0, -900.0]]))
    assert many == pytest.approx(np.array([[1 / 8, 2 / 8, 5 / 8], [1, 0, 0]]), abs=1e-15)
    losses = logistic_losses(np.array([2.0, 2.0, 600.0]), np.array([1, 0, 0]))
    assert losses == pytest.approx([math.log1p(math.exp(-2)), math.log1p(math.exp(2)), 600])

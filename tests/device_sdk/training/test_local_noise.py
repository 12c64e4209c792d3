from __future__ import annotations

from math import floor, log2, sqrt

import numpy as np
import pytest
from fleetlearn_device.training.local_noise import add_noise, grid_of, withheld
from fleetlearn_device.training.train import DivergedError
from fleetlearn_protocol.discrete_gaussian import sample
from fleetlearn_protocol.messages import Evaluation, Part, Report, Task, VectorReference
from fleetlearn_protocol.vector import Vector
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

SECRET = bytes(range(32))


@pytest.mark.parametrize("sigma", [1e-30, 0.3, 0.5, 0.75, 1.0, 2.0**-20, 3e29])
def test_the_grid_is_a_power_of_two_below_sigma(sigma: float) -> None:
    assert grid_of(sigma) == 2.0 ** (floor(log2(sigma)) - 30)


def test_what_is_sent_is_whole_steps_of_the_grid_by_hand() -> None:
    """Of sigma 1 the grid is 2^-30. 0.75 has 805,306,368 steps; half a step is rounded towards
    zero, from below too."""
    update = np.array([0.75, -0.75, 0.5 * 2.0**-30, -0.5 * 2.0**-30], np.float32)
    steps = np.array([805_306_368, -805_306_368, 0, 0])
    expected = (steps + sample(2.0**30, 4, SECRET)) * 2.0**-30
    assert add_noise(update, 1.0, SECRET).tolist() == expected.astype(np.float32).tolist()


@given(
    arrays(np.float32, 20, elements=st.floats(-1e3, 1e3, width=32)),
    st.floats(1e-4, 1e4),
)
def test_rounding_to_the_grid_makes_no_element_greater(update: Vector, sigma: float) -> None:
    """With the noise taken off again. The sum is rounded to float32 once more, afterwards."""
    grid = grid_of(sigma)
    noise = sample(sigma / grid, 20, SECRET)
    steps = np.trunc(update.astype(np.float64) / grid)
    assert (np.abs(steps * grid) <= np.abs(update)).all()
    found = add_noise(update, sigma, SECRET)
    assert found.tolist() == ((steps.astype(np.int64) + noise) * grid).astype(np.float32).tolist()


def test_the_noise_has_the_mean_and_the_deviation_that_were_asked_for() -> None:
    """Of 40,000 numbers: the mean within 5 of its own standard deviations, and the variance."""
    count, sigma = 40_000, 0.37
    noise = add_noise(np.zeros(count, np.float32), sigma, SECRET).astype(np.float64)
    assert abs(noise.mean()) < 5 * sigma / sqrt(count)
    assert abs((noise**2).mean() / sigma**2 - 1) < 5 * sqrt(2 / count)


def test_each_call_has_noise_of_its_own() -> None:
    update = np.ones(8, np.float32)
    first, second = add_noise(update, 1.0), add_noise(update, 1.0)
    assert (first != second).any()


def test_noise_that_is_too_little_for_the_update_is_an_error() -> None:
    with pytest.raises(DivergedError, match="too little to hide an update with elements up to 1"):
        add_noise(np.ones(3, np.float32), 1e-20)


def test_a_report_says_nothing_that_depends_on_the_data() -> None:
    task = Task(
        "t1", 4, "a" * 64, (VectorReference("model", "b" * 64, 4, "float32"),),
        {"update": "float32"}, {}, 3, 8, 5, 60.0, clip=1.0, local_noise=1.0,
    )  # fmt: skip
    parts = (Part("update", "float32", 4, 7),)
    measured = Evaluation(120, 3.0)
    reports = [
        Report("t1", 4, parts, 120, 17, 2.5, False, 0.4, {"accuracy": 0.9}, 9.0, measured),
        Report("t1", 4, parts, 7, 3, 3.0, True, 2.5, lost_tied=True, clipped=True),
    ]
    assert withheld(reports[0], task) == withheld(reports[1], task)
    assert withheld(reports[0], task) == Report("t1", 4, parts, 1, 1, 3.0, True, 0.0)

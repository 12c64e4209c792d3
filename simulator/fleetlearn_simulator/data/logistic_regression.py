"""The logistic regression of the pooled data of all devices, to compare a federated model with."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from fleetlearn_simulator.data.sources import Source
from fleetlearn_simulator.errors import SimulatorError

MAX_STEPS = 100
ADVICE = "the likelihood has no single maximum. Take more examples, or fewer features"


def pooled_mle(
    source: Source, ids: Iterable[int], *, intercept: bool = True
) -> tuple[NDArray[np.float64], float]:
    """Return the maximum-likelihood estimate of the devices' pooled data: weights, float64
    (features,), and bias.

    The mean over the examples of log(1 + exp(z)) - y z with z = x @ weights + bias is minimised by
    Newton's method (iteratively reweighted least squares; McCullagh and Nelder, Generalized Linear
    Models, 1989, section 2.5) in float64, until a step changes each z by less than 1e-9. Without
    ``intercept`` the bias is 0. Labels are 0 and 1. A model with two outputs has the same maximum:
    there, the differences of its weights and biases are these.

    Raises SimulatorError if the labels or the number of arrays are others, or if the likelihood has
    no single maximum.
    """
    parts = [source.arrays(device) for device in ids]
    if not parts or any(len(part) != 2 for part in parts):
        raise SimulatorError(
            f"the data of {len(parts)} devices were given; expected inputs and labels of at least "
            "one"
        )
    x = np.concatenate([part[0].reshape(len(part[0]), -1) for part in parts]).astype(np.float64)
    y = np.concatenate([part[1].reshape(-1) for part in parts]).astype(np.float64)
    if not np.isin(y, (0, 1)).all():
        raise SimulatorError(
            f"the labels are {np.unique(y)[:10].tolist()}; a logistic regression takes 0 and 1"
        )
    if intercept:
        x = np.hstack([x, np.ones((len(x), 1))])
    estimate = _newton(x, y)
    return (estimate[:-1], float(estimate[-1])) if intercept else (estimate, 0.0)


def _newton(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    w = np.zeros(x.shape[1])
    if np.linalg.matrix_rank(x) < len(w):
        raise SimulatorError(
            f"the {len(x)} pooled examples' features depend on each other linearly: {ADVICE}"
        )
    for _ in range(MAX_STEPS):
        z = x @ w
        p = 0.5 * (1 + np.tanh(z / 2))
        try:
            step = np.linalg.solve((x.T * (p * (1 - p))) @ x, x.T @ (p - y))
        except np.linalg.LinAlgError:
            break
        moved = float(np.abs(x @ step).max())
        while moved > 1e-4 and _loss(x @ (w - step), y) > _loss(z, y):
            step, moved = step / 2, moved / 2
        w = w - step
        if moved < 1e-9:  # the error after the step is about its square
            return w
    # If the maximum is infinitely far away, each step changes z by about 1.
    raise SimulatorError(
        f"a plane separates the labels of the {len(x)} pooled examples, or nearly so: {ADVICE}"
    )


def _loss(z: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    return float(np.mean(np.logaddexp(0, z) - y * z))

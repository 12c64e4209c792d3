"""The penalised least squares of a base learner, and the penalty that gives it so many degrees of
freedom."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from fleetlearn_protocol.computations.boosting_settings import BoostedComponents
from fleetlearn_protocol.computations.components_layout import BaseLearner
from numpy.typing import NDArray

Doubles = NDArray[np.float64]
HALVINGS = 200
"""Steps of the search for a penalty: more than a double has bits to tell apart."""
EXPONENTS = (-60.0, 80.0)
"""Penalties are looked for between 2^-60 and 2^80 times the mean of X^T X's diagonal."""


def gram_of(learner: BaseLearner, grams: Doubles) -> Doubles:
    """Return X^T X as a matrix, (size, size). grams: those of all base learners."""
    own = grams[learner.gram]
    if learner.kind == "linear":
        return np.array([[own[0], own[1]], [own[1], own[2]]])
    if learner.kind == "category":
        return np.diag(own)
    band = own.reshape(learner.size, 4)
    gram = np.diag(band[:, 0])
    for off in (1, 2, 3):
        beside = band[: learner.size - off, off]
        gram += np.diag(beside, off) + np.diag(beside, -off)
    return gram


def penalty_of(learner: BaseLearner) -> Doubles:
    """Return the penalty's matrix P, (size, size): squared second differences of a spline's
    coefficients, squares of a category's, nothing of a straight line's."""
    if learner.kind == "linear":
        return np.zeros((2, 2))
    if learner.kind == "category":
        return np.eye(learner.size)
    differences = _second_differences(learner.size)
    return differences.T @ differences


def directions_of(learner: BaseLearner, settings: BoostedComponents) -> Doubles:
    """Return the columns that the coefficients are sums of, (size, free).

    All directions, except for a spline beside a straight line: those are D^T (D D^T)^-1, with the
    matrix D of second differences, and have no straight line in them. (Kneib, Hothorn and Tutz,
    "Variable selection and model choice in geoadditive regression models", Biometrics 2009.)
    """
    if learner.kind != "spline" or not settings.centred:
        return np.eye(learner.size)
    differences = _second_differences(learner.size)
    found: Doubles = differences.T @ np.linalg.inv(differences @ differences.T)
    return found


def penalty_for(learner: BaseLearner, gram: Doubles, settings: BoostedComponents) -> float:
    """Return lambda, so that the hat matrix S of the fit has trace(2 S - S S) degrees of freedom.

    0 where the design has no more than these anyway, and for straight lines.
    """
    wanted, directions = settings.degrees_of_freedom, directions_of(learner, settings)
    penalty = directions.T @ penalty_of(learner) @ directions
    gram = directions.T @ gram @ directions
    if learner.kind == "linear" or np.count_nonzero(gram.diagonal()) <= wanted:
        return 0.0
    size = gram.diagonal().mean()
    low, high = EXPONENTS
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        hat = _solve(gram + size * 2.0**middle * penalty, gram)
        # More penalty, fewer degrees of freedom.
        if np.trace(2 * hat - hat @ hat) > wanted:
            low = middle
        else:
            high = middle
    return float(size * 2.0**low)


def fit(
    learner: BaseLearner,
    gram: Doubles,
    penalty: float,
    gradient: Doubles,
    settings: BoostedComponents,
) -> Doubles:
    """Return (X^T X + lambda P)^-1 X^T r, (size,). Coefficients without rows are 0.

    gram: X^T X. penalty: lambda. gradient: X^T r.
    """
    directions = directions_of(learner, settings)
    matrix = directions.T @ (gram + penalty * penalty_of(learner)) @ directions
    found: Doubles = directions @ _solve(matrix, directions.T @ gradient)
    return found


@lru_cache(maxsize=16)
def _second_differences(size: int) -> Doubles:
    return np.diff(np.eye(size), n=2, axis=0)


def _solve(matrix: Doubles, right: Doubles) -> Doubles:
    empty = np.flatnonzero(matrix.diagonal() == 0)
    if len(empty):
        matrix = matrix.copy()
        matrix[empty, empty] = 1.0
    try:
        return np.asarray(np.linalg.solve(matrix, right), np.float64)
    except np.linalg.LinAlgError:
        raise ValueError(
            "the X^T X of a base learner has no inverse: the total is not of rows"
        ) from None

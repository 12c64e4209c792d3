"""What a device computes for component-wise boosting: counts for the columns' ranges, X^T X of each
base learner, then X^T r of each.

The product of each row is rounded to a whole number before it is added, so that the sums are the
same however the rows are divided over devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from fleetlearn_protocol.computations.boosting_settings import BoostedComponents
from fleetlearn_protocol.computations.components_layout import (
    DESIGN,
    EXPONENTS,
    FIND_RANGES,
    HEADROOM,
    LOSS_BITS,
    LOWEST_EXPONENT,
    BaseLearner,
    base_learners,
    components_state,
    components_sums,
    grid_bits,
    numeric_columns,
    range_counts_of,
    scaled,
    spline_basis,
)
from fleetlearn_protocol.computations.fixed_point import to_fixed
from fleetlearn_protocol.computations.layout import Sums
from fleetlearn_protocol.computations.portable_math import logistic_losses, sigmoid
from fleetlearn_protocol.computations.shared_edges import count_between
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray

from fleetlearn_device.computations.columns import Columns

Doubles = NDArray[np.float64]
Values = Mapping[str, NDArray[Any]]


def compute(state: Vector, columns: Columns, settings: BoostedComponents) -> Sums:
    """Return a batch's sums, int64 (S,).

    columns: ``x`` float32 (n, F), NaN where a value is missing; ``y`` (n,): float32, or int64 with
    logistic loss. Raises ValueError where a y is not finite.
    """
    values = components_state(settings).unpack(state)
    x, y = columns["x"], columns["y"]
    if not np.isfinite(y).all():
        row = int(np.flatnonzero(~np.isfinite(y))[0])
        raise ValueError(f"y of row {row} (the first is 0) is {y[row]}; expected a finite number")
    layout = components_sums(settings)
    total = np.zeros(layout.size, np.int64)
    sums = layout.unpack(total)  # views, which are filled in
    sums["rows"][()] = len(x)
    if values["phase"] == FIND_RANGES:
        _add_counts(sums, values, x, y, settings)
    elif values["phase"] == DESIGN:
        _add_design(sums, values, x, y, settings)
    else:
        _add_gradient(sums, values, x, y, settings)
    return total


def component_scores(
    values: Values, x: NDArray[np.float32], settings: BoostedComponents
) -> Doubles:
    """Return the rows' scores, float64 (n,). values: the state, unpacked."""
    found = np.full(len(x), float(values["base"]))
    for learner in base_learners(settings):
        own = values["coefficients"][learner.coefficients]
        if own.any():
            places, basis = _design(learner, values, x, settings)
            for place, value in zip(places.T, basis.T, strict=True):
                found += own[place] * value
    return found


def _design(
    learner: BaseLearner, values: Values, x: NDArray[np.float32], settings: BoostedComponents
) -> tuple[NDArray[np.int64], Doubles]:
    """Return the base learner's columns that are not 0 and their values: (n, 1, 2 or 4) each. Where
    the table's value is missing the values are 0."""
    column = x[:, learner.column]
    if learner.kind == "category":
        known = (column >= 0) & (column < learner.size) & (np.floor(column) == column)
        code = np.where(known, column, 0).astype(np.int64)
        return code[:, None], known[:, None].astype(np.float64)
    low, high = map(float, values["ranges"][learner.numeric])
    missing = np.isnan(column)
    if high <= low:  # a column of one value has nothing to tell
        low, high, missing = 0.0, 1.0, np.ones(len(column), np.bool_)
    places = np.where(missing, 0.0, scaled(column, low, high))
    if learner.kind == "linear":
        columns = np.repeat(np.array([[0, 1]]), len(column), axis=0)
        basis = np.stack([np.ones(len(column)), places], axis=1)
    else:
        first, basis = spline_basis(places, settings.knots)
        columns = first[:, None] + np.arange(4)
    basis[missing] = 0
    return columns, basis


def _add_counts(
    sums: Values,
    values: Values,
    x: NDArray[np.float32],
    y: NDArray[Any],
    settings: BoostedComponents,
) -> None:
    numeric = numeric_columns(settings)
    boundaries = values["boundaries"]
    counts = range_counts_of(sums["body"], settings)
    for place, column in enumerate(numeric):
        counts[place] = count_between(x[:, column], boundaries[place])
    if settings.loss == "squared":
        powers = np.frexp(y)[1].astype(np.int64)
        cells = np.where(y == 0, 0, np.clip(powers - LOWEST_EXPONENT, 0, EXPONENTS - 1))
        sums["exponents"][:] = np.bincount(cells, minlength=EXPONENTS)


def _add_design(
    sums: Values,
    values: Values,
    x: NDArray[np.float32],
    y: NDArray[Any],
    settings: BoostedComponents,
) -> None:
    bits = grid_bits(int(values["rows"]))
    sums["label"][()] = to_fixed(y, bits - int(values["scale"])).sum()
    for learner in base_learners(settings):
        places, basis = _design(learner, values, x, settings)
        own = sums["body"][learner.gram]
        if learner.kind == "linear":
            ones, along = basis.T
            products = np.stack([ones, along, along * along], axis=1)
            own[:] = to_fixed(products, bits).sum(axis=0)
        elif learner.kind == "category":
            np.add.at(own, places[:, 0], to_fixed(basis[:, 0], bits))
        else:
            band = own.reshape(learner.size, 4)
            for a in range(4):
                for b in range(a, 4):
                    products = to_fixed(basis[:, a] * basis[:, b], bits)
                    np.add.at(band[:, b - a], places[:, a], products)


def _add_gradient(
    sums: Values,
    values: Values,
    x: NDArray[np.float32],
    y: NDArray[Any],
    settings: BoostedComponents,
) -> None:
    scale, bits = int(values["scale"]), grid_bits(int(values["rows"]))
    score = component_scores(values, x, settings)
    if settings.loss == "squared":
        residuals = y - score
        losses = residuals * residuals / 2
    else:
        residuals = y - sigmoid(score)
        losses = logistic_losses(score, y)
    sums["loss"][()] = to_fixed(losses, LOSS_BITS - 2 * scale).sum()
    for learner in base_learners(settings):
        places, basis = _design(learner, values, x, settings)
        products = to_fixed(basis * residuals[:, None], bits - scale - HEADROOM)
        np.add.at(sums["body"][learner.coefficients], places, products)

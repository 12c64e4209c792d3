"""What a base learner's coefficients say, in the units of its column."""

from __future__ import annotations

from typing import Any

import numpy as np
from fleetlearn_protocol.computations.boosting_settings import BoostedComponents
from fleetlearn_protocol.computations.components_layout import BaseLearner, spline_basis
from numpy.typing import NDArray

POINTS = 11
"""Points at which a spline's effect is told."""


def effect_of(
    learner: BaseLearner, values: dict[str, NDArray[Any]], settings: BoostedComponents
) -> dict[str, Any]:
    """Return what the learner adds to a score: ``intercept`` and ``slope`` of a straight line,
    ``points`` (value of the column, effect) of a spline, ``effects`` of a category's codes."""
    own = values["coefficients"][learner.coefficients]
    if learner.kind == "category":
        return {"effects": [float(effect) for effect in own]}
    low, high = map(float, values["ranges"][learner.numeric])
    if learner.kind == "linear":
        slope = own[1] / (high - low)
        return {"intercept": float(own[0] - slope * low), "slope": float(slope)}
    places = np.linspace(0, 1, POINTS)
    first, basis = spline_basis(places, settings.knots)
    effects = (own[first[:, None] + np.arange(4)] * basis).sum(axis=1)
    points = zip(low + (high - low) * places, effects, strict=True)
    return {"points": [[float(value), float(effect)] for value, effect in points]}

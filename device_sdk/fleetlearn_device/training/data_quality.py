"""What a device tells of its data: moments of each feature. No example leaves the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import numpy as np
from fleetlearn_protocol.manifest import Input
from fleetlearn_protocol.messages import Evaluation
from fleetlearn_protocol.quality_messages import MOST_FEATURES, QualityAnswer
from numpy.typing import NDArray

from fleetlearn_device.runtimes.checks import Arrays
from fleetlearn_device.training.data import Data, one_pass
from fleetlearn_device.training.train import (
    EVALUATION_BATCH,
    NO_BATCH,
    NoExamplesError,
    StoppedError,
)

LARGEST = 1e30
"""Moments beyond are cut: no number of a message is larger."""


def features_of(batch: NDArray[Any]) -> NDArray[np.float64]:
    """Return the features of n examples, float64 (n, F), from the first array of a batch, (n, ...).

    Each value of an example is a feature; where it has more than MOST_FEATURES values, its features
    are their mean, deviation, least and largest (``quality_messages.FIGURES_OF_EXAMPLES``)."""
    rows = batch.reshape(len(batch), prod(batch.shape[1:])).astype(np.float64)
    if rows.shape[1] <= MOST_FEATURES:
        return rows
    figures = rows.mean(axis=1), rows.std(axis=1), rows.min(axis=1), rows.max(axis=1)
    return np.stack(figures, axis=1)


def feature_moments(
    batches: Iterable[Arrays], evaluation: Evaluation | None = None
) -> QualityAnswer:
    """Return the moments of the batches' first arrays. ``evaluation``: of the same examples. Raises
    NoExamplesError."""
    rows, shift = 0, None
    missing, powers = np.zeros(1, np.int64), np.zeros((4, 1))
    with np.errstate(over="ignore", invalid="ignore"):
        for arrays in batches:
            features = features_of(arrays[0])
            known = np.isfinite(features)
            if shift is None:  # near the mean, so that large values with a small spread keep it
                shift = _per_value(np.where(known, features, 0.0).sum(axis=0), known.sum(axis=0))
            away = np.where(known, features - shift, 0.0)
            rows, missing = rows + len(features), missing + (~known).sum(axis=0)
            powers = powers + np.stack([(away**order).sum(axis=0) for order in (1, 2, 3, 4)])
        if shift is None:
            raise NoExamplesError(NO_BATCH)
        first, second, third, fourth = _per_value(powers, rows - missing)
        variances = np.maximum(second - first**2, 0.0)
        fourths = fourth - 4 * first * third + 6 * first**2 * second - 3 * first**4
    return QualityAnswer(
        rows,
        tuple(missing.tolist()),
        _told(shift + first),
        _told(variances),
        _told(np.maximum(fourths, 0.0)),
        evaluation,
    )


def _told(numbers: NDArray[np.float64]) -> tuple[float, ...]:
    """Return the numbers as a message may have them."""
    return tuple(np.clip(np.nan_to_num(numbers, nan=0.0), -LARGEST, LARGEST).tolist())


def _per_value(sums: NDArray[Any], counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the means of ``counts`` values; 0 of none."""
    return np.asarray(sums / np.maximum(counts, 1), np.float64)


def measure_features(
    data: Data,
    inputs: Sequence[Input],
    evaluation: Evaluation | None,
    should_stop: Callable[[], bool],
) -> QualityAnswer:
    """Return the moments over all data. Raises StoppedError, NoExamplesError, DataError."""

    def batches() -> Iterable[Arrays]:
        for arrays in one_pass(data, data.batches(EVALUATION_BATCH, None), inputs):
            if should_stop():
                raise StoppedError("the look at the data was stopped")
            yield arrays

    return feature_moments(batches(), evaluation)

"""A look at the devices' data: which of them are unlike the others', and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping
from math import log10
from typing import Any

import numpy as np
from fleetlearn_protocol.quality_messages import QualityAnswer

from fleetlearn_coordinator.quality.feature_drift import FeatureMoments, feature_drifts
from fleetlearn_coordinator.quality.label_noise import label_noise
from fleetlearn_coordinator.quality.outliers import DeviceFigure, Unlikeness, corrected, unlikeness

MOST_TOLD = 50
"""Drifts and losses that a summary holds, the surest first."""
ACCURACY = "accuracy"
"""The metric from which wrong labels are estimated."""


def look_at(
    answers: Mapping[str, QualityAnswer], alarm: float, classes: int | None
) -> dict[str, Any]:
    """Return the summary of a look: ``features`` and ``losses`` that are unlike the others', each
    with its device and how sure that is, ``measured`` (how many devices' loss is known) and
    ``not_finite`` (devices on whose data the model's loss is not finite)."""
    fleet = {
        device: FeatureMoments(
            answer.rows,
            np.array(answer.missing, np.int64),
            *(np.array(each) for each in (answer.means, answer.variances, answer.fourths)),
        )
        for device, answer in answers.items()
    }
    drifts = [
        {"device": each.device, "feature": each.feature, "what": each.what, **_told(each.found)}
        for each in feature_drifts(fleet, alarm)
    ]
    measured = {
        device: answer.evaluation
        for device, answer in answers.items()
        if answer.evaluation is not None
    }
    losses = _loss_outliers(answers, alarm)
    for each in losses:
        each.update(_wrong_labels(each["device"], answers, classes))
    return {
        "alarm": alarm,
        "features": drifts[:MOST_TOLD],
        "losses": losses[:MOST_TOLD],
        "measured": len(measured),
        "not_finite": sorted(answers.keys() - measured.keys())[:MOST_TOLD],
    }


def _told(found: Unlikeness) -> dict[str, float]:
    """Return how a number lies among the others', finite: JSON has no infinity."""
    most = 1e300
    return {
        "value": found.value,
        "others": found.others,
        "deviations": max(-most, min(most, found.deviations)),
        "log10_p": max(-most, found.log10_p),
    }


def _loss_outliers(answers: Mapping[str, QualityAnswer], alarm: float) -> list[dict[str, Any]]:
    """Return the devices on whose data the model's loss is higher than on the others'."""
    losses = {
        device: DeviceFigure(answer.evaluation.loss_sum / answer.evaluation.examples)
        for device, answer in answers.items()
        if answer.evaluation is not None
    }
    found = unlikeness(losses)
    p_values = corrected([each.log10_p for each in found.values()])
    high = [
        {"device": device, **_told(each._replace(log10_p=p))}
        for (device, each), p in zip(found.items(), p_values, strict=True)
        if each.deviations > 0 and p < log10(alarm)
    ]
    return sorted(high, key=lambda each: (each["log10_p"], -each["deviations"]))


def _wrong_labels(
    device: str, answers: Mapping[str, QualityAnswer], classes: int | None
) -> dict[str, float]:
    """Return the estimated share of the device's labels that are wrong, where the model's accuracy
    is measured."""
    counts = {
        name: (answer.evaluation.metric_sums[ACCURACY], answer.evaluation.examples)
        for name, answer in answers.items()
        if answer.evaluation is not None and ACCURACY in answer.evaluation.metric_sums
    }
    if device not in counts or len(counts) < 2:
        return {}
    right, examples = counts.pop(device)
    others = sum(each for each, _ in counts.values()) / sum(each for _, each in counts.values())
    found = label_noise(right / examples, examples, others, classes)
    return {} if found is None else {"wrong_labels": found.share, "wrong_labels_error": found.error}

"""How many of a device's labels are wrong, as far as its accuracy tells."""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple


class LabelNoise(NamedTuple):
    """An estimate of the share of a device's labels that are drawn at random."""

    share: float
    error: float
    """Its standard error."""


def label_noise(
    accuracy: float, examples: int, fleet_accuracy: float, classes: int | None
) -> LabelNoise | None:
    """Return the share of labels that explains why the common model is right on ``accuracy`` of a
    device's examples, where it is right on ``fleet_accuracy`` of the others'.

    A label that is replaced by one of the other classes, each alike, agrees with a model of
    accuracy A with probability (1 - A) / (C - 1). So the accuracy is A - share (A - (1 - A) /
    (C - 1)) (the confusion of symmetric noise: Natarajan et al., "Learning with Noisy Labels",
    2013). ``classes`` None: not known; wrong labels are then taken never to agree, which gives a
    lower bound.

    Returns None where the model is no better than chance: nothing can be told then. Data of another
    kind lower the accuracy too: this number says how bad it is, not why.
    """
    by_chance = 0.0 if classes is None else (1 - fleet_accuracy) / (classes - 1)
    lost = fleet_accuracy - by_chance
    if lost <= 0 or examples < 1:
        return None
    share = (fleet_accuracy - accuracy) / lost
    error = sqrt(max(accuracy * (1 - accuracy), 1 / (4 * examples)) / examples) / lost
    return LabelNoise(share, error)

"""[quality]: looking at the devices' data, by the moments of their features and by the model's loss
on them."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from fleetlearn_coordinator.aggregation.exact_mean import MAX_UPDATES
from fleetlearn_coordinator.plan.toml_errors import Section
from fleetlearn_coordinator.quality.outliers import FEWEST
from fleetlearn_coordinator.rounds.settings import EvaluationSettings


class QualitySection(Section, frozen=True, kw_only=True):
    """Looks at the devices' data, in exchanges beside the training rounds."""

    every: Annotated[int, Meta(ge=1, le=2**31)] = 10
    """Committed rounds from one look to the next; there is one after the last round too."""
    devices: Annotated[int, Meta(ge=FEWEST, le=MAX_UPDATES)] = 100
    """Devices that are asked in a look."""
    minimum: Annotated[int, Meta(ge=FEWEST)] = FEWEST
    """Fewest devices that must have answered for a look to be valid."""
    deadline: Annotated[float, Meta(gt=0, le=366 * 86400.0)]
    """Seconds after which a look ends with what there is. Default: round.deadline."""
    alarm: Annotated[float, Meta(gt=0, lt=1)] = 0.01
    """A device is named where its data would be as unlike the others' with less than this
    probability, by chance and corrected for all numbers that are looked at."""
    classes: Annotated[int, Meta(ge=2, le=2**31)] | None = None
    """How many classes the labels have, for the estimate of wrong labels. Default: not known; the
    estimate is then a lower bound."""
    contributions: Annotated[int, Meta(ge=1, le=2**31)] | None = None
    """Committed rounds from one in which each update's worth is measured on held-out data
    (``evaluation.data``) to the next. Default: none is measured."""
    utilities: Annotated[int, Meta(ge=16, le=100_000)] = 256
    """About how many models are measured in such a round. For up to 8 devices all sets of them."""


def fill_quality(quality: dict[str, Any], round_: object, deadline: float) -> None:
    """Fill in what follows from the rounds. ``deadline``: the rounds' where the plan has none."""
    found = round_.get("deadline", deadline) if isinstance(round_, dict) else deadline
    quality.setdefault("deadline", found)


def quality_settings(quality: QualitySection | None) -> EvaluationSettings | None:
    """Return what the engine needs of the section."""
    if quality is None:
        return None
    return EvaluationSettings(quality.every, quality.devices, quality.minimum, quality.deadline)

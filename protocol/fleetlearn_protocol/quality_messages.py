"""What a device says of its data in the exchanges of the kind `quality`: moments of its features,
and the model measured on them. PROTOCOL.md, section 4, "Data quality", is the specification."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from fleetlearn_protocol.messages import MAX_EXAMPLES, Evaluation, Number

QUALITY = "quality"
"""The kind of these exchanges."""
MOST_FEATURES = 256
"""Values of an example, in the first array of a batch, that are features by themselves. Where it
has more, its features are ``FIGURES_OF_EXAMPLES``."""
FIGURES_OF_EXAMPLES = ("mean", "deviation", "least", "most")
"""Of all values of one example; the deviation is the population's standard deviation."""

FeatureNumbers = Annotated[tuple[Number, ...], Meta(max_length=MOST_FEATURES)]
FeatureCounts = Annotated[
    tuple[Annotated[int, Meta(ge=0, le=MAX_EXAMPLES)], ...], Meta(max_length=MOST_FEATURES)
]


class QualityAnswer(msgspec.Struct, frozen=True):
    """The content of a `reply` of the kind `quality`. The four lists have one number for each
    feature."""

    rows: Annotated[int, Meta(ge=1, le=MAX_EXAMPLES)]
    """How many examples there are."""
    missing: FeatureCounts
    """In how many of them the feature is not finite."""
    means: FeatureNumbers
    """The mean of the feature's finite values; 0 of none."""
    variances: FeatureNumbers
    """The mean of their squared distances from that mean."""
    fourths: FeatureNumbers
    """The mean of the fourth powers of these distances."""
    evaluation: Evaluation | None = None
    """The model measured on the same examples. null: its loss there is not finite."""

    @property
    def contradiction(self) -> str | None:
        """What of the answer does not fit together; None if all does."""
        lists = self.missing, self.means, self.variances, self.fourths
        if len({*map(len, lists)}) > 1:
            return "missing, means, variances and fourths have different lengths"
        if max(self.missing, default=0) > self.rows:
            return "more values are missing than there are examples"
        if min(*self.variances, *self.fourths, 0.0, 0.0) < 0:
            return "a mean of even powers is below 0"
        return None

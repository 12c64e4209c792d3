"""All that a private round releases, and what its summary says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from fleetlearn_protocol.messages import Evaluation
from numpy.typing import NDArray

from fleetlearn_coordinator.aggregation.privacy.beside_the_mean import count_within, noisy_metrics
from fleetlearn_coordinator.aggregation.privacy.release import release
from fleetlearn_coordinator.aggregation.privacy.rules import PrivacyRules
from fleetlearn_coordinator.aggregation.privacy.state import PrivacyState


class RoundRelease(NamedTuple):
    """What a private round lets the world see."""

    mean: NDArray[np.float64]
    """The noisy mean of the updates, float64, (P,)."""
    state: PrivacyState
    """For the next release."""
    summary: dict[str, Any]
    """What the round's summary says: ``privacy``, and ``evaluation`` and ``metrics`` where these
    are released."""


def release_round(
    rules: PrivacyRules,
    state: PrivacyState,
    total: NDArray[np.float64],
    clipped: Sequence[bool],
    evaluations: Sequence[Evaluation | None],
) -> RoundRelease:
    """Return the release of a round. ``total``: the sum of its updates, as for ``release``.
    ``clipped``: for each report, whether its update was longer than the clip norm.
    ``evaluations``: what each device measured of the round's model."""
    made = release(rules, state, total)
    after = made.state
    about: dict[str, float] = {"release": after.releases, "clip": state.clip}
    summary: dict[str, Any] = {"privacy": about}
    counted = count_within(rules, state, clipped)
    if counted is not None:
        after = replace(after, clip=counted.next_clip)
        about |= {"next_clip": counted.next_clip, "clipped_share": 1 - counted.within}
    measured = noisy_metrics(rules, state, evaluations)
    if measured is not None:
        about["metrics_noise"] = measured.noise
        # They are shown where other plans have what devices measured before they trained.
        summary |= {"evaluation": dict(measured.metrics), "metrics": dict(measured.metrics)}
    return RoundRelease(made.mean, after, summary)

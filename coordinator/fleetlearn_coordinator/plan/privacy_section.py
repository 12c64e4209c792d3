"""[privacy] of a plan: differential privacy of the devices that take part (docs/privacy.md)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from fleetlearn_protocol.messages import Name, Number
from msgspec import Meta

from fleetlearn_coordinator.aggregation.privacy.rules import Mechanism
from fleetlearn_coordinator.plan.toml_errors import Section

METRICS_SHARE = 0.1
"""By default the measured values take this share of 1 / noise^2."""
# With less, the sum may have more steps of the noise's grid than an int64 holds (release.py).
Multiplier = Annotated[float, Meta(ge=1e-3, le=1e6)]
Count = Annotated[int, Meta(ge=1, le=2**31)]


class PrivacySection(Section, frozen=True, kw_only=True):
    """[privacy]: what the released models may tell about one device. At least one of ``epsilon``
    and ``noise``."""

    epsilon: Annotated[float, Meta(gt=0, le=1e5)] | None = None
    """The budget: the run stops when its next release would go past it. Default: no budget, the
    run ends by [stop] alone."""
    delta: Annotated[float, Meta(gt=0, lt=1)]
    """The probability with which epsilon may not hold, as a rule far below 1 / population."""
    population: Count
    """How many devices may take part at all."""
    noise: Multiplier | None = None
    """The standard deviation of a release's noise on the sum of its updates, in units of the
    largest weight times ``clip``; with mechanism = "local" of one update's. Default: the least
    with which stop.rounds releases are within epsilon."""
    mechanism: Mechanism
    """gaussian: independent noise in each release; dp-ftrl: correlated noise, a part of which later
    releases cancel; local: noise on the device, for whoever trusts no coordinator; distributed:
    devices add it under the masks of [secure], so that nobody sees a sum without noise. Default:
    the recipe's, else gaussian."""
    colluding: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """With mechanism = "distributed": the share of the devices in any sum that may tell their noise
    to whoever would take it off. The others' noise is made enough without them. Default: none of
    them; with secure.mode = "pairwise" secure.adversaries of all that begin a round."""
    clip: Annotated[float, Meta(gt=0, le=1e30)]
    """C: a longer update is multiplied by clip / its norm (L2 norm of the whole update)."""
    clip_quantile: Annotated[float, Meta(gt=0, lt=1)] | None = None
    """The clip norm follows the updates, so that this share of them is within it; ``clip`` is where
    it begins. Default: it stays where it is."""
    clip_rate: Annotated[float, Meta(gt=0, le=10)] | None = None
    """How fast it follows them. Default: 0.2."""
    separation: Count
    """Least number of releases from one participation of a device to its next; 1: it may take part
    in each. Default: 1; dp-ftrl: population / (2 * cohort), rounded down, at least 1."""
    participations: Count
    """Most releases that one device takes part in. Default: stop.rounds / separation, rounded
    up."""
    sampling: Literal["none", "poisson"] = "none"
    """Whether each device takes part in a round by its own coin, with which epsilon is less. Only
    the simulator can do that: devices that check in when they like are no such sample."""
    metrics: Literal["none", "noised"] = "none"
    """Whether what devices measure is kept from everybody, or released with noise."""
    metrics_noise: Multiplier | None = None
    """The noise multiplier of all measured values of a round together. Default: sqrt(10) times
    ``noise``, so that they take a tenth of 1 / noise^2."""
    metrics_bounds: dict[Name, tuple[Number, Number]] = msgspec.field(default_factory=dict)
    """The measured values that are released, "loss" or metrics of the bundle -> the least and the
    greatest that a device's mean counts as. Default: stop.metric with stop.bounds."""

    def most_of(self, rounds: int) -> int:
        """Return how many of so many releases one device can take part in."""
        return min(self.participations, -(-rounds // self.separation))

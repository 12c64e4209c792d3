"""What a plan's [privacy] says of the releases of a run. ``Plan.round_rules`` makes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fleetlearn_coordinator.aggregation.privacy.noise_split import NoiseSplit, split_noise

Mechanism = Literal["gaussian", "dp-ftrl", "local", "distributed"]
"""gaussian: independent noise in each release. dp-ftrl: noise that is correlated from release to
release, so that a part of it cancels out. local: the noise of each update is added on its
device. distributed: devices add it under the masks of secure aggregation, so that the sum of the
fewest that are added up has a release's noise."""


@dataclass(frozen=True, kw_only=True)
class PrivacyRules:
    """The rules of all releases of a run. A release is one committed round's noisy mean."""

    mechanism: Mechanism
    noise: float
    """z, the noise multiplier: the standard deviation of a release's noise on the sum of its
    updates, in units of ``largest_weight * clip``; of one update's noise with the mechanism local.
    Where a round releases more than the mean, they share it."""
    clip: float
    """C, the L2 norm to which updates are clipped; of the first release where the norm is
    adaptive."""
    clip_quantile: float | None = None
    """The share of the updates that is to be within the clip norm. None: the norm stays."""
    clip_rate: float = 0.2
    """How fast an adaptive clip norm moves."""
    goal: int
    """Reports wanted. The mean is divided by ``goal * largest_weight``, however many came."""
    largest_weight: int = 1
    """W, the most that an update weighs. One of weight w contributes w / W of itself."""
    separation: int = 1
    """Least number of releases from one participation of a device to its next; 1: each release."""
    participations: int
    """Most participations of one device in the run."""
    planned: int = 1
    """Most releases under these rules; correlated noise is made for that many."""
    survivors: int | None = None
    """With mechanism distributed: how many devices' own noise is a release's together. None: the
    coordinator adds it, or each device all of it."""
    metrics: bool = False
    """Whether what devices measure is released, with noise."""
    metrics_noise: float | None = None
    """The noise multiplier of all measured values of a round together. None without metrics."""
    metric_bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """The measured values that are released -> the least and the greatest that a device's mean
    counts as."""

    @property
    def split(self) -> NoiseSplit:
        """How what one round releases shares the noise multiplier. Raises ValueError, in words,
        where nothing is left for the mean."""
        adaptive = self.clip_quantile is not None
        return split_noise(
            self.noise, self.goal, adaptive=adaptive, metrics_noise=self.metrics_noise
        )

"""How the releases of one private round share its noise multiplier.

A round with a noise multiplier z may release more than the mean of its updates: how many updates
were within the clip norm, so that the norm can follow them, and what devices measured. Gaussian
mechanisms that are released together are one with 1/z^2 = sum_j 1/z_j^2, so the mean's own noise
is larger by as much as the others take (Andrew, Thakkar, McMahan and Ramaswamy, "Differentially
Private Learning with Adaptive Clipping" (2021), arXiv 1905.03871, section 2.3):

    z_update = (z^-2 - (2 sigma_b)^-2 - z_metrics^-2)^-1/2

A device's part of the count is +1/2 or -1/2, so noise of the standard deviation sigma_b has the
multiplier 2 sigma_b. All multipliers are of devices whose part is replaced by zeros.

With correlated noise the count and the metrics have independent noise. A device with k
participations then loses k / z_j^2 by each of them, and sens^2 / z_update^2 by the mean, where
sens^2 is at least k. Their sum is at most sens^2 / z^2: what the mean alone would lose at z.
"""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

COUNT_SHARE = 0.05
"""sigma_b over the round's goal: the paper's m / 20."""


class NoiseSplit(NamedTuple):
    """The noise of everything that one private round releases."""

    update: float
    """The noise multiplier of the mean of updates, at least the round's."""
    clip_count: float | None
    """sigma_b: the standard deviation, in devices, of the noise on how many updates were within the
    clip norm. None: nobody is told."""
    metrics: float | None
    """The noise multiplier of all measured values together. None: nobody is told."""


def count_noise(goal: int) -> float:
    """Return sigma_b, in devices, of a round of ``goal`` reports."""
    return COUNT_SHARE * goal


def split_noise(
    noise: float, goal: int, *, adaptive: bool, metrics_noise: float | None
) -> NoiseSplit:
    """Return how a round's noise multiplier is shared. ``adaptive``: whether the clip norm follows
    the updates. ``metrics_noise``: the multiplier of all measured values; None: they are not
    released.

    Raises ValueError, in words, where nothing is left for the mean."""
    left = noise**-2
    count = count_noise(goal) if adaptive else None
    parts = []
    if count is not None:
        what = f"the count of clipped updates, with noise of {count:g} devices, takes"
        parts.append((what, (2 * count) ** -2))
    if metrics_noise is not None:
        parts.append(("what devices measure takes", metrics_noise**-2))
    for _, taken in parts:
        left -= taken
    if left <= 0:
        takes = " and ".join(f"{what} {taken:.4g}" for what, taken in parts)
        raise ValueError(
            f"privacy.noise = {noise:g} leaves nothing for the mean of updates: all that a "
            f"round releases takes 1 / noise^2 = {noise**-2:.4g} together, and {takes}. "
            f"{_advice(adaptive, metrics_noise is not None)}"
        )
    return NoiseSplit(1 / sqrt(left), count, metrics_noise)


def _advice(adaptive: bool, measured: bool) -> str:
    ways = []
    if adaptive:
        ways.append("a larger round.goal, or no privacy.clip_quantile")
    if measured:
        ways.append('a larger privacy.metrics_noise, or privacy.metrics = "none"')
    return f"It takes {', or '.join(ways)}"

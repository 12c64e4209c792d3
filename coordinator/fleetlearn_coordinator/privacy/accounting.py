"""Epsilon of a noise, and the noise for an epsilon. The only file that imports dp_accounting.

Every mechanism of ours is Gaussian, so that a run without amplification by sampling is one
Gaussian mechanism: mu^2 = sum of (sensitivity / noise)^2 over its parts, and its epsilon is that
of a noise of 1 / mu on a sensitivity of 1 (Balle and Wang, "Improving the Gaussian Mechanism for
Differential Privacy", arXiv 1805.06530, theorem 8, as dp_accounting computes it).

Sensitivities are in units of the clip norm C, noise in units of the largest weight times C.
"""

from __future__ import annotations

import math
from functools import lru_cache
from types import ModuleType

import numpy as np
from fleetlearn_protocol.errors import Code, FleetError

from fleetlearn_coordinator.aggregation.privacy.rules import Mechanism


class PrivacyError(FleetError):
    """A loss of privacy that cannot be computed, or a noise that cannot be found."""


def need_accounting() -> ModuleType:
    """Return dp_accounting. Raises PrivacyError where the extra ``privacy`` is not installed."""
    try:
        import dp_accounting
    except ImportError:
        raise PrivacyError(
            Code.BAD_MESSAGE,
            "[privacy] of a plan needs the package dp-accounting, which computes epsilon, and it "
            "is not installed. Install the extra: pip install 'fleetlearn[coordinator,privacy]'",
        ) from None
    return dp_accounting  # type: ignore[no-any-return]


def sensitivity(mechanism: Mechanism, releases: int, separation: int, participations: int) -> float:
    """Return how far a device's contributions to this many releases, replaced by zeros, move what
    the noise is added to (L2 norm, in units of C), where the device takes part at most
    ``participations`` times, each at least ``separation`` releases after the last.

    Independent noise: each contribution is at most 1 long and in a release of its own, so that it
    is the root of their number.
    """
    if mechanism == "dp-ftrl":
        raise PrivacyError(
            Code.BAD_MESSAGE, 'mechanism = "dp-ftrl" is not accounted for yet; use "gaussian"'
        )
    return math.sqrt(min(participations, -(-releases // separation)))


@lru_cache(maxsize=1024)
def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return epsilon at ``delta`` of a Gaussian mechanism with sensitivity / noise = ``mu``, at
    least 0. Raises PrivacyError without the extra."""
    accounting = need_accounting()
    if mu == 0:
        return 0.0
    # The logarithm of 0, where delta of a trial epsilon is 0.
    with np.errstate(all="ignore"):
        return float(accounting.get_epsilon_gaussian(1 / mu, delta))


@lru_cache(maxsize=1024)
def noise_for(epsilon: float, delta: float, sensitivity: float) -> float:
    """Return the least noise multiplier with which a Gaussian mechanism of this sensitivity is
    within ``epsilon`` at ``delta``. Raises PrivacyError without the extra."""
    accounting = need_accounting()
    with np.errstate(all="ignore"):
        ratio = float(accounting.get_sigma_gaussian(epsilon, delta))
    noise = ratio * sensitivity
    # The search ends within 1e-12 of the noise, maybe below it.
    while gaussian_epsilon(sensitivity / noise, delta) > epsilon:
        noise *= 1 + 1e-13
    return noise

"""Epsilon of a noise, and the noise for an epsilon. The only file that imports dp_accounting.

Every mechanism of ours is Gaussian, so that a run without amplification by sampling is one
Gaussian mechanism: mu^2 = sum of (sensitivity / noise)^2 over its parts, and its epsilon is that
of a noise of 1 / mu on a sensitivity of 1 (Balle and Wang, "Improving the Gaussian Mechanism for
Differential Privacy", arXiv 1805.06530, theorem 8, as dp_accounting computes it).

Sensitivities are in units of the clip norm C, noise in units of the largest weight times C. What
rounding adds to a sensitivity is in the noise itself, which is raised by it
(aggregation/privacy/release.py, correlated.py); what the sampler's numbers are away from Gaussian
ones changes delta by less than 2^-900 (fleetlearn_protocol/discrete_gaussian.py). So nothing more
is to be counted here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from types import ModuleType

import numpy as np
from fleetlearn_protocol.epsilon_text import budget_text
from fleetlearn_protocol.errors import Code, FleetError

from fleetlearn_coordinator.aggregation.privacy.blt import correlated_sensitivity
from fleetlearn_coordinator.aggregation.privacy.rules import Mechanism

MOST_NOISE = 1e6
"""The largest noise multiplier, as in a plan."""
NOISE_DIGITS = 9
"""Significant digits of a noise multiplier that is computed."""
FINE, MIDDLE, COARSE = 1e-4, 1e-3, 1e-2
"""Steps in which losses of privacy are counted."""
FINE_NOISE = 0.4
"""From this noise multiplier on, losses are counted in fine steps."""
TOLERANCE = 1e-4
"""How far, as a fraction, a noise that is searched for may be above the least."""


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


def has_accounting() -> bool:
    """Return whether the extra ``privacy`` is installed."""
    try:
        need_accounting()
    except PrivacyError:
        return False
    return True


def sensitivity(
    mechanism: Mechanism,
    releases: int,
    separation: int,
    participations: int,
    planned: int | None = None,
) -> float:
    """Return how far a device's contributions to this many releases, replaced by zeros, move what
    the noise is added to (L2 norm, in units of C), where the device takes part at most
    ``participations`` times, each at least ``separation`` releases after the last.

    Independent noise: each contribution is at most 1 long and in a release of its own, so that it
    is the root of their number. ``planned``: for how many releases correlated noise is made; None:
    for these. Local: what a device sends is what it tells, whether it counts or not, so that there
    is one contribution in each round, whatever the limits are.
    """
    if mechanism == "local":
        return math.sqrt(releases)
    if mechanism == "dp-ftrl":
        return correlated_sensitivity(releases, separation, participations, planned)
    return math.sqrt(min(participations, -(-releases // separation)))


@lru_cache(maxsize=4096)
def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return epsilon at ``delta`` of a Gaussian mechanism with sensitivity / noise = ``mu``, at
    least 0. Raises PrivacyError without the extra."""
    accounting = need_accounting()
    if mu == 0:
        return 0.0
    # The logarithm of 0, where delta of a trial epsilon is 0.
    with np.errstate(all="ignore"):
        return float(accounting.get_epsilon_gaussian(1 / mu, delta))


@lru_cache(maxsize=256)
def noise_for(epsilon: float, delta: float, sensitivity: float) -> float:
    """Return the least noise multiplier of NOISE_DIGITS digits with which a Gaussian mechanism of
    this sensitivity is within ``epsilon`` at ``delta``. Raises PrivacyError without the extra, and
    where it would be more than MOST_NOISE.

    A run whose plan states a budget computes its noise at each start. With all digits, another
    version of SciPy could find another noise, and the run would take that for a changed plan."""
    accounting = need_accounting()
    with np.errstate(all="ignore"):
        noise = sensitivity * float(accounting.get_sigma_gaussian(epsilon, delta))
    step = 10.0 ** (math.floor(math.log10(noise)) + 1 - NOISE_DIGITS)
    steps = math.ceil(noise / step)
    # The search ends within 1e-12 of the noise, maybe below it.
    while gaussian_epsilon(sensitivity / (steps * step), delta) > epsilon:
        steps += 1
    return _found(steps * step, epsilon, delta)


@lru_cache(maxsize=256)
def poisson_epsilon(
    noise: float, rate: float, releases: int, delta: float, interval: float | None = None
) -> float:
    """Return epsilon at ``delta`` of this many releases with independent noise, where each device
    takes part in each of them by a coin of its own, with probability ``rate``.

    By privacy loss distributions (Doroshenko et al., "Connect the Dots", arXiv 2207.04380), as
    dp_accounting composes them: an upper bound, a little above the least. ``interval``: the step in
    which losses are counted; with a larger one the bound is higher and found sooner. Takes up to
    some seconds. Raises PrivacyError without the extra.
    """
    accounting = need_accounting()
    if interval is None:
        # Where epsilon is in the hundreds, fine steps would take minutes, and tell no more.
        interval = FINE if noise >= FINE_NOISE else COARSE
    accountant = accounting.pld.PLDAccountant(value_discretization_interval=interval)
    one = accounting.PoissonSampledDpEvent(rate, accounting.GaussianDpEvent(noise))
    accountant.compose(accounting.SelfComposedDpEvent(one, releases))
    return float(accountant.get_epsilon(delta))


@lru_cache(maxsize=64)
def poisson_noise_for(epsilon: float, delta: float, rate: float, releases: int) -> float:
    """Return a noise multiplier with which these releases are within ``epsilon`` at ``delta``, at
    most a fraction of TOLERANCE above the least. Takes some seconds. Raises PrivacyError without
    the extra, and where it would be more than MOST_NOISE."""

    def fits(interval: float | None, noise: float) -> bool:
        return poisson_epsilon(noise, rate, releases, delta, interval) <= epsilon

    # Enough without sampling is enough with it. The bound in coarse steps is an upper one too, so
    # that fine steps are needed close to the end alone.
    noise = noise_for(epsilon, delta, math.sqrt(releases))
    for interval, step in ((COARSE, 0.5), (MIDDLE, 0.05), (None, 0.002)):
        noise = _least_noise(partial(fits, interval), noise, step)
    return noise


def _least_noise(fits: Callable[[float], bool], enough: float, step: float) -> float:
    """Return a noise that fits, at most a fraction of TOLERANCE above the least, at most
    ``enough``. ``step``: the fraction by which noise is made smaller until it does not fit."""
    while fits(enough * (1 - step)):
        enough *= 1 - step
    low = enough * (1 - step)
    while enough - low > TOLERANCE * enough:
        middle = (low + enough) / 2
        low, enough = (low, middle) if fits(middle) else (middle, enough)
    return enough


def _found(noise: float, epsilon: float, delta: float) -> float:
    """Return the noise. Raises PrivacyError where nobody can mean it."""
    if noise <= MOST_NOISE:
        return noise
    raise PrivacyError(
        Code.BAD_MESSAGE,
        f"epsilon = {budget_text(epsilon)} at delta = {delta:g} would take a noise multiplier "
        f"above {MOST_NOISE:g}, in which every update is lost. It takes a larger epsilon, fewer "
        "releases, or fewer participations of a device",
    )

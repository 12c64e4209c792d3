"""Buffered linear Toeplitz matrices (BLT): correlated noise that needs a few buffers.

The coefficients are c_0 = 1 and c_k = sum over j of omega_j theta_j^(k-1). With such a C, what
n = C^-1 z needs of all earlier noise is one running sum S_j per buffer:

    n_t = z_t - sum over j of omega_j S_j        and then        S_j = theta_j S_j + n_t

so that memory does not grow with the number of releases or with the separation (a matrix of b
bands keeps b - 1 of the n's). Four buffers come within 0.1 % of the best matrix for 2048 releases
and one participation. Sources: ``toeplitz.py``; the parameters are found by ``blt_search.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fleetlearn_coordinator.aggregation.privacy.blt_search import search
from fleetlearn_coordinator.aggregation.privacy.toeplitz import sensitivity

BUFFERS = 4
"""How many buffers a strategy has."""


@dataclass(frozen=True)
class BltStrategy:
    """A buffered linear Toeplitz matrix C. Raises ValueError where its coefficients could be
    negative or increase: what noise it needs would not be known."""

    theta: tuple[float, ...]
    """What each buffer keeps of itself from one release to the next; at least 0, less than 1."""
    omega: tuple[float, ...]
    """How much of each buffer is taken from the next noise; at least 0, together at most 1."""

    def __post_init__(self) -> None:
        decays = all(0 <= theta < 1 for theta in self.theta)
        positive = all(omega >= 0 for omega in self.omega) and sum(self.omega) <= 1
        if not (decays and positive and len(self.theta) == len(self.omega) > 0):
            raise ValueError(
                f"a BLT has theta in 0 <= theta < 1 and as many omega >= 0 whose sum is at most 1, "
                f"not theta {self.theta}, omega {self.omega}"
            )

    def coefficients(self, releases: int) -> NDArray[np.float64]:
        """Return c, the first column of C for this many releases: float64, shape (releases,). They
        are not negative and do not increase."""
        powers = np.power.outer(np.array(self.theta), np.arange(releases - 1))
        later = (np.array(self.omega)[:, None] * powers).sum(axis=0)
        # The last bit of a power must not make a coefficient larger than the one before.
        return np.minimum.accumulate(np.concatenate([[1.0], later]))

    def sensitivity(self, releases: int, separation: int, participations: int) -> float:
        """Return the most that a device's contributions of norm 1 move C x in this many releases;
        arguments and errors are those of ``toeplitz.sensitivity``."""
        return sensitivity(self.coefficients(releases), separation, participations)


@lru_cache(maxsize=64)
def strategy_for(
    releases: int, separation: int, participations: int, buffers: int = BUFFERS
) -> BltStrategy:
    """Return the strategy for a run that plans this many releases, in which a device takes part at
    most ``participations`` times, each at least ``separation`` releases after the last: of all with
    this many buffers, about that with the least greatest error of a prefix sum for its sensitivity.
    That is independent noise where a device may take part in every release. The same arguments give
    the same bits. Takes a tenth of a second the first time. Raises ValueError if an argument is
    below 1.
    """
    return BltStrategy(*search(releases, separation, participations, buffers))


@lru_cache(maxsize=4096)
def correlated_sensitivity(
    releases: int,
    separation: int,
    participations: int,
    planned: int | None = None,
    strategy: BltStrategy | None = None,
) -> float:
    """Return how far a device's contributions move what the noise is added to, in units of the clip
    norm, in the first ``releases`` releases of a run (or segment) that planned ``planned`` of them;
    None: all that it planned. ``strategy``: what it was made with; None: what is found for it now.

    There may be more releases than planned. The matrix goes on with the same theta and omega, and
    what they cost is exact; the noise is only not the best for that many. Takes O(releases). Raises
    ValueError if an argument is below 1.
    """
    if strategy is None:
        strategy = strategy_for(planned or releases, separation, participations)
    return strategy.sensitivity(releases, separation, participations)

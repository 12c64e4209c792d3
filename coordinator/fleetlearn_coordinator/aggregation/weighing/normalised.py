"""FedNova: updates divided by the local work that made them, so that devices that do more steps
have no more say.

Wang, Liu, Liang, Joshi and Poor, "Tackling the Objective Inconsistency Problem in Heterogeneous
Federated Optimization" (2020), arXiv 2007.07481, section 5. A device's update is -lr * sum over its
steps of a_ij * g_ij: each gradient counts with a factor a_ij >= 0, which follows from the local
step. The model moves by

    tau_eff * sum(p_i * x_i / ||a_i||_1),    tau_eff = sum(p_i * ||a_i||_1)

with p_i the weights' shares: the paper's equation 9 with its default tau_eff. ||a_i||_1 is the
number of steps for SGD, sum over them of (1 - rho^j) / (1 - rho) for momentum rho, and (1 - (1 -
alpha)^tau) / alpha for a proximal term with alpha = lr * mu (the paper's section 4.1).

Where no a_ij is negative, their sum is how far constant gradients of 1 take a model (in units of
-lr). With the path z and the momentum b of such a model, one step is, for each of the local steps
here,

    g = 1 - alpha * z;  b <- rho * b + g;  z <- z + b  (momentum),  z <- z + g + rho * b  (Nesterov)

and tau steps are a power of a 3 x 3 matrix: 31 squarings at most for whatever a device claims to
have done. SGD is momentum with rho = 0. No a_ij is negative while the path has no swing, which
bounds alpha (``most_alpha``)."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache, partial
from math import fsum
from statistics import median

from fleetlearn_coordinator.aggregation.weighing.weighing import Reported, WeighingRule

Matrix = tuple[tuple[float, ...], ...]
STEPS = ("sgd", "momentum", "nesterov")
"""The local optimizers with such factors a_ij."""
MOST_SCALE = 10.0
"""tau_eff is at most this many times the median of ||a_i||_1: it decides how far the model moves,
not where to, and a device that claims 2^31 steps must not decide it."""


def most_alpha(optimizer: str, rho: float) -> float:
    """Return up to which lr * mu no gradient counts with a negative factor.

    The powers of the step's matrix do not swing if its eigenvalues are real: those of the momentum
    step solve x^2 - (1 + rho - alpha) x + rho = 0, those of Nesterov's x^2 - (1 + rho) (1 - alpha)
    x + rho (1 - alpha) = 0."""
    return ((1 - rho) / (1 + rho)) ** 2 if optimizer == "nesterov" else (1 - rho**0.5) ** 2


@lru_cache(maxsize=65536)
def work(steps: int, optimizer: str, rho: float, alpha: float) -> float:
    """Return ||a||_1 of this many local steps: at least 1."""
    path = (
        (1 - alpha * (1 + rho), rho * rho, 1 + rho)
        if optimizer == "nesterov"
        else (1 - alpha, rho, 1.0)
    )
    power: Matrix = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
    base: Matrix = (path, (-alpha, rho, 1.0), (0.0, 0.0, 1.0))  # of z, b, 1
    while steps:
        if steps & 1:
            power = _product(power, base)
        base, steps = _product(base, base), steps >> 1
    return max(1.0, power[0][2])  # from z = b = 0


def _product(left: Matrix, right: Matrix) -> Matrix:
    columns = tuple(zip(*right, strict=True))
    return tuple(
        tuple(sum(a * b for a, b in zip(row, column, strict=True)) for column in columns)
        for row in left
    )


def normalised(optimizer: str, rho: float, alpha: float) -> WeighingRule:
    """Return the rule for a local step: its optimizer, one of STEPS, with momentum ``rho`` and
    ``alpha`` = lr * mu."""
    own = partial(work, optimizer=optimizer, rho=rho, alpha=alpha)

    def scale(reports: Collection[Reported], level: float | None) -> float:
        works = [own(each.steps) for each in reports]
        mean = fsum(each.weight * one for each, one in zip(reports, works, strict=True))
        return min(mean / sum(each.weight for each in reports), MOST_SCALE * median(works))

    def factor(reported: Reported, level: float | None) -> float:
        return 1 / own(reported.steps)

    return WeighingRule(
        "normalised",
        factor,
        scale,
        lambda reports, level: level,
        needs_norms=False,
        needs_losses=False,
    )

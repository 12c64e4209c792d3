"""The BG/NBD model of repeat purchases, fitted by Newton's method to customers whom nobody sees
together; and what the fitted model says of a customer.

Fader, Hardie and Lee 2005, "Counting Your Customers" the Easy Way: An Alternative to the Pareto/NBD
Model, Marketing Science 24(2). While active, a customer buys at random times, at a rate that is
gamma(r, alpha) over customers; after each purchase the customer leaves with a probability that is
beta(a, b). The likelihood is a product over customers, so that its logarithm's gradient and Hessian
are sums: ``sums`` runs on each device, ``step`` on the coordinator. _purchase_bgnbd.toml declares
the arrays. ``age`` is the paper's T: weeks from the first purchase to the day of the look.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import digamma, gammaln, hyp2f1, polygamma

NAMES = ("r", "alpha", "a", "b")
MOST = 1.0
"""Length of a step of the logarithms at most: the likelihood is not concave everywhere."""
ENOUGH = 1e-6
"""The largest step of a logarithm after which the fit has ended."""
Floats = NDArray[np.float64]


def sums(state: dict[str, Any], rows: dict[str, Any]) -> dict[str, Any]:
    """On a device: log-likelihood of its customers, equation 6 as section 7 writes it, with the
    gradient and Hessian by the logarithms of the parameters."""
    r, alpha, a, b = natural = np.exp(state["log_parameters"])
    x, t_x, age = rows["x"], rows["t_x"], rows["age"]
    zero, again = np.zeros_like(x), x > 0
    left = np.where(again, b + x - 1, 1.0)  # the second term is there for x > 0 alone
    # Logarithms of: active until now; left at t_x.
    active = -(r + x) * np.log(alpha + age)
    gone = np.where(again, np.log(a / left) - (r + x) * np.log(alpha + t_x), -np.inf)
    both = np.logaddexp(active, gone)
    p = np.exp(active - both)
    log_likelihood = gammaln(r + x) - gammaln(r) + r * np.log(alpha) + both
    log_likelihood += gammaln(a + b) + gammaln(b + x) - gammaln(b) - gammaln(a + b + x)

    gradient_active = np.array([-np.log(alpha + age), -(r + x) / (alpha + age), zero, zero])
    gradient_gone = np.array(
        [-np.log(alpha + t_x), -(r + x) / (alpha + t_x), zero + 1 / a, -1 / left]
    )
    difference = gradient_active - gradient_gone
    gradient = p * gradient_active + (1 - p) * gradient_gone
    gradient[0] += digamma(r + x) - digamma(r) + np.log(alpha)
    gradient[1] += r / alpha
    by_a = digamma(a + b) - digamma(a + b + x)
    gradient[2] += by_a
    gradient[3] += by_a + digamma(b + x) - digamma(b)

    hessian = p * (1 - p) * difference[:, None] * difference[None]
    hessian[0, 0] += polygamma(1, r + x) - polygamma(1, r)
    hessian[0, 1] += 1 / alpha - p / (alpha + age) - (1 - p) / (alpha + t_x)
    hessian[1, 0] = hessian[0, 1]
    hessian[1, 1] += (r + x) * (p / (alpha + age) ** 2 + (1 - p) / (alpha + t_x) ** 2)
    hessian[1, 1] -= r / alpha**2
    by_ab = polygamma(1, a + b) - polygamma(1, a + b + x)
    hessian[2:, 2:] += by_ab
    hessian[2, 2] -= (1 - p) / a**2
    hessian[3, 3] += polygamma(1, b + x) - polygamma(1, b) + (1 - p) / left**2

    by_logarithm = natural * gradient.sum(axis=1)
    return {
        "gradient": by_logarithm,
        "hessian": np.outer(natural, natural) * hessian.sum(axis=2) + np.diag(by_logarithm),
        "log_likelihood": log_likelihood.sum(),
    }


def step(
    state: dict[str, Any], sums: dict[str, Any], count: Any
) -> tuple[dict[str, Any], dict[str, float], bool]:
    """On the coordinator: Newton's step, uphill also where the likelihood is not concave."""
    curvatures, directions = np.linalg.eigh(sums["hessian"])
    change = directions @ ((directions.T @ sums["gradient"]) / np.abs(curvatures))
    change *= min(1.0, MOST / np.linalg.norm(change))
    largest = float(np.abs(change).max())
    reached = {"log_parameters": state["log_parameters"] + change, "hessian": sums["hessian"]}
    metrics = {"log_likelihood": sums["log_likelihood"], "largest_step": largest}
    return reached, metrics, largest < ENOUGH


def standard_errors(state: dict[str, Any]) -> Floats:
    """Return those of the four parameters, by the curvature at the maximum."""
    of_logarithms = np.sqrt(np.diag(np.linalg.inv(-state["hessian"])))
    return np.asarray(np.exp(state["log_parameters"]) * of_logarithms)


def active(parameters: Floats, x: Floats, t_x: Floats, age: Floats) -> Floats:
    """Return the probability that each customer has not left: the denominator of equation 10."""
    r, alpha, a, b = parameters
    again = x > 0
    odds = a / np.where(again, b + x - 1, 1.0) * ((alpha + age) / (alpha + t_x)) ** (r + x)
    return np.asarray(1 / (1 + again * odds))


def expected(parameters: Floats, x: Floats, t_x: Floats, age: Floats, weeks: float) -> Floats:
    """Return the purchases to expect of each customer in these weeks: equation 10."""
    r, alpha, a, b = parameters
    share = ((alpha + age) / (alpha + age + weeks)) ** (r + x)
    series = hyp2f1(r + x, b + x, a + b + x - 1, weeks / (alpha + age + weeks))
    found = (a + b + x - 1) / (a - 1) * (1 - share * series)
    return np.asarray(found * active(parameters, x, t_x, age))


def chance(parameters: Floats, x: Floats, t_x: Floats, age: Floats, weeks: float) -> Floats:
    """Return the probability that each customer buys in these weeks.

    Who is active buys at a rate that is gamma(r + x, alpha + age), so that the first purchase waits
    longer than these weeks with the probability ((alpha + age) / (alpha + age + weeks))^(r + x).
    """
    r, alpha, *_ = parameters
    waits = ((alpha + age) / (alpha + age + weeks)) ** (r + x)
    return np.asarray(active(parameters, x, t_x, age) * (1 - waits))

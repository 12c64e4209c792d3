"""The search for a BLT's parameters: the least error for its sensitivity.

The generating function of the coefficients is C(x) = prod (1 - zeta_j x) / prod (1 - theta_j x).
Its inverse has zeta and theta change places, and is a BLT as well (2404.16706, section 5). Where
1 > theta_1 > zeta_1 > theta_2 > ... > zeta_d > 0, each omega is positive and their sum, that of
theta_j - zeta_j, is below 1: each point of the search is a matrix whose sensitivity is known. A
point is the logarithms of the steps from 0 up to -log(1 - zeta_d), from there to
-log(1 - theta_d), and so on up to -log(1 - theta_1); they may be any numbers.

What is minimised is the standard deviation of the noise in the sum of all n releases (no earlier
sum has more) times the sensitivity: "MaxLoss" of 2408.08868. Both are sums of geometric series, so
that a step takes as long for a million releases as for ten.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

PULL = 1e-5
"""How hard the search is pulled towards evenly spread parameters. Without it two buffers may become
one, or one a constant, which gains less than this and costs digits."""
RESULT_GRID = 2.0**-40
"""To what theta and omega are rounded, so that the last bits of this machine's exp do not count."""


def search(
    releases: int, separation: int, participations: int, buffers: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return theta and omega of about the best BLT; arguments and errors are those of
    ``blt.strategy_for``."""
    if min(releases, separation, participations, buffers) < 1:
        raise ValueError(
            f"there is no strategy for {releases} releases, separation {separation}, "
            f"{participations} participations and {buffers} buffers: each must be at least 1"
        )
    if min(participations, -(-releases // separation)) == releases:
        # A device may be in every release, and then moves their sum by as much as there are of
        # them. No noise hides that better than independent noise.
        return (0.0,) * buffers, (0.0,) * buffers
    # 1 - theta_1 begins at 1 / releases; the others are even between that and 1, as logarithms.
    start = np.full(2 * buffers, np.log(np.log(max(releases, 8)) / (2 * buffers)))

    def loss(point: Array) -> float:
        pull = PULL * float(((point - start) ** 2).sum())
        return log_loss(point, releases, separation, participations) + pull

    theta, zeta = parameters(np.rint(minimise(loss, start) * 1024) / 1024)
    gaps = np.maximum(np.rint(theta / RESULT_GRID), 1.0) * RESULT_GRID
    omega = np.rint(residues(theta, zeta) / RESULT_GRID) * RESULT_GRID
    return tuple((1.0 - gaps).tolist()), tuple(omega.tolist())


def parameters(point: Array) -> tuple[Array, Array]:
    """Return 1 - theta and 1 - zeta, each (d,), at a point of the search, (2d,)."""
    gaps = np.exp(-np.cumsum(np.exp(point)))[::-1]
    return gaps[::2], gaps[1::2]


def residues(poles: Array, zeros: Array) -> Array:
    """Return omega, (d,), of prod (1 - zeros_j x) / prod (1 - poles_j x) = 1 + sum over j of
    omega_j x / (1 - poles_j x). Poles and zeros are given as 1 - pole and 1 - zero."""
    above = (zeros[None, :] - poles[:, None]).prod(axis=1)
    below = poles[None, :] - poles[:, None]
    np.fill_diagonal(below, 1.0)
    found: Array = above / below.prod(axis=1)
    return found


def log_loss(point: Array, releases: int, separation: int, participations: int) -> float:
    """Return the logarithm of error times sensitivity at a point of the search."""
    theta, zeta = parameters(point)
    error = _squared_error(theta, zeta, releases)
    return 0.5 * float(
        np.log(error * _squared_sensitivity(theta, zeta, releases, separation, participations))
    )


def _squared_error(theta: Array, zeta: Array, releases: int) -> float:
    """Return the variance of the noise in the sum of all releases, where z has variance 1. What the
    sum of the first t of C^-1's coefficients is: a constant plus a multiple of each zeta_j^t."""
    constant = (theta / zeta).prod()
    factors = np.concatenate([[constant], -residues(zeta, theta) / zeta])
    logs = np.concatenate([[0.0], np.log1p(-zeta)])
    return float((factors * _series(logs, releases) * factors[:, None]).sum())


def _squared_sensitivity(
    theta: Array, zeta: Array, releases: int, separation: int, participations: int
) -> float:
    """Return the square of ``toeplitz.sensitivity``. From one participation to the next the sum of
    the columns is a multiple of each theta_j^t, after its first element."""
    omega, logs = residues(theta, zeta), np.log1p(-theta)
    columns = min(participations, -(-releases // separation))
    powers = np.exp(np.arange(columns)[:, None] * separation * logs)
    multiples = omega * np.cumsum(powers, axis=0)
    before = (multiples[:-1] * np.exp((separation - 1) * logs)).sum(axis=1)
    first = 1.0 + ((1.0 + before) ** 2).sum()
    series = _series(logs, separation - 1)
    between = np.einsum("mi,ij,mj->", multiples[:-1], series, multiples[:-1])
    last = _series(logs, releases - (columns - 1) * separation - 1)
    return float(first + between + (multiples[-1] * last * multiples[-1][:, None]).sum())


def _series(logs: Array, terms: int) -> Array:
    """Return for each pair of factors a, b (given as logarithms) the sum of (a b)^t over 0 <= t <
    terms, (d, d)."""
    both = np.add.outer(logs, logs)
    found: Array = np.expm1(terms * both) / np.where(both < 0, np.expm1(both), 1.0)
    return np.where(both < 0, found, float(terms))


def minimise(function: Callable[[Array], float], point: Array, steps: int = 300) -> Array:
    """Return a point near a minimum of ``function``, from ``point`` on: BFGS (Nocedal and Wright,
    "Numerical Optimization", algorithm 6.1) with differences for derivatives, and steps that halve
    until the value falls. The same on each call."""
    value, slope = function(point), _slope(function, point)
    curvature = np.eye(len(point))
    for _ in range(steps):
        direction = -(curvature * slope).sum(axis=1)
        if (direction * slope).sum() >= 0:
            curvature = np.eye(len(point))
            direction = -slope
        direction /= max(1.0, float(np.abs(direction).max()))
        gain = float((direction * slope).sum())
        length = 1.0
        while (lower := function(point + length * direction)) > value + 1e-4 * length * gain:
            length /= 2
            if length < 1e-9:
                return point
        move = length * direction
        before, slope = slope, _slope(function, point + move)
        point = point + move
        if value - lower < 1e-10:
            break
        value = lower
        change = slope - before
        along = float((move * change).sum())
        if along > 1e-12:
            turn = np.eye(len(point)) - np.outer(move, change) / along
            curvature = turn @ curvature @ turn.T + np.outer(move, move) / along
    return point


def _slope(function: Callable[[Array], float], point: Array) -> Array:
    """Return the derivatives of ``function`` at a point."""
    steps = np.eye(len(point)) * 1e-5
    return np.array([(function(point + each) - function(point - each)) / 2e-5 for each in steps])

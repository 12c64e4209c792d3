"""Noise that the device adds to its own update, for whoever trusts no coordinator with it.

The clipped update is written as whole numbers of a fine grid, and each gets a number rint(Y), Y
normal: k + rint(Y) = rint(k + Y), so what is sent is what the Gaussian mechanism would send,
rounded afterwards. No float decides about it: the low bits of floating-point noise can give away
what it was added to (Mironov, "On Significance of the Least Significant Bits for Differential
Privacy", CCS 2012). Whatever is done with these numbers later, by an encoding too, tells no more
than they do.
"""

from __future__ import annotations

import secrets
from math import frexp, ldexp

import numpy as np
from fleetlearn_protocol.messages import Report, Task
from fleetlearn_protocol.vector import Vector
from fleetlearn_protocol.withheld import without_data

from fleetlearn_device.training.train import DivergedError

FINER = 30
"""The grid is 2^-30 of the largest power of two that is no more than the standard deviation."""
MOST_STEPS = 2.0**62
"""Largest magnitude of a clipped element, in steps of the grid: its sum with the noise is an
int64."""


def grid_of(sigma: float) -> float:
    """Return the grid for noise of this standard deviation: a power of two."""
    return ldexp(1.0, frexp(sigma)[1] - 1 - FINER)


def add_noise(update: Vector, sigma: float, secret: bytes | None = None) -> Vector:
    """Return the update, float32 of shape (P,), with noise of standard deviation ``sigma`` on each
    element.

    secret: decides the noise; who knows it can take the noise off. None: 32 bytes of the operating
    system, which nobody keeps. Tests give others. Raises DivergedError: sigma is far too small for
    such an update.
    """
    from fleetlearn_protocol.discrete_gaussian import sample  # makes tables: only where needed

    grid = grid_of(sigma)
    steps = update.astype(np.float64)
    steps /= grid
    # Towards zero: rounding to the nearest could make the update longer than it was clipped to.
    np.trunc(steps, out=steps)
    if np.abs(steps).max(initial=0.0) >= MOST_STEPS:
        raise DivergedError(
            f"noise of standard deviation {sigma:g} is too little to hide an update with elements "
            f"up to {np.abs(update).max():g}"
        )
    noisy = sample(sigma / grid, len(update), secret or secrets.token_bytes(32))
    noisy += steps.astype(np.int64)
    return (noisy * grid).astype(np.float32)


def withheld(report: Report, task: Task) -> Report:
    """Return the report without anything that depends on the device's data."""
    return without_data(report, task.epochs)

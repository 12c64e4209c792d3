"""Sums for differential privacy: scaled, so that one norm can bound all of them, and clipped.

A device's sums have many units: rows, sums of values, sums of squares. They are divided into
groups, and a group by the greatest L2 norm that one row can add to it and by the root of the number
of groups. So one row moves the scaled sums by at most 1, n rows by at most n, and the clip norm C
is a number of rows: a device with up to C rows is never shortened, and one with more counts as at
least C of its own. A scale follows from what everybody knows, the settings and the state, and never
from a device's rows.

What travels are whole numbers of steps of C / ``LENGTH``, rounded towards zero, so that their norm,
which whole numbers have exactly, is at most ``LENGTH``. The noise is added to the total of all
devices, by the coordinator.

A group may be ordered: counts of neighbouring ranges, where the sum of the first j counts, for
quantiles, should have little noise. Then the counts are first multiplied by the square root R of
the matrix of all such sums, so that the sums are R (R counts + noise): for n counts each has noise
of the standard deviation |R|^2, about (3.35 + ln n) / pi, where sums of noisy counts have up to
sqrt(n) (Fichtenberger, Henzinger and Upadhyay, "Constant Matters: Fine-grained Error Bound on
Differentially Private Continual Observation", 2023, arXiv 2202.11205, section 4).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import sqrt
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fleetlearn_protocol.computations.layout import Sums

LENGTH = 2**30
"""The greatest L2 norm of the whole numbers that a device sends."""
Scaled: TypeAlias = NDArray[np.float64]


class SumsGroup(NamedTuple):
    """Sums that are scaled together."""

    places: NDArray[np.int64]
    """Where they are among all sums, shape (n,), or (m, n). No place is in two groups, or twice in
    one."""
    most: float
    """The greatest L2 norm of what one row adds to them, above 0."""
    ordered: bool = False
    """Whether they are counts (or other sums) of neighbouring ranges, in order along the last axis,
    each row in at most one of them; of m such rows of ranges ``most`` is the norm of all together.
    """


Groups: TypeAlias = Sequence[SumsGroup]
"""Of all sums that a round releases; the others are not sent."""


class ClippedSums(NamedTuple):
    """What a device sends."""

    sums: Sums
    """int64, shape (S,)."""
    clipped: bool
    """Whether the sums were longer than the clip norm."""


def root_of_prefix_sums(count: int) -> Scaled:
    """Return the first column of R, a lower triangular matrix that is the same along its diagonals:
    the coefficients of (1 - x)^(-1/2). R R has ones on and below its diagonal."""
    places = np.arange(1, count)
    return np.concatenate([[1.0], np.cumprod((places - 0.5) / places)])


def clip_sums(sums: Sums, groups: Groups, clip: float) -> ClippedSums:
    """Return sums, int64, (S,), as a device sends them. ``clip``: C, above 0."""
    scaled = _scaled(sums, groups)
    norm = float(np.linalg.norm(scaled))
    factor = min(1.0, clip / norm) if norm > 0 else 1.0
    while True:
        steps = np.trunc(scaled * (factor / clip * LENGTH)).astype(np.int64)
        if squared_norm(steps) <= LENGTH**2:
            return ClippedSums(steps, norm > clip)
        factor *= 1 - 2.0**-30  # the floating-point norm was a little too small


def squared_norm(steps: Sums) -> int:
    """Return the square of the L2 norm, exactly; (S,). Each must be less than 2^31, and S at most
    2^28."""
    upper, lower = steps >> 16, steps & 0xFFFF  # of magnitudes up to 2^15 and 2^16
    parts = (upper @ upper, upper @ lower, lower @ lower)  # each below 2^60
    return (int(parts[0]) << 32) + (int(parts[1]) << 17) + int(parts[2])


def is_short(steps: Sums) -> bool:
    """Return whether these whole numbers, (S,), are at most ``LENGTH`` long."""
    if steps.min(initial=0) < -LENGTH or steps.max(initial=0) > LENGTH:
        return False
    return squared_norm(steps) <= LENGTH**2


def in_rows(total: Sums, clip: float) -> Scaled:
    """Return the scaled sums of a total of such whole numbers, float64, (S,)."""
    return total.astype(np.float64) * (clip / LENGTH)


def unscale(scaled: Scaled, groups: Groups) -> Sums:
    """Return the sums that scaled ones, (S,), are of, rounded to whole numbers; int64, (S,). Those
    that are in no group are 0."""
    sums = np.zeros(len(scaled), np.int64)
    for group, scale in _scales(groups):
        values = scaled[group.places] * scale
        if group.ordered:
            # The sums of the first counts are rounded, so that their rounding does not add up.
            firsts = _times_root(values) * _root_norm(group)
            sums[group.places] = np.diff(_whole(firsts), prepend=0, axis=-1)
        else:
            sums[group.places] = _whole(values)
    return sums


def noise_of_sums(noise: float, groups: Groups, size: int) -> Scaled:
    """Return the standard deviation of the noise of each sum, float64, (S,), where each scaled sum
    has noise of the standard deviation ``noise``. ``size``: S."""
    found = np.zeros(size)
    for group, scale in _scales(groups):
        found[group.places] = noise * scale
        if group.ordered:
            # A count is a difference of two sums: the inverse of R, (1 - x)^(1/2).
            inverse = np.diff(root_of_prefix_sums(group.places.shape[-1]), prepend=0)
            found[group.places] *= _root_norm(group) * np.sqrt(np.cumsum(inverse**2))
    return found


def noise_of_first_sums(noise: float, groups: Groups, group: SumsGroup) -> Scaled:
    """Return the same of the sum of the first counts of an ordered group, up to each of them;
    float64, (n,)."""
    assert group.ordered, "only of ordered counts are there such sums"
    root = root_of_prefix_sums(group.places.shape[-1])
    scale = group.most * sqrt(len(groups)) * _root_norm(group)
    return noise * scale * np.sqrt(np.cumsum(root**2))


def _scaled(sums: Sums, groups: Groups) -> Scaled:
    scaled = np.zeros(len(sums))
    for group, scale in _scales(groups):
        values = sums[group.places] / scale
        scaled[group.places] = _times_root(values) / _root_norm(group) if group.ordered else values
    return scaled


def _scales(groups: Groups) -> Iterator[tuple[SumsGroup, float]]:
    for group in groups:
        yield group, group.most * sqrt(len(groups))


def _times_root(values: Scaled) -> Scaled:
    count = values.shape[-1]
    root = root_of_prefix_sums(count)
    rows = [np.convolve(root, row)[:count] for row in values.reshape(-1, count)]
    return np.array(rows).reshape(values.shape)


def _root_norm(group: SumsGroup) -> float:
    """Return how long one row's count becomes by the root at most."""
    return float(np.linalg.norm(root_of_prefix_sums(group.places.shape[-1])))


def _whole(values: Scaled) -> Sums:
    """Return them as whole numbers; noise may make them as large as it likes."""
    whole: Sums = np.rint(np.clip(values, -(2.0**62), 2.0**62)).astype(np.int64)
    return whole

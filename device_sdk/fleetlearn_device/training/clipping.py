"""An update that is no longer than its task allows, as its bytes mean it.

The bound is that of differentially private training (McMahan, Ramage, Talwar and Zhang, "Learning
Differentially Private Recurrent Language Models", arXiv 1710.06963, algorithm 1): an update x of L2
norm n becomes x * min(1, C / n). The noise of a round is measured in units of C, so what counts is
what the coordinator decodes: an encoding that rounds may make an update longer.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import fsum, isfinite, sqrt
from typing import NamedTuple

import numpy as np
from fleetlearn_protocol.encodings import SLAB, Encoding
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray

from fleetlearn_device.training.train import DivergedError

TRIES = 24
"""Encodings that are tried before zeros are sent. One is enough for nearly every update that is
not clipped, two or three for the others."""
LEAST_EXCESS = 2.0**-24
"""The least part by which a second try is shorter: half of the distance of two float32."""


class ClippedUpdate(NamedTuple):
    """An update as it is sent."""

    content: memoryview
    """Its bytes."""
    meant: Vector
    """What the bytes mean: float32, shape (P,), of an L2 norm of at most the bound."""
    clipped: bool
    """Whether the update was longer than the bound before it was encoded."""
    whole: Vector
    """The update after the clipping, before the encoding: float32, shape (P,)."""


def encode_clipped(
    encoding: Encoding, update: Vector, left: Vector | None, seed: int, clip: float
) -> ClippedUpdate:
    """Scale an update to the L2 norm ``clip`` where it is longer, and encode it, so that what its
    bytes mean is no longer either.

    update: float32, shape (P,). left: what is added to it first, such as what earlier encodings
    left out; float32, shape (P,). seed: for the encoding. Sums and products are float64. Raises
    DivergedError (an element is not finite), ProtocolError (the encoding cannot hold it).
    """
    norm = _norm(_slabs(update, left))
    if not isfinite(norm):
        raise DivergedError("the update has an element that is not finite; a smaller lr may help")
    factor = min(1.0, clip / norm) if norm else 1.0
    whole = tried = _scaled(update, left, factor)
    for attempt in range(TRIES):
        content = encoding.encode(tried, seed)
        meant = encoding.decode(content, len(tried))
        length = _norm(_slabs(meant, None))
        if length <= clip:
            return ClippedUpdate(content, meant, norm > clip, whole)
        # Rounding to nearest can give the same values again for an update that is little shorter:
        # each try goes twice as far as the one before.
        excess = max(length / clip - 1, LEAST_EXCESS)
        factor /= 1 + excess * 2.0**attempt
        tried = _scaled(update, left, factor)
    nothing = np.zeros_like(whole)
    return ClippedUpdate(encoding.encode(nothing, seed), nothing, norm > clip, whole)


def _slabs(update: Vector, left: Vector | None) -> Iterator[NDArray[np.float64]]:
    """Yield the sum, a slab at a time: a copy of it all as float64 may be more than the memory
    holds."""
    for start in range(0, len(update), SLAB):
        slab = update[start : start + SLAB].astype(np.float64)
        if left is not None:
            slab += left[start : start + SLAB]
        yield slab


def _norm(slabs: Iterator[NDArray[np.float64]]) -> float:
    """Return the L2 norm, added as the coordinator adds it (aggregation/weighing/norms.py)."""
    return sqrt(fsum(float(np.add.reduce(slab * slab)) for slab in slabs))


def _scaled(update: Vector, left: Vector | None, factor: float) -> Vector:
    """Return the sum times the factor, float32. Without either, the update itself."""
    if left is None and factor == 1.0:
        return update
    scaled = np.empty(len(update), np.float32)
    start = 0
    for slab in _slabs(update, left):
        scaled[start : start + len(slab)] = slab * factor
        start += len(slab)
    return scaled

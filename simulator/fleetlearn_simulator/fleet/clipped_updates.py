"""The clipping of many devices' updates at once: to the last bit what each device does with its own
(``fleetlearn_device.training.clipping``), where updates travel uncompressed.

A round of 10,000 devices with 610 parameters takes 0.02 s of CPU, and 0.12 s device by device; with
40 parameters 0.002 s and 0.1 s.
"""

from __future__ import annotations

import numpy as np
from fleetlearn_device.training.clipping import LEAST_EXCESS, TRIES
from fleetlearn_protocol.encodings import SLAB
from numpy.typing import NDArray

CLIPPED = "clipped"
"""Among the vectors that training makes beside the updates: whether each device clipped its update,
1 or 0, shape (n, 1)."""
ROWS_TOGETHER = 2**16
"""Elements that are clipped together: the copies in float64 of 2^22 take six times as long."""


def clip_rows(updates: NDArray[np.float32], clip: float) -> NDArray[np.bool_]:
    """Scale the rows of ``updates``, shape (n, P), in place to an L2 norm of at most ``clip``.
    Returns which rows were longer, (n,). Rows with an element that is not finite stay as they
    are."""
    clipped = np.zeros(len(updates), np.bool_)
    together = max(1, ROWS_TOGETHER // max(1, updates.shape[1]))
    for start in range(0, len(updates), together):
        here = slice(start, start + together)
        clipped[here] = _clip_block(updates[here], clip)
    return clipped


def _clip_block(updates: NDArray[np.float32], clip: float) -> NDArray[np.bool_]:
    norms = row_norms(updates)
    clipped = (norms > clip) & np.isfinite(norms)
    rows = np.flatnonzero(clipped)
    whole = updates[rows].astype(np.float64)
    factors = clip / norms[rows]
    for attempt in range(TRIES):
        tried = (whole * factors[:, None]).astype(np.float32)
        lengths = row_norms(tried)
        updates[rows] = tried
        over = lengths > clip
        if not over.any():
            return clipped
        # Rounding to float32 made them longer than the bound again: the same steps as a device's.
        excess = np.maximum(lengths[over] / clip - 1, LEAST_EXCESS)
        factors = factors[over] / (1 + excess * 2.0**attempt)
        rows, whole = rows[over], whole[over]
    updates[rows] = 0.0
    return clipped


def row_norms(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the L2 norm of each row, (n,): the same bits as a device's and the coordinator's."""
    size = rows.shape[1]
    if size > SLAB:
        raise ValueError(f"rows of {size} elements are added in slabs of {SLAB}: one by one")
    wide = rows.astype(np.float64)
    wide *= wide
    found: NDArray[np.float64] = np.sqrt(np.add.reduce(wide, axis=1))
    return found

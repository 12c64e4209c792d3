"""k-means over the rows of all devices, which nobody sees together: Lloyd's algorithm.

Lloyd, Least squares quantization in PCM, 1982, section II. kmeans.toml declares the arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def sums(state: dict[str, Any], rows: dict[str, Any]) -> dict[str, Any]:
    """On a device: how many rows are nearest to each centre, and what they add up to."""
    x, centres = rows["x"], state["centres"]
    squares = ((x[:, None, :] - centres) ** 2).sum(axis=2)
    nearest = np.eye(len(centres))[squares.argmin(axis=1)]
    return {
        "counts": nearest.sum(axis=0).astype(np.int64),
        "totals": nearest.T @ x,
        "inertia": squares.min(axis=1).sum(),
    }


def next_centres(
    state: dict[str, Any], sums: dict[str, Any], count: Any, *, tolerance: float = 0.0
) -> tuple[dict[str, Any], dict[str, float], bool]:
    """On the coordinator: each centre moves to the mean of its rows; one without rows stays."""
    counts = sums["counts"][:, None]
    means = sums["totals"] / np.maximum(counts, 1)
    centres = np.where(counts > 0, means, state["centres"])
    moved = ((centres - state["centres"]) ** 2).sum()
    return {"centres": centres}, {"inertia": sums["inertia"], "moved": moved}, moved <= tolerance

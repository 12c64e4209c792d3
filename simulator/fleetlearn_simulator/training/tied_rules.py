"""SCAFFOLD's and FedDyn's vectors for many devices at once: the equations of
``fleetlearn_device.training.algorithms``, where the papers are cited, with a row for each
device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from fleetlearn_protocol.messages import CONTROL
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray

Rows = NDArray[np.float32]
"""Shape (devices, P)."""


class TiedRule(NamedTuple):
    """What is added to the gradients, and how the tied vector changes. Elements of buffers are set
    to 0 afterwards."""

    correction: Callable[[Rows, Mapping[str, Vector]], Rows]
    """The devices' tied vectors, the task's vectors -> what is added to each step's gradient: a new
    array."""
    change: Callable[[Mapping[str, Vector], Rows, NDArray[np.float64], Mapping[str, float]], Rows]
    """The task's vectors, updates, the steps done or the sum of their learning rates' factors
    (devices, 1), hyper-parameters -> by what the tied vectors change."""


def _scaffold_change(
    vectors: Mapping[str, Vector],
    updates: Rows,
    steps: NDArray[np.float64],
    hyper: Mapping[str, float],
) -> Rows:
    times: Rows = (steps * hyper["lr"]).astype(np.float32)
    return -vectors[CONTROL] - updates / times


def _feddyn_change(
    vectors: Mapping[str, Vector],
    updates: Rows,
    steps: NDArray[np.float64],
    hyper: Mapping[str, float],
) -> Rows:
    return np.float32(-hyper["mu"]) * updates


RULES = {
    "scaffold": TiedRule(lambda own, vectors: vectors[CONTROL] - own, _scaffold_change),
    "feddyn": TiedRule(lambda own, vectors: -own, _feddyn_change),
}
"""By the name of the algorithm. Those that are not here train device by device."""

"""What the updates of one round are worth: which models are measured on held-out data, and what
follows from their losses. For the server and the simulator alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from fleetlearn_protocol.errors import many
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray

from fleetlearn_coordinator.quality.contributions import (
    Utility,
    leave_one_out,
    needed_sets,
    shapley,
)

MOST_BYTES = 2**28
"""Bytes of the devices' models that are held together. A round with more is not measured."""


class UpdatesOfRound(NamedTuple):
    """The models of a round's devices, and how they are combined."""

    before: Vector
    """The model that the round began from, float32, (P,). The empty set of devices has it."""
    models: NDArray[np.float32]
    """Each device's own model, (n, P)."""
    weights: NDArray[np.float64]
    """What each counts in the mean, (n,)."""

    def model_of(self, members: frozenset[int]) -> Vector:
        """Return the mean model of these devices, by their rows: float32, (P,)."""
        if not members:
            return self.before
        rows = sorted(members)
        weights = self.weights[rows] / self.weights[rows].sum()
        mean: Vector = (weights @ self.models[rows].astype(np.float64)).astype(np.float32)
        return mean


class WorthRule(NamedTuple):
    """How the worth of a round's updates is worked out. The same rule gives the same numbers."""

    utilities: int
    """About how many models are measured (``quality.utilities``)."""
    seed: int
    """Of the orders of devices that are drawn: the plan's seed plus the round's number."""

    def sets(self, devices: int) -> list[frozenset[int]]:
        """Return the sets of devices whose mean models are to be measured, smaller ones first."""
        return needed_sets(devices, self.utilities, self.seed)

    def worth_of(
        self, devices: Sequence[str], losses: Mapping[frozenset[int], float]
    ) -> dict[str, dict[str, float]]:
        """Return what a round's summary has under ``contributions``: device -> its Shapley value,
        the standard error of that, and by how much it is missed. ``losses``: the mean loss on
        held-out data of each of ``sets``."""
        utility: Utility = lambda members: -losses[members]  # noqa: E731
        number = len(devices)
        drawn = shapley(number, utility, utilities=self.utilities, seed=self.seed)
        without = leave_one_out(number, utility)
        rows = zip(devices, drawn.values, drawn.errors, without.values, strict=True)
        return {
            device: {"shapley": value, "error": error, "left_out": left_out}
            for device, value, error, left_out in rows
        }


def why_too_large(devices: int, size: int) -> str:
    """Return why the models of this many devices, of ``size`` elements each, are not measured;
    empty: they are."""
    held = 4 * devices * size
    if held <= MOST_BYTES:
        return ""
    return (
        f"the models of {many(devices, 'device')} take {held / 2**20:.0f} MiB, and "
        f"{MOST_BYTES / 2**20:.0f} MiB are held together at most"
    )

"""The circle of a simulated round with pairwise masks: how much its devices say to each other, and
whether those that answered are enough to take the masks off. Nobody makes keys, shares or masks."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from fleetlearn_coordinator.plan.pairwise_rules import graph_for
from fleetlearn_coordinator.plan.secure_section import SecureSection
from fleetlearn_protocol.secure.graph import Degrees
from fleetlearn_protocol.secure.pairwise_messages import KEYS_BYTES, SEALED_BYTES, SHARE_BYTES

from fleetlearn_simulator import keyed_random
from fleetlearn_simulator.fleet.device_names import name_of
from fleetlearn_simulator.population.traits import Ints

NAME_BYTES = 16
"""Of a neighbour's name in a message, with its quotes."""
KEYS_SAID = 2 * (KEYS_BYTES + 64)
"""Of a device's keys in a message, with its signature: two digits for each byte."""
SEALED_SAID = NAME_BYTES + 2 * SEALED_BYTES
"""Of what one neighbour sealed for another."""
SHARE_SAID = NAME_BYTES + 2 * SHARE_BYTES
"""Of one share, when masks are taken off."""


def bytes_of_neighbours(secure: SecureSection, devices: int) -> int:
    """Return the bytes of what a task has of its device's neighbours. ``devices``: of a round."""
    return graph_for(secure, devices).neighbours * SEALED_SAID


def circle_order(seed: int, round: int, devices: Sequence[int]) -> list[int]:
    """Return the devices of a round in the random order of their circle."""
    luck = keyed_random.uniform(seed, "circle", np.array(devices, np.int64), round)
    return [devices[place] for place in np.argsort(luck, kind="stable")]


def lacking_shares(
    degrees: Degrees,
    order: Sequence[int],
    sharers: Collection[int],
    survivors: Collection[int],
    told: Collection[int],
) -> str | None:
    """Return why the masks of a round's updates cannot be taken off, for people. None: they can.

    order: the devices of the circle. sharers: those that sent shares. survivors: whose updates
    count. told: who told their shares at the end.
    """
    near = _near(degrees.neighbours, order, told)
    stayed = np.isin(order, [*survivors])
    beside = _near(degrees.neighbours, order, survivors) > 0
    lost = np.isin(order, [*sharers]) & ~stayed & beside
    for what, needed in {"own seed": stayed, "masking key": lost}.items():
        short = np.flatnonzero(needed & (near < degrees.threshold))
        if len(short):
            return (
                f"the shares of the {what} of {name_of(order[short[0]])} are too few: "
                f"{near[short[0]]} came, and {degrees.threshold} are needed"
            )
    return None


def _near(degree: int, order: Sequence[int], chosen: Collection[int]) -> Ints:
    """Return how many of each device's neighbours in the circle are chosen, (n,)."""
    marked = np.isin(order, [*chosen]).astype(np.int64)
    half, count = degree // 2, len(order)
    if degree >= count - 1:  # all others
        return np.asarray(marked.sum() - marked)
    around = np.concatenate([marked[count - half :], marked, marked[:half]])
    sums = np.concatenate([[0], np.cumsum(around)])
    return np.asarray(sums[2 * half + 1 :] - sums[:count] - marked)

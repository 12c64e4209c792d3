"""Which devices send bad updates, always in the same way."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fleetlearn_simulator import keyed_random
from fleetlearn_simulator.scenario.scenario import Scenario

CORRUPTIONS = ("", "garbage", "stale", "scaled", "flipped", "labels", "little")
"""The kinds of [[failures.corrupt]], after "" for devices that send what they trained."""
OF_DATA = ("labels",)
"""Those that are in a device's data."""


def corruptions_of(
    scenario: Scenario, ids: NDArray[np.int64]
) -> tuple[NDArray[np.int8], NDArray[np.float64]]:
    """Return the corruption of each of n devices as its index in ``CORRUPTIONS``, (n,), and its
    factor, (n,)."""
    rows = scenario.failures.corrupt
    if not rows:
        return np.zeros(len(ids), np.int8), np.ones(len(ids))
    ends = np.cumsum([row.share for row in rows])
    which = np.searchsorted(ends, keyed_random.uniform(scenario.seed, "corrupt", ids), side="right")
    codes = np.array([*(CORRUPTIONS.index(row.kind) for row in rows), 0], np.int8)
    return codes[which], np.array([*(row.factor for row in rows), 1.0])[which]


def damaged(scenario: Scenario, devices: Sequence[int], *, of_data: bool) -> dict[int, str]:
    """Return each of these devices that is damaged -> its corruption. ``of_data``: only those whose
    data are, not what they send."""
    codes, _ = corruptions_of(scenario, np.array(devices, np.int64))
    found = zip(devices, (CORRUPTIONS[code] for code in codes.tolist()), strict=True)
    return {device: kind for device, kind in found if kind and (kind in OF_DATA or not of_data)}

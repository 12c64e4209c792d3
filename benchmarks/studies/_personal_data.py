"""The devices of personal.py and their digits: labels that are skewed, or scanners that differ."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from examples import digits

DEVICES = 20
ALPHA = 0.1
"""Of the Dirichlet distribution by which the labels are shared out."""
TEST = 0.3
"""The share of each device's examples on which nobody trains."""
Arrays = tuple[NDArray[np.float32], NDArray[np.int64]]


class Device(NamedTuple):
    train: Arrays
    test: Arrays


@cache
def fleet(kind: str, seed: int) -> tuple[Device, ...]:
    """Share out all digits. ``scanners``: the labels are alike, and each device has another
    contrast and brightness, half of them dark on light."""
    data, random = digits.data(), np.random.default_rng(seed)
    x, y = np.concatenate([data.x_train, data.x_test]), np.concatenate([data.y_train, data.y_test])
    alpha = ALPHA if kind == "labels" else 1e6
    devices = []
    for number, rows in enumerate(digits.dirichlet_shards(y, DEVICES, alpha, seed, minimum=20)):
        scans = x[rows]
        if kind == "scanners":
            scans = 1 - scans if number % 2 else scans
            scans = scans * np.float32(random.uniform(0.4, 1.6)) + np.float32(
                random.uniform(-0.5, 0.5)
            )
        cut = round(TEST * len(rows))
        devices.append(Device((scans[cut:], y[rows[cut:]]), (scans[:cut], y[rows[:cut]])))
    return tuple(devices)


def labels(device: int, seed: int) -> Arrays:
    """A device's examples to train on, for a scenario's data function."""
    return fleet("labels", seed)[device].train


def scanners(device: int, seed: int) -> Arrays:
    """The same for the other data."""
    return fleet("scanners", seed)[device].train

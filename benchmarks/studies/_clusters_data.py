"""The devices of clusters.py and their digits: three groups, each with digits that are turned by
another angle, or whose labels mean other digits."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from _personal_data import TEST, Arrays, Device

from examples import digits

DEVICES, GROUPS = 30, 3


def group_of(device: int) -> int:
    return device % GROUPS


@cache
def fleet(kind: str, seed: int) -> tuple[Device, ...]:
    """Share out all digits, the labels alike. ``turned``: group g has them turned by g quarters.
    ``labels``: each group renames the digits by a random permutation."""
    data, random = digits.data(), np.random.default_rng(seed)
    x, y = np.concatenate([data.x_train, data.x_test]), np.concatenate([data.y_train, data.y_test])
    names = [np.arange(digits.CLASSES), *map(random.permutation, [digits.CLASSES] * (GROUPS - 1))]
    devices = []
    for number, rows in enumerate(digits.dirichlet_shards(y, DEVICES, 1e6, seed, minimum=20)):
        group, cut = group_of(number), round(TEST * len(rows))
        turns = group if kind == "turned" else 0
        scans = np.ascontiguousarray(np.rot90(x[rows], turns, axes=(-2, -1)))
        called = names[group][y[rows]] if kind == "labels" else y[rows]
        devices.append(Device((scans[cut:], called[cut:]), (scans[:cut], called[:cut])))
    return tuple(devices)


def turned(device: int, seed: int) -> Arrays:
    """A device's examples to train on, for a scenario's data function."""
    return fleet("turned", seed)[device].train


def labels(device: int, seed: int) -> Arrays:
    """The same for the other data."""
    return fleet("labels", seed)[device].train


def group(device: int, seed: int, kind: str, number: int) -> Arrays:
    """The same for the devices of one group alone."""
    return fleet(kind, seed)[GROUPS * device + number].train


def turned_0(device: int, seed: int) -> Arrays:
    return group(device, seed, "turned", 0)


def turned_1(device: int, seed: int) -> Arrays:
    return group(device, seed, "turned", 1)


def turned_2(device: int, seed: int) -> Arrays:
    return group(device, seed, "turned", 2)


def labels_0(device: int, seed: int) -> Arrays:
    return group(device, seed, "labels", 0)


def labels_1(device: int, seed: int) -> Arrays:
    return group(device, seed, "labels", 1)


def labels_2(device: int, seed: int) -> Arrays:
    return group(device, seed, "labels", 2)

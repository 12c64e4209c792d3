"""Simulated devices: when they are online, when they vanish, and which data they have."""

import numpy as np
from fleetlearn_simulator import in_slots


def at_night(share: float = 0.9, begin: int = 22, end: int = 6):
    """Devices are online at night alone."""

    def probability(devices, seconds):
        hour = seconds / 3600 % 24  # on the device's own clock
        return share * ((hour >= begin) | (hour < end))

    return in_slots(probability, slot=600.0)


def half_way(chance: float = 0.1):
    """A device vanishes half of the way through its download with this chance."""

    def law(tasks):
        after = np.full_like(tasks.seconds, np.inf)  # a row for download, train, upload
        gone = tasks.luck[0] < chance
        after[0, gone] = tasks.seconds[0, gone] / 2
        return after

    return law


class Lines:
    """Each device measures points of a line."""

    def __init__(self, noise):
        self.noise = noise

    def examples(self, ids, seed):
        return 10 + ids % 5

    def arrays(self, device, seed):
        random = np.random.default_rng([seed, device])
        x = random.normal(size=(10 + device % 5, 3)).astype(np.float32)
        y = x.sum(axis=1) + self.noise * random.normal(size=len(x))
        return {"x": x, "y": y.astype(np.float32)}

    def test(self, seed):
        return None


def lines(noise: float = 0.1):
    """Points of a line with this noise (standard deviation)."""
    return Lines(noise)


def in_turn():
    """The examples go to the devices in turn."""

    def partition(labels, devices, random):
        return [np.arange(device, len(labels), devices) for device in range(devices)]

    return partition

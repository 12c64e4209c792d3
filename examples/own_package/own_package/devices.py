"""What devices do with their data, and what the coordinator makes of it."""

import numpy as np
from fleetlearn_device import TaskOutcome

from own_package.lengths import no_longer


def shortened(work, *, longest: float = 1.0):
    """Local SGD whose update is no longer than this (L2 norm)."""
    work.load()  # the round's model
    result = work.train()  # as the task says: epochs, batch size, learning rate, time
    return TaskOutcome(result, {"update": no_longer(result.update, longest)})


def totals(state, rows):
    """A device's sums, without a gradient step."""
    return {"x": rows["x"].sum(axis=0, dtype=np.float64)}


def mean(state, sums, count):
    """The mean of all devices' rows: done after one round."""
    return {"x": sums["x"] / count.rows}, {}, True

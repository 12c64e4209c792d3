"""Which rows each step of a vertical run takes, and from which seed its parts draw: functions of
the run's terms alone, so that nobody need send them."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fleetlearn_protocol.splitmix64 import GAMMA, mix

MOST_SEED = 2**53 - 1


def steps_of_epoch(rows: int, batch_size: int) -> int:
    """Return the steps in which each of ``rows`` is taken once. What is left of an epoch, fewer
    rows than a batch, is left out of it; another order leaves out others."""
    return max(1, rows // batch_size)


def rows_of_step(step: int, rows: int, batch_size: int, seed: int) -> NDArray[np.int64]:
    """Return the numbers of the rows of a step (the first is 0): int64, at most ``batch_size``,
    each once."""
    epoch, place = divmod(step, steps_of_epoch(rows, batch_size))
    return order_of_epoch(rows, seed, epoch)[place * batch_size : (place + 1) * batch_size]


@lru_cache(maxsize=2)
def order_of_epoch(rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return 0 to rows - 1 in the order of an epoch: int64, read-only.

    The rows are sorted by numbers of SplitMix64's stream mix(mix(seed) + epoch); of equal numbers
    the smaller row is first.
    """
    with np.errstate(over="ignore"):
        start = mix(mix(np.array([seed], np.uint64)) + np.uint64(epoch))
        numbers = mix(start + np.arange(1, rows + 1, dtype=np.uint64) * GAMMA)
    order = np.argsort(numbers, kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order


def seed_of_step(step: int, seed: int, part: int) -> int:
    """Return the seed from which a part draws in a step (dropout). part: 0 for the top, then the
    parties in their order from 1 on."""
    with np.errstate(over="ignore"):
        start = mix(mix(np.array([seed], np.uint64)) + np.uint64(2**40 + part))
        number = mix(start + np.uint64(step + 1) * GAMMA)[0]
    return int(number) & MOST_SEED


def is_checkpoint(step: int, every: int, steps: int) -> bool:
    """Return whether all sides write what they have after this many steps."""
    return step % every == 0 or step == steps

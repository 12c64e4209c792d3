"""One contender of privacy_noise.py: NAME ELEMENTS RELEASES SEPARATION PARTICIPATIONS REPEATS.
Writes what its noise cost as JSON. Names are independent, blt-N (N buffers) and banded-N (N
bands)."""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
from fleetlearn_coordinator.aggregation.privacy import correlated
from fleetlearn_coordinator.aggregation.privacy.blt import strategy_for
from fleetlearn_coordinator.aggregation.privacy.sealed import seal
from fleetlearn_coordinator.aggregation.privacy.state import Buffers
from fleetlearn_coordinator.aggregation.privacy.toeplitz import sensitivity
from fleetlearn_protocol import discrete_gaussian
from numpy.typing import NDArray

SIGMA = 1.5 * 2.0**30
SECRET = bytes(32)


def square_root(releases: int, bands: int) -> NDArray[np.float64]:
    """Return the first column of the square root of the matrix of ones, with this many bands."""
    order = np.arange(1, bands)
    column = np.zeros(releases)
    column[:bands] = np.concatenate([[1.0], np.cumprod((2 * order - 1) / (2 * order))])
    return column


def greatest_error(column: NDArray[np.float64], separation: int, participations: int) -> float:
    """Return the standard deviation of the noise in the sum of all releases, where each release's
    fresh noise is as large as the sensitivity."""
    inverse = np.zeros_like(column)
    inverse[0] = 1.0
    for row in range(1, len(column)):
        inverse[row] = -(column[1 : row + 1] * inverse[row - 1 :: -1]).sum()
    moved = sensitivity(column, separation, participations)
    return moved * float(np.sqrt((np.cumsum(inverse) ** 2).sum()))


class Independent:
    """Fresh noise in each release."""

    nbytes = 0

    def __init__(self, releases: int) -> None:
        self.column = np.eye(1, releases)[0]

    def next(self, fresh: NDArray[np.int64]) -> None:
        pass


class Blt:
    """What the coordinator has, with any number of buffers."""

    def __init__(
        self, buffers: int, elements: int, releases: int, separation: int, participations: int
    ) -> None:
        self.strategy = strategy_for(releases, separation, participations, buffers)
        self.bits = correlated.fraction_bits(self.strategy, releases)
        self.column = self.strategy.coefficients(releases)
        self.buffers: Buffers = {
            f"sum_{number}": np.zeros(elements, np.int64) for number in range(buffers)
        }

    @property
    def nbytes(self) -> int:
        return sum(values.nbytes for values in self.buffers.values())

    def next(self, fresh: NDArray[np.int64]) -> None:
        self.buffers = correlated.correlate(self.strategy, self.bits, fresh, self.buffers).buffers


class Banded:
    """The last b - 1 releases' noise in float32, in a ring."""

    def __init__(self, bands: int, elements: int, releases: int) -> None:
        self.column = square_root(releases, bands)
        self.ring = np.ones((bands - 1, elements), np.float32)
        self.nbytes = self.ring.nbytes
        self.release = 0

    def next(self, fresh: NDArray[np.int64]) -> None:
        noise = fresh.astype(np.float64)
        count = len(self.ring)
        for start in range(0, noise.size, correlated.BLOCK):
            place = slice(start, start + correlated.BLOCK)
            for back in range(1, count + 1):
                held = self.ring[(self.release - back) % count, place]
                noise[place] -= self.column[back] * held
        self.ring[self.release % count] = noise
        self.release += 1


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Return the median CPU of a call."""
    found = []
    for _ in range(repeats):
        before = time.process_time()
        work()
        found.append(time.process_time() - before)
    return statistics.median(found)


def main(
    name: str, elements: int, releases: int, separation: int, participations: int, repeats: int
) -> None:
    kind, _, number = name.partition("-")
    fresh = discrete_gaussian.sample(SIGMA, elements, SECRET)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    contender: Independent | Blt | Banded
    if kind == "blt":
        contender = Blt(int(number), elements, releases, separation, participations)
    elif kind == "banded":
        contender = Banded(int(number), elements, releases)
    else:
        contender = Independent(releases)
    figures = {
        "bytes": contender.nbytes,
        "sample_cpu": seconds(lambda: discrete_gaussian.sample(SIGMA, elements, SECRET), repeats),
        "cpu": seconds(lambda: contender.next(fresh), repeats),
        "error": greatest_error(contender.column, separation, participations),
    }
    figures["peak_mib"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    figures["seal_cpu"] = 0.0
    if isinstance(contender, Blt):
        buffers = contender.buffers
        figures["seal_cpu"] = seconds(
            lambda: [seal(values, SECRET, each) for each, values in buffers.items()], repeats
        )
    print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))

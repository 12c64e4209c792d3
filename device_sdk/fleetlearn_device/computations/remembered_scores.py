"""The scores of rows by the trees that were finished when they were last asked for: the next round
adds what came since, in place of walking through hundreds of trees again."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MOST_BYTES = 64 * 2**20
"""What is remembered at most, in bytes."""


class Remembered(NamedTuple):
    """Of a batch of rows."""

    trees: bytes
    """The digest of the trees that count."""
    rounds: int
    """How many boosting rounds these are."""
    bins: NDArray[np.int64]
    scores: NDArray[np.float64]


class ScoreMemory:
    """Remembers batches of rows by what they hold; the oldest are forgotten first. Threads may
    share it."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most = most_bytes
        self._bytes = 0
        self._rows: OrderedDict[bytes, Remembered] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, rows: bytes, trees: Callable[[int], bytes]) -> Remembered | None:
        """Return what is remembered of the rows with this digest, if it is of these trees.

        trees: a number of boosting rounds -> the digest of their trees.
        """
        with self._lock:
            found = self._rows.get(rows)
        return found if found is not None and trees(found.rounds) == found.trees else None

    def keep(self, rows: bytes, remembered: Remembered) -> None:
        """Remember these scores of the rows with this digest."""
        with self._lock:
            self._forget(rows)
            self._rows[rows] = remembered
            self._bytes += _size(remembered)
            while self._bytes > self._most:
                self._forget(next(iter(self._rows)))

    def _forget(self, rows: bytes) -> None:
        before = self._rows.pop(rows, None)
        if before is not None:
            self._bytes -= _size(before)


def digest_of(*arrays: NDArray[np.float32], about: bytes = b"") -> bytes:
    """Return what stands for the contents of these arrays. about: what counts beside them."""
    found = hashlib.blake2b(about, digest_size=16)
    for array in arrays:
        found.update(np.ascontiguousarray(array).data)
    return found.digest()


def _size(remembered: Remembered) -> int:
    return remembered.bins.nbytes + remembered.scores.nbytes

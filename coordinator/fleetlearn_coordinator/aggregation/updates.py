"""The elements of one update, for the aggregators."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from fleetlearn_protocol.vector import Vector

ALIGNMENT = 4096
"""Whoever reads a part of an update begins at a multiple of this many elements, since an encoding may have a scale for
each block."""


class Update(Protocol):
    """One update: P elements, flat float32. It may be read again and again."""

    def __iter__(self) -> Iterator[Vector]:
        """Yield the elements in order, in parts. A part may use the memory of the part before."""

    def read(self, start: int, stop: int) -> Vector:
        """Return the elements from ``start``, a multiple of ALIGNMENT, up to ``stop``."""


@dataclass(frozen=True, slots=True, eq=False)
class ArrayUpdate:
    """An update in memory."""

    vector: Vector
    """float32, shape (P,)."""

    def __iter__(self) -> Iterator[Vector]:
        yield self.vector

    def read(self, start: int, stop: int) -> Vector:
        return self.vector[start:stop]

"""The elements of one update and the values of its buffers, for the aggregators, and what these
return."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from fleetlearn_protocol.computations.layout import Sums
from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.secure.fixed_point import Words
from fleetlearn_protocol.sparse_rows import RowLayout, Rows
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray

ALIGNMENT = 4096
"""Whoever reads a part of an update begins at a multiple of this many elements, since an encoding
may have a scale for each block."""


class Update(Protocol):
    """One update: P elements, flat float32. It may be read again and again."""

    def __iter__(self) -> Iterator[Vector]:
        """Yield the elements in order, in parts. A part may use the memory of the part before."""

    def read(self, start: int, stop: int) -> Vector:
        """Return the elements from ``start``, a multiple of ALIGNMENT, up to ``stop``."""


@runtime_checkable
class MaskedWords(Protocol):
    """An update that may be masked."""

    def words(self) -> Iterator[Words]:
        """Yield its words in order, in parts: uint32, P + 1 altogether. A part may use the memory
        of the part before. Raises ProtocolError (bad-encoding) where it came as floats. Where it
        did not, reading floats raises that."""


def words_of(update: Update) -> Iterator[Words]:
    """Yield a masked update's words. Raises ProtocolError (bad-encoding) where it has floats."""
    if not isinstance(update, MaskedWords):
        raise ProtocolError(Code.BAD_ENCODING, "an update of floats was given; masked was expected")
    yield from update.words()


@runtime_checkable
class WholeNumbers(Protocol):
    """An update that may be sums."""

    def whole_numbers(self) -> Iterator[Sums]:
        """Yield its sums in order, in parts: int64, S altogether. A part may use the memory of the
        part before. Raises ProtocolError (bad-encoding) where it came as floats."""


def whole_numbers_of(update: Update) -> Iterator[Sums]:
    """Yield an update's sums. Raises ProtocolError (bad-encoding) where it has floats."""
    if not isinstance(update, WholeNumbers):
        raise ProtocolError(Code.BAD_ENCODING, "floats were given; whole numbers were expected")
    yield from update.whole_numbers()


@dataclass(frozen=True, slots=True, eq=False)
class ArrayUpdate:
    """An update in memory."""

    vector: Vector
    """float32, shape (P,)."""

    def __iter__(self) -> Iterator[Vector]:
        yield self.vector

    def read(self, start: int, stop: int) -> Vector:
        return self.vector[start:stop]


@dataclass(frozen=True, slots=True, eq=False)
class SelectedRows(ArrayUpdate):
    """The update of a sub-model in memory: ``RowsUpdate``. ``vector`` has the selected elements."""

    rows: Rows


@dataclass(frozen=True, slots=True, eq=False)
class MaskedArray:
    """A masked update in memory."""

    content: Words
    """uint32, shape (P + 1,)."""

    def __iter__(self) -> Iterator[Vector]:
        yield self.read(0, len(self.content))

    def read(self, start: int, stop: int) -> Vector:
        raise ProtocolError(Code.BAD_ENCODING, "a masked update was given; floats were expected")

    def words(self) -> Iterator[Words]:
        yield self.content


@dataclass(frozen=True, slots=True, eq=False)
class SumsArray:
    """A device's sums in memory."""

    content: Sums
    """int64, shape (S,)."""

    def __iter__(self) -> Iterator[Vector]:
        yield self.read(0, len(self.content))

    def read(self, start: int, stop: int) -> Vector:
        raise ProtocolError(Code.BAD_ENCODING, "sums were given; floats were expected")

    def whole_numbers(self) -> Iterator[Sums]:
        yield self.content


@runtime_checkable
class RowsUpdate(Protocol):
    """An update of a sub-model (the protocol's ``sparse_rows``): the selected elements alone. It is
    an ``Update`` too."""

    @property
    def rows(self) -> Rows:
        """The rows of the tables that it has, ascending: int64, shape (R,)."""

    def __iter__(self) -> Iterator[Vector]: ...


class Values(NamedTuple):
    """What n reports say of the model's buffers, and how far each counts."""

    rows: NDArray[np.float32]
    """The values after training, not differences: finite, shape (n, B)."""
    factors: NDArray[np.float64]
    """c: a value v counts as c * v + (1 - c) * x, where x is the present model's. Above 0 and at
    most 1, shape (n,)."""
    present: Vector
    """x, shape (B,)."""

    def select(self, row: int) -> Values:
        """Return what one of the reports says."""
        return Values(self.rows[row : row + 1], self.factors[row : row + 1], self.present)


def concatenated(parts: Sequence[Values]) -> Values:
    """Return what all of these reports say, in order. They are of one round."""
    rows, factors = (np.concatenate(columns) for columns in list(zip(*parts, strict=True))[:2])
    return Values(rows, factors, parts[0].present)


NO_VALUES = Values(np.zeros((1, 0), np.float32), np.ones(1), np.zeros(0, np.float32))
"""Of one report, for a model without buffers."""


class ChangedRows(NamedTuple):
    """The rows of a model's tables that a round's updates had. All other rows stay as they are."""

    layout: RowLayout
    rows: Rows
    """int64, ascending."""


class Result(NamedTuple):
    """What an aggregator made of a round's reports."""

    delta: NDArray[np.float64]
    """What the server optimizer moves the model by, shape (P,), or that of the selected elements.
    Any values in the buffers' places."""
    buffers: NDArray[np.float64]
    """The next values of the model's buffers, shape (B,)."""
    changed: ChangedRows | None = None
    """The rows that updates had, where ``delta`` has the selected elements alone. None: it has all
    of the model's."""

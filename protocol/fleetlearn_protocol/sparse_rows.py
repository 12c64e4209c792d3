"""Sub-models: of each sparse table the rows that a device's data name, and all of the rest.

A sub-model is trained as the whole model is: the tables have fewer rows, and the integers of the
batch are the rows' places among those that were chosen. Rows that no example names take no
gradient, so nothing is left out (Niu et al. 2020, "Billion-Scale Federated Learning on Mobile
Clients: A Submodel Design with Tunable Privacy", MobiCom). Its vector has the model's order, each
table with the chosen rows alone, ascending: the *selected* elements of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from math import prod
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetlearn_protocol.encodings import UINT32
from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.frames import Buffer
from fleetlearn_protocol.manifest import Manifest, Parameter, State
from fleetlearn_protocol.messages import ROW_ELEMENTS, ROWS, UPDATE, ContentSelection, Piece, Report
from fleetlearn_protocol.vector import Vector

Rows = NDArray[np.int64]
"""Numbers of rows, ascending, shape (R,)."""


class RowSegment(NamedTuple):
    """A stretch of the model's vector: elements that all devices have, or a sparse table."""

    start: int
    stop: int
    width: int
    """Elements of each row of the table; 0: it is none."""


class RowLayout(NamedTuple):
    """Where the sparse tables are in the model's vector."""

    rows: int
    """N, the rows of each table."""
    segments: tuple[RowSegment, ...]
    """One after the other, without gaps."""

    @property
    def size(self) -> int:
        """P, the elements of the model."""
        return self.segments[-1].stop

    @property
    def row_elements(self) -> int:
        """Elements of one row, of all tables together."""
        return sum(segment.width for segment in self.segments)

    def elements(self, count: int) -> int:
        """Return the elements of the sub-model with this many rows."""
        return selected_elements(self.size, self.rows, self.row_elements, count)


def selected_elements(size: int, rows: int, row_elements: int, count: int) -> int:
    """Return the elements of a sub-model with ``count`` rows. size: of the model; rows: of its
    tables; row_elements: of one row, of all tables together."""
    return size - (rows - count) * row_elements


def row_layout(manifest: Manifest) -> RowLayout | None:
    """Return where the sparse tables are; None where there are none."""
    sparse = manifest.sparse
    if sparse is msgspec.UNSET:
        return None
    segments = list[RowSegment]()
    for row in manifest.travelling:
        stop = row.offset + prod(row.shape)
        width = prod(row.shape[1:]) if row.name in sparse.tables else 0
        if not width and segments and not segments[-1].width:
            segments[-1] = segments[-1]._replace(stop=stop)
        else:
            segments.append(RowSegment(row.offset, stop, width))
    return RowLayout(sparse.rows, tuple(segments))


def check_rows(rows: Rows, layout: RowLayout) -> None:
    """Raise ProtocolError (out-of-range) where a row, of those that ascend, is beyond the
    table."""
    if rows.size and not 0 <= rows[0] <= rows[-1] < layout.rows:
        text = f"rows {rows[0]} to {rows[-1]} were named; the tables have 0 to {layout.rows - 1}"
        raise ProtocolError(Code.OUT_OF_RANGE, text)


def select(vector: Vector, layout: RowLayout, rows: Rows) -> Vector:
    """Return the selected elements of a vector like the model's, in new memory."""
    parts = []
    for start, stop, width in layout.segments:
        stretch = vector[start:stop]
        parts.append(stretch.reshape(-1, width)[rows].reshape(-1) if width else stretch)
    return np.concatenate(parts)


def put_back(vector: Vector, layout: RowLayout, rows: Rows, selected: Vector) -> None:
    """Undo ``select``: write the selected elements to their places in ``vector``."""
    begin = 0
    for start, stop, width in layout.segments:
        end = begin + (len(rows) * width if width else stop - start)
        if width:
            vector[start:stop].reshape(-1, width)[rows] = selected[begin:end].reshape(-1, width)
        else:
            vector[start:stop] = selected[begin:end]
        begin = end


def touched_rows(vector: Vector, layout: RowLayout) -> Rows:
    """Return the rows of a vector like the model's in which an element is not 0."""
    found = np.zeros(layout.rows, np.bool_)
    for start, stop, width in layout.segments:
        if width:
            found |= vector[start:stop].reshape(-1, width).any(axis=1)
    return np.flatnonzero(found)


def sub_manifest(manifest: Manifest, count: int) -> Manifest:
    """Return the manifest of the sub-model with this many rows. Its files are the bundle's, whose
    parameters are those of the whole model."""
    sparse = manifest.sparse
    assert sparse is not msgspec.UNSET
    tables = {*sparse.tables}
    batch = tuple(
        msgspec.structs.replace(array, below=count) if array.name in sparse.arrays else array
        for array in manifest.batch
    )
    parameters, state = list[Parameter](), list[State]()
    offset = 0
    for row in manifest.parameters:
        shape = (count, *row.shape[1:]) if row.name in tables else row.shape
        parameters.append(msgspec.structs.replace(row, shape=shape, offset=offset))
        offset += prod(shape)
    offset = 0
    for slot in manifest.state:  # SLOT.PARAMETER
        of_table = slot.name.partition(".")[2] in tables
        shape = (count, *slot.shape[1:]) if of_table else slot.shape
        state.append(msgspec.structs.replace(slot, shape=shape, offset=offset))
        offset += prod(shape)
    return msgspec.structs.replace(
        manifest,
        parameters=tuple(parameters),
        state=tuple(state),
        batch=batch,
        sparse=msgspec.structs.replace(sparse, rows=count),
    )


def selection_of(layout: RowLayout, rows: Rows, item: int) -> ContentSelection:
    """Return what a device asks for to get the selected elements of a content, ``item`` bytes to an
    element."""
    gaps = np.diff(rows, prepend=-1) - 1
    pieces = (
        Piece(item * start, item * (width or stop - start), bool(width))
        for start, stop, width in layout.segments
    )
    return ContentSelection(tuple(pieces), tuple(gaps.tolist()))


def rows_of(selection: ContentSelection) -> Rows:
    """Return the numbers of the chosen rows."""
    return np.cumsum(np.array(selection.rows, np.int64) + 1) - 1


def selected_bytes(selection: ContentSelection) -> int:
    """Return how many bytes are selected."""
    chosen = len(selection.rows)
    return sum(piece.size * (chosen if piece.chosen else 1) for piece in selection.pieces)


def check_selection(selection: ContentSelection, size: int) -> None:
    """Raise ProtocolError (bad-message) unless the pieces are those of a content of ``size`` bytes,
    in order and without overlaps."""
    last = int(rows_of(selection)[-1]) if selection.rows else -1
    end = 0
    for piece in selection.pieces:
        if piece.begin < end:
            text = f"a piece begins at byte {piece.begin}; the one before it ends at {end}"
            raise ProtocolError(Code.BAD_MESSAGE, text)
        end = piece.begin + piece.size * (last + 1 if piece.chosen else 1)
        if end > size:
            text = f"a piece ends at byte {end}; the content has {size}"
            raise ProtocolError(Code.BAD_MESSAGE, text)


def select_bytes(
    read: Callable[[int, int], Buffer], selection: ContentSelection, near: int
) -> bytes:
    """Return the selected bytes of a content of which ``read`` returns some: from a first one on,
    how many. Rows with at most ``near`` bytes between them are read together with these."""
    rows, parts = rows_of(selection), list[Buffer]()
    for begin, size, chosen in map(msgspec.structs.astuple, selection.pieces):
        if not chosen:
            parts.append(read(begin, size))
            continue
        breaks = np.flatnonzero((np.diff(rows) - 1) * size > near) + 1
        for first, end in pairwise([0, *breaks.tolist(), len(rows)] if len(rows) else []):
            start, last = int(rows[first]), int(rows[end - 1])
            window = read(begin + start * size, (last + 1 - start) * size)
            if last - start >= end - first:  # some are left out
                table = np.frombuffer(window, np.uint8).reshape(-1, size)
                window = table[rows[first:end] - start].tobytes()
            parts.append(window)
    return b"".join(parts)


def elements_in(report: Report, elements_of: Callable[[str], int]) -> Callable[[str], int]:
    """Return how many elements each part of a report has. elements_of: the same for whole
    models, and for ROW_ELEMENTS."""
    rows = next((part.size // UINT32.size(1) for part in report.parts if part.name == ROWS), None)
    if rows is None:
        return elements_of
    sizes = elements_of(UPDATE), elements_of(ROWS), elements_of(ROW_ELEMENTS)
    update = selected_elements(*sizes, rows)
    return lambda part: update if part == UPDATE else elements_of(part)


def with_row_elements(parts: Iterable[str]) -> list[str]:
    """Return these parts of a report, and what ``elements_in`` asks beside them."""
    names = list(parts)
    return [*names, ROW_ELEMENTS, UPDATE] if ROWS in names else names

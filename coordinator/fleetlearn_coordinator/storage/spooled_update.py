"""An accepted report's parts in its spool file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from fleetlearn_protocol.computations.layout import Sums
from fleetlearn_protocol.encodings import INT64, MASKED_NAMES, find_encoding, word_bytes
from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.formats.masked import words_from_bytes
from fleetlearn_protocol.formats.whole import rows_from_bytes, sums_from_bytes
from fleetlearn_protocol.messages import ROWS, UPDATE, Part, Report
from fleetlearn_protocol.secure.fixed_point import Words
from fleetlearn_protocol.sparse_rows import Rows, elements_in
from fleetlearn_protocol.vector import Vector

from fleetlearn_coordinator.storage.blobs import PART_BYTES

PART = 32768
"""Elements that are decoded at a time: whole blocks of every encoding."""


class SpoolReader(Protocol):
    """What reads spool files: the run's ``Blobs``, or another process that may read them."""

    def read_spool_file(
        self, number: int, size: int, begin: int = 0, part_bytes: int = PART_BYTES
    ) -> Iterator[memoryview]:
        """As ``Blobs`` has it."""


@dataclass(frozen=True, slots=True, eq=False)
class SpooledUpdate:
    """``aggregation.updates.Update``, one part of a report: read for as long as the spool file is
    not another upload's."""

    blobs: SpoolReader
    spool_file: int
    part: Part
    begin: int
    """The byte of the file at which the part begins."""
    elements: int
    """Of the vector that the part says."""

    def __iter__(self) -> Iterator[Vector]:
        encoding, left = find_encoding(self.part.encoding), self.elements
        step = encoding.size(PART)
        for content in self.blobs.read_spool_file(
            self.spool_file, self.part.size, self.begin, part_bytes=step
        ):
            yield encoding.decode(content, min(PART, left))
            left -= PART

    def read(self, start: int, stop: int) -> Vector:
        encoding = find_encoding(self.part.encoding)
        begin, end = encoding.size(start), encoding.size(stop)
        (content,) = self.blobs.read_spool_file(
            self.spool_file, end - begin, self.begin + begin, part_bytes=end - begin
        )
        return encoding.decode(content, stop - start)

    def words(self) -> Iterator[Words]:
        if self.part.encoding not in MASKED_NAMES:
            text = f"part {self.part.name} came as {self.part.encoding}; masked was expected"
            raise ProtocolError(Code.BAD_ENCODING, text)
        encoding = find_encoding(self.part.encoding)
        for content in self.blobs.read_spool_file(
            self.spool_file, self.part.size, self.begin, part_bytes=encoding.size(PART)
        ):
            yield words_from_bytes(content, word_bytes(encoding))

    def whole_numbers(self) -> Iterator[Sums]:
        if self.part.encoding != INT64.name:
            text = f"part {self.part.name} came as {self.part.encoding}; int64 was expected"
            raise ProtocolError(Code.BAD_ENCODING, text)
        for content in self.blobs.read_spool_file(
            self.spool_file, self.part.size, self.begin, part_bytes=INT64.size(PART)
        ):
            yield sums_from_bytes(content)


@dataclass(frozen=True, slots=True, eq=False)
class SpooledRows(SpooledUpdate):
    """The update of a sub-model: ``aggregation.updates.RowsUpdate``."""

    rows: Rows


def spooled_parts(
    blobs: SpoolReader, spool_file: int, report: Report, elements: Mapping[str, int]
) -> dict[str, SpooledUpdate]:
    """Return the report's parts by name. They lie in the spool file one after the other.
    ``elements``: part -> how many it has. The rows that an update has are a part of it. Raises
    ProtocolError (bad-encoding, out-of-range) where they do not ascend, or are none of the
    tables'."""
    own = elements_in(report, elements.__getitem__)
    begins = accumulate((part.size for part in report.parts), initial=0)
    parts = {
        part.name: SpooledUpdate(blobs, spool_file, part, begin, own(part.name))
        for part, begin in zip(report.parts, begins, strict=False)
    }
    of_rows = parts.pop(ROWS, None)  # before the update or behind it, as the device likes
    if of_rows is not None and (update := parts.get(UPDATE)) is not None:
        rows = _read_rows(of_rows, elements[ROWS])
        place = blobs, spool_file, update.part, update.begin, update.elements
        parts[UPDATE] = SpooledRows(*place, rows)
    return parts


def _read_rows(of_rows: SpooledUpdate, count: int) -> Rows:
    blobs, size, begin = of_rows.blobs, of_rows.part.size, of_rows.begin
    (content,) = blobs.read_spool_file(of_rows.spool_file, size, begin, part_bytes=size)
    rows = rows_from_bytes(content)
    if rows.size and rows[-1] >= count:
        text = f"row {rows[-1]} was named; the tables have 0 to {count - 1}"
        raise ProtocolError(Code.OUT_OF_RANGE, text)
    return rows

"""An accepted update in its spool file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fleetlearn_protocol.encodings import find_encoding
from fleetlearn_protocol.messages import Part
from fleetlearn_protocol.vector import Vector

from fleetlearn_coordinator.storage.blobs import Blobs

PART = 32768
"""Elements that are decoded at a time: whole blocks of every encoding."""


@dataclass(frozen=True, slots=True, eq=False)
class SpooledUpdate:
    """``aggregation.updates.Update``: read for as long as the spool file is not another upload's."""

    blobs: Blobs
    spool_file: int
    part: Part
    elements: int

    def __iter__(self) -> Iterator[Vector]:
        encoding, left = find_encoding(self.part.encoding), self.elements
        parts = self.blobs.read_spool_file(self.spool_file, self.part.size, part_bytes=encoding.size(PART))
        for content in parts:
            yield encoding.decode(content, min(PART, left))
            left -= PART

    def read(self, start: int, stop: int) -> Vector:
        encoding = find_encoding(self.part.encoding)
        begin, end = encoding.size(start), encoding.size(stop)
        content = b"".join(self.blobs.read_spool_file(self.spool_file, end - begin, begin))
        return encoding.decode(content, stop - start)

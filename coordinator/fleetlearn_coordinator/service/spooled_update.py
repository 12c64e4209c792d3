"""An accepted update in its spool file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fleetlearn_protocol.encodings import ENCODINGS
from fleetlearn_protocol.messages import Part
from fleetlearn_protocol.vector import Vector

from fleetlearn_coordinator.storage.blobs import Blobs


@dataclass(frozen=True, slots=True, eq=False)
class SpooledUpdate:
    """``aggregation.updates.Update``: read for as long as the spool file is not another upload's."""

    blobs: Blobs
    spool_file: int
    part: Part

    def __iter__(self) -> Iterator[Vector]:
        return map(ENCODINGS[self.part.encoding].decode, self.blobs.read_spool_file(self.spool_file, self.part.size))

    def read(self, start: int, stop: int) -> Vector:
        encoding = ENCODINGS[self.part.encoding]
        begin, end = encoding.size(start), encoding.size(stop)
        return encoding.decode(b"".join(self.blobs.read_spool_file(self.spool_file, end - begin, begin)))

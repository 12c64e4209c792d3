"""Begun uploads: the bytes of an update that are here, of an upload that is not complete."""

from __future__ import annotations

from fleetlearn_protocol.messages import Part
from msgspec import Struct


class BegunUpload(Struct, frozen=True):
    """How far an upload came, and what is known of its bytes: enough to go on with it on another
    connection, in another process."""

    device: str
    task: str
    parts: tuple[Part, ...]
    """Of the report that announced it. Only a report of the same parts, whose CRC-32 are among
    them, goes on with these bytes."""
    spool_file: int
    """The number of the spool file that has the bytes."""
    offset: int
    """Bytes that are here."""
    crc32: dict[str, int]
    """Name of each part that has begun to arrive -> CRC-32 of its bytes so far."""
    largest: dict[str, float]
    """Name of each part that has begun to arrive -> the greatest magnitude so far."""


class Announced(Struct, frozen=True):
    """What a run says of an announced update."""

    wanted: bool
    """False: its report has counted already."""
    begun: BegunUpload | None = None
    """What is here of the same bytes: the upload goes on there. Its spool file belongs to whoever
    is told this."""

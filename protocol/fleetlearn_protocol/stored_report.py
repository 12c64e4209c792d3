"""JSON on the disks of coordinators and devices, where bytes may be damaged; and stored reports,
those of earlier versions included."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from fleetlearn_protocol.frames import Buffer
from fleetlearn_protocol.messages import UPDATE, Report

Stored = TypeVar("Stored")


def read_json(content: Buffer, kind: type[Stored]) -> Stored:
    """Return the value of this type that a file holds. Raises msgspec.DecodeError, whatever the
    bytes are.

    msgspec alone raises UnicodeDecodeError where a string is no UTF-8, and RecursionError where
    values are nested deeply.
    """
    try:
        return msgspec.json.decode(content, type=kind)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(f"not JSON: {error}") from None


def read_report(content: bytes) -> Report:
    """Read a report that ``msgspec.json.encode`` wrote. Raises msgspec.DecodeError.

    Until reports had parts, each described one update by its fields ``size``, ``crc32`` and
    ``encoding``.
    """
    fields = read_json(content, dict[str, Any])
    if "parts" not in fields:
        update = {name: fields.get(name) for name in ("encoding", "size", "crc32")}
        fields["parts"] = [{"name": UPDATE, **update}]
    return msgspec.convert(fields, Report)

"""Reports as coordinators and devices keep them on disk, those of earlier versions included."""

from __future__ import annotations

from typing import Any

import msgspec

from fleetlearn_protocol.messages import UPDATE, Report


def read_report(content: bytes) -> Report:
    """Read a report that ``msgspec.json.encode`` wrote. Raises msgspec.DecodeError.

    Until reports had parts, each described one update by its fields ``size``, ``crc32`` and ``encoding``.
    """
    fields = msgspec.json.decode(content, type=dict[str, Any])
    if "parts" not in fields:
        update = {name: fields.get(name) for name in ("encoding", "size", "crc32")}
        fields["parts"] = [{"name": UPDATE, **update}]
    return msgspec.convert(fields, Report)

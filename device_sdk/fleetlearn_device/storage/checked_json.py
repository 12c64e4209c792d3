"""Small files as JSON objects with a version of their format and a checksum, as their last fields.

A file without the two is taken as it is: an older version wrote it, or its owner did. A version
that knows no checksums ignores the fields.
"""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec
from fleetlearn_protocol.stored_report import read_json
from fleetlearn_protocol.vector import checksum

FORMAT = 1
"""Of the files that this version writes."""
_END = re.compile(rb',"format":(\d{1,9}),"crc32":(\d{1,10})}\s*\Z')

Checked = TypeVar("Checked")


class NewerFormatError(msgspec.DecodeError):
    """A later version wrote the file."""


def checked_json(value: msgspec.Struct) -> bytes:
    """Return the struct, which has at least one field, as a file's content."""
    content = msgspec.json.encode(value)
    return b'%b,"format":%d,"crc32":%d}' % (content[:-1], FORMAT, checksum(content))


def read_checked_json(content: bytes, kind: type[Checked]) -> Checked:
    """Return the value of this type that a file holds.

    Raises msgspec.DecodeError, whatever the bytes are; NewerFormatError where a later version wrote
    them.
    """
    return read_json(intact_json(content), kind)


def intact_json(content: bytes) -> bytes:
    """Return a file's JSON without format and checksum, where these are right or missing. Raises as
    above."""
    end = _END.search(content)
    if end is None:
        return content
    format_, crc = map(int, end.groups())
    if format_ > FORMAT:
        raise NewerFormatError(
            f"its format is {format_}, and this version knows {FORMAT}: a newer fleetlearn wrote it"
        )
    content = content[: end.start()] + b"}"
    if checksum(content) != crc:
        raise msgspec.DecodeError("its checksum is another than its content's")
    return content

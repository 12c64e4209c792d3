"""A part's checkpoint as bytes: its parameters and its optimizer's state after some steps."""

from __future__ import annotations

import struct
from typing import NamedTuple

import msgspec
import numpy as np

from fleetlearn_protocol.messages import Digest, Identifier
from fleetlearn_protocol.stored_report import read_json
from fleetlearn_protocol.vector import Vector, checksum

FORMAT = b"fleetvp1"
"""The first bytes. Another format has another name."""
_END = struct.Struct("<II")


class PartKey(msgspec.Struct, frozen=True):
    """What a checkpoint is of: one with another key is of no use."""

    run: Identifier
    bundle: Digest
    alignment: Digest
    """Of the rows that it was trained on."""


class _Header(msgspec.Struct, frozen=True):
    key: PartKey
    step: int
    local: int
    state: int


class KeptPart(NamedTuple):
    """A checkpoint."""

    step: int
    """Steps that were done."""
    local: Vector
    """float32, shape (local_size,)."""
    state: Vector
    """float32, shape (state_size,)."""


def write_part(key: PartKey, part: KeptPart) -> bytes:
    """Return the bytes: format, vectors, header as JSON, its length, CRC-32 of all before."""
    header = msgspec.json.encode(_Header(key, part.step, part.local.size, part.state.size))
    vectors = part.local.astype("<f4").tobytes() + part.state.astype("<f4").tobytes()
    content = FORMAT + vectors + header
    return content + _END.pack(len(header), checksum(content))


def key_of(content: bytes) -> PartKey | None:
    """Return what the bytes say that they are a checkpoint of, or None where they are damaged."""
    header = _header(content)
    return None if header is None else header.key


def read_part(content: bytes, key: PartKey) -> KeptPart | None:
    """Return the checkpoint, or None where the bytes are damaged, or of another key."""
    header = _header(content)
    if header is None or header.key != key:
        return None
    begin = len(FORMAT)
    local = np.frombuffer(content, "<f4", header.local, begin)
    state = np.frombuffer(content, "<f4", header.state, begin + 4 * header.local)
    return KeptPart(header.step, local.astype(np.float32), state.astype(np.float32))


def _header(content: bytes) -> _Header | None:
    """Return the header of a whole checkpoint, or None."""
    end = len(content) - _END.size
    if end < len(FORMAT) or not content.startswith(FORMAT):
        return None
    length, crc = _END.unpack(content[end:])
    if length > end - len(FORMAT) or checksum(memoryview(content)[:end]) != crc:
        return None
    try:  # the CRC does not cover the length
        header = read_json(content[end - length : end], _Header)
    except msgspec.DecodeError:
        return None
    sizes = header.local, header.state
    fits = min(sizes) >= 0 and len(FORMAT) + 4 * sum(sizes) == end - length
    return header if fits else None

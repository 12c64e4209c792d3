"""Binary frames: bulk bytes travel as chunks, each one a WebSocket message with a 16-byte header.

A chunk is a whole message rather than a fragment of a long one: browsers cannot fragment, control
messages may pass between chunks, a transfer can resume at any chunk, and one chunk's bytes serve
every connection (no field of the header depends on who receives it).

Header, little-endian: u8 kind (1), u8 and u16 reserved (0), u32 transfer, u64 offset. The 16 bytes
keep the payload aligned for float32.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from fleetlearn_protocol.errors import Code, ProtocolError

CHUNK_BYTES = 128 * 1024
"""Bytes of a full chunk's payload. Larger chunks cost a sender four times the CPU per byte
(allocator); smaller ones cost the receiver more."""
HEADER = struct.Struct("<BBHIQ")
MAX_FRAME_BYTES = HEADER.size + CHUNK_BYTES
"""Largest binary message, in bytes."""
CHUNK_KIND = 1

Buffer = bytes | bytearray | memoryview
"""Bytes in memory."""


class Chunk(NamedTuple):
    """One piece of a transfer."""

    transfer: int
    offset: int
    """Place of the payload's first byte in the content or upload, in bytes."""
    payload: memoryview


def pack_chunk(transfer: int, offset: int, payload: Buffer) -> bytes:
    """Return the chunk as one binary message. ``payload`` is 1 to CHUNK_BYTES bytes. Raises
    ValueError."""
    size = memoryview(payload).nbytes
    if not 0 < size <= CHUNK_BYTES:
        raise ValueError(f"a chunk of {size} bytes was given; it takes 1 to {CHUNK_BYTES}")
    if not (0 <= transfer < 2**32 and 0 <= offset < 2**64):
        raise ValueError(
            f"transfer {transfer} or offset {offset} does not fit the header (u32, u64)"
        )
    return HEADER.pack(CHUNK_KIND, 0, 0, transfer, offset) + payload


def pack_chunks(transfer: int, content: Buffer, offset: int = 0) -> Iterator[bytes]:
    """Yield ``content`` from ``offset`` on, as messages of one chunk each; none if nothing is left
    to send."""
    view = memoryview(content).cast("B")
    for start in range(offset, len(view), CHUNK_BYTES):
        yield pack_chunk(transfer, start, view[start : start + CHUNK_BYTES])


def unpack_chunk(message: Buffer) -> Chunk:
    """Read a binary message. The payload is a view into it. Raises ProtocolError (bad-frame,
    too-large)."""
    if len(message) <= HEADER.size:
        raise ProtocolError(
            Code.BAD_FRAME,
            f"a binary frame of {len(message)} bytes was sent; a chunk has a header of "
            f"{HEADER.size} and a payload",
        )
    if len(message) > MAX_FRAME_BYTES:
        raise ProtocolError(
            Code.TOO_LARGE,
            f"a chunk of {len(message)} bytes was sent; the limit is {MAX_FRAME_BYTES}",
        )
    kind, flags, reserved, transfer, offset = HEADER.unpack_from(message)
    if kind != CHUNK_KIND or flags or reserved:
        raise ProtocolError(
            Code.BAD_FRAME,
            f"a binary frame begins with kind {kind}, flags {flags}, reserved {reserved}; "
            f"this version knows kind {CHUNK_KIND} with zeros",
        )
    return Chunk(transfer, offset, memoryview(message)[HEADER.size :])

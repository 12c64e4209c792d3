"""How asyncio reads from TLS connections: 256 KiB at a time, as from those without TLS, and without
a buffer for each connection.

By itself asyncio keeps a buffer of 256 KiB for each connection, and OpenSSL another that has grown
to the most that was ever read at once: 1,000 connections that are idle take 320 MiB. Read record by
record (16 KiB) they take 46 MiB, but a record then costs a turn of the event loop: a round of large
updates took twice the CPU that a server with nothing behind it takes, and takes 1.5 times now
(``benchmarks/connections.py --tls``). asyncio has no setting for either.
"""

from __future__ import annotations

import asyncio.sslproto
from asyncio import AbstractEventLoop
from typing import Any
from weakref import WeakKeyDictionary

READ = 2**18
"""Bytes that are read from a connection at a time."""
RECORD = 2**14
"""Bytes that OpenSSL is given at a time: about the largest record of TLS (RFC 8446, section
5.1)."""

_buffers: WeakKeyDictionary[AbstractEventLoop, memoryview] = WeakKeyDictionary()
"""The buffer of each event loop: what is read is handed to OpenSSL before another connection is
read."""


class SharedBufferProtocol(asyncio.sslproto.SSLProtocol):
    """asyncio's TLS, which reads into a buffer that all connections of its event loop share."""

    max_size = RECORD

    def __init__(self, loop: AbstractEventLoop, *args: Any, **kwargs: Any) -> None:
        super().__init__(loop, *args, **kwargs)
        self._ssl_buffer = bytearray()
        if loop not in _buffers:
            _buffers[loop] = memoryview(bytearray(READ))
        self._shared = _buffers[loop]

    def get_buffer(self, n: int) -> memoryview:
        """Return where bytes from the peer are written to. ``n``: what asyncio guesses that will
        come."""
        return self._shared

    def buffer_updated(self, nbytes: int) -> None:
        """Handle the bytes that came, as many as a record has at a time: OpenSSL's own buffer never
        grows beyond two."""
        for start in range(0, nbytes, RECORD):
            part = self._shared[start : min(start + RECORD, nbytes)]
            self._ssl_buffer_view = part
            super().buffer_updated(len(part))


def share_read_buffers() -> None:
    """Have all TLS connections that this process makes from now on read in this way."""
    asyncio.sslproto.SSLProtocol = SharedBufferProtocol  # type: ignore[misc]

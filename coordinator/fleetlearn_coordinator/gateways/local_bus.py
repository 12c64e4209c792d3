"""A bus on this machine: a UNIX socket, on which each batch has its length before it.

The socket lies in a folder that the engine process's user alone can use, and both sides look which
user the other one is.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fleetlearn_coordinator.gateways.bus import BusUser

LENGTH = struct.Struct("<I")
"""What stands before each batch: its bytes."""
LONGEST_BATCH = 2**28
"""Bytes. A longer one is of another program."""
MOST_UNSENT = 2**28
"""Bytes that wait for a peer that does not read. Above, the bus is lost."""
LONGEST_PATH = 100
"""Bytes of the path of a socket: systems allow 104 or 108."""
BACKLOG = 128


class LocalBus(asyncio.Protocol):
    """One end of a socket. ``user`` is told what comes, from ``connection_made`` on."""

    def __init__(self, find_user: Callable[[LocalBus], BusUser]) -> None:
        """``find_user``: called with the bus once it is there; returns who speaks on it."""
        self._find_user = find_user
        self._user: BusUser
        self._transport: asyncio.Transport
        self._unread = bytearray()
        self.full = False
        self._over = False

    # What the user asks

    def send(self, batch: bytes) -> None:
        if self._over:
            return
        self._transport.writelines([LENGTH.pack(len(batch)), batch])
        if self._transport.get_write_buffer_size() > MOST_UNSENT:
            self._transport.abort()

    def close(self) -> None:
        if not self._over:
            self._transport.close()

    # What asyncio says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._user = self._find_user(self)

    def data_received(self, data: bytes) -> None:
        unread = self._unread
        unread += data
        begin = 0
        while len(unread) - begin >= LENGTH.size:
            (size,) = LENGTH.unpack_from(unread, begin)
            if size > LONGEST_BATCH:
                self._transport.abort()
                return
            end = begin + LENGTH.size + size
            if len(unread) < end:
                break
            batch = bytes(memoryview(unread)[begin + LENGTH.size : end])
            begin = end
            self._user.received(batch)
            if self._over:
                return
        del unread[:begin]

    def pause_writing(self) -> None:
        self.full = True

    def resume_writing(self) -> None:
        self.full = False
        self._user.writable()

    def connection_lost(self, error: Exception | None) -> None:
        self._over = True
        self._user.lost(
            "the other process ended, or closed the connection" if error is None else str(error)
        )


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Yield a path of a socket that is short enough for the system, also where this one is not. On
    systems other than Linux a long one stays as it is, and cannot be used."""
    if len(os.fsencode(path)) <= LONGEST_PATH or not Path("/proc/self/fd").is_dir():
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


async def listen_locally(
    path: Path, find_user: Callable[[LocalBus], BusUser]
) -> asyncio.AbstractServer:
    """Take gateways in on this socket, in whose folder the caller alone listens. ``find_user``: as
    for ``LocalBus``. Raises OSError."""
    loop = asyncio.get_running_loop()
    listening = socket.socket(socket.AF_UNIX)
    try:
        with suppress(FileNotFoundError):
            path.unlink()  # of a process that was killed
        with short_path(path) as short:
            before = os.umask(0o177)
            try:
                listening.bind(short)
            finally:
                os.umask(before)
        return await loop.create_unix_server(
            lambda: CheckedBus(find_user), sock=listening, backlog=BACKLOG
        )
    except BaseException:
        listening.close()
        raise


async def connect_locally(path: Path, find_user: Callable[[LocalBus], BusUser]) -> None:
    """Connect to the engine process that listens there. ``find_user``: as for ``LocalBus``. Raises
    OSError."""
    loop = asyncio.get_running_loop()
    with short_path(path) as short:
        await loop.create_unix_connection(lambda: CheckedBus(find_user), short)


class CheckedBus(LocalBus):
    """A bus whose peer must be a process of the same user, or of root."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        user = peer_user(transport.get_extra_info("socket"))
        if user not in (None, 0, os.getuid()):
            self._over = True
            assert isinstance(transport, asyncio.Transport)
            transport.abort()
            return
        super().connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._over:
            super().connection_lost(error)


def peer_user(connected: socket.socket) -> int | None:
    """Return the user number of the process at the other end of a UNIX socket; None where the
    system does not say."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack(
        "3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    )
    return int(user)

"""Settings of the process that bound a coordinator's memory and stalls, each with its measured
effect."""

from __future__ import annotations

import ctypes
import errno
import gc
import resource
import socket
import sys
from typing import NamedTuple

from fleetlearn_protocol.errors import in_words

from fleetlearn_coordinator.conversation.limits import NEWCOMERS, OTHER_FILES

BACKLOG = 4096
"""Connections the kernel holds before they are accepted. With asyncio's 100, 10,000 devices that
connect at the same instant take a minute and some fail; with 4096 seconds."""
ENOUGH = 1000
"""Devices at a time that are enough for whoever left ``max_connections`` at its default."""
SEND_BUFFER = 256 * 1024
"""Bytes of kernel memory that a device which stopped reading can hold (4 MiB each where the kernel
decides)."""
USER_TIMEOUT_MS = 30_000
"""Milliseconds of unacknowledged data after which the kernel ends a connection, where the system
has the option."""

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


def collect_garbage_rarely() -> None:
    """Keep all objects that exist now out of the garbage collector, and run the collector less
    often.

    A connection is some 50 objects: with the default thresholds more than half of a handshake's CPU
    is collection, and a full collection stops 10,000 connections for 0.4 s. Nothing that comes and
    goes may wait for it: see ``Connection.cut_cycles``.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def keep_freed_memory() -> None:
    """Have glibc keep freed memory instead of returning it to the kernel, which clears each page
    that comes back."""
    if sys.platform != "linux":
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return
    mallopt(_M_MMAP_THRESHOLD, 64 * 2**20)
    mallopt(_M_TRIM_THRESHOLD, 64 * 2**20)
    mallopt(_M_TOP_PAD, 2**20)


def raise_file_limit() -> None:
    """Allow as many open connections as the system lets this process have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class DescriptorShares(NamedTuple):
    """How many connections the process has descriptors for."""

    limit: int
    """Files and sockets that the process may open (RLIMIT_NOFILE)."""
    devices: int
    """Connections that may speak for a device: as many as were asked for, or fewer. Below 1 there
    is room for none."""
    newcomers: int
    """Other connections: in the handshake, before the check-in, closing."""


def places(devices: int, *, files: int) -> DescriptorShares:
    """Share the process's descriptors between ``files`` files, ``devices`` devices, and
    newcomers."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return DescriptorShares(2**31, devices, NEWCOMERS)
    newcomers = max(1, min(NEWCOMERS, limit // 8))
    return DescriptorShares(limit, min(devices, limit - newcomers - files - OTHER_FILES), newcomers)


async def listening_sockets(
    host: str, port: int, backlog: int = BACKLOG, *, shared: bool = False
) -> list[socket.socket]:
    """Return sockets that listen on an address, without blocking. ``backlog``: connections that the
    kernel holds before they are accepted. ``shared``: other processes of this user may listen there
    too, and each gets a part of the connections (SO_REUSEPORT). Raises OSError, whose text says
    what can be done."""
    import asyncio  # late: doctor has no use for it

    try:
        # asyncio looks up the name and makes the sockets.
        server = await asyncio.get_running_loop().create_server(
            asyncio.Protocol, host, port, start_serving=False, reuse_port=shared or None
        )
    except OSError as error:
        raise listening_error(error, host, port) from None
    listening = [one.dup() for one in server.sockets]
    server.close()
    for one in listening:
        tune_listener(one)
        one.listen(backlog)
        one.setblocking(False)
    return listening


def listening_error(error: OSError, host: str, port: int) -> OSError:
    """Return an error for people, in place of the system's: an address that cannot be listened
    on."""
    return OSError(error.errno, f"cannot listen on {host}, port {port}: {_why_not(error)}")


def _why_not(error: OSError) -> str:
    """Return why an address cannot be listened on, and what can be done."""
    match error.errno:
        case errno.EADDRINUSE:
            return (
                "another program listens there, perhaps another coordinator. End it, or set "
                "another port"
            )
        case errno.EACCES | errno.EPERM:
            return "the system forbids it: ports below 1024 are for root. Set another port"
        case errno.EADDRNOTAVAIL:
            return (
                "this machine has no such address. Set host to one that it has, or to 0.0.0.0 for "
                "all"
            )
    if isinstance(error, socket.gaierror):
        return (
            f"the name cannot be looked up ({in_words(error)}). Set host to an address of this "
            "machine"
        )
    return in_words(error)


def tune_listener(listener: socket.socket) -> None:
    """Set the socket options that accepted connections inherit."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)

"""What a coordinator tells systemd: that it listens, that it is alive, that it stops.

A service of ``Type=notify`` has a datagram socket in NOTIFY_SOCKET
(https://www.freedesktop.org/software/systemd/man/sd_notify.html). Elsewhere nothing is sent.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress

READY, ALIVE, STOPPING = "READY=1", "WATCHDOG=1", "STOPPING=1"


def notify_systemd(state: str) -> None:
    """Send a state. What cannot be sent is lost: the service manager may be gone for a moment."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    with suppress(OSError), socket.socket(socket.AF_UNIX, kind) as sender:
        # "@" begins the name of a socket that has no file
        sender.sendto(state.encode(), address.replace("@", "\0", 1))

"""systemd, for the rooms that run as services: what a process tells it, and what the units that we
write have in common.

A service of ``Type=notify`` has a datagram socket in NOTIFY_SOCKET
(https://www.freedesktop.org/software/systemd/man/sd_notify.html). Elsewhere nothing is sent. Every
setting of a unit is explained in systemd.exec(5).
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

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


FOR_EVERY_SERVICE = """\
NoNewPrivileges=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
SystemCallArchitectures=native
# setrlimit and sched_setaffinity, of the group @resources, are needed.
SystemCallFilter=@system-service
SystemCallFilter=~@privileged
SystemCallErrorNumber=EPERM
"""
"""Lines of [Service] that work in the units of one user, too."""

FOR_THE_SYSTEM = """\
# Nothing of the system may be written but the service's own folders.
ProtectSystem=strict
PrivateTmp=yes
PrivateMounts=yes
RemoveIPC=yes
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectProc=invisible
"""
"""Lines of [Service] for the units of the system alone."""

HOMES = ("/home", "/root", "/run/user")
"""What ProtectHome= is about."""


def quoted(word: str) -> str:
    """Return a word of a command as systemd reads it, without specifiers or variables."""
    word = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{word}"' if any(each.isspace() for each in word) or '"' in word else word


def write_unit(path: Path, text: str) -> None:
    """Write a unit whole or not at all, readable by everybody. Raises OSError."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text, "utf-8")
    draft.chmod(0o644)
    draft.replace(path)

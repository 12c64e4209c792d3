"""Runs one attack in a separate process, until the process is ended:
``_run_attack.py MODULE NAME ADDRESS SOURCES``.

The attackers come from SOURCES addresses of this machine, 127.0.1.1 and the next ones (Linux only).
Honest devices come from 127.0.0.1.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import socket
import sys
from typing import Any

BIND_ADDRESS_NO_PORT = 24
"""Linux's IP_BIND_ADDRESS_NO_PORT: the port is chosen when it is known to whom the socket
connects."""


class AttackersLoop(asyncio.SelectorEventLoop):
    """Connects from the addresses of the attackers, in turns."""

    def __init__(self, sources: int) -> None:
        super().__init__()
        self._sources = itertools.cycle([f"127.0.1.{number}" for number in range(1, sources + 1)])

    async def sock_connect(self, sock: socket.socket, address: Any) -> None:
        sock.setsockopt(socket.IPPROTO_IP, BIND_ADDRESS_NO_PORT, 1)
        sock.bind((next(self._sources), 0))
        await super().sock_connect(sock, address)


def main(module: str, name: str, address: str, sources: str) -> None:
    attack = getattr(importlib.import_module(module), name)
    with asyncio.Runner(loop_factory=lambda: AttackersLoop(int(sources))) as runner:
        runner.run(attack(address, asyncio.Event()))


if __name__ == "__main__":
    main(*sys.argv[1:])

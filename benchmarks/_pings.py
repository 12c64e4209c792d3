"""A process that pings a coordinator: ``_pings.py URL``. It ends when something is written to it.

It prints a line when it begins, and at the end the seconds until each answer. It never checks in,
so it takes a new connection every RECONNECT seconds, before the coordinator ends the old one.
"""

from __future__ import annotations

import select
import sys
import time

from fleetlearn_protocol.messages import PROTOCOL_NAME
from websockets.sync.client import connect
from websockets.typing import Subprotocol

INTERVAL = 0.01
"""Seconds between an answer and the next ping."""
RECONNECT = 5.0
"""Half of the time in which a peer has to check in."""


def main(url: str) -> None:
    waits: list[float] = []
    print("connected", flush=True)
    asked_to_end = False
    while not asked_to_end:
        began = time.monotonic()
        with connect(
            url, subprotocols=[Subprotocol(PROTOCOL_NAME)], compression=None, open_timeout=60
        ) as connection:
            connected = time.monotonic()
            waits.append(connected - began)  # to connect takes a turn of the loop too
            while not asked_to_end and time.monotonic() < connected + RECONNECT:
                sent = time.monotonic()
                connection.ping().wait(120)
                waits.append(time.monotonic() - sent)
                asked_to_end = bool(select.select([sys.stdin], [], [], INTERVAL)[0])
    for wait in waits:
        print(f"{wait:.4f}")


if __name__ == "__main__":
    main(sys.argv[1])

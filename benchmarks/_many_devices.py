"""Some of the devices of many_connections.py, as a process of their own.

``_many_devices.py SETTINGS`` (JSON) reads commands from its standard input, one JSON object a
line, and prints what its devices have come to, whenever that has changed.
"""

from __future__ import annotations

import json
import os
import random
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from math import inf
from pathlib import Path
from typing import Any

import _raw_devices
import _websocket_device
from _raw_devices import Peer
from _raw_peer import PING, masked_header
from fleetlearn_coordinator.network import process_settings
from fleetlearn_protocol.messages import Cancel, ComeBack, Task, Welcome, decode_from_coordinator

TELL = 0.2
"""Seconds between two looks whether there is something to say."""
BACK_OFF = 2.0
"""Seconds within which a device connects again whose connection was refused or lost."""
PER_ADDRESS = 8000
"""Connections from one address: Linux is slow to find a free port above half of its 28,000."""
PING_FRAME = masked_header(PING, 0)


class ManyDevices(_raw_devices.Fleet):
    """Devices that stay. One that loses its connection comes back within BACK_OFF."""

    def __init__(
        self,
        url: str,
        update: _websocket_device.Update,
        *,
        rounds: int,
        first: int,
        source: str,
        at_once: int,
        ca: str | None = None,
    ) -> None:
        """``first``: the number of the first device. ``source``: the first three numbers of the
        loopback addresses that they connect from. ``at_once``: most devices that wait for their
        welcome at a time; 0: all. ``ca``: what certifies the coordinator, if it has TLS."""
        super().__init__(url, update, rounds, ca=None if ca is None else Path(ca))
        self.first, self.source = first, source
        self._most = at_once or inf
        self._under_way = 0
        self._welcomed: set[Peer] = set()
        self.holds = True
        """Whether devices keep their tasks and do nothing yet."""
        self._held: list[tuple[Peer, bytes]] = []
        self._waiting: list[tuple[float, str]] = []
        """When a device connects again, and its name: a heap."""
        self._beat = inf
        self._order: deque[Peer] = deque()
        """Who gives a sign of life next."""
        self._beaten = 0.0

    def connect_all(self, count: int) -> None:
        """Begin ``count`` connections, as many at once as may be."""
        now = time.perf_counter()
        for number in range(self.first, self.first + count):
            heappush(self._waiting, (now, f"d{number}"))
        self.step()

    def beat(self, interval: float) -> None:
        """From now on, each device sends a ping each ``interval`` seconds; 0: none does."""
        self._beat, self._beaten = interval or inf, time.perf_counter()
        self._order = deque(self.peers)

    def release(self) -> None:
        """Let devices do the tasks that they have, and those that they are given."""
        self.holds = False
        held, self._held = self._held, []
        for peer, body in held:
            if peer in self.peers:
                self._hear(peer, body)

    def step(self) -> None:
        """Do what is due: signs of life, and connections of those that lost theirs."""
        now = time.perf_counter()
        while self._waiting and self._waiting[0][0] <= now and self._under_way < self._most:
            self._under_way += 1
            name = heappop(self._waiting)[1]
            address = 1 + (int(name[1:]) - self.first) // PER_ADDRESS
            self.connect_one(name, f"{self.source}.{address}")
        if self._beat < inf and self.peers:
            due = int((now - self._beaten) * len(self.peers) / self._beat)
            self._beaten += due * self._beat / len(self.peers)
            for _ in range(min(due, len(self._order))):
                peer = self._order.popleft()
                if peer in self.peers:
                    self._order.append(peer)
                    self._ping(peer)

    def _ping(self, peer: Peer) -> None:
        if not peer.open or peer.outgoing:
            return
        peer.outgoing.append(PING_FRAME)
        self.counts["pings"] += 1
        try:
            self._flush(peer)
        except OSError as error:
            self._fail(peer, error.strerror or str(error))

    def _hear(self, peer: Peer, body: bytes) -> None:
        match decode_from_coordinator(body):
            case Task() if self.holds:
                self._held.append((peer, body))
                self.counts["held"] += 1
            case ComeBack(after, reason) if reason != "finished":
                self.counts[f"told to come back: {reason}"] += 1
                self._under_way -= peer not in self._welcomed
                self._welcomed.discard(peer)
                self._end(peer)
                heappush(self._waiting, (time.perf_counter() + after, peer.name))
            case Cancel():
                self.counts["cancelled"] += 1
            case Welcome():
                self._under_way -= 1
                self._welcomed.add(peer)
                super()._hear(peer, body)
            case _:
                super()._hear(peer, body)

    def _fail(self, peer: Peer, cause: str) -> None:
        super()._fail(peer, cause)
        if peer in self._welcomed:
            self._welcomed.remove(peer)
            self.counts["lost"] += 1
        else:
            self._under_way -= 1
        heappush(self._waiting, (time.perf_counter() + random.uniform(0.0, BACK_OFF), peer.name))

    def told(self) -> dict[str, Any]:
        """Return what the parent process is told."""
        rounds = {
            round: (moments.first_task, moments.last_accepted, moments.accepted)
            for round, moments in self.log.items()
        }
        return {"counts": dict(self.counts), "rounds": rounds}


def main(size: int, **settings: Any) -> None:
    process_settings.raise_file_limit()
    update = _websocket_device.make_update(size)
    fleet = ManyDevices(update=update, **settings)
    acts: dict[str, Callable[[Any], object]] = {
        "connect": fleet.connect_all,
        "beat": fleet.beat,
        "release": lambda _: fleet.release(),
        "waits": lambda _: _say({"welcomed_at": fleet.welcomed_at}),
    }
    commands = _commands()
    said = ""
    _say({})
    while True:
        look_again = time.perf_counter() + TELL

        def due(until: float = look_again) -> bool:
            fleet.step()
            return time.perf_counter() >= until

        fleet.run(due, inf)
        for command in next(commands):
            (name, value), *_ = command.items()
            acts[name](value)
        told = json.dumps(fleet.told())
        if told != said:
            said = told
            print(told, flush=True)


def _commands() -> Iterator[list[dict[str, Any]]]:
    """Yield the commands that have come since the last time. Ends the process where none can come
    any more."""
    unread = b""
    while True:
        while select.select([sys.stdin], [], [], 0)[0]:
            data = os.read(sys.stdin.fileno(), 4096)
            if not data:
                sys.exit()
            unread += data
        *lines, unread = unread.split(b"\n")
        yield [json.loads(line) for line in lines]


def _say(content: dict[str, Any]) -> None:
    print(json.dumps(content), flush=True)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))

"""Devices that come and go: they enrol, train nothing, send updates, vanish, are slow, and are
revoked."""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from secrets import token_urlsafe

from _websocket_device import EXAMPLES, Update, report
from fleetlearn_coordinator.storage.identities import Identities
from fleetlearn_protocol.encodings import FAMILIES
from fleetlearn_protocol.frames import pack_chunks, unpack_chunk
from fleetlearn_protocol.messages import (
    PROTOCOL_NAME,
    PROTOCOL_VERSION,
    Accepted,
    CheckIn,
    ComeBack,
    Content,
    Fetch,
    Grant,
    Heartbeat,
    Refused,
    Task,
    Uploaded,
    decode_from_coordinator,
    encode,
)
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException
from websockets.typing import Subprotocol

FATES = {"leaves": 8, "vanishes": 4, "slow": 2, "revoked": 1}
"""What becomes of a connection -> how often, of 15."""
TASKS = 4
"""Tasks that a device does on a connection, at most."""
PAUSE = 4.0
"""Seconds between a device's connections, at most."""
SLOW = 4.0
"""Times the heartbeat that a slow device takes for an upload, at most: some of their tasks end
without them."""


class Comings:
    """The devices of one coordinator. ``counts`` has what they did."""

    def __init__(
        self,
        url: str,
        identities: Path,
        update: Update,
        heartbeat: float,
        seed: int,
        ca: Path | None = None,
    ) -> None:
        """``ca``: what certifies the coordinator, if it has TLS."""
        self.url, self.update, self.heartbeat = url, update, heartbeat
        self._tls = None if ca is None else ssl.create_default_context(cafile=str(ca))
        self.counts: Counter[str] = Counter()
        self.connected = 0
        self.round = 0
        """The newest round for which a device was given a task."""
        self._identities, self._draws = Identities(identities), random.Random(seed)
        now = time.time()
        self._token = self._identities.make_token(10**6, now + 10**6, (), now)

    def close(self) -> None:
        self._identities.close()

    async def live(self, place: int) -> None:
        """Be a device until cancelled. When it was revoked, another device takes its place."""
        secret = device = ""
        while True:
            fate = self._draws.choices([*FATES], [*FATES.values()])[0]
            if not secret:
                secret = token_urlsafe(32)
                self.counts["enrolments"] += 1
                device = f"device-{place}-{self.counts['enrolments']}"
            headers = {
                "Authorization": f"Bearer {secret}",
                "Fleetlearn-Device": device,
                "Fleetlearn-Enrolment": self._token,
            }
            with suppress(OSError, WebSocketException, TimeoutError):
                async with connect(
                    self.url,
                    subprotocols=[Subprotocol(PROTOCOL_NAME)],
                    compression=None,
                    max_size=1 << 20,
                    additional_headers=headers,
                    ssl=self._tls,
                    close_timeout=1.0,
                ) as connection:
                    self.counts["connections"] += 1
                    self.connected += 1
                    try:
                        await self._converse(connection, device, fate)
                    finally:
                        self.connected -= 1
            if fate == "revoked":
                if self._identities.revoke(device, time.time()):
                    self.counts["revocations"] += 1
                secret = ""
            await asyncio.sleep(self._draws.uniform(0, PAUSE))

    async def _converse(self, connection: ClientConnection, device: str, fate: str) -> None:
        """Do tasks until the device leaves or its fate comes."""
        await connection.send(
            encode(
                CheckIn(
                    PROTOCOL_VERSION, device, EXAMPLES, software="benchmark", encodings=FAMILIES
                )
            )
        )
        task: Task | None = None
        left = self._draws.randint(1, TASKS)
        ends_after = self._draws.randint(1, 12) if fate in ("vanishes", "revoked") else 10**9
        to_come = heard = 0
        while left:
            try:
                # wait_for of Python 3.11 can lose a cancellation
                async with asyncio.timeout(self.heartbeat):
                    message = await connection.recv()
            except TimeoutError:
                await connection.send(encode(Heartbeat()))
                continue
            heard += 1
            if heard == ends_after and fate == "vanishes":
                self.counts["vanished"] += 1
                connection.transport.abort()
                return
            # goes on until it is cut off
            if heard == ends_after and self._identities.revoke(device, time.time()):
                self.counts["revocations"] += 1
            if isinstance(message, bytes):
                to_come -= len(unpack_chunk(message).payload)
                if not to_come and task is not None:
                    await asyncio.sleep(self._draws.uniform(0, self.heartbeat / 4))
                    await connection.send(encode(report(task, self.update)))
                continue
            match decode_from_coordinator(message):
                case Task() as task:
                    self.round = max(self.round, task.round)
                    await connection.send(encode(Fetch(task.vector("model").sha256)))
                case Content(_, _, size, offset):
                    to_come = size - offset
                case Grant(name, transfer, offset):
                    await self._upload(connection, transfer, offset, fate)
                    await connection.send(encode(Uploaded(name)))
                case Accepted():
                    self.counts["accepted"] += 1
                    left -= 1
                case Refused(code):
                    self.counts[f"refused: {code}"] += 1
                    return
                case ComeBack():
                    return
                case _:
                    pass

    async def _upload(
        self, connection: ClientConnection, transfer: int, offset: int, fate: str
    ) -> None:
        wait = self._draws.uniform(0, SLOW * self.heartbeat) if fate == "slow" else 0.0
        chunks = [*pack_chunks(transfer, self.update.content, offset)]
        for chunk in chunks:
            await connection.send(chunk)
            await asyncio.sleep(wait / len(chunks))

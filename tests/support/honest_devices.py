"""For tests: devices in the test's own event loop that do what they are told, through whatever
deaths of their coordinator, and remember what they were promised."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from contextlib import suppress

import numpy as np
from fleetlearn_protocol import Code
from fleetlearn_protocol.exchanges import fields_of
from fleetlearn_protocol.messages import (
    PROTOCOL_NAME,
    Accepted,
    Cancel,
    CheckIn,
    ComeBack,
    Evaluation,
    Grant,
    Held,
    Question,
    Refused,
    Reply,
    Task,
    Welcome,
)
from fleetlearn_protocol.vector import Vector
from peers import SIZE, Peer, report_of
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException
from websockets.typing import Subprotocol


def update_for(name: str, round: int) -> Vector:
    """The update that this device makes in this round, always the same."""
    seed = zlib.crc32(f"{name} {round}".encode())
    return np.random.default_rng(seed).normal(size=SIZE).astype(np.float32)


class HonestDevice:
    """A device that trains each task at once, and keeps its update until that is acknowledged."""

    def __init__(self, name: str, address_of: Callable[[], str | None]) -> None:
        """``address_of``: where the coordinator listens now; None: nowhere."""
        self.name, self._address_of = name, address_of
        self.task: Task | None = None
        """Whose update is done and not acknowledged."""
        self.accepted: list[str] = []
        """The tasks whose updates were acknowledged."""
        self.may_report = asyncio.Event()
        self.may_report.set()

    async def run(self) -> None:
        """Serve until the coordinator says that training is over."""
        while True:
            address = self._address_of()
            with suppress(OSError, WebSocketException):
                if address is not None and await self._serve(address):
                    return
            await asyncio.sleep(0.005)

    async def _serve(self, address: str) -> bool:
        """Return whether training is over."""
        protocol = Subprotocol(PROTOCOL_NAME)
        async with connect(address, subprotocols=[protocol], compression=None) as connection:
            peer = Peer(self.name, connection)
            held = None if self.task is None else Held(self.task.task, self.task.round)
            await peer.send(CheckIn(1, self.name, 10, held=held, exchanges=("evaluation",)))
            while not isinstance(message := await peer.receive(), ComeBack):
                await self._hear(peer, message)
            return message.reason == "finished"

    async def _hear(self, peer: Peer, message: object) -> None:
        match message:
            case Welcome():
                await self._report(peer)
            case Task():
                self.task = message
                await self._report(peer)
            case Grant() if self.task is not None:
                update = update_for(self.name, self.task.round)
                await peer.send_update(message, update)
            case Accepted(task):
                self.accepted.append(task)
                self.task = None
            case Cancel():
                self.task = None
            case Refused(code=Code.STALE_ROUND | Code.UNKNOWN_TASK):
                self.task = None
            case Refused():
                raise AssertionError(message)
            case Question(task):
                score = float(len(self.name))
                result = Evaluation(10, score, {"accuracy": score})
                await peer.send(Reply(task, "evaluation", fields_of(result)))

    async def _report(self, peer: Peer) -> None:
        await self.may_report.wait()
        if self.task is not None:
            await peer.send(report_of(self.task, update_for(self.name, self.task.round)))

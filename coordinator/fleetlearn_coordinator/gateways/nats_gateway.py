"""A gateway's side of NATS: one bus after another to the engine process that has the run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from secrets import token_hex
from typing import Protocol

import msgspec

from fleetlearn_coordinator.gateways.bus import Bus, BusUser
from fleetlearn_coordinator.gateways.nats_bus import BEAT, NatsBus
from fleetlearn_coordinator.gateways.nats_line import NatsLine
from fleetlearn_coordinator.gateways.nats_place import NatsPlace, end_task, stay_connected
from fleetlearn_coordinator.gateways.nats_subjects import BusOffered, BusWanted, EngineThere
from fleetlearn_coordinator.network.peer_log import logger

SILENCE = 10
"""Seconds without an answer, after which the log says so."""
AGAIN = 2
"""Beats without an answer after which the gateway says again that it
wants a bus."""


class SpeaksForGateway(Protocol):
    """What speaks on a gateway's buses, one after another: engine_link.py."""

    over: asyncio.Event
    """Set while there is no bus."""

    def speak_on(self, bus: Bus) -> BusUser:
        """Speak on this bus from now on. Returns whom the bus tells what comes."""


class NatsGateway:
    """The buses of one gateway. Within a running event loop."""

    def __init__(
        self,
        place: NatsPlace,
        name: str,
        link: SpeaksForGateway,
        numbered: Callable[[int], None],
    ) -> None:
        """``name``: the gateway's, a part of a subject. ``numbered``: called with the gateway's
        number before ``link`` speaks on a bus."""
        self._place, self._name, self._link, self._numbered = place, name, link, numbered
        self._process = token_hex(8)
        self._newest = -1
        """The highest epoch of an engine process that was heard of: none before it has the run."""
        self._wanted = ""
        """The name of the bus that is asked for. Empty: none is."""
        self._current = "", ""
        """The engine process and the bus that is spoken on."""
        self._bus: NatsBus | None = None
        self._beats = 0
        """Seconds since the bus was asked for, or is there."""
        self._unanswered = 0
        """Seconds for which no engine process has answered. -1: one has, or that was said."""
        self._line: NatsLine | None = None
        self._task: asyncio.Task[None]

    def begin(self) -> None:
        """Stay connected, until ``close``."""
        name = f"fleetlearn gateway {self._name}"
        self._task = asyncio.get_running_loop().create_task(
            stay_connected(self._place, name, self._speak)
        )

    async def close(self) -> None:
        """End the bus, once what was said is with the server."""
        if self._bus is not None:
            self._bus.close()
        await end_task(self._task)

    async def _speak(self, line: NatsLine) -> None:
        base = self._place.subjects
        await line.subscribe(base.engine, self._engine_there)
        await line.subscribe(base.welcome(self._name), self._offered)
        await line.subscribe(base.down(self._name, "*", "*"), self._frame)
        await line.flush()
        self._line, self._unanswered = line, 0
        self._ask()
        try:
            while not line.over.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(line.over.wait(), BEAT)
                self._beats += 1
                if self._bus is not None:
                    self._bus.beat()
                elif self._beats >= AGAIN:
                    self._ask()
                self._count_silence()
        finally:
            self._line = None
            self._wanted = ""
            if self._bus is not None:
                self._bus.lose(line.why)

    def _count_silence(self) -> None:
        if self._bus is None and self._unanswered >= 0:
            self._unanswered += 1
        if self._unanswered >= SILENCE:
            self._unanswered = -1
            logger.warning(
                "the bus: no engine process answers at %s. Check that `fleetlearn-coordinator "
                "serve` runs with this bus and a plan of that name. The gateway goes on asking",
                self._place.subjects.hello(self._name),
            )

    def _ask(self) -> None:
        """Say that a bus is wanted."""
        if self._line is not None and self._bus is None:
            self._wanted, self._beats = token_hex(8), 0
            wanted = msgspec.msgpack.encode(BusWanted(self._wanted, self._process))
            self._line.publish(self._place.subjects.hello(self._name), wanted)

    def _engine_there(self, subject: str, content: bytes) -> None:
        """An engine process has the run."""
        there = msgspec.msgpack.decode(content, type=EngineThere)
        if there.epoch > self._newest:
            self._newest = there.epoch
            if self._bus is not None:
                self._bus.lose("another engine process has the run")
        self._ask()

    def _offered(self, subject: str, content: bytes) -> None:
        """An engine process answers."""
        offered = msgspec.msgpack.decode(content, type=BusOffered)
        if offered.epoch < self._newest:
            text = "the bus: an engine process of epoch %d answers, which has lost the run to %d"
            logger.warning(text, offered.epoch, self._newest)
            return
        if offered.epoch > self._newest and self._bus is not None:
            self._bus.lose("another engine process has the run")
            self._ask()
        self._newest = offered.epoch
        if offered.bus != self._wanted or self._line is None:
            return
        self._wanted = ""
        name = offered.engine, offered.bus
        publish = partial(self._line.publish, self._place.subjects.up(self._name, *name))
        self._beats, self._current = 0, name
        logger.info("the bus: an engine process answers; this is gateway %d", offered.number)
        self._unanswered = -1
        self._bus = NatsBus(publish, self._line.longest, self._bus_over)
        self._numbered(offered.number)
        self._bus.user = self._link.speak_on(self._bus)

    def _bus_over(self) -> None:
        self._bus = None
        if self._beats >= AGAIN:  # else a bus that ends at once would be asked for at once
            asyncio.get_running_loop().call_soon(self._ask)
        self._beats = 0

    def _frame(self, subject: str, frame: bytes) -> None:
        *_, engine, name = subject.split(".")
        if self._bus is not None and (engine, name) == self._current:
            self._bus.took(frame)

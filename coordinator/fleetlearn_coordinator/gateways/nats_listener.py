"""The engine process's side of NATS: it lets gateways in, as ``local_bus.listen_locally`` does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from secrets import token_hex

import msgspec

from fleetlearn_coordinator.gateways.bus import Bus, BusUser
from fleetlearn_coordinator.gateways.nats_bus import BEAT, NatsBus
from fleetlearn_coordinator.gateways.nats_line import NatsLine
from fleetlearn_coordinator.gateways.nats_place import (
    NatsPlace,
    check_place,
    end_task,
    stay_connected,
)
from fleetlearn_coordinator.gateways.nats_subjects import BusOffered, BusWanted, EngineThere
from fleetlearn_coordinator.gateways.numbered_frames import begins, end_of_unknown
from fleetlearn_coordinator.network.peer_log import logger, say_seldom

NAME = "fleetlearn engine"
"""For the NATS server's own lists."""


class NatsListener:
    """The buses of one run. Within a running event loop."""

    def __init__(
        self,
        place: NatsPlace,
        epoch: int,
        find_user: Callable[[Bus, int, str], BusUser],
        *,
        first: int,
        may_speak: Callable[[], bool],
    ) -> None:
        """``epoch``: above that of all engine processes that had the run before. ``find_user``: as
        for ``LocalBus``, with the gateway's number and name, which the NATS server vouches for as
        far as its permissions do. ``first``: the lowest number of a gateway. ``may_speak``: returns
        whether the run is this process's still, as far as it can know without asking anybody."""
        self._place, self._epoch, self._find_user = place, epoch, find_user
        self._first, self._may_speak = first, may_speak
        self._engine = token_hex(8)
        self._numbers: dict[str, int] = {}
        """Name of a gateway -> its number."""
        self._processes: dict[str, tuple[str, str]] = {}
        """Name of a gateway -> the names of its process, and of the one before."""
        self._buses: dict[tuple[str, str], NatsBus] = {}
        """A gateway, and its name for the bus -> the bus."""
        self._task: asyncio.Task[None]
        self._line: NatsLine | None = None

    async def listen(self) -> None:
        """Let gateways in from now on. Raises BusError where that can never go well; a server that
        is not there is waited for."""
        await check_place(self._place, NAME)
        self._task = asyncio.get_running_loop().create_task(
            stay_connected(self._place, NAME, self._speak)
        )

    async def close(self) -> None:
        """End all buses, once what was said is with the server."""
        for bus in list(self._buses.values()):
            bus.close()
        await end_task(self._task)

    async def _speak(self, line: NatsLine) -> None:
        base = self._place.subjects
        await line.subscribe(base.hello("*"), partial(self._hello, line))
        await line.subscribe(base.up("*", self._engine, "*"), partial(self._frame, line))
        await line.flush()
        self._line = line
        logger.info("the bus: connected to %s (NATS %s)", line.address, line.version)
        if self._may_speak():
            line.publish(base.engine, msgspec.msgpack.encode(EngineThere(self._epoch)))
        try:
            while not line.over.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(line.over.wait(), BEAT)
                for bus in list(self._buses.values()):
                    bus.beat()
        finally:
            self._line = None
            for bus in list(self._buses.values()):
                bus.lose(line.why)
        logger.warning("the bus: %s; gateways are connected again when it is back", line.why)

    def _hello(self, line: NatsLine, subject: str, content: bytes) -> None:
        """A gateway wants a bus."""
        gateway = subject.rpartition(".")[2]
        try:
            wanted = msgspec.msgpack.decode(content, type=BusWanted)
        except msgspec.MsgspecError as error:
            logger.error("gateway %s speaks another language: %s", gateway, error)
            return
        if not self._may_speak():
            return  # whoever has the run by now answers
        if gateway not in self._numbers:
            self._numbers[gateway] = self._first + len(self._numbers)
            logger.info("the bus: gateway %d is %s", self._numbers[gateway], gateway)
        self._look_for_twins(gateway, wanted.process)
        number = self._numbers[gateway]
        offered = BusOffered(wanted.bus, self._engine, self._epoch, number)
        line.publish(self._place.subjects.welcome(gateway), msgspec.msgpack.encode(offered))

    def _look_for_twins(self, gateway: str, process: str) -> None:
        """Say so where a process asks again after another one of its name: they drive each other
        away."""
        now, before = self._processes.get(gateway, ("", ""))
        if not process or process == now:
            return
        self._processes[gateway] = process, now
        if process == before:
            text = "two gateways have this name, and take the bus away from each other: give each "
            text += "a name of its own ([gateway] name)"
            say_seldom(f"gateway {gateway}", text, logging.ERROR)

    def _frame(self, line: NatsLine, subject: str, frame: bytes) -> None:
        """A frame of a gateway came. The first one begins a bus."""
        *_, gateway, _, name = subject.split(".")
        bus = self._buses.get((gateway, name))
        if bus is not None:
            bus.took(frame)
            return
        publish = partial(line.publish, self._place.subjects.down(gateway, self._engine, name))
        number = self._numbers.get(gateway)
        if number is None or not begins(frame):
            publish(end_of_unknown())
            return

        def ended() -> None:
            self._buses.pop((gateway, name), None)

        bus = NatsBus(publish, line.longest, ended)
        self._buses[gateway, name] = bus
        bus.user = self._find_user(bus, number, gateway)
        bus.took(frame)

"""A supervisor that stands by: its engine process waits until nobody else serves the run, and only
then are there gateways.

Gateways that listen without an engine process would keep devices waiting while another group serves
the run. So they are started once the engine process speaks, and ended once it says nothing any
more: it lost the run, or stands still.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from fleetlearn_protocol.command_line import stop_signals

from fleetlearn_coordinator.gateways.child_process import Child, Gateway
from fleetlearn_coordinator.gateways.local_bus import short_path
from fleetlearn_coordinator.gateways.replacing import asked_to_replace
from fleetlearn_coordinator.gateways.supervisor import (
    END_TIMEOUT,
    GATEWAY_END_TIMEOUT,
    Supervised,
    held_port,
    keep_running,
    listen_on,
)

logger = logging.getLogger("fleetlearn.coordinator")

LOOK = 0.5
"""Seconds between looks whether the engine process speaks."""
ANSWER = 2.0
"""Seconds that the engine process has to say something: it does so at once."""
SILENT = 10.0
"""Seconds without a word of the engine process after which its gateways are ended. It is started
again within a few, and then devices stay connected."""


def supervise_when_it_serves(commands: Supervised, bus: Path) -> int:
    """Do what ``supervise`` does, with gateways only while the engine process has the run. Blocks.
    Returns the exit status. ``bus``: the engine process's socket, which is this supervisor's alone.
    Raises OSError."""
    assert commands.address is not None
    remove_stale(bus)
    try:
        return asyncio.run(_supervise(commands, bus))
    finally:
        bus.unlink(missing_ok=True)


def remove_stale(bus: Path) -> None:
    """Remove the sockets beside this one of supervisors that were killed."""
    for other in bus.parent.glob(f"{bus.stem.rpartition('-')[0]}-*{bus.suffix}"):
        process = other.stem.rpartition("-")[2]
        if process.isdigit() and not Path(f"/proc/{process}").exists():
            other.unlink(missing_ok=True)


async def speaks(bus: Path) -> bool:
    """Return whether an engine process that has the run says something at this socket."""
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(ANSWER):
            with short_path(bus) as path:
                reader, writer = await asyncio.open_unix_connection(path)
            try:
                return bool(await reader.read(1))
            finally:
                writer.close()
    return False


async def _supervise(commands: Supervised, bus: Path) -> int:
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[None] = loop.create_future()

    def stop(number: signal.Signals) -> None:
        if not stopped.done():
            logger.info("%s: ending the engine process, then the gateways", number.name)
            stopped.set_result(None)

    engine, asked = Child("the engine process", commands.engine), asyncio.Event()
    with stop_signals(loop, stop), asked_to_replace(asked.set):
        await engine.start()
        group = StandbyGroup(engine, commands, bus, stopped, asked)
        try:
            status = await group.run()
        finally:
            await engine.end(END_TIMEOUT)
            await group.end_gateways()
    if status is None:
        status = engine.process.returncode
        if status == -signal.SIGTERM:  # it was still starting, and had nothing to end in order
            status = 0
    return 1 if status is None or status < 0 else status


class StandbyGroup:
    """The engine process, and its gateways while it has the run."""

    def __init__(
        self,
        engine: Child,
        commands: Supervised,
        bus: Path,
        stopped: asyncio.Future[None],
        asked: asyncio.Event,
    ) -> None:
        self._engine, self._commands, self._bus = engine, commands, bus
        self._stopped, self._asked = stopped, asked
        self._gateways: list[Gateway] = []
        self._said = ""
        """Why there are no gateways, as people were told."""

    async def run(self) -> int | None:
        """Stand by and serve in turns. Returns the status with which a process ended, so that all
        is to end; None: somebody wants that."""
        while True:
            status = await self._until(self._engine_speaks)
            if status is not None or self._stopped.done():
                return status
            status = await self._serve()
            if status is not None or self._stopped.done():
                return status

    async def _serve(self) -> int | None:
        """Have gateways until the engine process says nothing any more."""
        assert self._commands.address is not None
        host, port = self._commands.address
        try:
            with held_port(host, port, patience=0.0):
                await self._start_gateways()
                self._said = ""
                status = await self._until(self._engine_is_silent)
                if status is None and not self._stopped.done():
                    logger.warning(
                        "the engine process has said nothing for %.0f s: the gateways end, and "
                        "devices go to whoever serves the run",
                        SILENT,
                    )
                    await self.end_gateways()
                return status
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            if self._said != str(error):
                self._said = str(error)
                logger.warning("no gateways yet: %s", error)
            return await self._until(lambda: asyncio.sleep(LOOK))

    async def _start_gateways(self) -> None:
        count = len(self._commands.gateways)
        for number, command in enumerate(self._commands.gateways):
            sockets = await listen_on(self._commands.address)
            gateway = Gateway(number, count, command, sockets)
            try:
                await gateway.start()
            except BaseException:
                gateway.close()
                raise
            self._gateways.append(gateway)

    async def end_gateways(self) -> None:
        """End the gateways that there are, at once."""
        gateways, self._gateways = self._gateways, []
        await asyncio.gather(*(gateway.end(GATEWAY_END_TIMEOUT) for gateway in gateways))
        for gateway in gateways:
            gateway.close()

    async def _engine_speaks(self) -> None:
        while not await speaks(self._bus):
            await asyncio.sleep(LOOK)

    async def _engine_is_silent(self) -> None:
        spoke = time.monotonic()
        while time.monotonic() - spoke < SILENT:
            await asyncio.sleep(LOOK)
            began = time.monotonic()
            if await speaks(self._bus) or time.monotonic() - began > 2 * ANSWER:
                spoke = time.monotonic()  # or this process stood still itself

    async def _until(self, wait: Callable[[], Coroutine[Any, Any, None]]) -> int | None:
        """Start again what dies until this is over. Returns as ``keep_running`` does."""
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = asyncio.create_task(wait())

        def end(_: object) -> None:
            if not over.done():
                over.set_result(None)

        waiting.add_done_callback(end)
        self._stopped.add_done_callback(end)
        try:
            return await keep_running(self._engine, self._gateways, over, self._asked)
        finally:
            self._stopped.remove_done_callback(end)
            waiting.cancel()
            with suppress(asyncio.CancelledError):
                await waiting

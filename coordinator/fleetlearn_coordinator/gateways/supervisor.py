"""The process that starts the engine process and the gateways, and starts again whichever of them
dies. It has no run and no connections itself.

What it starts has a pipe from here as its standard input, and ends in an orderly way when that
ends: nothing is left where the supervisor is killed.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from fleetlearn_protocol.command_line import stop_signals

from fleetlearn_coordinator.network.process_settings import listening_error

logger = logging.getLogger("fleetlearn.coordinator")

PAUSES = 0.1, 10.0
"""Seconds between the death of a process and its next start: at first, and at most. Each death soon
after a start doubles them."""
STEADY = 30.0
"""Seconds after which a process that dies was not dying at its start."""
STOPPED_LIMIT = 60.0
"""Seconds after which a process that was stopped (SIGSTOP) is killed, and started again. Seconds in
which this process or the machine stood still do not count."""
LOOK = 1.0
"""Seconds between looks whether a process is stopped."""
END_TIMEOUT = 45.0
"""Seconds that the engine process has to end in an orderly way: fewer than a service has."""
GATEWAY_END_TIMEOUT = 10.0
"""The same for gateways, once the engine process has ended."""
PORT_PATIENCE = 15.0
"""Seconds to wait for a port: where a supervisor was killed, what it had started still ends."""


class Supervised(NamedTuple):
    """The commands to supervise."""

    engine: Sequence[str]
    gateways: Sequence[Sequence[str]]


class Child:
    """One process, which is started again and again."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        """``name``: for people."""
        self.name = name
        self._command = command
        self.process: asyncio.subprocess.Process
        self._began = 0.0
        self._pause = PAUSES[0]

    async def start(self) -> None:
        """Start the process. A signal of the terminal does not reach it. Raises OSError."""
        self._began = time.monotonic()
        self.process = await asyncio.create_subprocess_exec(
            *self._command, stdin=subprocess.PIPE, start_new_session=True
        )

    def next_pause(self) -> float:
        """Return for how many seconds to wait before the next start."""
        if time.monotonic() - self._began > STEADY:
            self._pause = PAUSES[0]
        pause, self._pause = self._pause, min(2 * self._pause, PAUSES[1])
        return pause

    def is_stopped(self) -> bool:
        """Return whether a signal has stopped the process. A process that a debugger has stopped is
        none, and where there is no /proc this returns False."""
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_bytes()
        except OSError:
            return False
        return stat.rpartition(b")")[2].split()[:1] == [b"T"]

    async def kill_if_stopped(self) -> None:
        """Kill the process whenever it was stopped for STOPPED_LIMIT seconds: those who wait for it
        have waited long enough. Never returns."""
        stopped, last = 0.0, time.monotonic()
        while True:
            await asyncio.sleep(LOOK)
            now = time.monotonic()
            stopped = stopped + min(now - last, 2 * LOOK) if self.is_stopped() else 0.0
            last = now
            if stopped > STOPPED_LIMIT:
                text = "%s (process %d) was stopped for %.0f s, and is killed"
                logger.error(text, self.name, self.process.pid, stopped)
                self.process.kill()
                await self.process.wait()
                stopped = 0.0

    async def end(self, timeout: float) -> None:
        """End the process in an orderly way, or at last by force."""
        if self.process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self.process.wait()
        if self.process.returncode is None:
            logger.error("%s did not end within %.0f s, and is killed", self.name, timeout)
            self.process.kill()
            await self.process.wait()


def supervise(commands: Supervised) -> int:
    """Run the engine process and the gateways until the engine process ends by itself, or SIGTERM,
    SIGINT or SIGHUP comes. Blocks. Returns the exit status. A process that a signal killed is
    started again; one that ends with an error ends all. Raises OSError."""
    return asyncio.run(_supervise(commands))


async def _supervise(commands: Supervised) -> int:
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[None] = loop.create_future()

    def stop(number: signal.Signals) -> None:
        if not stopped.done():
            logger.info("%s: ending the engine process, then the gateways", number.name)
            stopped.set_result(None)

    engine = Child("the engine process", commands.engine)
    gateways = [
        Child(f"gateway {number}", command) for number, command in enumerate(commands.gateways)
    ]
    with stop_signals(loop, stop):
        started: list[Child] = []
        try:
            for child in (engine, *gateways):
                await child.start()
                started.append(child)
            status = await _keep_running(engine, gateways, stopped)
        finally:
            if engine in started:
                await engine.end(END_TIMEOUT)
            rest = [child.end(GATEWAY_END_TIMEOUT) for child in started if child is not engine]
            await asyncio.gather(*rest)
    if status is None:
        status = engine.process.returncode
    return 1 if status is None or status < 0 else status


async def _keep_running(
    engine: Child, gateways: Sequence[Child], stopped: asyncio.Future[None]
) -> int | None:
    """Start again what dies. Returns the status with which a process ended, so that all is to end;
    None: somebody wants that."""
    children = (engine, *gateways)
    watching = {asyncio.create_task(_watch(child)): child for child in children}
    looking = [asyncio.create_task(child.kill_if_stopped()) for child in children]
    try:
        ends: set[asyncio.Future[Any]] = {*watching, stopped}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if stopped.done():
            return None
        task = next(task for task in watching if task.done())
        child, status = watching[task], task.result()
        if child is not engine:
            logger.error("%s ended with status %d: all are ended", child.name, status)
        return status
    finally:
        for each in (*watching, *looking):
            each.cancel()
        await asyncio.wait([*watching, *looking])


async def _watch(child: Child) -> int:
    """Start the process again whenever a signal killed it. Returns the status with which it ended
    by itself."""
    while True:
        status = await child.process.wait()
        if status >= 0:
            return status
        pause = child.next_pause()
        name = signal.Signals(-status).name
        logger.error(
            "%s (process %d) was killed by %s; it is started again in %.1f s",
            child.name,
            child.process.pid,
            name,
            pause,
        )
        await asyncio.sleep(pause)
        await child.start()


@contextmanager
def held_port(host: str, port: int, patience: float = PORT_PATIENCE) -> Iterator[int]:
    """Within the block, hold a port for the gateways, which share it: no other program gets it
    meanwhile. ``port``: 0 for any that is free. ``patience``: seconds to wait for one that is in
    use. Yields the port. Raises OSError, whose text says what can be done."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        until = time.monotonic() + patience
        while not _is_free(family, kind, protocol, address, until):
            time.sleep(0.1)
        held = socket.socket(family, kind, protocol)
        try:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.bind(address)
        except BaseException:
            held.close()
            raise
    except OSError as error:
        raise listening_error(error, host, port) from None
    with held:
        yield held.getsockname()[1]


def _is_free(family: int, kind: int, protocol: int, address: Any, until: float) -> bool:
    """Return whether nobody has the address; after ``until``, on the monotonic clock, raise OSError
    where somebody has."""
    # Who shares the port would not notice another coordinator there: look without sharing.
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= until:
                raise
            return False
    return True

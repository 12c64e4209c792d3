"""The process that starts the engine process and the gateways, starts again whichever of them dies,
and on SIGUSR1 replaces them all, one after the other. It has no run and no connections itself.

It opens the sockets on which the gateways listen, one set for each, and has them as long as it
lives: what waits there to be accepted is not lost where a gateway dies or is replaced, as it would
be where a process leaves a group of sockets (SO_REUSEPORT).

What it starts has a pipe from here as its standard input, and ends in an orderly way when that
ends: nothing is left where the supervisor is killed.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from fleetlearn_protocol.command_line import stop_signals

from fleetlearn_coordinator.gateways.child_process import Child, Gateway, ReplaceError
from fleetlearn_coordinator.gateways.replacing import START_AGAIN, asked_to_replace
from fleetlearn_coordinator.network import process_settings
from fleetlearn_coordinator.network.process_settings import listening_error

logger = logging.getLogger("fleetlearn.coordinator")

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
    """Each is started with ``--number``, ``--ready`` and ``--listening`` in addition."""
    address: tuple[str, int] | None = None
    """Host and port on which gateways listen. None: they open sockets of their own."""


def supervise(commands: Supervised) -> int:
    """Run the engine process and the gateways until the engine process ends by itself, or SIGTERM,
    SIGINT or SIGHUP comes. Blocks. Returns the exit status. A process that a signal killed is
    started again, and so is a gateway that was told to end; one that ends with an error ends all.
    Raises OSError."""
    return asyncio.run(_supervise(commands))


async def _supervise(commands: Supervised) -> int:
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[None] = loop.create_future()

    def stop(number: signal.Signals) -> None:
        if not stopped.done():
            logger.info("%s: ending the engine process, then the gateways", number.name)
            stopped.set_result(None)

    engine = Child("the engine process", commands.engine)
    count = len(commands.gateways)
    gateways = [
        Gateway(number, count, command, await listen_on(commands.address))
        for number, command in enumerate(commands.gateways)
    ]
    asked = asyncio.Event()
    with stop_signals(loop, stop), asked_to_replace(asked.set):
        started: list[Child] = []
        try:
            for child in (engine, *gateways):
                await child.start()
                started.append(child)
            status = await keep_running(engine, gateways, stopped, asked)
        finally:
            if engine in started:
                await engine.end(END_TIMEOUT)
            rest = [child.end(GATEWAY_END_TIMEOUT) for child in started if child is not engine]
            await asyncio.gather(*rest)
            for gateway in gateways:
                gateway.close()
    if status is None:
        status = engine.process.returncode
        if status == -signal.SIGTERM:  # it was still starting, and had nothing to end in order
            status = 0
    return 1 if status is None or status < 0 else status


async def listen_on(address: tuple[str, int] | None) -> list[socket.socket]:
    """Return sockets for one gateway; none where there is no address: it opens its own."""
    if address is None:
        return []
    return await process_settings.listening_sockets(*address, shared=True)


async def keep_running(
    engine: Child,
    gateways: Sequence[Gateway],
    stopped: asyncio.Future[None],
    asked: asyncio.Event,
) -> int | None:
    """Start again what dies, and replace all whenever that is ``asked`` for. Returns the status
    with which a process ended, so that all is to end; None: somebody wants that."""
    children = (engine, *gateways)
    watching = {asyncio.create_task(_watch(child)): child for child in children}
    others: list[asyncio.Task[None]] = [
        asyncio.create_task(_replace_all(engine, gateways, asked)),
        *(asyncio.create_task(child.kill_if_stopped()) for child in children),
    ]
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
        for each in (*others, *watching):
            each.cancel()
        await asyncio.wait([*others, *watching])


async def _replace_all(engine: Child, gateways: Sequence[Gateway], asked: asyncio.Event) -> None:
    """Replace the gateways, one after the other, and then the engine process, whenever it is
    ``asked``. Never returns."""
    while True:
        await asked.wait()
        asked.clear()
        logger.info("SIGUSR1: replacing the gateways, one after the other, then the engine process")
        try:
            for gateway in gateways:
                await gateway.replace()
        except (ReplaceError, OSError) as error:
            logger.error("%s; nothing else is replaced, and the service goes on", error)
            continue
        with suppress(ProcessLookupError):
            engine.process.send_signal(signal.SIGUSR1)


async def _watch(child: Child) -> int:
    """Start the process again whenever a signal killed it, or it asks for that, or it is a gateway
    that ended in order. Returns the status with which it ended by itself otherwise."""
    while True:
        process, ended = child.process, child.ended
        await asyncio.wait([ended])
        async with child.changes:
            if child.process is not process:  # another took its place
                continue
        status = ended.result()
        if status == START_AGAIN:
            logger.info("%s (process %d) is replaced", child.name, process.pid)
            await child.start()
            continue
        # A gateway has no end of its own: somebody sent it SIGTERM. The engine process has one.
        if status > 0 or (status == 0 and not isinstance(child, Gateway)):
            return status
        pause = child.next_pause()
        why = f"was killed by {signal.Signals(-status).name}" if status else "was told to end"
        logger.error(
            "%s (process %d) %s; it is started again in %.1f s",
            child.name,
            child.process.pid,
            why,
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
            # Connections of a process without gateways, which has just ended, may linger there.
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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

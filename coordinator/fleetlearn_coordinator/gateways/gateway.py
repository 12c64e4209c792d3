"""A gateway as a process: its listener, its bus to the engine process, its end."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

from fleetlearn_protocol.command_line import stop_signals
from fleetlearn_protocol.errors import in_words
from msgspec.structs import replace

from fleetlearn_coordinator.gateways.draining import drain
from fleetlearn_coordinator.gateways.engine_link import EngineLink
from fleetlearn_coordinator.gateways.gateway_host import GatewayHost
from fleetlearn_coordinator.gateways.local_bus import connect_locally
from fleetlearn_coordinator.gateways.parent import parent_ended
from fleetlearn_coordinator.gateways.run_there import allow_plugins
from fleetlearn_coordinator.network import peer_log, process_settings
from fleetlearn_coordinator.network.content_port import content_descriptors, content_port
from fleetlearn_coordinator.network.gate import Gate
from fleetlearn_coordinator.plan.service_settings import ServiceSettings, share
from fleetlearn_coordinator.storage.identities import open_identities

logger = logging.getLogger("fleetlearn.coordinator")

SWEEP = 1.0
"""Seconds between looks at all connections."""
SEVERAL_RUNS = 8
"""Runs for whose spool files a gateway sets descriptors aside, where there are several."""
RETRY = 0.1, 1.0
"""Seconds between tries to connect to the engine process: at first, and at most."""
REFUSED_RETRY = 5.0
"""The same, while the engine process is of a release with which this gateway cannot work."""


def serve_gateway(
    service: ServiceSettings,
    number: int,
    of: int,
    bus: Path,
    *,
    listening: Sequence[socket.socket] = (),
    ready: int | None = None,
) -> None:
    """Hold connections of devices until a signal comes, or the process that started this one has
    ended. Blocks. On SIGTERM the devices go on at other gateways (draining.py); SIGINT, or a second
    signal, ends their connections at once, as where the service ends.

    ``number``: this gateway's, from 0 on. ``of``: how many there are: each has its share of the
    service's places for transfers. ``bus``: the engine process's socket. ``listening``: sockets to
    accept connections from, which the supervisor opened; none: this process opens its own.
    ``ready``: a descriptor that is closed, after a line, once devices are served. Raises
    FleetError, OSError.
    """
    asyncio.run(_serve(service, number, of, bus, listening, ready))


async def _serve(
    service: ServiceSettings,
    number: int,
    of: int,
    bus: Path,
    listening: Sequence[socket.socket],
    ready: int | None,
) -> None:
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[str] = loop.create_future()
    hurried = asyncio.Event()

    def stop(why: str) -> None:
        if stopped.done():
            hurried.set()
        else:
            stopped.set_result(why)

    process_settings.keep_freed_memory()
    process_settings.raise_file_limit()
    with stop_signals(loop, lambda signal: stop(signal.name)), parent_ended(stop):
        async with gateway_running(service, number, of, bus, listening) as host:
            process_settings.collect_garbage_rarely()
            logger.info("gateway %d listens on %s", number, host.address)
            telling = None if ready is None else loop.create_task(_tell_ready(host.link, ready))
            await stopped
            if telling is not None:
                telling.cancel()
            if stopped.result() == "SIGTERM":
                await drain(host, hurried)
            host.link.warn_no_more()
            await host.empty()
    logger.info("gateway %d ends: %s", number, stopped.result())


async def _tell_ready(link: EngineLink, descriptor: int) -> None:
    await link.is_set_up.wait()
    with suppress(OSError):  # nobody waits for it
        os.write(descriptor, b"ready\n")
    os.close(descriptor)


@asynccontextmanager
async def gateway_running(
    service: ServiceSettings,
    number: int,
    of: int,
    bus: Path,
    listening: Sequence[socket.socket] = (),
) -> AsyncIterator[GatewayHost]:
    """Hold connections of devices, as ``serve_gateway`` does, until the block is left."""
    allow_plugins(service)
    uploads, downloads = share(service.uploads, of), share(service.downloads, of)
    service = replace(service, uploads=uploads, downloads=downloads)
    files = 4 * uploads  # lent spool files, and those that were lent before
    files *= 1 if service.runs is None else SEVERAL_RUNS
    files += content_descriptors(service)
    places = process_settings.places(service.max_connections, files=files)
    identities = None if service.identities is None else open_identities(service.identities)
    try:
        gate = None if identities is None else Gate(identities)
        host = GatewayHost(service, places, gate, gateway=number, process=os.getpid())
        async with host, AsyncExitStack() as ends:
            await host.listen(shared=True, sockets=listening)
            await ends.enter_async_context(content_port(service, host.find_content, shared=True))
            tasks = [
                asyncio.create_task(_stay_connected(host.link, bus)),
                asyncio.create_task(_sweep(host)),
            ]
            try:
                yield host
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                host.end()
        host.link.close()
        host.link.close_runs()
    finally:
        if identities is not None:
            identities.close()


async def _stay_connected(link: EngineLink, bus: Path) -> None:
    """Connect to the engine process, again and again: whenever it was started again."""
    pause, longest = RETRY
    while True:
        try:
            await connect_locally(bus, link.speak_on)
        except OSError as error:
            logger.debug("the engine process is not there yet: %s", in_words(error))
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)
        else:
            pause = RETRY[0]
            await link.over.wait()
            await asyncio.sleep(REFUSED_RETRY if link.refused else pause)


async def _sweep(host: GatewayHost) -> None:
    while True:
        try:
            host.sweep(SWEEP)
        except Exception as error:
            host.link.fail(error)
        peer_log.flush()
        await asyncio.sleep(SWEEP)

"""A gateway on another machine than the engine process, as a process."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from fleetlearn_protocol.addresses import is_loopback
from fleetlearn_protocol.command_line import stop_signals
from fleetlearn_protocol.errors import Code, in_words
from fleetlearn_protocol.systemd import ALIVE, READY, STOPPING, notify_systemd

from fleetlearn_coordinator.gateways.distant_link import DistantLink
from fleetlearn_coordinator.gateways.draining import drain
from fleetlearn_coordinator.gateways.engine_link import GatewayConnections
from fleetlearn_coordinator.gateways.gateway_host import GatewayHost
from fleetlearn_coordinator.gateways.nats_gateway import NatsGateway
from fleetlearn_coordinator.gateways.nats_place import check_place, place_of
from fleetlearn_coordinator.gateways.remote_gate import RemoteGate
from fleetlearn_coordinator.gateways.run_there import allow_plugins
from fleetlearn_coordinator.network import peer_log, process_settings
from fleetlearn_coordinator.network.content_port import content_descriptors, content_port
from fleetlearn_coordinator.plan.service_settings import ServiceError, ServiceSettings
from fleetlearn_coordinator.storage.lock import locked_folder

logger = logging.getLogger("fleetlearn.coordinator")

SWEEP = 1.0
"""Seconds between looks at all connections."""


def serve_distant_gateway(service: ServiceSettings) -> None:
    """Hold connections of devices until SIGTERM or SIGINT comes. Blocks. Raises FleetError (also
    the error that this gateway ended with), OSError."""
    asyncio.run(_serve(service))


async def _serve(service: ServiceSettings) -> None:
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
    with stop_signals(loop, lambda signal: stop(signal.name)):
        async with distant_gateway_running(service) as host:
            process_settings.collect_garbage_rarely()
            logger.info("the gateway listens on %s", host.address)
            notify_systemd(READY)
            failure = link_of(host).failure
            ends: set[asyncio.Future[Any]] = {stopped, failure}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            notify_systemd(STOPPING)
            if stopped.done() and stopped.result() == "SIGTERM":
                await drain(host, hurried)
            host.link.warn_no_more()
            await host.empty()
            if failure.done():
                failure.result()
    logger.info("the gateway ends: %s", stopped.result())


@asynccontextmanager
async def distant_gateway_running(service: ServiceSettings) -> AsyncIterator[GatewayHost]:
    """Hold connections of devices, as ``serve_distant_gateway`` does, until the block is left."""
    allow_plugins(service)
    settings = service.gateway
    if settings is None:
        raise ServiceError(
            Code.BAD_MESSAGE,
            "the service file has no [gateway]: it says which run the gateway is for. Add "
            '[gateway] with run = "NAME", the name of the plan, or use `fleetlearn-coordinator '
            "serve` for a coordinator",
        )
    place = place_of(service, settings.run)
    assert place is not None  # [gateway] needs it
    await check_place(place, "fleetlearn gateway")
    folder = settings.data_dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ServiceError(
            Code.BAD_MESSAGE,
            f"gateway.data_dir = {folder} cannot be made: {in_words(error)}. Name a folder that "
            "this process may write to",
        ) from None
    objects = None if service.blobs is None else f"{service.blobs.rstrip('/')}/{settings.run}"

    gate = RemoteGate()

    def make_link(host: GatewayConnections) -> DistantLink:
        return DistantLink(
            host,
            os.getpid(),
            folder,
            service.uploads,
            objects,
            gate,
            open_to_all=service.open or is_loopback(service.host),
        )

    files = 3 * service.uploads + 1 + content_descriptors(service)
    places = process_settings.places(service.max_connections, files=files)
    with locked_folder(folder, "gateway"):
        host = GatewayHost(
            service, places, gate, gateway=-1, process=os.getpid(), make_link=make_link
        )
        link = link_of(host)
        buses = NatsGateway(place, settings.own_name, link, link.number)
        async with host, AsyncExitStack() as ends:
            await host.listen(shared=True)
            await ends.enter_async_context(content_port(service, host.find_content))
            buses.begin()
            sweeper = asyncio.create_task(_sweep(host))
            try:
                yield host
            finally:
                sweeper.cancel()
                await asyncio.wait({sweeper})
                host.end()
        link.close()
        await buses.close()
        link.own.close()


def link_of(host: GatewayHost) -> DistantLink:
    """Return the link of a gateway on another machine."""
    assert isinstance(host.link, DistantLink)
    return host.link


async def _sweep(host: GatewayHost) -> None:
    while True:
        try:
            host.sweep(SWEEP)
        except Exception as error:
            host.link.fail(error)
        peer_log.flush()
        notify_systemd(ALIVE)
        await asyncio.sleep(SWEEP)

"""For tests: a coordinator and its gateways in the test's own event loop, with the real bus between
them. Each gateway has a port of its own, so that a test says to which of them a device connects."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from fleetlearn_coordinator import Plan, ServiceSettings
from fleetlearn_coordinator.gateways.distant_gateway import distant_gateway_running
from fleetlearn_coordinator.gateways.engine_host import SOCKET
from fleetlearn_coordinator.gateways.gateway import gateway_running
from fleetlearn_coordinator.gateways.gateway_host import GatewayHost
from fleetlearn_coordinator.gateways.gateway_link import GatewayLink
from fleetlearn_coordinator.service.serve import running
from fleetlearn_coordinator.service.server import RunServer
from fleetlearn_coordinator.service.several_runs import hosting
from fleetlearn_coordinator.storage.object_store import Objects
from fleetlearn_protocol.messages import PROTOCOL_NAME, Held
from nats_server import NatsServer, nats_server
from object_server import BUCKET, object_server
from peers import Peer
from several import Several
from websockets.asyncio.client import ClientConnection, connect
from websockets.typing import Subprotocol


class GatewayFleet:
    """An engine, which can end and be there again, behind gateways, which can end too."""

    def __init__(self, plan: Plan, gateways: int, **service: Any) -> None:
        self.plan = plan
        self.settings = ServiceSettings.read({"port": 0, "gateways": gateways, **service})
        self.gateways: list[GatewayHost] = []
        self.server: RunServer
        self._stack = AsyncExitStack()
        self._engine = AsyncExitStack()
        self._ends: list[AsyncExitStack] = []
        self._connections: list[ClientConnection] = []

    async def begin(self) -> None:
        for number in range(self.settings.gateways):
            await self.begin_gateway(number)
        await self.begin_engine()

    async def begin_gateway(self, number: int) -> None:
        end = AsyncExitStack()
        socket = self.plan.data_dir / SOCKET
        host = await end.enter_async_context(
            gateway_running(self.settings, number, self.settings.gateways, socket)
        )
        if number < len(self.gateways):
            self.gateways[number], self._ends[number] = host, end
        else:
            self.gateways.append(host)
            self._ends.append(end)

    async def begin_engine(self) -> None:
        self.server = await self._engine.enter_async_context(running(self.plan, self.settings))
        for gateway in self.gateways:
            await gateway.link.is_set_up.wait()

    async def end_engine(self) -> None:
        """End the engine as a kill does: devices are told nothing."""
        await self._engine.aclose()
        for gateway in self.gateways:
            await gateway.link.over.wait()

    async def end_gateway(self, number: int) -> None:
        await self._ends[number].aclose()

    async def join(
        self,
        name: str,
        gateway: int = 0,
        *,
        check_in: bool = True,
        held: Held | None = None,
        headers: Mapping[str, str] | None = None,
        **stated: Any,
    ) -> Peer:
        connection = await connect(
            self.gateways[gateway].address,
            subprotocols=[Subprotocol(PROTOCOL_NAME)],
            compression=None,
            max_size=None,
            additional_headers=headers,
        )
        self._connections.append(connection)
        peer = Peer(name, connection)
        if check_in:
            await peer.check_in(held, **stated)
        return peer

    async def close(self) -> None:
        for connection in self._connections:
            connection.transport.abort()
        for end in self._ends:
            await end.aclose()
        await self._engine.aclose()


class DistantFleet(GatewayFleet):
    """The same behind gateways on other machines: each has a folder of its own, and the bus and the
    object store in common with the engine."""

    def __init__(self, plan: Plan, gateways: int, place: DistantPlace, **service: Any) -> None:
        place = place.of(plan)
        super().__init__(plan, 0, **place.engine, **service)
        self._count, self.place, self._service = gateways, place, service

    def folder(self, number: int) -> Path:
        """Return a gateway's folder."""
        return self.place.folder / self.place.token / f"gateway-{number}"

    def objects(self, folder: str) -> list[str]:
        """Return the names of the run's objects in a folder."""
        keys = Objects(f"s3://{BUCKET}/{self.place.token}/{self.plan.name}").keys(folder)
        return [f"{folder}/{key}" for key in keys]

    def devices_of(self, link: GatewayLink) -> list[str]:
        return [device.name for device in link.devices.values()]

    async def begin(self) -> None:
        for number in range(self._count):
            await self.begin_gateway(number)
        await self.begin_engine()

    async def begin_gateway(self, number: int) -> None:
        end = AsyncExitStack()
        settings = self.place.gateway(self.plan, number, **self._service)
        host = await end.enter_async_context(distant_gateway_running(settings))
        if number < len(self.gateways):
            self.gateways[number], self._ends[number] = host, end
        else:
            self.gateways.append(host)
            self._ends.append(end)


class DistantPlace(NamedTuple):
    """Where a run's bus and objects are, for tests. All runs of tests have one name."""

    bus: str
    folder: Path
    """Of the gateways' folders."""
    server: NatsServer
    token: str = ""
    """Of one run."""

    def of(self, plan: Plan) -> DistantPlace:
        """Return the plan's place on these servers."""
        return self._replace(token=sha256(bytes(plan.data_dir)).hexdigest()[:16])

    @property
    def engine(self) -> dict[str, Any]:
        """Keys of the engine's service file."""
        blobs = f"s3://{BUCKET}/{self.token}"
        return {"bus": self.bus, "blobs": blobs, "nats": {"prefix": self.token}}

    def gateway(self, plan: Plan, number: int, **service: Any) -> ServiceSettings:
        """Return the settings of a gateway."""
        folder = str(self.folder / self.token / f"gateway-{number}")
        own = {"run": plan.name, "name": f"gateway-{number}", "data_dir": folder}
        keys = {"port": 0, "bus": self.bus, "nats": {"prefix": self.token}, "gateway": own}
        service.pop("identities", None)  # the engine has them
        return ServiceSettings.read({**keys, **service})


@contextmanager
def distant_place(folder: Path) -> Iterator[DistantPlace]:
    """Start a NATS server and an object store. Skips the test where NATS is not installed."""
    with nats_server() as bus, object_server() as objects:
        before = {name: os.environ.get(name) for name in objects.environment}
        os.environ.update(objects.environment)
        try:
            yield DistantPlace(bus.url(), folder, bus)
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


@asynccontextmanager
async def distant_fleet(
    plan: Plan, place: DistantPlace, gateways: int = 2, **service: Any
) -> AsyncIterator[DistantFleet]:
    fleet = DistantFleet(plan, gateways, place, **service)
    try:
        async with asyncio.timeout(30):
            await fleet.begin()
        yield fleet
    finally:
        await fleet.close()


@asynccontextmanager
async def gateway_fleet(
    plan: Plan, gateways: int = 2, **service: Any
) -> AsyncIterator[GatewayFleet]:
    fleet = GatewayFleet(plan, gateways, **service)
    try:
        async with asyncio.timeout(30):
            await fleet.begin()
        yield fleet
    finally:
        await fleet.close()


class SeveralBehindGateways(Several):
    """Several runs behind gateways, to which devices connect in turn."""

    gateways: list[GatewayHost]
    _count = 0

    def address(self) -> str:
        self._count += 1
        return self.gateways[self._count % len(self.gateways)].address


@asynccontextmanager
async def several_behind_gateways(
    folder: Path, gateways: int = 2, **service: Any
) -> AsyncIterator[SeveralBehindGateways]:
    """As ``several.several``; the host's connections are swept, and runs are looked at when a test
    calls ``look``."""
    given = {"port": 0, "runs": str(folder / "runs"), "gateways": gateways, **service}
    settings = ServiceSettings.read(given)
    assert settings.runs is not None
    async with AsyncExitStack() as stack:
        found = [
            await stack.enter_async_context(
                gateway_running(settings, number, gateways, settings.runs / SOCKET)
            )
            for number in range(gateways)
        ]
        runs = await stack.enter_async_context(hosting(settings))
        await runs._stop_sweeping()
        for gateway in found:
            await gateway.link.is_set_up.wait()
        behind = SeveralBehindGateways(folder, settings, runs)
        behind.gateways = found
        stack.callback(behind.close)
        yield behind

"""For tests: a coordinator and its gateways in the test's own event loop, with the real bus between
them. Each gateway has a port of its own, so that a test says to which of them a device connects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from fleetlearn_coordinator import Plan, ServiceSettings
from fleetlearn_coordinator.gateways.engine_host import SOCKET
from fleetlearn_coordinator.gateways.gateway import gateway_running
from fleetlearn_coordinator.gateways.gateway_host import GatewayHost
from fleetlearn_coordinator.service.serve import running
from fleetlearn_coordinator.service.server import RunServer
from fleetlearn_protocol.messages import PROTOCOL_NAME, Held
from peers import Peer
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
        **stated: Any,
    ) -> Peer:
        connection = await connect(
            self.gateways[gateway].address,
            subprotocols=[Subprotocol(PROTOCOL_NAME)],
            compression=None,
            max_size=None,
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

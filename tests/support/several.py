"""For tests: a host with several runs, and devices that speak the protocol by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fleetlearn_coordinator import ServiceSettings
from fleetlearn_coordinator.service.server import RunServer
from fleetlearn_coordinator.service.several.operations import Operations
from fleetlearn_coordinator.service.several_runs import HostedRuns, hosting
from fleetlearn_coordinator.storage.runs import Population, Runs, WantedRun
from fleetlearn_protocol.messages import PROTOCOL_NAME, Task
from peers import Peer, plan_text, update_of, write_test_bundle
from websockets.asyncio.client import connect
from websockets.typing import Subprotocol

SIZE = 1000
UPDATE = update_of(1.0, SIZE)
EVERYBODY = Population()


class Several:
    """A host of a test, with its runs and devices."""

    def __init__(self, folder: Path, service: ServiceSettings, runs: HostedRuns) -> None:
        assert service.runs is not None
        self.folder, self.hosted, self.wanted = folder, runs, Runs(service.runs)
        self._service, self._peers = service, list[Peer]()

    async def add(
        self, name: str, population: Population = EVERYBODY, /, **settings: Any
    ) -> RunServer:
        """Add a run with a plan of its own, and wait until it is served. ``place``: of its data,
        if not a folder."""
        plan = self.folder / f"{name}.toml"
        rules: dict[str, Any] = {"round__goal": 1, "round__over_selection": 1, "round__minimum": 1}
        rules |= settings
        place = rules.pop("place", self.folder / f"{name}.run")
        plan.write_text(plan_text(self.folder / "bundle", place, **rules))
        Operations(self._service, self.wanted, None, "test").add(name, plan, population)
        await self.hosted.look()
        return self.server(name)

    async def want(self, name: str, state: Any) -> None:
        self.wanted.want(name, state)
        await self.hosted.look()

    def roll_back(self, name: str, version: int) -> None:
        Operations(self._service, self.wanted, None, "test").roll_back(name, version)

    def server(self, name: str) -> RunServer:
        return dict(self.hosted.servers())[name]

    def row(self, name: str) -> WantedRun:
        return next(run for run in self.wanted.runs() if run.name == name)

    async def join(self, name: str, **stated: Any) -> Peer:
        """Connect a device and check it in."""
        peer = await self.connect(name)
        await peer.check_in(**stated)
        return peer

    def address(self) -> str:
        """Where the next device connects."""
        return self.hosted.host.address

    async def connect(self, name: str) -> Peer:
        address = self.address()
        connection = await connect(
            address, subprotocols=[Subprotocol(PROTOCOL_NAME)], compression=None, max_size=None
        )
        peer = Peer(name, connection)
        self._peers.append(peer)
        return peer

    def of(self, task: Task) -> str:
        """Return the name of the run that gave this task."""
        return next(
            name
            for name, server in self.hosted.servers()
            if task.task.startswith(f"{server.task_prefix}-")
        )

    def close(self) -> None:
        self.wanted.close()
        for peer in self._peers:
            peer.connection.transport.abort()


@asynccontextmanager
async def several(folder: Path, **service: Any) -> AsyncIterator[Several]:
    """A host whose sweep does not come by itself: a test calls ``look`` when it is to."""
    settings = ServiceSettings.read({"port": 0, "runs": str(folder / "runs"), **service})
    async with hosting(settings) as runs:
        await runs._stop_sweeping()
        found = Several(folder, settings, runs)
        try:
            yield found
        finally:
            found.close()


def run_async(test: Callable[[Path], Awaitable[None]]) -> Callable[[Path], None]:
    """Run a coroutine test in an event loop of its own, with a folder that has a bundle."""

    def run(tmp_path: Path) -> None:
        write_test_bundle(tmp_path / "bundle", SIZE)

        async def bounded() -> None:
            async with asyncio.timeout(60):
                await test(tmp_path)

        asyncio.run(bounded())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


async def settled(peer: Peer) -> None:
    """Wait until the coordinator has heard all that the device said, and the device all answers to
    it."""
    await (await peer.connection.ping())


async def nothing_comes(peer: Peer) -> None:
    await settled(peer)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            raise AssertionError(f"{await peer.connection.recv()!r} came")

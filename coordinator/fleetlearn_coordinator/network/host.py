"""The connections of one process: who speaks for which device, what is served, and who is overdue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fleetlearn_protocol import Bundle
from fleetlearn_protocol.messages import SILENT_HEARTBEATS, FromCoordinator
from fleetlearn_protocol.vector import Vector

from fleetlearn_coordinator.conversation.limits import STOP_TIMEOUT
from fleetlearn_coordinator.conversation.places import Places, Proven
from fleetlearn_coordinator.conversation.port import Port, Spool
from fleetlearn_coordinator.conversation.uploads import Uploads
from fleetlearn_coordinator.network.connection import Connection
from fleetlearn_coordinator.network.contents import Contents
from fleetlearn_coordinator.network.downloads import Downloads
from fleetlearn_coordinator.network.driver import Driver, Shared


class Host:
    """Serves connections, within a running event loop, for one coordinator behind a port."""

    def __init__(
        self,
        port: Port,
        spool: Spool,
        bundle: Bundle,
        failed: Callable[[Exception], None],
        *,
        uploads: int,
        downloads: int,
        least_rate: float,
        most_devices: int,
    ) -> None:
        """``failed``: called with an error that no device is to blame for. ``uploads``, ``downloads``: how many at a
        time; ``least_rate``: bytes per second below which one loses its place while others wait."""
        proven = Proven(most_devices)
        self.uploads = Uploads(spool, Places(uploads, least_rate, proven))
        self.downloads = Downloads(Places(downloads, least_rate, proven))
        self.contents = Contents(bundle)
        self.shared = Shared(port, self.contents, self.uploads, self.downloads, failed)
        self.devices = self.shared.devices
        """Device -> the driver of its connection, of those that checked in."""
        self.connections: set[Driver] = set()
        self._loop = asyncio.get_running_loop()

    async def converse(self, connection: Connection) -> None:
        """Serve one connection to its end."""
        driver = Driver(connection, self.shared)
        self.connections.add(driver)
        try:
            await driver.serve()
        finally:
            self.connections.discard(driver)
            driver.disconnected()

    # What the coordinator says

    def tell(self, device: str, message: FromCoordinator) -> None:
        """Send to a device, if it is connected. Places that come free are given by ``grant``."""
        driver = self.devices.get(device)
        if driver is not None:
            driver.conversation.tell(message)

    def grant(self) -> None:
        """Let uploads begin, as many as there is room for."""
        self.uploads.grant(self._loop.time())

    def publish(self, sha256: str, model: Vector) -> None:
        """Serve the newest model. Each download of an older one would keep that one's bytes in memory."""
        old = self.contents.publish(sha256, model)
        if old is not None:
            for driver in self.devices.values():
                driver.conversation.withdrawn(old)

    # Time, and the end

    def sweep(self, heartbeat: float) -> None:
        """End the connections that are overdue, and take places from those that hardly move while others wait."""
        now, silence = self._loop.time(), SILENT_HEARTBEATS * heartbeat
        self.uploads.places.measure(now)
        self.downloads.places.measure(now)
        self.grant()
        self.downloads.go_on(now)
        for driver in self.connections:
            why = driver.overdue(now, silence)
            if why is not None:
                driver.log(f"connection ended: {why}")
                driver.connection.transport.abort()

    async def empty(self) -> None:
        """Wait STOP_TIMEOUT seconds at most for all connections to end."""
        until = self._loop.time() + STOP_TIMEOUT
        while self.connections and self._loop.time() < until:
            await asyncio.sleep(0.05)

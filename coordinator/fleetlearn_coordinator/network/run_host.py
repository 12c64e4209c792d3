"""What runs ask of the host that has their devices' connections.

``network/host.py::Host`` has the connections in this process. Gateways have them in other
processes: runs must not see the difference, so nothing here is a connection or a driver.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping
from typing import NamedTuple, Protocol

from fleetlearn_protocol import Bundle
from fleetlearn_protocol.frames import Buffer
from fleetlearn_protocol.messages import CheckIn, FromCoordinator

from fleetlearn_coordinator.conversation.port import Port, Spool
from fleetlearn_coordinator.network.driver import ServedRun
from fleetlearn_coordinator.network.loop_lag import LoopLag
from fleetlearn_coordinator.network.several.turns import Turns
from fleetlearn_coordinator.network.transfers.contents import Older
from fleetlearn_coordinator.storage.served_objects import ServedObjects


class UploadsNow(NamedTuple):
    """How many uploads of a run there are at this moment."""

    arriving: int
    """They have a place: their bytes may come."""
    waiting: int
    """They wait for a place."""


class ConnectionsNow(NamedTuple):
    """The connections of devices and newcomers at this moment, for monitoring."""

    open: int
    unsent: int
    """Bytes that wait for peers to read them, over all connections."""
    longest: int
    """Such bytes of the connection that has most of them."""
    refused: Mapping[str, int]
    """Cause of ``gate.CAUSES`` -> connections that were refused before they were open, since the
    start."""


class GatewayNow(NamedTuple):
    """A gateway at this moment, for people and for monitoring."""

    number: int
    """From 0 on."""
    process: int
    """Its process number."""
    connections: int
    """With newcomers."""
    devices: int
    """Devices that have checked in there."""
    bytes_up: int
    """Payload of updates that came in, since this process knows the gateway."""
    bytes_down: int
    """Payload of models and bundles sent, since then."""
    lag: float
    """How late its event loop was in the last second, in seconds, at most."""
    name: str = ""
    """Of a gateway on another machine. Empty: it is on this one."""


class RunHost(Protocol):
    """The connections of the devices, as a run and its process see them."""

    heartbeat: float
    """Seconds between a device's signs of life."""
    address: str
    """Where devices connect, as a URL. Empty before the host listens."""
    lag: LoopLag
    """How late the event loop of this process is."""

    @property
    def turns(self) -> Turns | None:
        """Which of several runs each device serves. None: the host serves one run."""

    @property
    def ended(self) -> bool:
        """Whether nothing more may be done."""

    @property
    def certificate_ends(self) -> float | None:
        """When the coordinator's certificate ends, in Unix time. None: there is none."""

    def region_of(self, device: str) -> str | None:
        """Return the region of the gateway to which the device is connected, or by which it asks to
        be admitted now; without gateways this machine's. None: it has none."""

    def end(self) -> None:
        """Do nothing more, whatever devices say: the host is being closed, or an error left its
        only run's memory and disk different."""

    def serve_run(
        self,
        port: Port,
        bundles: Iterable[Bundle],
        failed: Callable[[Exception], None],
        name: str = "",
        served: ServedObjects | None = None,
    ) -> ServedRun:
        """Serve a run, whose devices may fetch these bundles. ``failed`` is called with errors that
        no device caused. ``name``: the run's, of several. ``served``: where in its object store
        what devices fetch may be published; None: it has none."""

    def drop_run(self, run: ServedRun) -> None:
        """The run, of several, is not served any more. Its devices were told."""

    # The devices

    @property
    def devices(self) -> Collection[str]:
        """The devices that have checked in and are connected."""

    def devices_of(self, run: ServedRun) -> list[str]:
        """Return the connected devices that serve a run."""

    def can_sign_for(self, check_in: CheckIn) -> bool:
        """Return whether the device, if it trusts keys, trusts one of the service's."""

    def tell(self, device: str, message: FromCoordinator) -> None:
        """Send to a device, if it is connected. Places that come free are given by ``grant``."""

    # What devices send and fetch

    def grant(self) -> None:
        """Let uploads begin, as many as there is room for."""

    def forget_uploads(self, spool: Spool, unless: Container[str]) -> None:
        """The tasks of the run with this spool are over, except those named by ``unless``: forget
        which of their uploads arrived wrong."""

    def uploads_of(self, spool: Spool) -> UploadsNow:
        """Return how many uploads there are of the run with this spool."""

    def publish(
        self, run: ServedRun, newest: Mapping[str, Buffer], older: Mapping[str, Older]
    ) -> None:
        """Serve a run's newest vectors by their SHA-256, and the older ones that its tasks began
        from."""

    def serve_older(self, run: ServedRun, sha256: str, where: Older) -> None:
        """Serve an older vector of a run too, until newest ones are published without it."""

    # The process

    def connections_now(self) -> ConnectionsNow:
        """Return what the connections are like, for monitoring."""

    def gateways_now(self) -> list[GatewayNow]:
        """Return what each gateway is like, in order of their numbers. Empty: there are none."""

    def allow_page(self, port: int) -> None:
        """The coordinator's own page is served on this port of the same host: it may connect."""

    def sweep(self, interval: float) -> None:
        """Look at all connections: end those that are overdue. Called each ``interval`` seconds."""

    async def empty(self) -> None:
        """Wait STOP_TIMEOUT seconds at most for all connections to end."""

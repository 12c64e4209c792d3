"""The connections of one gateway: a host whose run is in the engine process."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from fleetlearn_protocol.messages import PROTOCOL_VERSION, CheckIn, ComeBack
from fleetlearn_protocol.versions import agreed_version
from msgspec.structs import replace

from fleetlearn_coordinator.conversation.pending import Pending
from fleetlearn_coordinator.conversation.port import Admitted, Spool
from fleetlearn_coordinator.gateways import wire
from fleetlearn_coordinator.gateways.engine_link import EngineLink, GatewayConnections
from fleetlearn_coordinator.gateways.run_there import RunThere
from fleetlearn_coordinator.network.driver import ConnectionDriver, ServedRun
from fleetlearn_coordinator.network.gate import Doorkeeper
from fleetlearn_coordinator.network.host import Host, spread
from fleetlearn_coordinator.network.process_settings import DescriptorShares
from fleetlearn_coordinator.network.transfers.contents import FramedContent, StoredContent
from fleetlearn_coordinator.network.transfers.elsewhere import NOWHERE, Elsewhere
from fleetlearn_coordinator.network.transfers.find_elsewhere import elsewhere_of
from fleetlearn_coordinator.plan.service_settings import ServiceSettings

QUEUES = 5.0
"""Seconds between looks at what waits to be sent on each connection. Each second, these looks were
a third of what an idle connection costs: 2.6 us of CPU a second, 1.7 without them."""


class GatewayHost(Host):
    """Within a running event loop. ``link`` has the engine process."""

    def __init__(
        self,
        service: ServiceSettings,
        places: DescriptorShares,
        gate: Doorkeeper | None,
        *,
        gateway: int,
        process: int,
        make_link: Callable[[GatewayConnections], EngineLink] | None = None,
    ) -> None:
        """As ``Host``; ``gateway``, ``process``: its number among the gateways, and of its
        process. ``make_link``: makes ``link``, where that is another one than usual."""
        super().__init__(service, places, gate)
        make_link = make_link or partial(EngineLink, gateway=gateway, process=process)
        self.link = make_link(self)
        self._queues, self._looked = self.connections_now(), 0.0
        """What waits to be sent, and when that was looked at."""
        self._lag = 0.0
        self.lag.watch(self._note_lag)
        self._was_ready = False
        """What ``is_ready`` returned last."""
        contents = service.contents
        self._in_store = contents is not None and contents.in_store
        self._elsewhere = NOWHERE if self._in_store else elsewhere_of(contents, None, ())

    def admit(
        self, driver: ConnectionDriver, check_in: CheckIn
    ) -> Admitted | ComeBack | Pending[Admitted | ComeBack]:
        """Ask whether the device may stay, which has joined the run then."""
        full = check_in.device not in self.devices and len(self.devices) >= self._places
        if full or self.link.is_away():
            return ComeBack(spread(30.0), "busy")
        agreed_version(check_in)  # may raise
        if (check_in.newest_protocol or 0) > PROTOCOL_VERSION:
            # The engine process, of a newer release, is not to speak what this process does not.
            check_in = replace(check_in, newest_protocol=PROTOCOL_VERSION)
        return self.link.new_port(driver.connection.address, check_in).admit(check_in)

    def is_ready(self) -> bool:
        """Return whether the engine process knows this gateway, or did until it went away: it comes
        back to all gateways at once."""
        self._was_ready = self.link.is_set_up.is_set() or (
            self._was_ready and not self.link.refused
        )
        return self._was_ready

    def find_content(self, sha256: str) -> FramedContent | StoredContent | None:
        """Return a content of a run that is served now."""
        found = (run.contents.get(sha256) for run in self.link.runs.values())
        return next((content for content in found if content is not None), None)

    def elsewhere_of(self, run: RunThere) -> Elsewhere:
        """Return where devices can fetch the run's contents by HTTP."""
        return run.in_store if self._in_store else self._elsewhere

    def fail(self, error: Exception) -> None:
        self.link.fail(error)

    def replace(self, driver: ConnectionDriver, address: str) -> None:
        """The device has connected again, from this address, to another gateway or to this one."""
        device = driver.conversation.device
        assert device is not None
        driver.replaced_by = device, address
        driver.conversation.replaced()
        del self.devices[device]
        self.shared.budgets.keep(device, driver.connection.budgets())

    def drop_uploads(self, spool: Spool, files: Collection[int] | None = None) -> None:
        """These files of this spool, or all of them, are others' now: the devices whose uploads
        have them connect again, and send them from the beginning."""
        for driver in list(self.devices.values()):
            upload = driver.conversation.upload
            if (
                upload is not None
                and upload.spool is spool
                and (files is None or upload.spool_file in files)
            ):
                driver.log("connection ended: the bytes of its upload were lost")
                self.uploads.drop(upload)
                driver.conversation.upload = None
                driver.connection.transport.abort()

    def hold_devices(self) -> None:
        """Read nothing from devices for now. Those that stay silent for too long are ended, and
        told to come back later when they connect again."""
        for driver in self.devices.values():
            driver.connection.hold()

    def release_devices(self) -> None:
        """Read from devices again, except those that wait for an answer."""
        for driver in self.devices.values():
            if not driver.conversation.asks:
                driver.connection.go_on()

    def _runs(self) -> list[ServedRun]:
        """Return nothing: the engine process has the run."""
        return []

    def sweep(self, interval: float) -> None:
        super().sweep(interval)
        self.link.sweep(interval)
        now = self._loop.time()
        if now - self._looked >= QUEUES:
            self._looked, self._queues = now, self.connections_now()
        of_runs = {name: self.uploads_of(run.files) for name, run in self.link.runs.items()}
        self.link.say(
            wire.GatewayFigures(
                len(self.connections),
                self._queues.unsent,
                self._queues.longest,
                dict(self.refused),
                sum(each.arriving for each in of_runs.values()),
                sum(each.waiting for each in of_runs.values()),
                self._lag,
                self.certificate_ends,
                {
                    name: (each.arriving, each.waiting)
                    for name, each in of_runs.items()
                    if name and any(each)
                },
            )
        )
        self._lag = 0.0

    def _note_lag(self, late: float) -> None:
        self._lag = max(self._lag, late)

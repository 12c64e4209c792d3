"""What a gateway has of one run of the engine process: its spool files, what devices fetch, and the
sums that the gateway adds up."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.errors import Code, FleetError
from fleetlearn_protocol.extensions import ExtensionError
from fleetlearn_protocol.frames import Buffer
from fleetlearn_protocol.messages import OwnEncoding
from fleetlearn_protocol.own_encodings import listed_encoding
from msgspec.structs import replace

from fleetlearn_coordinator.conversation.port import Spool
from fleetlearn_coordinator.gateways import wire
from fleetlearn_coordinator.gateways.partial_sums import PartialSums
from fleetlearn_coordinator.gateways.remote_spool import RemoteSpool
from fleetlearn_coordinator.network.several.guarded_spool import GuardedSpool
from fleetlearn_coordinator.network.transfers.contents import Contents, Older
from fleetlearn_coordinator.network.transfers.elsewhere import Elsewhere
from fleetlearn_coordinator.plan.service_settings import ServiceError, ServiceSettings
from fleetlearn_coordinator.storage.file_bytes import FileBytes


class RunThere:
    """A run, from its first ``Setup`` on. It outlives the bus: the next engine process serves it
    again, and says so by a ``Setup``."""

    def __init__(
        self,
        name: str,
        title: str,
        spool: RemoteSpool,
        answer: Callable[[wire.PartialSumMade], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """``name``: as ``run`` of its messages. ``title``: its name for people, of several.
        ``answer``: says that a partial sum is made; called in a thread. ``failed``: ends the run,
        of several, because of an error of its files."""
        self.name, self.title = name, title
        self.spool = spool
        self.files: Spool = GuardedSpool(self.spool, failed) if name else self.spool
        """The spool, as conversations have it."""
        self.sums = PartialSums(lambda made: answer(replace(made, run=name)), spool.added)
        self.contents = Contents()
        """What devices may fetch."""
        self.in_store = InStore()
        """What of it they may fetch from the object store."""
        self.shown: str | None = None
        """What people read in place of what a device says of its data. None: they read that."""
        self._folder = Path()
        self._bundles: tuple[str, ...] = ()

    def set_up(self, setup: wire.Setup) -> None:
        """An engine process serves the run. Raises BundleError, OSError; FleetError where its own
        encoding cannot be had here."""
        if setup.encoding is not None:
            find_own_encoding(setup.encoding, residual=setup.residual)
        self.shown, self._folder = setup.shown, Path(setup.contents)
        if setup.bundles != self._bundles:
            self._bundles = setup.bundles
            self.contents.add_bundles(*map(open_bundle, setup.bundles))
        self.spool.find(Path(setup.spool))
        self.sums.begin(Path(setup.spool), Path(setup.sums))
        self.spool.lose(setup.lost)

    def held(self) -> Iterator[wire.LentFile]:
        """Return the spool files that the run has lent."""
        return (replace(file, run=self.name) for file in self.spool.held())

    def publish(self, newest: Iterable[str], older: Iterable[str]) -> list[str]:
        """Devices may fetch these contents, by SHA-256, and no others. Returns those that may be
        fetched no more. Raises OSError."""
        found: dict[str, Buffer] = {}
        stored: dict[str, Older] = {}
        for sha256 in newest:
            if (file := self._stored(sha256)) is not None:
                found[sha256] = file.map() if file.size else b""
        for sha256 in older:
            if (file := self._stored(sha256)) is not None:
                stored[sha256] = Older(file, file.size)
        return list(self.contents.publish(found, stored))

    def publish_older(self, sha256: str) -> None:
        """Devices may fetch this content too, until others are published. Raises OSError."""
        if (file := self._stored(sha256)) is not None:
            self.contents.serve_older(sha256, Older(file, file.size))

    def _stored(self, sha256: str) -> MappedFile | None:
        """Return the content. None: this gateway is late, and others were published since: that is
        the next it hears."""
        try:
            return MappedFile(self._folder / sha256)
        except FileNotFoundError:
            return None

    def close(self) -> None:
        """Write nothing any more, and add up nothing."""
        self.sums.close()
        self.spool.close()


def allow_plugins(service: ServiceSettings) -> None:
    """Let the modules of the service file be named in this process. Raises ServiceError."""
    try:
        if service.plugins is not None:
            service.plugins.allow()
    except ExtensionError as error:
        raise ServiceError(Code.BAD_MESSAGE, f"[plugins] of the service: {error}") from None


def find_own_encoding(own: OwnEncoding, *, residual: bool) -> None:
    """Let uploads come in this encoding. Raises FleetError where its module is not listed or not
    there."""
    try:
        listed_encoding(own, "encoding.up", residual=residual)
    except ExtensionError as error:
        text = f"this gateway cannot read the run's updates: {error}"
        raise FleetError(Code.BAD_ENCODING, text) from error


class InStore(Elsewhere):
    """Contents in the object store, as the engine process said last."""

    def __init__(self) -> None:
        super().__init__()
        self._urls: dict[str, str] = {}

    def url(self, sha256: str) -> str | None:
        return self._urls.get(sha256)

    def say(self, urls: dict[str, str]) -> None:
        """The engine process said this."""
        self._urls = urls
        self.wake()


class MappedFile(FileBytes):
    """Stored bytes that can be read without a copy. Nobody makes such a file shorter: it is removed
    as a whole."""

    def map(self) -> Buffer:
        """Return the bytes, in the system's own cache of the file, as other processes have it."""
        return memoryview(mmap.mmap(self._file, self.size, access=mmap.ACCESS_READ))

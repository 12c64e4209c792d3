"""One run whose devices are connected to gateways, as the engine process's host has it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from fleetlearn_protocol import Bundle
from fleetlearn_protocol.errors import Code, FleetError, in_words
from fleetlearn_protocol.frames import Buffer
from fleetlearn_protocol.messages import OwnEncoding
from msgspec.structs import replace

from fleetlearn_coordinator.aggregation.partial_sum import Adders
from fleetlearn_coordinator.conversation.begun import BegunUpload, decode_begun
from fleetlearn_coordinator.conversation.port import Port, RunPort
from fleetlearn_coordinator.gateways import wire
from fleetlearn_coordinator.gateways.gateway_adders import CollectsSums, GatewayAdders, SpokenTo
from fleetlearn_coordinator.gateways.lent_files import LentFiles
from fleetlearn_coordinator.gateways.published_files import PublishedFiles
from fleetlearn_coordinator.network.driver import ServedRun
from fleetlearn_coordinator.network.transfers.contents import Older
from fleetlearn_coordinator.network.transfers.store_publisher import StorePublisher
from fleetlearn_coordinator.storage.lent_spool import ArrivedSpool, LendableSpool

LARGE = 2**22
"""Bytes of contents from which on they are written in a thread: the event loop would stand still,
for half a gigabyte half a second and more."""
CONTENTS = "served"
"""The folder with what devices fetch, in the run's data directory."""


@runtime_checkable
class GivesUpdatesAway(Protocol):
    """A run whose updates others may add."""

    def let_add(self, adders: Adders, count: int) -> CollectsSums | None:
        """Have these processes, of which there are ``count``, add the updates that they store.
        Returns whom they tell; None: they are to add none."""


@runtime_checkable
class ReleasesUploads(Protocol):
    """A run that keeps begun uploads."""

    def release_upload(self, spool_file: int) -> bool:
        """Part from the begun upload in this spool file, whose bytes go on coming. Returns whether
        the run had it."""


@runtime_checkable
class HasOwnEncoding(Protocol):
    """A run whose updates may come in an own encoding."""

    def own_encoding(self) -> tuple[OwnEncoding | None, bool]:
        """Return the encoding, and whether devices keep what it leaves out."""


class KnownGateway(SpokenTo, Protocol):
    """A gateway that has said hello: gateway_link.py."""

    number: int
    wire: int
    """The version of the messages that both sides speak."""
    apart: bool
    """Whether it is on another machine."""


class Gateways(NamedTuple):
    """The gateways of a host."""

    links: Mapping[int, KnownGateway]
    """Number of a gateway that has said hello -> what is said to it."""
    wanted: int
    """How many there are to be."""
    each: int
    """How many spool files of a run each of them has at a time."""


class RunBehind:
    """A run, from ``RunHost.serve_run`` to ``RunHost.drop_run``."""

    def __init__(
        self, served: ServedRun, bundles: Iterable[Bundle], gateways: Gateways, name: str
    ) -> None:
        """``name``: as ``run`` of its messages. Raises FleetError where its spool files cannot be
        lent; OSError."""
        port = served.port
        if not isinstance(port.spool, LendableSpool):
            raise FleetError(
                Code.BAD_MESSAGE, "gateways need the run's spool files in a folder of this machine"
            )
        self.served, self.name, self.spool = served, name, port.spool
        folder = self.spool.folder
        releases = port.release_upload if isinstance(port, ReleasesUploads) else None
        self.files = LentFiles(self.spool, gateways.each, releases)
        self.published = PublishedFiles(folder / CONTENTS)
        self._gateways = gateways.links
        self.adders = GatewayAdders(gateways.links, folder, name)
        if isinstance(port, GivesUpdatesAway):
            self.adders.run = port.let_add(self.adders, gateways.wanted)
        self.urls: dict[str, str] = {}
        """SHA-256 of a content -> where devices can fetch it in the object store."""
        self.store: StorePublisher | None = None
        """What gateways on other machines fetch for their devices, unless ``served`` has it."""
        self.stored_bundles: tuple[str, ...] = ()
        """The bundles' SHA-256, where their files are served as objects."""
        self._thread = ThreadPoolExecutor(1, "published files")
        self._writing = 0
        """How many writes of that thread are not done."""
        self._bundles = tuple(str(bundle.path.absolute()) for bundle in bundles)

    @property
    def port(self) -> Port:
        """The run, as conversations see it."""
        return self.served.port

    def set_up(
        self,
        gateway: KnownGateway,
        lost: list[int],
        page: int | None,
        *,
        knows_devices: bool = False,
    ) -> None:
        """Say what a gateway must know of the run. ``lost``: spool files of its hello that are
        others' now. ``page``: the port of the coordinator's own page. ``knows_devices``: whether
        devices have to be enrolled. Raises FleetError where the
        gateway is on another machine, and the run is not for those."""
        where, first_put = "", 0
        if gateway.apart:
            if not isinstance(self.spool, ArrivedSpool):
                text = f"gateway {gateway.number} is on another machine, and the run has no bus"
                raise FleetError(Code.BAD_MESSAGE, text)
            where = self.spool.where_objects
            first_put = self.files.begin_puts(gateway.number, self.spool)
        probe = "?"
        shown = self.port.shown(None, probe)
        port = self.port
        own = port.own_encoding() if isinstance(port, HasOwnEncoding) else (None, False)
        setup = wire.Setup(
            self._bundles,
            str(self.published.folder.absolute()),
            str(self.spool.folder.absolute()),
            tuple(lost),
            page,
            None if shown == probe else shown,
            str(self.adders.folder),
            gateway.wire,
            where,
            self.stored_bundles if gateway.apart else (),
            first_put,
            run=self.name,
            name=self.served.name,
            knows_devices=knows_devices,
            adds_up=gateway.apart and self.adders.run is not None,
            encoding=own[0],
            residual=own[1],
        )
        gateway.say(setup)
        gateway.say(self.contents())

    def contents(self) -> wire.PublishContents:
        """Return what devices may fetch."""
        published = self.published
        return wire.PublishContents(published.newest, published.older, self.urls, self.name)

    def stored(self, gateway: KnownGateway, spool_file: int) -> None:
        """The gateway has the update, which is complete."""
        most = None if self.adders.run is None else self.adders.run.most_apart
        apart = sum(each.apart for each in self._gateways.values())
        if (most is not None) == gateway.apart and (most is None or apart <= most):
            self.adders.stored(gateway.number, spool_file)

    def sum_made(self, gateway: KnownGateway, message: wire.PartialSumMade) -> None:
        """The gateway has added up what it was given, or could not."""
        is_awaited = self.adders.is_awaited(gateway.number, message.number)
        if not gateway.apart or message.made is None or not is_awaited:
            self.adders.made(gateway.number, message)
            return
        spool = self.spool
        assert isinstance(spool, ArrivedSpool)
        file = Path(self.adders.file_of(message.number))
        loop = asyncio.get_running_loop()
        job = loop.run_in_executor(None, spool.fetch_partial_sum, message.number, file)
        job.add_done_callback(partial(self._fetched, gateway.number, message))

    def _fetched(
        self, gateway: int, message: wire.PartialSumMade, job: asyncio.Future[None]
    ) -> None:
        error = None if job.cancelled() else job.exception()
        if isinstance(error, FleetError | OSError):
            message = replace(message, made=None, text=in_words(error))
        elif error is not None:
            self.served.failed(RuntimeError(error))
            return
        self.adders.made(gateway, message)

    def publish(self, newest: Mapping[str, Buffer], older: Mapping[str, Older]) -> None:
        """Have these contents for gateways, and no others. What gateways are told from now on waits
        until they are written. Raises OSError."""
        self.published.name(newest, older)
        size = sum(memoryview(content).nbytes for content in newest.values())
        self._write(size, partial(self.published.write, newest, older))

    def add_older(self, sha256: str, where: Older) -> None:
        """Have this content too. Otherwise as ``publish``."""
        self.published.older += (sha256,)
        self._write(where.content.size, partial(self.published.write_older, sha256, where))

    def _write(self, size: int, write: Callable[[], None]) -> None:
        if size < LARGE and not self._writing:
            write()
            return
        loop, done = asyncio.get_running_loop(), self.served.gate.begin()
        self._writing += 1

        def written(future: Future[None]) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits for it
                loop.call_soon_threadsafe(self._written, future, done)

        self._thread.submit(write).add_done_callback(written)

    def _written(self, future: Future[None], done: Callable[[], None]) -> None:
        self._writing -= 1
        try:
            future.result()
        except Exception as error:
            self.served.failed(error)
            self.served.gate.give_up()
        else:
            done()

    def close(self) -> None:
        """Do nothing more."""
        self.adders.close()
        self._thread.shutdown(wait=False)

    def gateway_lost(self, gateway: int) -> None:
        """The gateway is gone: what it was lent is the run's again. Raises OSError."""
        for number in self.files.take_back_all(gateway):
            self.keep(number)
        self.adders.lost(gateway)

    def keep(self, number: int, begun: BegunUpload | None = None) -> None:
        """The run has this spool file again. ``begun``: what it holds; None: what its checkpoint
        says, if there is one."""
        content = self.spool.find_checkpoint(number)
        if begun is None and content is not None:
            begun = decode_begun(content)
        if begun is not None and begun.spool_file == number:
            self.port.keep_upload(begun.device, begun)
        else:
            self.spool.free_spool_file(number)

    def drop_checkpoint(self, number: int) -> None:
        """The upload in this spool file is complete."""
        if self.spool.find_checkpoint(number) is not None:
            self.spool.drop_checkpoint(number)


def name_of(port: Port, *, several: bool) -> str:
    """Return what ``run`` is in the messages about a run."""
    if not several:
        return ""
    of_several: RunPort = port  # type: ignore[assignment]
    return of_several.task_prefix

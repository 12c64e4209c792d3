"""Runs a peer from its files: address book, bundle, data, state directory."""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import Any, NamedTuple

from fleetlearn_protocol.bundle import open_bundle
from fleetlearn_protocol.command_line import installed_version, stop_signals
from fleetlearn_protocol.json_log import said
from fleetlearn_protocol.manifest import EVAL, INFER, TRAIN
from fleetlearn_protocol.paths import in_home

from fleetlearn_device.peers.book import (
    BookError,
    PeerBook,
    PeerGraph,
    compared_settings,
    read_book,
)
from fleetlearn_device.peers.bundle_rules import check_peer_bundle
from fleetlearn_device.peers.certificate import own_certificate, tls_contexts
from fleetlearn_device.peers.connections import PeerConnections, listening_at
from fleetlearn_device.peers.discovery import (
    Discovery,
    PeerAnnouncement,
    Place,
    checked_interface,
)
from fleetlearn_device.peers.gossip import GossipPeer
from fleetlearn_device.peers.local_training import LocalTraining
from fleetlearn_device.peers.machine import PeerRules
from fleetlearn_device.peers.node import Machine, PeerNode
from fleetlearn_device.peers.peer import SynchronousPeer
from fleetlearn_device.peers.peer_store import PeerStore
from fleetlearn_device.peers.record import PeerRecord
from fleetlearn_device.peers.terms import PeerTerms
from fleetlearn_device.runtimes.checks import check_hyper
from fleetlearn_device.runtimes.open_runtime import open_runtime
from fleetlearn_device.storage.device_key import device_key
from fleetlearn_device.storage.state_directory import StateDirectory
from fleetlearn_device.training.open_data import open_data
from fleetlearn_device.training.task_data import TaskDataMaker

log = logging.getLogger("fleetlearn.device")


class PeerOptions(NamedTuple):
    """What is this device's own: everything that is not in the address book."""

    book: str
    bundle: str
    data: Any
    """As for ``open_data``."""
    state: str
    steps: int
    name: str | None = None
    """The peer's name. None: the one that the state directory has."""
    listen: str | None = None
    """HOST:PORT. None: its address in the book."""
    discover: str | None = None
    """The IPv4 address of the interface on which neighbours are looked for. None: they are not."""
    output: str | None = None
    """The ONNX file of the result. None: model.onnx in the state directory."""
    hold_out: float = 0.0
    threads: int = 1
    runtime: str = "auto"
    provider: str = "cpu"


class Peer:
    """A device that trains with its neighbours. Raises BookError, DataError, FleetError,
    StateError, ValueError."""

    def __init__(self, options: PeerOptions) -> None:
        self.stopped_by: signal.Signals | None = None
        self.book = read_book(options.book)
        self.graph = PeerGraph(self.book)
        self._options = options
        self._interface = checked_interface(options.discover)
        check_peer_bundle(options.bundle, open_bundle(options.bundle).manifest)
        bundle = open_bundle(options.bundle, files=[TRAIN, EVAL, INFER])
        check_hyper(self.book.training.hyper, bundle.manifest.hyper)
        self._directory = StateDirectory(options.state, options.name)
        try:
            self.name = self._directory.device
            self._certificate = self._own_certificate()
            data = TaskDataMaker(open_data(options.data), options.hold_out).of(bundle.manifest)
            runtime = open_runtime(
                bundle,
                options.runtime,  # type: ignore[arg-type]
                options.threads,
                provider=options.provider,  # type: ignore[arg-type]
            )
            row = self.book.names.index(self.name)
            self.training = LocalTraining(bundle, runtime, data, self.book.training, row)
            self.store = PeerStore(
                self._directory.path,
                bundle.sha256,
                bundle.manifest.size,
                self.training.kept_size,
                self.book.run,
            )
            self.terms = PeerTerms(bundle.sha256, self.graph.digest(), compared_settings(self.book))
            output = self._directory.path / "model.onnx"
            self.node = PeerNode(
                self.name,
                machine_of(self.book, self.graph, self.name, self.store.record, options.steps),
                self.store,
                self.training,
                self.terms,
                self.book.encoding,
                output if options.output is None else in_home(options.output),
            )
            self.listening = listening_at(options.listen, self.book.entry(self.name).place)
        except BaseException:
            self.close()
            raise

    def _own_certificate(self) -> bytes:
        """Return the device's certificate, which the book must have. Raises BookError."""
        folder, options = self._directory.path, self._options
        card = f"`fleetlearn-device peer-card --state {options.state}`"
        if self.name not in self.book.names:
            raise BookError(
                f"this device is {self.name}, and {options.book} has {', '.join(self.book.names)}: "
                f"add what {card} prints"
            )
        certificate = own_certificate(folder, self.name, device_key(folder))
        if self.book.entry(self.name).der != certificate:
            raise BookError(
                f"{options.book} has another certificate for {self.name} than this device: replace "
                f"its entry by what {card} prints, on all peers"
            )
        return certificate

    def close(self) -> None:
        """Unlock the state directory."""
        self._directory.close()

    def run(self) -> None:
        """Train until all steps are done, or SIGTERM, SIGINT or SIGHUP comes. Raises as
        ``PeerNode.run`` does, OSError where the address cannot be listened at."""
        try:
            asyncio.run(self._run_until_signal())
        finally:
            self.close()

    async def _run_until_signal(self) -> None:
        def caught(number: signal.Signals) -> None:
            self.stopped_by = number
            log.info(
                "%s came: this peer ends, and goes on from here when it is started", number.name
            )
            self.node.stop()

        with stop_signals(asyncio.get_running_loop(), caught):
            await self.serve()

    async def serve(self) -> None:
        """As ``run``, in a running event loop, without signal handlers."""
        book, graph, name = self.book, self.graph, self.name
        neighbours = graph.neighbours(name)
        entries = {each: book.entry(each) for each in neighbours}
        certificates = {entry.der: each for each, entry in entries.items()}
        dialling, listening = tls_contexts(self._directory.path, [*certificates])
        connections = PeerConnections(dialling, listening, certificates, self.node.connection)
        server = await connections.listen(self.listening)
        port = next(iter(server.sockets)).getsockname()[1]
        log.info(
            "peer %s (fleetlearn %s) begins at step %d of %d, with %d examples: %s of %d peers, "
            "neighbours %s, listening at %s port %d",
            name,
            installed_version(),
            self.store.record.step,
            self._options.steps,
            self.training.examples,
            book.topology.kind,
            len(book.peer),
            ", ".join(neighbours),
            self.listening.host or "all addresses",
            port,
            extra=said("started", peer=name),
        )
        moved = {each: asyncio.Event() for each in neighbours}
        announcement = PeerAnnouncement(name, port, self.terms.topology)
        discovery = Discovery(announcement, neighbours, lambda each: moved[each].set())

        def places(each: str) -> list[Place]:
            found, listed = discovery.places.get(each), entries[each].place
            return [place for place in (found, listed) if place is not None]

        row = book.names.index
        dialled = [each for each in neighbours if row(each) > row(name)]
        tasks = [
            asyncio.create_task(
                connections.dial(each, lambda each=each: places(each), moved[each])  # type: ignore[misc]
            )
            for each in dialled
        ]
        if self._interface is not None:
            tasks.append(asyncio.create_task(discovery.run(self._interface)))
        lost = asyncio.create_task(_first_error(tasks))
        try:
            node = asyncio.create_task(self.node.run())
            await asyncio.wait({node, lost}, return_when=asyncio.FIRST_COMPLETED)
            if not node.done():
                self.node.stop()
                await node
                lost.result()
            node.result()
        finally:
            for task in (*tasks, lost):
                task.cancel()
            await asyncio.gather(*tasks, lost, return_exceptions=True)
            server.close()
            await server.wait_closed()


async def _first_error(tasks: list[asyncio.Task[None]]) -> None:
    """Raise the first error of tasks that do not end by themselves."""
    if not tasks:
        await asyncio.Event().wait()
    await asyncio.gather(*tasks)


def machine_of(
    book: PeerBook, graph: PeerGraph, name: str, record: PeerRecord, steps: int
) -> Machine:
    """Return a peer's state machine, as the address book says."""
    rules = PeerRules(steps, book.deadline, book.take_after, lambda step: graph.weights(name, step))
    neighbours = graph.neighbours(name)
    if book.mode == "gossip":
        seed = (book.training.seed << 20) + book.names.index(name)
        return GossipPeer(record, rules, neighbours, seed)
    return SynchronousPeer(record, rules, neighbours)

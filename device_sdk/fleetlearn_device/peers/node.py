"""Runs a peer: carries its state machine's orders out, one after the other, and tells the machine
what came of them and what its neighbours say."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from fleetlearn_protocol.encodings import find_encoding
from fleetlearn_protocol.errors import ProtocolError
from fleetlearn_protocol.json_log import said
from fleetlearn_protocol.peer_messages import (
    FromPeer,
    PeerFinished,
    PeerHello,
    PeerRefusal,
    PeerVote,
)
from fleetlearn_protocol.vector import Vector, checksum
from websockets.asyncio.connection import Connection as Socket

from fleetlearn_device.driver.connection import printable
from fleetlearn_device.driver.timeouts import timeout
from fleetlearn_device.peers.gossip import GossipPeer
from fleetlearn_device.peers.link import PeerLink
from fleetlearn_device.peers.local_training import LocalResult, LocalTraining
from fleetlearn_device.peers.model_frames import ArrivedModel, IncomingModel
from fleetlearn_device.peers.orders import (
    CommitModel,
    Differences,
    OfferModel,
    Order,
    Orders,
    PeerNote,
    SaveRecord,
    SendToPeer,
    StoreDifference,
    TrainPeer,
    WriteResult,
)
from fleetlearn_device.peers.peer import SynchronousPeer
from fleetlearn_device.peers.peer_status import PeerStatusFile
from fleetlearn_device.peers.peer_store import PeerStore
from fleetlearn_device.peers.terms import PeerTerms
from fleetlearn_device.training.own_model import write_own_model
from fleetlearn_device.training.train import StoppedError

log = logging.getLogger("fleetlearn.device")

Machine = SynchronousPeer | GossipPeer


class PeerNode:
    """One run of a peer, over connections that its owner opens (``connection``).

    Args:
        machine: Begins from the store's record.
        encoding: How models travel.
        output: The ONNX file for the result.
    """

    def __init__(
        self,
        name: str,
        machine: Machine,
        store: PeerStore,
        training: LocalTraining,
        terms: PeerTerms,
        encoding: str,
        output: Path,
    ) -> None:
        self.name, self.machine, self.terms, self.output = name, machine, terms, output
        self._store, self._training = store, training
        self._encoding = find_encoding(encoding)
        self._own, self._kept = training.first() if store.is_new else store.own()
        self._offered: dict[str, Vector] = {}
        """Neighbour -> own as it was offered last, and as the neighbour decodes it."""
        self._sent: tuple[Vector, Vector, memoryview, int] | None = None
        """(own, own as it is decoded, its bytes, their CRC-32)."""
        self._models: dict[str, ArrivedModel] = {}
        self._links: dict[str, PeerLink] = {}
        self._trained: LocalResult | None = None
        self._events: asyncio.Queue[tuple[Callable[[], Orders], asyncio.Future[None] | None]]
        self._events = asyncio.Queue()
        self._jobs: set[asyncio.Task[None]] = set()
        self._thread = ThreadPoolExecutor(1, "fleetlearn-training")
        self._error: BaseException | None = None
        self._stopping = False
        self.status = PeerStatusFile(store.path, name, machine, training.examples)

    # The owner's side

    def stop(self) -> None:
        """End soon; call in the event loop's thread. What is committed is kept."""
        self._stopping = True
        self._training.halt.set()
        self._post(list)

    async def run(self) -> None:
        """Train until all steps are done, or ``stop``. Raises StateError, TrainingError, DataError,
        and what else a step raises."""
        try:
            await self._carry_out(self.machine.start(time.monotonic()))
            while not (self.machine.over or self._stopping):
                if self._error is not None:
                    raise self._error
                due = self.machine.due()
                left = None if due == inf else max(0.0, due - time.monotonic())
                try:
                    async with timeout(left):
                        event, handled = await self._events.get()
                except TimeoutError:
                    await self._carry_out(self.machine.tick(time.monotonic()))
                    continue
                await self._carry_out(event())
                if handled is not None and not handled.done():
                    handled.set_result(None)
        finally:
            self._training.halt.set()
            self._stopping = True
            while not self._events.empty():
                _, handled = self._events.get_nowait()
                if handled is not None and not handled.done():
                    handled.set_result(None)
            await asyncio.gather(*(link.close() for link in self._links.values()))
            await asyncio.gather(*self._jobs, return_exceptions=True)
            self._thread.shutdown()
            self.status.write(running=False)

    async def connection(self, socket: Socket, neighbour: str) -> None:
        """Talk to a neighbour until the connection ends."""
        elements = self._training.runtime.manifest.size
        link = PeerLink(socket, neighbour, IncomingModel(self._encoding, elements))
        await self._handle(partial(self._opened, link))
        try:
            while (received := await link.receive()) is not None:
                await self._handle(partial(self._received, link, received))
        except ProtocolError as error:
            log.warning("%s broke the protocol: %s", neighbour, printable(error.text))
            link.why_ended = f"{neighbour} broke the protocol"
            link.refuse(error)
        finally:
            await link.close(1000 if not link.why_ended else 1002)
            self._post(partial(self._ended, link))

    # Events

    def _post(self, event: Callable[[], Orders]) -> None:
        self._events.put_nowait((event, None))

    async def _handle(self, event: Callable[[], Orders]) -> None:
        """Let the machine know, and wait until its orders were carried out."""
        if self._stopping:
            return
        handled = asyncio.get_running_loop().create_future()
        self._events.put_nowait((event, handled))
        await handled

    def _opened(self, link: PeerLink) -> Orders:
        """Say hello on a new connection; an older one of the same neighbour is over."""
        orders = self._ended(self._links[link.neighbour]) if link.neighbour in self._links else []
        self._links[link.neighbour] = link
        link.send(self.terms.hello(self.name, self.machine.votes_for(link.neighbour)))
        return orders

    def _ended(self, link: PeerLink) -> Orders:
        if self._links.get(link.neighbour) is not link:
            return []
        del self._links[link.neighbour]
        self._models.pop(link.neighbour, None)
        if not link.greeted:
            return []
        why = f": {link.why_ended}" if link.why_ended else ""
        text = "the connection to %s is gone%s"
        log.info(text, link.neighbour, why, extra=said("disconnected", peer=link.neighbour))
        self._start(link.close())
        return self.machine.disconnected(link.neighbour, time.monotonic())

    def _received(self, link: PeerLink, received: FromPeer | ArrivedModel) -> Orders:
        now, name, machine = time.monotonic(), link.neighbour, self.machine
        if self._links.get(name) is not link:
            return []
        if not link.greeted:
            return self._greeted(link, received)
        match received:
            case ArrivedModel(number=number, vector=None, why=why):
                return machine.damaged(name, number, why, now)
            case ArrivedModel(number=number):
                self._models[name] = received
                orders = machine.arrived(name, number, now)
                if self.machine.exchanges.edges[name].arrived != number:
                    # It is stored by an order, or of no use.
                    wanted = any(isinstance(order, StoreDifference) for order in orders)
                    if not wanted:
                        del self._models[name]
                return orders
            case PeerVote(number=number, have=have):
                return machine.voted(name, number, have, now)
            case PeerFinished():
                return machine.finished(name, now)
            case PeerRefusal(text=text):
                self._refused(link, text)
            case _:
                link.why_ended = f"{name} said hello twice"
                self._start(link.close(1002))
        return []

    def _greeted(self, link: PeerLink, received: FromPeer | ArrivedModel) -> Orders:
        """Take a neighbour's hello, or refuse it."""
        if isinstance(received, PeerRefusal):
            self._refused(link, received.text)
            return []
        if not isinstance(received, PeerHello):
            link.why_ended = f"{link.neighbour} did not say hello first"
            self._start(link.close(1002))
            return []
        refusal = self.terms.refusal(received, link.neighbour)
        if refusal is not None:
            link.send(refusal)
            self._refused(link, refusal.text)
            return []
        link.greeted = True
        log.info(
            "%s is connected, at step %d",
            link.neighbour,
            received.step,
            extra=said("connected", peer=link.neighbour),
        )
        return self.machine.connected(link.neighbour, received, time.monotonic())

    def _refused(self, link: PeerLink, text: str) -> None:
        """A neighbour and this peer do not go together: say so, and end the connection."""
        link.why_ended = printable(text)
        self.status.refused(link.neighbour, link.why_ended)
        log.warning("no training with %s: %s", link.neighbour, link.why_ended)
        self._start(link.close(1008))

    # Orders

    async def _carry_out(self, orders: Orders) -> None:
        queue = deque(orders)
        while queue:
            await self._carry_out_one(queue.popleft())
        self.status.write()

    async def _carry_out_one(self, order: Order) -> None:
        match order:
            case PeerNote(text=text, warning=warning):
                log.log(logging.WARNING if warning else logging.INFO, "%s", printable(text))
            case SendToPeer(neighbour=name, message=message):
                if name in self._links:
                    self._links[name].send(message)
            case SaveRecord(record=record):
                await asyncio.to_thread(self._store.save, record)
            case OfferModel(neighbour=name, number=number):
                await self._offer(name, number)
            case StoreDifference(neighbour=name, number=number, weight=weight):
                model = self._models.pop(name).vector
                assert model is not None
                difference = np.float32(weight) * (model - self._offered[name])
                await asyncio.to_thread(self._store.save_difference, name, number, difference)
            case TrainPeer():
                await self._begin_training(order)
            case CommitModel():
                await self._commit(order)
            case WriteResult():
                await asyncio.to_thread(self._write_result)

    async def _offer(self, name: str, number: int) -> None:
        """Send own. What the neighbour decodes is what counts on both sides."""
        if self._sent is None or self._sent[0] is not self._own:
            # The same step gives the same bytes, also after a restart.
            seed = self._training.seed(self.machine.record.trainings)
            content = await asyncio.to_thread(self._encoding.encode, self._own, seed)
            decoded = self._encoding.decode(content, len(self._own))
            self._sent = self._own, decoded, content, checksum(content)
        _, self._offered[name], content, crc32 = self._sent
        if name in self._links:
            self._links[name].send_model(number, self._encoding.name, content, crc32)

    def _with_differences(self, model: Vector, differences: Differences) -> Vector:
        """Return a model with these differences, added in double precision."""
        if not differences:
            return model
        total = model.astype(np.float64)
        for name, number in differences:
            total += self._store.difference(name, number)
        return total.astype(np.float32)

    async def _begin_training(self, order: TrainPeer) -> None:
        if order.take is not None:
            model = self._models[order.take].vector
            assert model is not None
        else:
            model = await asyncio.to_thread(self._with_differences, self._own, order.differences)
        if order.differences and order.take is None:
            log.info(
                "step %d: mixed with %s",
                self.machine.record.step,
                ", ".join(name for name, _ in order.differences),
                extra=said("mixed", step=self.machine.record.step),
            )
        self._start(self._train(model, order.number))

    async def _train(self, model: Vector, number: int) -> None:
        loop, begun = asyncio.get_running_loop(), time.monotonic()
        try:
            result = await loop.run_in_executor(
                self._thread, self._training.train, model, self._kept, number
            )
        except StoppedError:
            return
        self._trained = result
        seconds = time.monotonic() - begun
        log.info(
            "training %d: %d steps of the optimizer in %.1f s, loss %.4g",
            number + 1,
            result.steps,
            seconds,
            result.loss,
            extra=said("trained", training=number + 1, loss=result.loss),
        )
        self.status.trained(result.loss)
        self._post(lambda: self.machine.trained(time.monotonic()))

    async def _commit(self, order: CommitModel) -> None:
        model = self._own
        if order.trained:
            assert self._trained is not None
            model, self._kept = self._trained.model, self._trained.kept
            self._trained = None
        own = await asyncio.to_thread(self._with_differences, model, order.differences)
        await asyncio.to_thread(self._store.commit, order.record, own, self._kept)
        self._own = own

    def _write_result(self) -> None:
        """Write the model for its owner, and say how good it is on this device's examples."""
        manifest = self._training.runtime.manifest
        personal = self._kept[: manifest.local_size - manifest.size]
        whole = np.concatenate([self._own, personal])
        write_own_model(self.output, self._training.bundle, whole)
        measured = self._training.measure(self._own, self._kept)
        means = {name: total / measured.examples for name, total in measured.metric_sums.items()}
        words = [f"loss {measured.loss_sum / measured.examples:.4g}"]
        words += [f"{name} {value:.4g}" for name, value in means.items()]
        which = "that were held out" if self._training.data.held_out is not None else "of its own"
        log.info(
            "the result, after step %d: %s on %d examples %s",
            self.machine.record.step,
            ", ".join(words),
            measured.examples,
            which,
        )

    def _start(self, job: Coroutine[Any, Any, None]) -> None:
        """Do a job beside the events; its error ends the peer."""
        task = asyncio.create_task(job)
        self._jobs.add(task)

        def done(task: asyncio.Task[None]) -> None:
            self._jobs.discard(task)
            if not task.cancelled() and task.exception() is not None:
                self._error = task.exception()
                self._post(list)

        task.add_done_callback(done)

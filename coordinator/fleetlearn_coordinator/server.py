"""The coordinator's websocket server: a thin driver of the run and its engine. PROTOCOL.md says what it answers.

What decides its memory and its stalls: no compression (32 KiB a connection), uploads granted a few at a time, model
frames made once and written with a yield after each, a bound on everything that waits for a peer, and ``abort()`` for
one that stalls (a close handshake waits for ever behind a full write buffer).
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from fleetlearn_protocol.errors import Code, FleetError, ProtocolError
from fleetlearn_protocol.frames import CHUNK_BYTES, MAX_FRAME_BYTES, unpack_chunk
from fleetlearn_protocol.messages import (
    MAX_REFUSALS,
    PROTOCOL_VERSION,
    SILENT_HEARTBEATS,
    Accepted,
    CheckIn,
    ComeBack,
    Content,
    Failed,
    Fetch,
    FromCoordinator,
    Grant,
    Heartbeat,
    Refused,
    Report,
    Task,
    Uploaded,
    Welcome,
    decode_from_device,
    encode,
)
from fleetlearn_protocol.messages import Cancel as CancelMessage
from websockets.asyncio.server import ServerConnection, broadcast
from websockets.exceptions import ConnectionClosed
from websockets.protocol import State

from fleetlearn_coordinator.engine import Assign, Cancel, Command, Finish, Phase
from fleetlearn_coordinator.run import Clocks, Run
from fleetlearn_coordinator.transfer import Contents, Upload, Uploads

logger = logging.getLogger("fleetlearn.coordinator")

SOFTWARE = f"fleetlearn {version('fleetlearn')}"
"""What a `welcome` says. Looked up once: reading the installed metadata takes 0.1 ms."""
SEND_TIMEOUT = 30.0
"""Seconds that a write to a device may wait for it to read."""
UPLOAD_TIMEOUT = 30.0
"""Seconds without a byte after which a granted upload's connection is ended."""
CLOSE_TIMEOUT = 5.0
"""Seconds that a closing handshake may take."""


@dataclass(slots=True, eq=False)
class Peer:
    """One connection. ``device`` is None before its check-in."""

    connection: ServerConnection
    seen: float
    device: str | None = None
    upload: Upload | None = None
    past_transfers: set[int] = field(default_factory=set)
    """Grants that ended early: chunks of theirs may still be on the way."""
    download: asyncio.Task[None] | None = None
    blocked: float | None = None
    """Since when a write has been waiting for the device to read."""
    refusals: int = 0


class Coordinator:
    """The server of one run. ``serve`` below is the way to start one."""

    def __init__(self, run: Run) -> None:
        self.run, self.store, self.engine, self.service = run, run.store, run.engine, run.plan.service
        self.contents = Contents(run.bundle)
        self.uploads = Uploads(run.store, self.service.uploads)
        self.downloads = asyncio.Semaphore(self.service.downloads)
        self.peers: dict[str, Peer] = {}
        """Device -> its connection, of those that checked in."""
        self.connections: set[Peer] = set()
        self.loop = asyncio.get_running_loop()
        self.address = ""
        self.done: asyncio.Future[str] = self.loop.create_future()
        """Set when the run is finished or was told to stop."""
        self._timer: asyncio.TimerHandle | None = None
        self._round = 0
        self._spoilt: set[str] = set()
        """Tasks of the round whose upload arrived wrong once."""
        self._closing: set[asyncio.Task[None]] = set()
        self._handlers: dict[type, Callable[[Peer, Any], None]] = {
            CheckIn: self._check_in,
            Heartbeat: lambda peer, message: None,
            Fetch: self._fetch,
            Report: self._report,
            Uploaded: self._uploaded,
            Failed: self._failed,
        }

    def start(self) -> None:
        """Take up what an earlier process left open."""
        self.contents.publish(self.run.model_digest, self.run.model)
        self._carry_out(self.run.resume(self.now()), recorded=True)
        if self.run.finished is not None:
            self.done.set_result(self.run.finished)

    def now(self) -> Clocks:
        return Clocks(self.loop.time(), time.time())

    # --- the engine's commands ---

    def _carry_out(self, commands: Iterable[Command], *, recorded: bool = False) -> None:
        """Record the commands, and tell the devices. Then set the engine's alarm."""
        for command in commands if recorded else self.run.carry_out(commands, self.now()):
            match command:
                case Assign():
                    self._assign(command)
                case Cancel(device, task, code, text):
                    self._forget_upload(device)
                    self._tell(device, CancelMessage(task, code, text))
                case Finish(reason):
                    self._finish(reason)
        if self.engine.round != self._round or self.engine.phase is not Phase.OPEN:
            self.uploads.forget_all()
            self._spoilt.clear()
            self._round = self.engine.round
        wake = self.engine.wake_at()
        if self._timer is not None:
            if self._timer.when() == wake:
                return
            self._timer.cancel()
        self._timer = None if wake is None else self.loop.call_at(wake, self._tick)

    def _tick(self) -> None:
        self._timer = None
        try:
            self._carry_out(self.engine.tick(self.loop.time()))
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Something that no device is to blame for: end the process rather than go on half-done. Disk has the truth."""
        if not self.done.done():
            self.done.set_exception(error)

    def _assign(self, lease: Assign) -> None:
        self.contents.publish(self.run.model_digest, self.run.model)
        local = self.run.plan.local
        self._tell(
            lease.device,
            Task(
                task=lease.task,
                round=lease.round,
                bundle=self.run.bundle.sha256,
                model=self.run.model_digest,
                model_bytes=self.run.model.nbytes,
                hyper=self.run.hyper,
                epochs=local.epochs,
                batch_size=local.batch_size,
                seed=lease.seed,
                deadline=max(0.0, lease.deadline - self.loop.time()),
                time_budget=local.time_budget,
                evaluate=local.evaluate,
            ),
        )

    def _finish(self, reason: str) -> None:
        for peer in list(self.peers.values()):
            self._send(peer, ComeBack(_spread(3600.0), "finished"))
        if not self.done.done():
            self.done.set_result(reason)

    # --- connections ---

    async def converse(self, connection: ServerConnection) -> None:
        """Serve one connection to its end."""
        peer = Peer(connection, self.loop.time())
        self.connections.add(peer)
        message: str | bytes | None
        try:
            while True:
                message = await connection.recv()
                peer.seen = self.loop.time()
                try:
                    self._handle(peer, message)
                except ProtocolError as error:
                    self._refuse(peer, error)
                message = None  # else a chunk stays in memory until the next message
        except ConnectionClosed:
            pass
        except Exception as error:
            self.fail(error)
        finally:
            self.connections.discard(peer)
            self._gone(peer)

    def _handle(self, peer: Peer, message: str | bytes) -> None:
        if isinstance(message, bytes):
            self._chunk(peer, message)
            return
        decoded = decode_from_device(message)
        if peer.device is None and not isinstance(decoded, CheckIn):
            raise ProtocolError(Code.OUT_OF_TURN, "the first message of a connection is check-in")
        self._handlers[type(decoded)](peer, decoded)

    def _check_in(self, peer: Peer, message: CheckIn) -> None:
        if peer.device is not None:
            raise ProtocolError(Code.DUPLICATE, f"this connection checked in as {peer.device} already")
        if message.protocol != PROTOCOL_VERSION:
            text = f"version {message.protocol} of the protocol; this coordinator speaks version {PROTOCOL_VERSION}"
            self._send(peer, Refused(Code.BAD_VERSION, text))
            self._close(peer, 1008, "protocol version")
            return
        if self.run.finished is not None or self.done.done():
            self._send(peer, ComeBack(_spread(3600.0), "finished" if self.run.finished is not None else "stopping"))
            return
        earlier = self.peers.get(message.device)
        if earlier is None and len(self.peers) >= self.service.max_connections:
            self._send(peer, ComeBack(_spread(30.0), "busy"))
            return
        if earlier is not None:
            self._send(earlier, Refused(Code.REPLACED, f"device {message.device} has connected again"))
            self._leave(earlier)
            self._close(earlier, 1008, "replaced")
        peer.device = message.device
        self.peers[message.device] = peer
        self._send(peer, Welcome(SOFTWARE, self.service.heartbeat, CHUNK_BYTES))
        held = message.held.task if message.held is not None else None
        self._carry_out(self.engine.check_in(message.device, held, self.loop.time()))

    def _gone(self, peer: Peer) -> None:
        if peer.download is not None:
            peer.download.cancel()
        if peer.device is not None and self.peers.get(peer.device) is peer:
            device = peer.device
            self._leave(peer)
            if not self.done.done():  # else the leases stay as they are on disk, for the next process
                self._carry_out(self.engine.disconnect(device, self.loop.time()))
                self._grant()

    def _leave(self, peer: Peer) -> None:
        """The connection no longer speaks for its device; what it uploaded so far is kept for the next one."""
        if peer.upload is not None:
            self.uploads.pause(peer.upload)
            peer.upload = None
        if peer.device is not None:
            del self.peers[peer.device]
            peer.device = None

    # --- downloads ---

    def _fetch(self, peer: Peer, message: Fetch) -> None:
        if peer.download is not None:  # its task was cancelled, and the device wants something else now
            peer.download.cancel()
            peer.download = None
        try:
            content = self.contents.find(message.sha256, message.offset)
        except FleetError as error:
            self._refuse(peer, error, sha256=message.sha256)
            return
        answer = Content(content.transfer, message.sha256, content.size, message.offset)
        peer.download = self.loop.create_task(self._download(peer, answer, content.frames(message.offset)))

    async def _download(self, peer: Peer, answer: Content, frames: Iterable[bytes]) -> None:
        connection = peer.connection
        try:
            async with self.downloads:
                self._send(peer, answer)
                for frame in frames:
                    peer.blocked = self.loop.time()
                    await connection.drain()
                    peer.blocked = None
                    await asyncio.sleep(0)  # drain() does not yield while the buffer is low
                    if connection.state is not State.OPEN:
                        return
                    connection.transport.write(frame)
                    self.run.bytes_down += len(frame)
        finally:
            peer.blocked = None
            if peer.download is asyncio.current_task():
                peer.download = None

    # --- uploads ---

    def _report(self, peer: Peer, message: Report) -> None:
        assert peer.device is not None
        try:
            if not self.engine.announce(peer.device, message.task, message.round):
                self._send(peer, Accepted(message.task))
                return
            if message.size != self.run.model.nbytes:
                raise ProtocolError(
                    Code.WRONG_LENGTH,
                    f"an update of {message.size} bytes was announced; the model has {self.run.model.nbytes}",
                )
        except ProtocolError as error:
            self._refuse(peer, error, message.task)
            if error.code is Code.WRONG_LENGTH:
                self._reject(peer, message.task, error)
            return
        if peer.upload is not None:
            if peer.upload.report == message:  # said twice: once is enough
                return
            self._stop_upload(peer)
        peer.upload = self.uploads.offer(peer.device, message)
        self._grant()

    def _grant(self) -> None:
        for upload in self.uploads.grants(self.loop.time()):
            self._tell(upload.device, Grant(upload.report.task, upload.transfer, upload.offset))

    def _chunk(self, peer: Peer, message: bytes) -> None:
        chunk = unpack_chunk(message)
        upload = peer.upload
        if upload is None or chunk.transfer != upload.transfer or not upload.transfer:
            if chunk.transfer in peer.past_transfers:
                return
            raise ProtocolError(Code.OUT_OF_TURN, f"a chunk of transfer {chunk.transfer} came, which was not granted")
        try:
            upload.take(chunk, self.store)
        except ProtocolError as error:
            self._bad_chunk(peer, upload, error)
            return
        upload.moved = peer.seen
        self.run.bytes_up += len(message)

    def _bad_chunk(self, peer: Peer, upload: Upload, error: ProtocolError) -> None:
        task = upload.report.task
        self._refuse(peer, error, task)
        if error.code is Code.WRONG_OFFSET:  # go on from where it is right
            peer.past_transfers.add(upload.transfer)
            self.uploads.renew(upload, self.loop.time())
            self._send(peer, Grant(task, upload.transfer, upload.offset))
            return
        self._spoiled(peer, task, error)

    def _uploaded(self, peer: Peer, message: Uploaded) -> None:
        upload = peer.upload
        if upload is None or upload.report.task != message.task or not upload.transfer:
            assert peer.device is not None
            if self.engine.accepted.get(message.task) == peer.device:
                self._send(peer, Accepted(message.task))
            elif not peer.past_transfers:
                raise ProtocolError(Code.OUT_OF_TURN, f"no upload of task {message.task} was granted")
            return
        try:
            upload.check_complete()
            self._accept(peer, upload)
        except ProtocolError as error:
            self._refuse(peer, error, message.task)
            self._spoiled(peer, message.task, error)
        self._grant()

    def _spoiled(self, peer: Peer, task: str, error: ProtocolError) -> None:
        """An upload was refused. Bytes that arrived wrong may be sent once more; others end the task."""
        self._stop_upload(peer)
        if error.code in (Code.WRONG_HASH, Code.WRONG_LENGTH) and task not in self._spoilt:
            self._spoilt.add(task)
        else:
            self._reject(peer, task, error)
        self._grant()

    def _reject(self, peer: Peer, task: str, error: ProtocolError) -> None:
        assert peer.device is not None
        self._carry_out(self.engine.end(peer.device, task, f"rejected: {error.code.value}", self.loop.time()))

    def _accept(self, peer: Peer, upload: Upload) -> None:
        assert peer.device is not None
        assert upload.slot is not None
        report = upload.report
        if not self.engine.wanted(peer.device, report.task):
            raise ProtocolError(Code.STALE_ROUND, f"round {report.round} ended before the update was here")
        self.run.accept(peer.device, report.task, report, upload.slot, upload.largest)
        self.uploads.keep(upload)
        peer.upload = None
        self._send(peer, Accepted(report.task))
        self._carry_out(self.engine.accept(peer.device, report.task, self.loop.time()))

    def _failed(self, peer: Peer, message: Failed) -> None:
        assert peer.device is not None
        if peer.upload is not None and peer.upload.report.task == message.task:
            self._stop_upload(peer)
        logger.warning("device %s failed task %s: %s %s", peer.device, message.task, message.code, message.text)
        cause = f"failed: {message.code}"
        self._carry_out(self.engine.end(peer.device, message.task, cause, self.loop.time()))
        self._grant()

    def _stop_upload(self, peer: Peer) -> None:
        if peer.upload is not None:
            peer.past_transfers.add(peer.upload.transfer)
            self.uploads.drop(peer.upload)
            peer.upload = None

    def _forget_upload(self, device: str) -> None:
        peer = self.peers.get(device)
        if peer is not None:
            self._stop_upload(peer)

    # --- sending ---

    def _tell(self, device: str, message: FromCoordinator) -> None:
        peer = self.peers.get(device)
        if peer is not None:
            self._send(peer, message)

    def _send(self, peer: Peer, message: FromCoordinator) -> None:
        """Put a control message on its way. Control is small and mostly an answer; who lets it pile up is ended."""
        broadcast((peer.connection,), encode(message))
        if peer.connection.transport.get_write_buffer_size() > 16 * MAX_FRAME_BYTES:
            peer.connection.transport.abort()

    def _refuse(self, peer: Peer, error: FleetError, task: str | None = None, sha256: str | None = None) -> None:
        logger.info("device %s: refused: %s", peer.device or "(not checked in)", error)
        self._send(peer, Refused(error.code, error.text, task, sha256))
        peer.refusals += 1
        if peer.refusals > MAX_REFUSALS:
            self._close(peer, 1008, "too many refused messages")

    def _close(self, peer: Peer, code: int, reason: str) -> None:
        """Close politely, and abort a peer that does not answer."""
        closing = self.loop.create_task(peer.connection.close(code, reason))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        self.loop.call_later(CLOSE_TIMEOUT, peer.connection.transport.abort)

    # --- time and people ---

    def sweep(self) -> None:
        """End the connections that are silent, do not read, or do not go on with a granted upload."""
        now = self.loop.time()
        silence = SILENT_HEARTBEATS * self.service.heartbeat
        for peer in list(self.connections):
            upload = peer.upload
            if now - peer.seen > silence:
                why = f"silent for {silence:.0f} s"
            elif peer.blocked is not None and now - peer.blocked > SEND_TIMEOUT:
                why = f"did not read for {SEND_TIMEOUT:.0f} s"
            elif upload is not None and upload.transfer and now - upload.moved > UPLOAD_TIMEOUT:
                why = f"sent nothing of its upload for {UPLOAD_TIMEOUT:.0f} s"
            else:
                continue
            logger.info("device %s: connection ended: %s", peer.device or "(not checked in)", why)
            peer.connection.transport.abort()

    def live(self) -> dict[str, Any]:
        """What ``status`` shows of a running coordinator."""
        return {
            "time": time.time(),
            "phase": self.engine.phase.value,
            "round": self.engine.round,
            "version": self.engine.version,
            "connected": len(self.peers),
            "idle": len(self.engine.idle),
            "leases": len(self.engine.leases),
            "accepted": len(self.engine.accepted),
            "dropped": self.engine.causes(),
            "uploading": len(self.uploads.active),
            "queued": len(self.uploads.waiting),
        }

    async def stop(self, reason: str) -> None:
        """Tell every device to come back later, and wait a moment for them to leave."""
        if not self.done.done():
            self.done.set_result(reason)
        for peer in list(self.peers.values()):
            if self.run.finished is None:
                self._send(peer, ComeBack(_spread(10.0), "stopping"))
        until = self.loop.time() + CLOSE_TIMEOUT
        while self.connections and self.loop.time() < until:
            await asyncio.sleep(0.05)


def _spread(longest: float) -> float:
    """A random wait, so that those who are told to come back do not come all at once (full jitter)."""
    return round(random.uniform(0.0, longest), 3)

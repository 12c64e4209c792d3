"""One connection: what each message of a device does. PROTOCOL.md says what is answered, and when.

A message that is refused changes nothing: the connection, the task and the round go on as if it had not come.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from math import inf
from typing import TYPE_CHECKING, Any

from fleetlearn_protocol.errors import Code, FleetError, ProtocolError
from fleetlearn_protocol.frames import CHUNK_BYTES, unpack_chunk
from fleetlearn_protocol.messages import (
    MAX_REFUSALS,
    PROTOCOL_VERSION,
    Accepted,
    CheckIn,
    Content,
    Failed,
    Fetch,
    FromCoordinator,
    Grant,
    Heartbeat,
    Refused,
    Report,
    Uploaded,
    Waiting,
    Welcome,
    decode_from_device,
    encode,
)
from websockets.asyncio.server import broadcast
from websockets.exceptions import ConnectionClosed
from websockets.protocol import State

from fleetlearn_coordinator.conversation.limits import (
    BYTE_BURST,
    CHECK_IN_TIMEOUT,
    CLOSE_TIMEOUT,
    PATIENCE,
    WRITE_LIMIT,
)
from fleetlearn_coordinator.conversation.transfer import Content as ServedContent
from fleetlearn_coordinator.conversation.transfer import Download, Upload, check_parts
from fleetlearn_coordinator.network.connection import Connection
from fleetlearn_coordinator.network.peer_log import ConnectionLog

if TYPE_CHECKING:
    from fleetlearn_coordinator.service.server import Coordinator

SOFTWARE = f"fleetlearn {version('fleetlearn')}"
"""What a `welcome` says. Looked up once: reading the installed metadata takes 0.1 ms."""
SEND_TIMEOUT = 30.0
"""Seconds that a write to a device may wait for it to read."""
UPLOAD_TIMEOUT = 30.0
"""Seconds without a byte after which a granted upload's connection is ended."""
WAITING_INTERVAL = 20.0
"""Seconds after which a fetch that waits is told so again: a third of a device's patience."""


class Conversation:
    """A connection and what is under way on it."""

    __slots__ = (
        "_log",
        "_new",
        "_over",
        "_refusals",
        "_transfers",
        "blocked",
        "connection",
        "coordinator",
        "device",
        "download",
        "seen",
        "upload",
    )

    def __init__(self, coordinator: Coordinator, connection: Connection) -> None:
        self.coordinator, self.connection = coordinator, connection
        connection.flooded = self._flooded
        self.device: str | None = None
        """Whom it speaks for; None before the check-in, and after another connection took over."""
        self.seen = coordinator.loop.time()
        """When the device last said something."""
        self.upload: Upload | None = None
        self.download: Download | None = None
        self.blocked: float | None = None
        """Since when a write has been waiting for the device to read."""
        self._transfers: deque[int] = deque(maxlen=MAX_REFUSALS)
        """The last grants: of those that are over, chunks may still be on the way."""
        self._refusals = 0
        self._new = True
        """It has not checked in yet."""
        self._over = False
        """The coordinator is closing the connection: what still comes is not handled."""
        self._log: ConnectionLog | None = None
        """Made for the first line."""

    async def serve(self) -> None:
        """Answer the device until the connection ends."""
        message: str | bytes | None
        try:
            while True:
                message = await self.connection.recv()
                self.seen = self.coordinator.loop.time()
                if self.coordinator.ended:
                    break
                if self._over:
                    continue
                try:
                    self._handle(message)
                except ProtocolError as error:
                    self._refuse(error)
                message = None  # else a chunk stays in memory until the next message
        except ConnectionClosed:
            pass
        finally:
            if self._log is not None:
                self._log.end(self.device)
            self.stop_download()

    def send(self, message: FromCoordinator) -> None:
        """Put a control message on its way. Control is small and mostly an answer; who lets it pile up is ended."""
        broadcast((self.connection,), encode(message))
        if self.connection.transport.get_write_buffer_size() > WRITE_LIMIT:
            self.connection.transport.abort()

    def close(self, code: int, reason: str) -> None:
        """Close politely, and abort a peer that does not answer. What still comes is not handled."""
        self._over = True
        self.coordinator.background(self.connection.close(code, reason))
        self.coordinator.loop.call_later(CLOSE_TIMEOUT, self.connection.transport.abort)

    def leave(self) -> None:
        """Speak for the device no longer; what it uploaded so far is kept for its next connection."""
        self.stop_download()
        if self.upload is not None:
            self.coordinator.uploads.pause(self.upload)
            self.upload = None
        self.device = None

    def overdue(self, now: float, silence: float) -> str | None:
        """Why the connection should be ended: silent, not reading, or not going on with a granted upload."""
        if self._new and now - self.connection.since > CHECK_IN_TIMEOUT:
            return f"not checked in within {CHECK_IN_TIMEOUT:.0f} s"
        if now - self.seen > silence:
            return f"silent for {silence:.0f} s"
        unread = self.download.stalled(now) if self.download is not None else inf
        blocked = min(unread, now - self.blocked) if self.blocked is not None else 0.0
        if self.connection.stalled is not None:
            blocked = max(blocked, now - self.connection.stalled)
        if blocked > SEND_TIMEOUT:
            return f"did not read for {SEND_TIMEOUT:.0f} s"
        upload = self.upload
        if upload is None or self.coordinator.uploads.places.waits(upload):
            return None
        if upload.stalled(now) > UPLOAD_TIMEOUT:
            return f"sent nothing of its upload for {UPLOAD_TIMEOUT:.0f} s"
        return None

    def _refuse(self, error: FleetError, task: str | None = None, sha256: str | None = None) -> None:
        self.log(logging.INFO, "refused: %s", error)
        self.send(Refused(error.code, error.text, task, sha256))
        self._refusals += 1
        if self._refusals > MAX_REFUSALS:
            self._end("too many refused messages")

    def _flooded(self) -> None:
        """The peer has been waiting for its budget of messages or bytes for too long."""
        text = f"more messages or bytes than allowed, for more than {PATIENCE:.0f} s; PROTOCOL.md states the rates"
        self._refuse(ProtocolError(Code.BUSY, text))
        self._end("too many messages")

    def _end(self, reason: str) -> None:
        """Close over misbehaviour: nothing more is read."""
        self._over = True
        self.connection.end(1008, reason)

    def log(self, level: int, text: str, *arguments: object) -> None:
        """Log a line about the device, or count it where there are many."""
        now, device = self.coordinator.loop.time(), self.device or "(not checked in)"
        self._log = self._log or ConnectionLog(now)
        self._log.say(now, level, f"device %s: {text}", device, *arguments)

    def _handle(self, message: str | bytes) -> None:
        if isinstance(message, bytes):
            self._chunk(message)
            return
        decoded = decode_from_device(message)
        if isinstance(decoded, CheckIn):
            self._check_in(decoded)
        elif self.device is None:
            raise ProtocolError(Code.OUT_OF_TURN, "the first message of a connection is check-in")
        else:
            HANDLERS[type(decoded)](self, self.device, decoded)

    def _check_in(self, message: CheckIn) -> None:
        if self.device is not None:
            raise ProtocolError(Code.DUPLICATE, f"this connection checked in as {self.device} already")
        if message.protocol != PROTOCOL_VERSION:
            text = f"version {message.protocol} of the protocol; this coordinator speaks version {PROTOCOL_VERSION}"
            self.send(Refused(Code.BAD_VERSION, text))
            self.close(1008, "protocol version")
            return
        not_now = self.coordinator.turn_away(message.device)
        if not_now is not None:
            self.connection.finished = not_now.reason == "finished"
            self.send(not_now)
            self.close(1000, "come back later")
            return
        self.device, self._new = message.device, False
        model = self.coordinator.run.model.nbytes
        self.connection.welcome(self.coordinator.bundle_bytes + model, 2 * model)
        self.send(Welcome(SOFTWARE, self.coordinator.service.heartbeat, CHUNK_BYTES))
        self.coordinator.join(self, message.device, message.held.task if message.held is not None else None)

    def _heartbeat(self, device: str, message: Heartbeat) -> None:
        self.coordinator.engine.progress(device, message.task, "steps", message.steps, self.seen)

    def _failed(self, device: str, message: Failed) -> None:
        if self.upload is not None and self.upload.report.task == message.task:
            self.stop_upload()
        self.log(logging.WARNING, "failed task %s: %s %r", message.task, message.code, message.text)
        self.coordinator.end_task(device, message.task, f"failed: {message.code}")

    # Downloads

    def _fetch(self, device: str, message: Fetch) -> None:
        self.stop_download()  # its task was cancelled, and the device wants something else now
        try:
            content = self.coordinator.contents.find(message.sha256, message.offset)
        except FleetError as error:
            self._refuse(error, sha256=message.sha256)
            return
        download = self.download = Download(device, message.sha256, self.connection.transport)
        download.task = self.coordinator.loop.create_task(self._send_content(download, content, message))

    async def _send_content(self, download: Download, content: ServedContent, fetch: Fetch) -> None:
        connection, loop, engine = self.connection, self.coordinator.loop, self.coordinator.engine
        device = download.device
        try:
            await self._wait_for_budget(download, content.size - fetch.offset)
            await self._take_turn(download)
            self.send(Content(content.transfer, fetch.sha256, content.size, fetch.offset))
            for frame in content.frames(fetch.offset):
                await self._drain()
                self.seen = loop.time()  # who takes chunks in is not silent
                if not download.turn.is_set():
                    await self._take_turn(download)
                await asyncio.sleep(0)  # drain() does not yield while the buffer is low
                if connection.state is not State.OPEN:
                    return
                connection.transport.write(frame)
                download.sent += len(frame)
                engine.progress(
                    device, engine.leases.get(device), fetch.sha256, fetch.offset + download.sent, self.seen
                )
                self.coordinator.run.bytes_down += len(frame)
                connection.downloads.tokens -= len(frame)
        finally:
            if self.download is download:
                self.download = None
            self.coordinator.end_download(download)

    async def _wait_for_budget(self, download: Download, size: int) -> None:
        """Wait until the device, which has fetched more than its tasks need, may fetch again."""
        budget, needed = self.connection.downloads, min(size, BYTE_BURST)
        while wait := budget.wait(self.coordinator.loop.time(), least=needed):
            self.send(Waiting(sha256=download.sha256))
            await asyncio.sleep(min(wait, WAITING_INTERVAL))

    async def _take_turn(self, download: Download) -> None:
        """Wait for a place, once the device has read what it was sent: until then it has no use for one."""
        await self._drain()
        engine, loop = self.coordinator.engine, self.coordinator.loop
        engine.wait(download.device, loop.time())
        try:
            self.coordinator.ask_download(download)
            while not download.turn.is_set():
                self.send(Waiting(sha256=download.sha256))
                with suppress(TimeoutError):
                    async with asyncio.timeout(WAITING_INTERVAL):
                        await download.turn.wait()
        finally:
            engine.proceed(download.device, loop.time())

    async def _drain(self) -> None:
        """Wait until the device has read most of what was written."""
        self.blocked = self.coordinator.loop.time()
        try:
            await self.connection.drain()
        finally:
            self.blocked = None

    def stop_download(self, gone: str | None = None) -> None:
        """Send no more of the download under way, if there is one. ``gone``: only if it is of this content, which is no
        longer served; the device is told so."""
        if self.download is None or gone not in (None, self.download.sha256):
            return
        assert self.download.task is not None
        self.download.task.cancel()
        self.download = None
        if gone is not None:  # not a fault of the device: it is not counted
            self.send(Refused(Code.UNKNOWN_CONTENT, "the model that was fetched is of an old round", None, gone))

    # Uploads

    def _report(self, device: str, message: Report) -> None:
        coordinator = self.coordinator
        try:
            if not coordinator.engine.announce(device, message.task, message.round):
                self.send(Accepted(message.task))
                return
        except ProtocolError as error:
            self._refuse(error, message.task)
            return
        try:
            check_parts(message, coordinator.run.model.size)
        except ProtocolError as error:
            self.stop_upload()
            self._reject(device, message.task, error)
            return
        if self.upload is not None:
            if self.upload.report == message:
                if self.upload not in coordinator.uploads.places:  # it was asked to wait, and nothing is on its way now
                    coordinator.uploads.queue(self.upload)
                    coordinator.engine.wait(device, self.seen)
                    coordinator.grant()
                return
            self.stop_upload()
        self.upload = coordinator.uploads.offer(device, message, self._arriving)
        coordinator.engine.wait(device, self.seen)
        coordinator.grant()

    def grant(self, upload: Upload) -> None:
        """Tell the device that its upload may begin, or go on."""
        self._transfers.append(upload.transfer)
        self.send(Grant(upload.report.task, upload.transfer, upload.offset))

    def _arriving(self) -> int:
        """Bytes of a message that is not complete."""
        return len(self.connection.protocol.reader.buffer)

    def _chunk(self, message: bytes) -> None:
        chunk = unpack_chunk(message)
        upload = self.upload
        if upload is None or self.device is None or not upload.transfer or chunk.transfer != upload.transfer:
            if chunk.transfer in self._transfers:
                return
            raise ProtocolError(Code.OUT_OF_TURN, f"a chunk of transfer {chunk.transfer} came, which was not granted")
        try:
            upload.take(chunk, self.coordinator.store)
        except ProtocolError as error:
            self._bad_chunk(self.device, upload, error)
            return
        self.coordinator.engine.progress(self.device, upload.report.task, "upload", upload.offset, self.seen)
        self.coordinator.run.bytes_up += len(message)

    def _bad_chunk(self, device: str, upload: Upload, error: ProtocolError) -> None:
        task = upload.report.task
        if error.code is not Code.WRONG_OFFSET:
            self._spoiled(device, task, error)
            return
        if upload not in self.coordinator.uploads.places.held:
            return  # it was asked to wait: its next grant says where to go on
        self._refuse(error, task)  # and go on from where it is right
        self.coordinator.uploads.renew(upload)
        upload.restarted = True
        self.grant(upload)

    def _uploaded(self, device: str, message: Uploaded) -> None:
        upload, engine = self.upload, self.coordinator.engine
        if upload is None or upload.report.task != message.task or not upload.transfer:
            if engine.accepted.get(message.task) == device:
                self.send(Accepted(message.task))
            elif not self._transfers:
                raise ProtocolError(Code.OUT_OF_TURN, f"no upload of task {message.task} was granted")
            return
        held = upload in self.coordinator.uploads.places.held
        if upload.offset < upload.report.size and (upload.restarted or not held):
            return  # it is of a grant that is over
        try:
            upload.check_complete()
            if not engine.wanted(device, message.task):
                text = f"round {upload.report.round} ended before the update was here"
                raise ProtocolError(Code.STALE_ROUND, text)
            self._accept(device, upload)
        except ProtocolError as error:
            self._spoiled(device, message.task, error)

    def _accept(self, device: str, upload: Upload) -> None:
        assert upload.slot is not None
        self.coordinator.run.accept(upload.report, upload.slot, upload.largest)
        self.coordinator.uploads.keep(upload, self.seen)
        self.upload = None
        self.send(Accepted(upload.report.task))
        self.coordinator.accept(device, upload.report.task)

    def _spoiled(self, device: str, task: str, error: ProtocolError) -> None:
        """An upload was refused. Bytes that arrived wrong may be sent once more; others end the task."""
        self.stop_upload()
        if error.code in (Code.WRONG_HASH, Code.WRONG_LENGTH) and self.coordinator.first_spoilt(task):
            self._refuse(error, task)
            self.coordinator.grant()
        else:
            self._reject(device, task, error)

    def _reject(self, device: str, task: str, error: ProtocolError) -> None:
        self._refuse(error, task)
        self.coordinator.end_task(device, task, f"rejected: {error.code.value}")

    def stop_upload(self) -> None:
        """Drop the upload under way, if there is one. The caller grants its place to another."""
        if self.upload is not None:
            self.coordinator.uploads.drop(self.upload)
            self.upload = None


HANDLERS: dict[type, Callable[[Conversation, str, Any], None]] = {
    Heartbeat: Conversation._heartbeat,
    Fetch: Conversation._fetch,
    Report: Conversation._report,
    Uploaded: Conversation._uploaded,
    Failed: Conversation._failed,
}
"""What a device may say once it has checked in; each takes the conversation, the device and the message."""

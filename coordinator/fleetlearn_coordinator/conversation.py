"""One connection: what each message of a device does. PROTOCOL.md says what is answered, and when.

A message that is refused changes nothing: the connection, the task and the round go on as if it had not come.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from fleetlearn_protocol.errors import Code, FleetError, ProtocolError
from fleetlearn_protocol.frames import CHUNK_BYTES, MAX_FRAME_BYTES, unpack_chunk
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
    Welcome,
    decode_from_device,
    encode,
)
from websockets.asyncio.server import ServerConnection, broadcast
from websockets.exceptions import ConnectionClosed
from websockets.protocol import State

from fleetlearn_coordinator.transfer import Upload

if TYPE_CHECKING:
    from fleetlearn_coordinator.server import Coordinator

logger = logging.getLogger("fleetlearn.coordinator")

SOFTWARE = f"fleetlearn {version('fleetlearn')}"
"""What a `welcome` says. Looked up once: reading the installed metadata takes 0.1 ms."""
SEND_TIMEOUT = 30.0
"""Seconds that a write to a device may wait for it to read."""
UPLOAD_TIMEOUT = 30.0
"""Seconds without a byte after which a granted upload's connection is ended."""
CLOSE_TIMEOUT = 5.0
"""Seconds that a closing handshake may take."""


class Conversation:
    """A connection and what is under way on it."""

    __slots__ = (
        "_past_transfers",
        "_refusals",
        "blocked",
        "connection",
        "coordinator",
        "device",
        "download",
        "seen",
        "upload",
    )

    def __init__(self, coordinator: Coordinator, connection: ServerConnection) -> None:
        self.coordinator, self.connection = coordinator, connection
        self.device: str | None = None
        """Whom it speaks for; None before the check-in, and after another connection took over."""
        self.seen = coordinator.loop.time()
        """When the device last said something."""
        self.upload: Upload | None = None
        self.download: asyncio.Task[None] | None = None
        self.blocked: float | None = None
        """Since when a write has been waiting for the device to read."""
        self._past_transfers: deque[int] = deque(maxlen=MAX_REFUSALS)
        """The last grants that ended early: chunks of theirs may still be on the way."""
        self._refusals = 0

    async def serve(self) -> None:
        """Answer the device until the connection ends."""
        message: str | bytes | None
        try:
            while True:
                message = await self.connection.recv()
                self.seen = self.coordinator.loop.time()
                if self.coordinator.ended:
                    break
                try:
                    self._handle(message)
                except ProtocolError as error:
                    self._refuse(error)
                message = None  # else a chunk stays in memory until the next message
        except ConnectionClosed:
            pass
        finally:
            if self.download is not None:
                self.download.cancel()

    def send(self, message: FromCoordinator) -> None:
        """Put a control message on its way. Control is small and mostly an answer; who lets it pile up is ended."""
        broadcast((self.connection,), encode(message))
        if self.connection.transport.get_write_buffer_size() > 16 * MAX_FRAME_BYTES:
            self.connection.transport.abort()

    def close(self, code: int, reason: str) -> None:
        """Close politely, and abort a peer that does not answer."""
        self.coordinator.background(self.connection.close(code, reason))
        self.coordinator.loop.call_later(CLOSE_TIMEOUT, self.connection.transport.abort)

    def leave(self) -> None:
        """Speak for the device no longer; what it uploaded so far is kept for its next connection."""
        if self.upload is not None:
            self.coordinator.uploads.pause(self.upload)
            self.upload = None
        self.device = None

    def overdue(self, now: float, silence: float) -> str | None:
        """Why the connection should be ended: silent, not reading, or not going on with a granted upload."""
        if now - self.seen > silence:
            return f"silent for {silence:.0f} s"
        if self.blocked is not None and now - self.blocked > SEND_TIMEOUT:
            return f"did not read for {SEND_TIMEOUT:.0f} s"
        if self.upload is not None and self.upload.transfer and now - self.upload.moved > UPLOAD_TIMEOUT:
            return f"sent nothing of its upload for {UPLOAD_TIMEOUT:.0f} s"
        return None

    def _refuse(self, error: FleetError, task: str | None = None, sha256: str | None = None) -> None:
        logger.info("device %s: refused: %s", self.device or "(not checked in)", error)
        self.send(Refused(error.code, error.text, task, sha256))
        self._refusals += 1
        if self._refusals == MAX_REFUSALS + 1:  # once, however many more are on their way
            self.close(1008, "too many refused messages")

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
            self.send(not_now)
            self.close(1000, "come back later")
            return
        self.device = message.device
        self.send(Welcome(SOFTWARE, self.coordinator.service.heartbeat, CHUNK_BYTES))
        self.coordinator.join(self, message.device, message.held.task if message.held is not None else None)

    def _heartbeat(self, device: str, message: Heartbeat) -> None:
        self.coordinator.engine.progress(device, message.task, "steps", message.steps, self.seen)

    def _failed(self, device: str, message: Failed) -> None:
        if self.upload is not None and self.upload.report.task == message.task:
            self.stop_upload()
        logger.warning("device %s failed task %s: %s %r", device, message.task, message.code, message.text)
        self.coordinator.end_task(device, message.task, f"failed: {message.code}")

    # Downloads

    def _fetch(self, device: str, message: Fetch) -> None:
        if self.download is not None:  # its task was cancelled, and the device wants something else now
            self.download.cancel()
            self.download = None
            self.coordinator.engine.proceed(device, self.seen)
        try:
            content = self.coordinator.contents.find(message.sha256, message.offset)
        except FleetError as error:
            self._refuse(error, sha256=message.sha256)
            return
        answer = Content(content.transfer, message.sha256, content.size, message.offset)
        self.coordinator.engine.wait(device, self.seen)
        self.download = self.coordinator.loop.create_task(self._send_content(answer, content.frames(message.offset)))

    async def _send_content(self, answer: Content, frames: Iterable[bytes]) -> None:
        connection, loop, engine = self.connection, self.coordinator.loop, self.coordinator.engine
        device, sent = self.device or "", answer.offset
        try:
            async with self.coordinator.downloads:
                engine.proceed(device, loop.time())
                self.send(answer)
                for frame in frames:
                    self.blocked = loop.time()
                    await connection.drain()
                    self.blocked, self.seen = None, loop.time()  # who takes chunks in is not silent
                    await asyncio.sleep(0)  # drain() does not yield while the buffer is low
                    if connection.state is not State.OPEN:
                        return
                    connection.transport.write(frame)
                    sent += len(frame)
                    engine.progress(device, engine.leases.get(device), answer.sha256, sent, self.seen)
                    self.coordinator.run.bytes_down += len(frame)
        finally:
            self.blocked = None
            if self.download is asyncio.current_task():
                self.download = None

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
        if message.size != coordinator.run.model.nbytes:
            self.stop_upload()
            text = f"an update of {message.size} bytes was announced; the model has {coordinator.run.model.nbytes}"
            self._reject(device, message.task, ProtocolError(Code.WRONG_LENGTH, text))
            return
        if self.upload is not None:
            if self.upload.report == message:  # said twice: once is enough
                return
            self.stop_upload()
        self.upload = coordinator.uploads.offer(device, message)
        coordinator.engine.wait(device, self.seen)
        coordinator.grant()

    def _chunk(self, message: bytes) -> None:
        chunk = unpack_chunk(message)
        upload = self.upload
        if upload is None or self.device is None or not upload.transfer or chunk.transfer != upload.transfer:
            if chunk.transfer in self._past_transfers:
                return
            raise ProtocolError(Code.OUT_OF_TURN, f"a chunk of transfer {chunk.transfer} came, which was not granted")
        try:
            upload.take(chunk, self.coordinator.store)
        except ProtocolError as error:
            self._bad_chunk(self.device, upload, error)
            return
        upload.moved = self.seen
        self.coordinator.engine.progress(self.device, upload.report.task, "upload", upload.offset, self.seen)
        self.coordinator.run.bytes_up += len(message)

    def _bad_chunk(self, device: str, upload: Upload, error: ProtocolError) -> None:
        task = upload.report.task
        if error.code is not Code.WRONG_OFFSET:
            self._spoiled(device, task, error)
            return
        self._refuse(error, task)  # and go on from where it is right
        self._past_transfers.append(upload.transfer)
        self.coordinator.uploads.renew(upload, self.seen)
        self.send(Grant(task, upload.transfer, upload.offset))

    def _uploaded(self, device: str, message: Uploaded) -> None:
        upload, engine = self.upload, self.coordinator.engine
        if upload is None or upload.report.task != message.task or not upload.transfer:
            if engine.accepted.get(message.task) == device:
                self.send(Accepted(message.task))
            elif not self._past_transfers:
                raise ProtocolError(Code.OUT_OF_TURN, f"no upload of task {message.task} was granted")
            return
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
        self.coordinator.uploads.keep(upload)
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
            if self.upload.transfer:
                self._past_transfers.append(self.upload.transfer)
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

"""The coordinator's side of the conversation with one connection, without I/O. PROTOCOL.md says
what is answered.

A ``Conversation`` opens no socket and no file, starts no task and reads no clock. Its owner
(network/driver.py, or a test) tells it what happened and carries out each effect as it comes; times
are seconds on the engine's clock. What concerns the training goes to the run that admitted the
device, through its port.

A message that is refused changes nothing: the connection, the task and the round go on as if it had
not come.

What a device says may have to be asked of the run (pending.py). Until the answer is here the
device's further messages wait. What the run tells the device meanwhile is said at once, as the run
decided it before it answered.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from fleetlearn_protocol.encodings import FLOAT32, find_encoding
from fleetlearn_protocol.errors import Code, FleetError, ProtocolError
from fleetlearn_protocol.frames import unpack_chunk
from fleetlearn_protocol.messages import (
    MAX_SELECTED_BYTES,
    UPDATE,
    Accepted,
    Cancel,
    CheckIn,
    ComeBack,
    ContentSelection,
    Failed,
    Fetch,
    FromCoordinator,
    Grant,
    Heartbeat,
    Question,
    Refused,
    Reply,
    Report,
    Task,
    TaskFinished,
    TaskWeighing,
    Uploaded,
    Waiting,
    decode_from_device,
)
from fleetlearn_protocol.sparse_rows import check_selection, elements_in, selected_bytes
from fleetlearn_protocol.versions import agreed_version

from fleetlearn_coordinator.conversation.conversation_state import ConversationState
from fleetlearn_coordinator.conversation.effects import (
    Allow,
    CheckedIn,
    LogNote,
    SendMessage,
    StartDownload,
)
from fleetlearn_coordinator.conversation.limits import (
    CHECK_IN_TIMEOUT,
    MESSAGES_OF_A_TASK,
    PATIENCE,
    RACES_OF_A_TASK,
)
from fleetlearn_coordinator.conversation.pending import Asking, Pending, ask
from fleetlearn_coordinator.conversation.port import Admitted
from fleetlearn_coordinator.conversation.uploads import Upload
from fleetlearn_coordinator.rounds.commands import FAILED, PRIVACY_LIMIT, REJECTED
from fleetlearn_coordinator.rounds.participation_limits import PrivacyLimitError

T = TypeVar("T")

UPLOAD_TIMEOUT = 30.0
"""Seconds without a byte after which a granted upload's connection is ended."""
WRONG_REPORTS = frozenset([Code.WRONG_PARTS, Code.WRONG_LENGTH, Code.BAD_MESSAGE])
"""Refusals of a report that end its task."""


class Conversation(ConversationState):
    """What is said on one connection, and what is under way on it."""

    __slots__ = ()

    # Events of the connection

    def told_where(self) -> None:
        """The device was told where else the content is, and fetches it there: nothing of it is
        under way here, and it does not matter here whether it is served any more."""
        self.elsewhere, self.fetching = self.fetching, None

    def fetched(self) -> None:
        """The content was sent, or cannot be."""
        self.fetching = None

    def flooded(self) -> None:
        """The peer has been waiting for its budget of messages or bytes for too long."""
        text = (
            f"more messages or bytes than allowed, for more than {PATIENCE:.0f} s; PROTOCOL.md "
            "states the rates"
        )
        self._refuse(ProtocolError(Code.BUSY, text))
        self._end("too many messages")

    def disconnected(self, now: float) -> None:
        """The connection is gone."""
        device = self.device
        self._leave()
        self.over = self._gone = True
        if device is not None:
            self.port.leave(device, now)
            self._uploads.grant(now)

    def overdue(self, now: float, silence: float) -> str | None:
        """Return why the connection should be ended, or None: the peer has not checked in, is
        silent for longer than ``silence`` seconds, or does not go on with a granted upload."""
        if self._asks is not None:
            return None  # it is the run's turn, and nothing is read from the device
        if self._new and now - self._since > CHECK_IN_TIMEOUT:
            return f"not checked in within {CHECK_IN_TIMEOUT:.0f} s"
        if now - self.seen > silence:
            return f"silent for {silence:.0f} s"
        upload = self.upload
        if upload is None or self._uploads.places.waits(upload):
            return None
        if upload.stalled(now) > UPLOAD_TIMEOUT:
            return f"sent nothing of its upload for {UPLOAD_TIMEOUT:.0f} s"
        return None

    # Events of the coordinator

    def tell(self, message: FromCoordinator) -> None:
        """The coordinator has something to say to the device. The caller grants the places that
        come free."""
        match message:
            case Task() | Question():  # first, so that a device may do at once what its task needs
                deltas = (
                    vector.delta.size for vector in message.vectors if vector.delta is not None
                )
                download = sum(vector.size for vector in message.vectors) + sum(deltas)
                parts = message.parts if isinstance(message, Task) else {UPDATE: FLOAT32.name}
                upload = sum(self._most_bytes(message.task, *part) for part in parts.items())
                self._races = max(0, self._races - RACES_OF_A_TASK)
                self._owner.perform(Allow(MESSAGES_OF_A_TASK, download, 2 * upload))
            case Cancel():
                self._stop_upload()
        self._owner.perform(SendMessage(message))
        if isinstance(message, ComeBack) and message.reason == "no-task":
            self._close(1000, "come back later")

    def _most_bytes(self, task: str, part: str, encoding: str) -> int:
        """Return how many bytes a part of a report may have."""
        return find_encoding(encoding).most_bytes(self.port.elements_of(task, part))

    def replaced(self) -> None:
        """The device has connected again."""
        self._owner.perform(
            SendMessage(Refused(Code.REPLACED, f"device {self.device} has connected again"))
        )
        self._leave()
        self._close(1008, "replaced")

    def withdrawn(
        self, sha256: str, text: str = "the model that was fetched is of an old round"
    ) -> None:
        """This content is no longer served."""
        if self.fetching == sha256:  # not a fault of the device: it is not counted
            self._stop_download()
            self._owner.perform(SendMessage(Refused(Code.UNKNOWN_CONTENT, text, None, sha256)))

    # Events of the upload: when they come depends on the uploads of other conversations

    def granted(self, upload: Upload, now: float) -> None:
        """The upload has a place: it may begin, or go on."""
        self.port.proceed(upload.device, now)
        self._send_grant(upload)

    def must_wait(self, upload: Upload) -> None:
        """The upload lost its place."""
        self._owner.perform(SendMessage(Waiting(task=upload.report.task)))

    def arriving(self) -> int:
        """Return how many bytes are here of a chunk that is not complete."""
        return self._owner.arriving()

    # Messages

    def _handle(self, message: str | bytes) -> Asking[None] | None:
        """Handle a message. Returns what goes on with it where the run is asked something."""
        if isinstance(message, bytes):
            self._chunk(message)
            return None
        decoded = decode_from_device(message)
        if isinstance(decoded, CheckIn):
            return self._check_in(decoded)
        if self.device is None:
            raise ProtocolError(Code.OUT_OF_TURN, "the first message of a connection is check-in")
        return HANDLERS[type(decoded)](self, self.device, decoded)

    def _check_in(self, message: CheckIn) -> Asking[None]:
        if self.device is not None:
            raise ProtocolError(
                Code.DUPLICATE, f"this connection checked in as {self.device} already"
            )
        try:
            agreed_version(message)
        except ProtocolError as error:
            if error.code is not Code.BAD_VERSION:
                raise
            note = f"{message.device} was refused: {error.text}"
            self._owner.perform(LogNote(note, warning=True, seldom=True))
            self._owner.perform(SendMessage(Refused(error.code, error.text)))
            self._close(1008, "protocol version")
            return
        message = self._owner.confirm(message)
        asking: Asking[Admitted | ComeBack] = ask(self._owner.admit(message))
        admitted = yield from asking
        if isinstance(admitted, ComeBack):
            self._owner.perform(SendMessage(admitted))
            self._close(1000, "come back later")
            return
        self.device, self._new, self.port = message.device, False, admitted.port
        self._owner.perform(SendMessage(admitted.welcome))
        self._owner.perform(CheckedIn(message.device, admitted.download, admitted.upload))
        self.port.join(message, self.seen)
        self._uploads.grant(self.seen)  # the place of an upload that the earlier connection left

    def _heartbeat(self, device: str, message: Heartbeat) -> None:
        self.port.steps_done(device, message.task, message.steps, self.seen)
        if message.fetched and self.elsewhere is not None:
            self.port.sent(device, self.elsewhere, message.fetched, 0, self.seen)

    def _reply(self, device: str, message: Reply) -> Asking[None]:
        try:
            saved = self.port.save_answer(device, message)
            counts = (yield from self._to_its_end(saved)) if isinstance(saved, Pending) else saved
        except ProtocolError as error:
            if error.code is Code.BAD_MESSAGE:  # the device would say the same again
                self._reject(device, message.task, error)
            else:
                self._refuse(error, message.task)
            return
        self._say(Accepted(message.task))
        if counts:
            self.port.count_answer(device, message.task, self.seen)

    def _failed(self, device: str, message: Failed) -> None:
        if self.upload is not None and self.upload.report.task == message.task:
            self._stop_upload()
        text = self.port.shown(message.task, message.text)
        self._owner.perform(
            LogNote(f"failed task {message.task}: {message.code} {text!r}", warning=True)
        )
        self._end_task(device, message.task, f"{FAILED}{message.code}", text)

    def _end_task(self, device: str, task: str, cause: str, text: str | None = None) -> None:
        self.port.end_task(device, task, cause, self.seen, text)
        self._uploads.grant(self.seen)

    # Downloads

    def _fetch(self, device: str, message: Fetch) -> None:
        self._stop_download()  # its task was cancelled, and the device wants something else now
        self.elsewhere = None
        selection = message.selection
        try:
            if selection is None:
                size = self.port.find(message.sha256, message.offset)
            else:
                size = self._size_of(message, selection)
        except FleetError as error:
            self._refuse(error, sha256=message.sha256)
            return
        self.fetching = message.sha256
        end = None if message.end is None else max(message.offset, min(message.end, size))
        http = message.http and selection is None
        self._owner.perform(
            StartDownload(message.sha256, message.offset, size, end, http, selection)
        )

    def _size_of(self, message: Fetch, selection: ContentSelection) -> int:
        """Return the bytes of the pieces of a content that are wanted. Raises ProtocolError
        (unknown-content, bad-message, too-large, wrong-offset)."""
        check_selection(selection, self.port.find(message.sha256, 0))
        size = selected_bytes(selection)
        if size > MAX_SELECTED_BYTES:
            raise ProtocolError(
                Code.TOO_LARGE,
                f"{size} bytes were selected of a content; at most {MAX_SELECTED_BYTES} are made "
                "for one device. Fetch the whole content",
            )
        if message.offset > size:
            text = f"offset {message.offset} is beyond the {size} bytes that are selected"
            raise ProtocolError(Code.WRONG_OFFSET, text)
        return size

    # Uploads

    def _finished(self, device: str, message: TaskFinished) -> Asking[None]:
        try:
            factor = yield from ask(self.port.weigh(device, message.task, self.seen))
        except ProtocolError as error:
            self._refuse_or_reject(device, message.task, error)
            return
        answer = Accepted(message.task) if factor is None else TaskWeighing(message.task, factor)
        self._owner.perform(SendMessage(answer))

    def _report(self, device: str, message: Report) -> Asking[None]:
        try:
            announced = self.port.announce(device, message, self.seen)
            if isinstance(announced, Pending):
                announced = yield from self._to_its_end(announced)
        except ProtocolError as error:
            self._refuse_or_reject(device, message.task, error)
            return
        if not announced.wanted:
            self._say(Accepted(message.task))
            return
        begun = announced.begun
        if self.over:  # the connection was lost meanwhile
            if begun is not None:
                self.port.keep_upload(device, begun)
            return
        if self.upload is None or self.upload.report != message:
            self._stop_upload()
            elements_of = elements_in(message, partial(self.port.elements_of, message.task))
            self.upload = self._uploads.offer(
                device, message, self.port.spool, elements_of, self, begun
            )
        elif self.upload not in self._uploads.places:
            # it was asked to wait, and nothing is on its way now
            self._uploads.queue(self.upload)
        else:
            return
        self.port.wait(device, self.seen)
        self._uploads.grant(self.seen)

    def _send_grant(self, upload: Upload) -> None:
        self._transfers.append(upload.transfer)
        self._owner.perform(SendMessage(Grant(upload.report.task, upload.transfer, upload.offset)))

    def _chunk(self, message: bytes) -> None:
        chunk = unpack_chunk(message)
        upload = self.upload
        if (
            upload is None
            or self.device is None
            or not upload.transfer
            or chunk.transfer != upload.transfer
        ):
            if chunk.transfer in self._transfers:
                return
            raise ProtocolError(
                Code.OUT_OF_TURN,
                f"a chunk of transfer {chunk.transfer} came, which was not granted",
            )
        try:
            upload.receive(chunk)
        except ProtocolError as error:
            self._bad_chunk(self.device, upload, error)
            return
        task, end = upload.report.task, upload.offset
        self.port.received(self.device, task, end, len(message), self.seen)
        if upload.needs_checkpoint(self.seen):
            upload.write_checkpoint(self.seen)

    def _bad_chunk(self, device: str, upload: Upload, error: ProtocolError) -> None:
        task = upload.report.task
        if error.code is not Code.WRONG_OFFSET:
            self._spoiled(device, task, error)
            return
        if upload not in self._uploads.places.held:
            return  # the upload lost its place: its next grant says where to go on
        self._refuse(error, task)  # the grant below says where to go on
        self._uploads.renew(upload)
        upload.restarted = True
        self._send_grant(upload)

    def _uploaded(self, device: str, message: Uploaded) -> Asking[None]:
        upload = self.upload
        if upload is None or upload.report.task != message.task or not upload.transfer:
            if (yield from ask(self.port.has_counted(device, message.task))):
                self._owner.perform(SendMessage(Accepted(message.task)))
            elif not self._transfers:
                raise ProtocolError(
                    Code.OUT_OF_TURN, f"no upload of task {message.task} was granted"
                )
            return
        held = upload in self._uploads.places.held
        if upload.offset < upload.report.size and (upload.restarted or not held):
            return  # the message belongs to a grant that is over
        try:
            upload.check_complete()
        except ProtocolError as error:
            self._spoiled(device, message.task, error)
            return
        yield from self._save_update(device, upload)

    def _save_update(self, device: str, upload: Upload) -> Asking[None]:
        """Have the run make the complete update durable, and count it. The upload is over, whatever
        becomes of the connection: its spool file is the run's, unless the update is refused."""
        assert upload.spool_file is not None
        report, task = upload.report, upload.report.task
        self._uploads.finish(upload, self.seen)
        self.upload = None
        try:
            saved = self.port.save_update(device, report, upload.spool_file, upload.largest)
            if isinstance(saved, Pending):
                self._uploads.grant(self.seen)  # its place is free
                yield from self._to_its_end(saved)
        except ProtocolError as error:
            self._uploads.drop(upload)
            self._reject(device, task, error)
            return
        self._uploads.complete(upload)
        self._say(Accepted(task))
        self.port.count_report(device, task, self.seen)
        self._uploads.grant(self.seen)

    def _to_its_end(self, answer: Pending[T]) -> Asking[T]:
        """``ask`` what is carried to its end, also where the connection is lost meanwhile."""
        self._must_end = True
        try:
            asking: Asking[T] = ask(answer)
            return (yield from asking)
        finally:
            self._must_end = False

    def _spoiled(self, device: str, task: str, error: ProtocolError) -> None:
        """Refuse an upload. If its bytes arrived wrong, the device may send them once more; any
        other fault ends the task."""
        self._stop_upload()
        if error.code in (Code.WRONG_HASH, Code.WRONG_LENGTH) and self._uploads.first_spoiled(
            task, self.port.spool
        ):
            self._refuse(error, task)
            self._uploads.grant(self.seen)
        else:
            self._reject(device, task, error)

    def _refuse_or_reject(self, device: str, task: str, error: ProtocolError) -> None:
        """Refuse what a device says of a task that it has done, and end the task where the device
        would say the same again."""
        if isinstance(error, PrivacyLimitError) or error.code in WRONG_REPORTS:
            self._stop_upload()
            self._reject(device, task, error)
        else:
            self._refuse(error, task)

    def _reject(self, device: str, task: str, error: ProtocolError) -> None:
        self._refuse(error, task, ends_task=True)
        is_limit = isinstance(error, PrivacyLimitError)
        self._end_task(device, task, PRIVACY_LIMIT if is_limit else f"{REJECTED}{error.code.value}")


HANDLERS: dict[type, Callable[[Conversation, str, Any], Asking[None] | None]] = {
    Heartbeat: Conversation._heartbeat,
    Fetch: Conversation._fetch,
    TaskFinished: Conversation._finished,
    Report: Conversation._report,
    Uploaded: Conversation._uploaded,
    Reply: Conversation._reply,
    Failed: Conversation._failed,
}
"""What a device may say once it has checked in; each takes the conversation, the device and the
message. One that asks the run something is a generator."""

"""The state of a conversation, and how it goes on: message after message, up to a question that the
run answers later; which messages are refused, and how many; and how it ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from functools import partial

from fleetlearn_protocol.errors import Code, FleetError, ProtocolError
from fleetlearn_protocol.messages import MAX_REFUSALS, FromCoordinator, Refused

from fleetlearn_coordinator.conversation.effects import (
    CloseConnection,
    Effect,
    End,
    HandOnMessages,
    HoldMessages,
    LogNote,
    Owner,
    SendMessage,
    StopDownload,
)
from fleetlearn_coordinator.conversation.limits import REFUSAL_FORGOTTEN
from fleetlearn_coordinator.conversation.pending import Asking
from fleetlearn_coordinator.conversation.port import Port
from fleetlearn_coordinator.conversation.uploads import Upload, Uploads

LOST_RACES = frozenset([Code.STALE_ROUND, Code.NOT_WANTED, Code.UNKNOWN_TASK, Code.UNKNOWN_CONTENT])
"""Refusals that are no fault of a device: the round or the task that its message is about ended a
moment before, or the coordinator was started again meanwhile."""

TELL_OF_DATA = frozenset(
    [Code.BAD_MESSAGE, Code.BAD_ENCODING, Code.NOT_FINITE, Code.OUT_OF_RANGE, Code.NORM_TOO_LARGE]
)
"""Refusals whose text may say what a report has in it. ``Port.shown`` decides who reads it; the
device does."""


class ConversationState(ABC):
    """What a connection's conversation holds. ``Conversation`` says what each message leads to."""

    __slots__ = (
        "_asks",
        "_gone",
        "_later",
        "_must_end",
        "_new",
        "_owner",
        "_races",
        "_refusals",
        "_refused_at",
        "_since",
        "_transfers",
        "_uploads",
        "device",
        "elsewhere",
        "fetching",
        "over",
        "port",
        "seen",
        "upload",
    )

    def __init__(self, uploads: Uploads, owner: Owner, since: float) -> None:
        """``uploads``: of all conversations. ``since``: when the peer connected."""
        self._uploads, self._owner, self._since = uploads, owner, since
        self.port: Port
        """The port of the run that admitted the device. Not set before the check-in."""
        self.device: str | None = None
        """The device at the other end; None before the check-in, and after another connection took
        over."""
        self.seen = since
        """When the device last said something, or took a chunk in."""
        self.upload: Upload | None = None
        self.fetching: str | None = None
        """The SHA-256 of the content that is being sent."""
        self.elsewhere: str | None = None
        """The SHA-256 of the content that the device was told to fetch by HTTP last."""
        self.over = False
        """The connection is being closed. Messages that still arrive are not handled."""
        self._transfers: deque[int] = deque(maxlen=MAX_REFUSALS)
        """Transfer numbers of the last grants. Chunks of a grant that is over may still arrive."""
        self._refusals = 0
        """Refused messages that are the device's fault and not forgotten yet."""
        self._refused_at = since
        """Up to when refused messages were forgotten."""
        self._races = 0
        """Other refused messages, without RACES_OF_A_TASK for each task that was given."""
        self._new = True
        """The peer has not checked in yet."""
        self._asks: Asking[None] | None = None
        """The handler that waits for an answer of the run."""
        self._must_end = False
        """The answer matters also where the connection is lost meanwhile: the run makes something
        durable, or hands out a spool file."""
        self._later: deque[str | bytes] = deque()
        """What the device said since the run was asked: the rest of one read at most."""
        self._gone = False
        """The connection is gone: its owner carries nothing out any more."""

    @property
    def asks(self) -> bool:
        """Whether messages wait for an answer of the run. Hand on no more of them: the owner is
        told ``HandOnMessages`` when the answer was handled."""
        return self._asks is not None

    def received(self, message: str | bytes, now: float) -> None:
        """A message arrived: a text frame, or a binary one."""
        self.seen = now
        if self.over:
            return
        if self._asks is not None:
            self._later.append(message)
        else:
            self._hear(message)

    def _hear(self, message: str | bytes) -> None:
        try:
            handler = self._handle(message)
        except ProtocolError as error:
            self._refuse(error)
            return
        if handler is not None:
            self._go_on(handler)
            if self._asks is not None:
                self._do(HoldMessages())

    def _go_on(self, handler: Asking[None]) -> None:
        """Let the handler of a message go on to its end, or up to a question that the run answers
        later."""
        try:
            pending = next(handler, None)
        except ProtocolError as error:
            self._refuse(error)
            return
        if pending is not None:
            self._asks = handler
            pending.then(partial(self._answered, handler))

    def _answered(self, handler: Asking[None], now: float) -> None:
        if self._asks is not handler:  # the connection was lost, and the question with it
            return
        self._asks = None
        self.seen = now  # until now it was the run's turn: the device was not silent
        self._go_on(handler)
        while self._later and self._asks is None and not self.over:
            self._hear(self._later.popleft())
        if self._asks is None:
            self._later.clear()
            self._do(HandOnMessages())

    def _do(self, effect: Effect) -> None:
        """Have the owner carry this out, if the connection is still there."""
        if not self._gone:
            self._owner.perform(effect)

    def _say(self, message: FromCoordinator) -> None:
        """Send a message to the device, unless it has another connection, or none."""
        if not self.over:
            self._owner.perform(SendMessage(message))

    @abstractmethod
    def _handle(self, message: str | bytes) -> Asking[None] | None:
        """Handle a message. Returns what goes on with it where the run is asked something. Raises
        ProtocolError."""

    # The end

    def _leave(self) -> None:
        """Part from the device. The run keeps what it uploaded so far for its next connection."""
        self._stop_download()
        if self.upload is not None:
            begun = self._uploads.part(self.upload, self.seen)
            if begun is not None:
                self.port.keep_upload(begun.device, begun)
            self.upload = None
        self._ask_no_more()
        self.device = None

    def _ask_no_more(self) -> None:
        """Drop what the device said and the run has not answered, except what must come to its
        end."""
        self._later.clear()
        if self._asks is not None:
            self._do(HandOnMessages())  # such as the answer to the close, which ends the connection
            if not self._must_end:
                self._asks = None

    def _close(self, code: int, reason: str) -> None:
        self.over = True
        self._ask_no_more()
        self._owner.perform(CloseConnection(code, reason))

    def _end(self, reason: str) -> None:
        self.over = True
        self._ask_no_more()
        self._owner.perform(End(reason))

    def _refuse(
        self,
        error: FleetError,
        task: str | None = None,
        sha256: str | None = None,
        *,
        ends_task: bool = False,
    ) -> None:
        shown = error
        if self.device is not None and error.code in TELL_OF_DATA:
            shown = FleetError(error.code, self.port.shown(task, error.text))
        self._do(LogNote(f"refused: {shown}"))
        self._say(Refused(error.code, error.text, task, sha256))
        if self.device is not None:
            self.port.refused(self.device, shown)
        if ends_task or error.code in LOST_RACES:
            self._races += 1
        else:
            self._forget_refusals()
            self._refusals += 1
        if max(self._refusals, self._races) > MAX_REFUSALS and not self.over:
            self._end("too many refused messages")

    def _forget_refusals(self) -> None:
        forgotten = int((self.seen - self._refused_at) / REFUSAL_FORGOTTEN)
        self._refusals = max(0, self._refusals - forgotten)
        self._refused_at = (
            self._refused_at + forgotten * REFUSAL_FORGOTTEN if self._refusals else self.seen
        )

    def _stop_download(self) -> None:
        if self.fetching is not None:
            self.fetching = None
            self._owner.perform(StopDownload())

    def _stop_upload(self) -> None:
        """Drop the upload under way, if there is one. The caller grants its place to another."""
        if self.upload is not None:
            self._uploads.drop(self.upload)
            self.upload = None

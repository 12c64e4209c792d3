"""What a conversation asks of whoever owns its connection. Each effect is carried out at once,
before the next."""

from __future__ import annotations

from typing import Protocol

from fleetlearn_protocol.messages import CheckIn, ComeBack, ContentSelection, FromCoordinator
from msgspec import Struct

from fleetlearn_coordinator.conversation.pending import Pending
from fleetlearn_coordinator.conversation.port import Admitted


class SendMessage(Struct, frozen=True, gc=False):
    """Send a message to the device."""

    message: FromCoordinator


class CheckedIn(Struct, frozen=True, gc=False):
    """The connection speaks for this device from now on. An earlier connection of the device is
    told ``replaced``. The device goes on with the budgets that it left; once a minute they are
    raised to those of a new device."""

    device: str
    download: int
    """Bytes that a new device may have to fetch for its first task."""
    upload: int
    """Bytes that a new device may have to send for its first task."""


class Allow(Struct, frozen=True, gc=False):
    """Raise the peer's budgets to at least these."""

    messages: int
    download: int
    """Bytes that the device may have to fetch now."""
    upload: int
    """Bytes that the device may have to send now."""


class StartDownload(Struct, frozen=True, gc=False):
    """Send a content, from ``offset`` on, when it is its turn; answer with ``fetched``."""

    sha256: str
    offset: int
    size: int
    """Bytes of the whole content."""
    end: int | None = None
    """Where to end; None: at the content's end."""
    http: bool = False
    """The device can fetch by HTTP: it may be told a URL in place of the bytes."""
    selection: ContentSelection | None = None
    """The pieces that are wanted, which ``offset``, ``size`` and ``end`` are about; None: all."""


class StopDownload(Struct, frozen=True, gc=False):
    """Send no more of the content."""


class HoldMessages(Struct, frozen=True, gc=False):
    """Hand on no message of the device until ``HandOnMessages``: the run is asked what the last one
    means. What was read already may still come. Harmless where they are held."""


class HandOnMessages(Struct, frozen=True, gc=False):
    """Hand on the device's messages again, after this. Harmless where they are not held."""


class CloseConnection(Struct, frozen=True, gc=False):
    """Close in an orderly way: what was sent before goes out first. Messages that still arrive are
    not handled."""

    code: int
    """The WebSocket's closing code."""
    reason: str


class End(Struct, frozen=True, gc=False):
    """Close because the peer misbehaves: nothing more is read."""

    reason: str


class LogNote(Struct, frozen=True, gc=False):
    """A line for the log."""

    text: str
    warning: bool = False
    seldom: bool = False
    """Devices cause it again and again: it is worth a line once in a while."""


Effect = (
    SendMessage
    | CheckedIn
    | Allow
    | StartDownload
    | StopDownload
    | HoldMessages
    | HandOnMessages
    | CloseConnection
    | End
    | LogNote
)


class Owner(Protocol):
    """The owner of a conversation's connection."""

    def confirm(self, check_in: CheckIn) -> CheckIn:
        """Return what may be believed of a check-in. Raises ProtocolError if the device may not
        check in."""

    def admit(self, check_in: CheckIn) -> Admitted | ComeBack | Pending[Admitted | ComeBack]:
        """Find the run that the device is to serve, or send it away. Nothing is remembered yet."""

    def perform(self, effect: Effect) -> None:
        """Carry out what the conversation asks for."""

    def arriving(self) -> int:
        """Return how many bytes of an incomplete message have arrived."""

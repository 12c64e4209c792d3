"""What a conversation asks of whoever owns its connection. Each effect is carried out at once, before the next."""

from __future__ import annotations

from dataclasses import dataclass

from fleetlearn_protocol.messages import FromCoordinator


@dataclass(frozen=True, slots=True)
class Send:
    message: FromCoordinator


@dataclass(frozen=True, slots=True)
class CheckedIn:
    """The connection speaks for this device from now on. An earlier connection of the device is told ``replaced``."""

    device: str


@dataclass(frozen=True, slots=True)
class Allow:
    """Let the peer have at least so much budget."""

    messages: int
    download: int
    """Bytes that the device may have to fetch now."""
    upload: int
    """Bytes that the device may have to send now."""


@dataclass(frozen=True, slots=True)
class StartDownload:
    """Send a content, from ``offset`` on, when it is its turn; answer with ``fetched``."""

    sha256: str
    offset: int
    size: int
    """Bytes of the whole content."""


@dataclass(frozen=True, slots=True)
class StopDownload:
    """Send no more of the content."""


@dataclass(frozen=True, slots=True)
class Close:
    """Close politely (what was sent before goes out first). What still comes is not handled."""

    code: int
    """The WebSocket's closing code."""
    reason: str


@dataclass(frozen=True, slots=True)
class End:
    """Close over misbehaviour: nothing more is read."""

    reason: str


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the log."""

    text: str
    warning: bool = False


Effect = Send | CheckedIn | Allow | StartDownload | StopDownload | Close | End | Note

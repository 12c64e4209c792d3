"""Contents on their way to devices: a few at a time. places.py says whose turn it is.

A download without a place still has its write buffer (192 KiB at most), which nobody can take back. A peer that does
not read could collect such buffers by the thousand, so of the downloads that lost their place before their buffer was
read, the oldest is ended where there are more than STALLED_PER_PLACE for each place: its peer read least. The device
connects again and goes on from the bytes that it has.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from fleetlearn_coordinator.conversation.places import Places, Turn

STALLED_PER_PLACE = 8
"""Downloads with unread bytes and without a place, for each place."""


@dataclass(slots=True, eq=False)
class Download(Turn):
    """One content on its way to a device."""

    sha256: str
    transport: asyncio.WriteTransport
    sent: int = 0
    """Bytes written to the transport."""
    turn: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while it has a place."""
    task: asyncio.Task[None] | None = None
    """Sends it."""

    def progress(self) -> int:
        return self.sent - self.transport.get_write_buffer_size()


class Downloads:
    """Who may download now."""

    def __init__(self, places: Places[Download]) -> None:
        self.places = places
        self._stalled: dict[Download, None] = {}
        """Without a place, and its device has not read what was written. The one that is so for longest comes first."""

    def ask(self, download: Download, *, idle: bool) -> None:
        """Let a download wait for a place. What was written before has been read."""
        self._stalled.pop(download, None)
        self.places.ask(download, idle=idle)

    def leave(self, download: Download) -> None:
        """Nothing more is to be sent."""
        self._stalled.pop(download, None)
        self.places.leave(download)

    def go_on(self, now: float) -> None:
        """Let downloads begin or go on, as many as there is room for."""
        while (found := self.places.next(now)) is not None:
            download, loser = found
            download.turn.set()
            if loser is not None:
                loser.turn.clear()
                self._stalled[loser] = None
        if len(self._stalled) > STALLED_PER_PLACE * self.places.limit:
            oldest = next(iter(self._stalled))
            del self._stalled[oldest]
            oldest.transport.abort()

"""Contents on their way to devices: a few at a time. places.py says whose turn it is.

A download that loses its place keeps its write buffer (192 KiB at most) until its peer has read it.
Peers that do not read could fill memory with such buffers. So there may be at most
STALLED_PER_PLACE such downloads for each place; beyond that, the connection of the oldest is cut
off. Its device connects again and goes on from the bytes that it has.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from fleetlearn_coordinator.conversation.places import Places, Turn
from fleetlearn_coordinator.network.transfers.contents import SelectedContent

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
    """Set while the download has a place."""
    pieces: SelectedContent | None = None
    """What is sent, where the device wants pieces of the content alone."""
    task: asyncio.Task[None] | None = None
    """The asyncio task that sends the content."""

    def progress(self) -> int:
        return self.sent - self.transport.get_write_buffer_size()


class Downloads:
    """The downloads of all devices: who may download now."""

    def __init__(self, places: Places[Download]) -> None:
        self.places = places
        self._stalled: dict[Download, None] = {}
        """Downloads that lost their places before their devices had read what was written. The
        oldest comes first."""

    def ask(self, download: Download, *, idle: bool) -> None:
        """Let a download wait for a place. Its device has read what was written before."""
        self._stalled.pop(download, None)
        self.places.ask(download, idle=idle)

    def leave(self, download: Download) -> None:
        """Nothing more is to be sent."""
        self._stalled.pop(download, None)
        self.places.leave(download)

    def go_on(self, now: float) -> None:
        """Let as many downloads begin or go on as there are places for."""
        while (found := self.places.next(now)) is not None:
            download, loser = found
            download.turn.set()
            if loser is not None:
                loser.turn.clear()
                if loser.pieces is not None:
                    loser.pieces.drop()
                self._stalled[loser] = None
        if len(self._stalled) > STALLED_PER_PLACE * self.places.limit:
            oldest = next(iter(self._stalled))
            del self._stalled[oldest]
            oldest.transport.abort()

"""Whose turn it is to download, without a network."""

from __future__ import annotations

import asyncio

from fleetlearn_coordinator.conversation.places import WINDOW, Places, Proven
from fleetlearn_coordinator.network.transfers.downloads import (
    STALLED_PER_PLACE,
    Download,
    Downloads,
)

RATE = 1000.0


class Reader(asyncio.WriteTransport):
    """A transport whose other side read some of what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.unread, self.aborted = 0, False

    def get_write_buffer_size(self) -> int:
        return self.unread

    def abort(self) -> None:
        self.aborted = True


def test_downloads_without_a_place_that_nobody_reads_are_bounded() -> None:
    downloads = Downloads(Places(1, RATE, Proven(1)))
    readers = [
        Download(f"d{number}", "0" * 64, Reader()) for number in range(3 + STALLED_PER_PLACE)
    ]
    for number, download in enumerate(readers):
        downloads.ask(download, idle=False)
        downloads.go_on(number)
        download.sent += 200_000
        download.transport.unread = 200_000  # type: ignore[attr-defined]
        assert download.turn.is_set()
        downloads.places.measure(number + WINDOW)
        # this one reads, if slowly, and waits for its turn again: nothing is held for it
        if number == 3:
            readers[0].transport.unread = 0  # type: ignore[attr-defined]
            downloads.ask(readers[0], idle=True)
    aborted = [download.device for download in readers if download.transport.aborted]  # type: ignore[attr-defined]
    assert aborted == ["d1"]

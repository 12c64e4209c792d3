"""Pages of devices that fit a search, of a hundred thousand.

What a search looks at is read for all devices, and kept for a moment. The rest is read for the
devices of one page.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from math import inf
from pathlib import Path
from typing import NamedTuple

import msgspec

from fleetlearn_coordinator.service.views.device_views import device_views
from fleetlearn_coordinator.service.views.records import DevicePage
from fleetlearn_coordinator.service.views.run_views import is_running
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.identities import Identities

FRESH = 1.0
"""Seconds for which what was read does for all who search."""
MOST_OF_TIME = 5
"""It does for this many times the seconds that reading took, too."""


class Searched(NamedTuple):
    """What a search looks at of a device."""

    connected: bool
    error: bool
    """Whether a task of it has failed."""
    revoked: bool
    words: str
    """Tags, tier and runtime, in lower case."""


UNSEEN = Searched(False, False, False, "")
FITS: dict[str, Callable[[Searched], bool]] = {
    "": lambda device: True,
    "connected": lambda device: device.connected,
    "away": lambda device: not device.connected and not device.revoked,
    "error": lambda device: device.error,
    "revoked": lambda device: device.revoked,
}
"""What a search may ask of a device's state -> whether a device is so."""
Places = Iterable[tuple[str, Path]]
"""The names of runs, and where their data are."""


class DeviceSearch:
    """Searches the devices. Safe to call from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._devices: dict[str, Searched] = {}
        self._until = -inf

    def page(
        self,
        places: Places,
        identities: Identities | None,
        *,
        search: str,
        state: str,
        offset: int,
        most: int,
    ) -> DevicePage:
        """Return the devices that fit, by name, from number ``offset`` on. Raises StoreError.

        ``search``: is in the name, a tag, the tier or the runtime; upper case counts as lower case.
        ``state``: of FITS. ``most``: a thousand at most.
        """
        places = list(places)
        devices, wanted, fits = self._look(places, identities), search.lower(), FITS[state]
        names = [
            name
            for name, device in devices.items()
            if fits(device) and (wanted in name.lower() or wanted in device.words)
        ]
        shown = names[offset : offset + most]
        return DevicePage(
            len(devices),
            sum(device.connected for device in devices.values()),
            len(names),
            device_views(places, identities, shown) if shown else [],
        )

    def _look(self, places: Places, identities: Identities | None) -> dict[str, Searched]:
        with self._lock:
            began = self._clock()
            if began >= self._until:
                self._devices = read_searched(places, identities)
                now = self._clock()
                self._until = now + FRESH + MOST_OF_TIME * (now - began)
            return self._devices


def read_searched(places: Places, identities: Identities | None) -> dict[str, Searched]:
    """Return what a search looks at of each device, by name. Raises StoreError."""
    found: dict[str, Searched] = {}
    for _, data in places:
        for device, row in _searched_of(data):
            before = found.get(device)
            if before is not None:
                row = Searched(
                    before.connected or row.connected,
                    before.error or row.error,
                    False,
                    f"{before.words}\n{row.words}",
                )
            found[device] = row
    if identities is not None:
        enrolled = identities.device_tags()
        for device, tags in enrolled.items():
            row = found.get(device, UNSEEN)
            found[device] = row._replace(words=f"{row.words}\n{tags.lower()}") if tags else row
        for device in identities.revoked().keys() - enrolled.keys():
            found[device] = found.get(device, UNSEEN)._replace(revoked=True)
    return dict(sorted(found.items()))


def _searched_of(data: Path) -> list[tuple[str, Searched]]:
    storage = find_storage(data)
    try:
        with storage.read_ledger() as ledger:
            meta, rows = ledger.metadata(), ledger.searched_devices()
    except StoreError as error:
        if error.code == "unknown-content":
            return []
        raise
    # A coordinator that was killed could not write that its devices are gone.
    running = is_running(storage, meta)
    began = msgspec.json.decode(meta.get("live") or "{}").get("began", 0.0)
    return [
        (
            device,
            Searched(
                running and connected is not None and connected >= began, bool(error), False, words
            ),
        )
        for device, connected, error, words in rows
    ]

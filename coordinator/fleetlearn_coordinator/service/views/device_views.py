"""What is known of devices: by the runs that saw them, and by the identities."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from fleetlearn_protocol.errors import Code, FleetError

from fleetlearn_coordinator.service.views.records import (
    DeviceDetail,
    DevicePage,
    DeviceTask,
    DeviceView,
)
from fleetlearn_coordinator.service.views.run_views import is_running
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.identities import Identities
from fleetlearn_coordinator.storage.ledger import DeviceActivity

FRESH = 1.0
"""Seconds for which the devices that were read do for all who ask."""


class _Seen(NamedTuple):
    """A device's activity in one run."""

    run: str
    row: DeviceActivity
    since: float | None
    """Since when it has been connected there; None: it is not."""


def device_views(
    places: Iterable[tuple[str, Path]], identities: Identities | None
) -> list[DeviceView]:
    """Return the devices that are enrolled, were revoked or were seen, by name. ``places``: the
    names of runs and where their data are; a run that has not begun has seen none. Raises
    StoreError."""
    seen: dict[str, list[_Seen]] = {}
    for name, data in places:
        for each in _seen_by(name, data):
            seen.setdefault(each.row.device, []).append(each)
    known = {} if identities is None else {each.device: each for each in identities.devices()}
    revoked = {} if identities is None else identities.revoked()
    found = []
    for device in sorted({*seen, *known, *revoked}):
        own = known.get(device)
        fields = _together(seen.get(device, []))
        if own is not None:
            fields["tags"] = list(dict.fromkeys((*own.tags, *fields.get("tags", ()))))
            fields["enrolled"] = own.enrolled
        else:
            fields["revoked"] = revoked.get(device)
        found.append(DeviceView(device=device, **fields))
    return found


def device_detail(
    device: str, places: Iterable[tuple[str, Path]], identities: Identities | None, most: int
) -> DeviceDetail:
    """Return a device with its last tasks, at most this many of each run. ``places``: as for
    ``device_views``. Raises FleetError where there is no such device, StoreError."""
    places = list(places)
    found = next((row for row in device_views(places, identities) if row.device == device), None)
    if found is None:
        text = f"no device called {device} is enrolled, or was seen"
        raise FleetError(Code.UNKNOWN_CONTENT, text)
    tasks = []
    for name, data in places:
        if name in found.runs:
            with find_storage(data).read_ledger() as ledger:
                tasks += [DeviceTask(name, *row) for row in ledger.tasks_of(device, most)]
    return DeviceDetail(**msgspec.structs.asdict(found), tasks=tasks)


def _seen_by(name: str, data: Path) -> list[_Seen]:
    storage = find_storage(data)
    try:
        with storage.read_ledger() as ledger:
            meta, rows = ledger.metadata(), ledger.device_activity()
    except StoreError as error:
        if error.code == "unknown-content":
            return []
        raise
    # A coordinator that was killed could not write that its devices are gone.
    running = is_running(storage, meta)
    began = msgspec.json.decode(meta.get("live") or "{}").get("began", 0.0)
    return [
        _Seen(
            name,
            row,
            row.connected
            if running and row.connected is not None and row.connected >= began
            else None,
        )
        for row in rows
    ]


def _together(seen: list[_Seen]) -> dict[str, Any]:
    """Return what several runs say of one device. The one that saw it last knows what it is."""
    if not seen:
        return {}
    rows = sorted((each.row for each in seen), key=lambda row: row.seen or 0.0)
    last = rows[-1]
    failed = max(rows, key=lambda row: row.error_at or 0.0)
    since = [each.since for each in seen if each.since is not None]
    return {
        "connected": bool(since),
        "since": min(since, default=None),
        "seen": last.seen,
        "runs": [each.run for each in seen],
        "done": sum(row.done for row in rows),
        "failed": sum(row.failed for row in rows),
        "lost": sum(row.lost for row in rows),
        "error": failed.error,
        "error_at": failed.error_at,
        "tags": list(last.tags or ()),
        "runtime": last.runtime,
        "software": last.software,
        "tier": last.tier,
    }


class RecentDevices:
    """All devices, as they were a moment ago: who turns pages, or types, reads them once. Safe to
    call from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._devices: list[DeviceView] = []
        self._until = -inf

    def look(self, read: Callable[[], list[DeviceView]]) -> list[DeviceView]:
        """Return the devices. ``read`` is called where they were read too long ago; the longer it
        takes, the longer what it returns is good."""
        with self._lock:
            began = self._clock()
            if began >= self._until:
                self._devices = read()
                now = self._clock()
                self._until = now + FRESH + 5 * (now - began)
            return self._devices


FITS: dict[str, Callable[[DeviceView], bool]] = {
    "": lambda device: True,
    "connected": lambda device: device.connected,
    "away": lambda device: not device.connected and device.revoked is None,
    "error": lambda device: device.error is not None,
    "revoked": lambda device: device.revoked is not None,
}
"""What a search may ask of a device's state -> whether a device is so."""


def device_page(
    devices: Sequence[DeviceView], search: str, state: str, offset: int, most: int
) -> DevicePage:
    """Return the devices that fit, from number ``offset`` on. ``search``: is in the name, a tag,
    the tier or the runtime; upper case counts as lower case. ``state``: of FITS."""
    wanted, fits = search.lower(), FITS[state]
    found = [
        device for device in devices if fits(device) and (not wanted or wanted in _searched(device))
    ]
    return DevicePage(
        len(devices),
        sum(device.connected for device in devices),
        len(found),
        found[offset : offset + most],
    )


def _searched(device: DeviceView) -> str:
    words = (device.device, *device.tags, device.tier or "", device.runtime or "")
    return "\n".join(words).lower()

"""What is known of devices: by the runs that saw them, and by the identities."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from fleetlearn_protocol.errors import Code, FleetError

from fleetlearn_coordinator.service.views.records import (
    DeviceDetail,
    DeviceTask,
    DeviceView,
)
from fleetlearn_coordinator.service.views.run_views import is_running
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.identities import Identities
from fleetlearn_coordinator.storage.ledger import DeviceActivity


class _Seen(NamedTuple):
    """A device's activity in one run."""

    run: str
    row: DeviceActivity
    since: float | None
    """Since when it has been connected there; None: it is not."""


def device_views(
    places: Iterable[tuple[str, Path]],
    identities: Identities | None,
    only: Collection[str] | None = None,
) -> list[DeviceView]:
    """Return the devices that are enrolled, were revoked or were seen, by name. ``places``: the
    names of runs and where their data are; a run that has not begun has seen none. ``only``: of
    these names, a thousand at most; None: all. Raises StoreError."""
    seen: dict[str, list[_Seen]] = {}
    for name, data in places:
        for each in _seen_by(name, data, only):
            seen.setdefault(each.row.device, []).append(each)
    known, revoked = {}, {}
    if identities is not None:
        known = {each.device: each for each in identities.devices(only)}
        revoked = identities.revoked()
        if only is not None:
            revoked = {device: revoked[device] for device in only if device in revoked}
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
    rows = device_views(places, identities, [device])
    if not rows:
        text = f"no device called {device} is enrolled, or was seen"
        raise FleetError(Code.UNKNOWN_CONTENT, text)
    (found,) = rows
    tasks = []
    for name, data in places:
        if name in found.runs:
            with find_storage(data).read_ledger() as ledger:
                tasks += [DeviceTask(name, *row) for row in ledger.tasks_of(device, most)]
    return DeviceDetail(**msgspec.structs.asdict(found), tasks=tasks)


def _seen_by(name: str, data: Path, only: Collection[str] | None) -> list[_Seen]:
    storage = find_storage(data)
    try:
        with storage.read_ledger() as ledger:
            meta, rows = ledger.metadata(), ledger.device_activity(only=only)
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

"""Devices whose last update the helper refused, in a run's ledger: what their owners are told.

A device hears that its update is accepted before the round's set is asked for, so it learns what
became of it when it checks in again.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from fleetlearn_protocol.secure.helper_messages import RefusalName

from fleetlearn_coordinator.storage.ledger import Ledger, Metadata, Row

KEY = "helper_refusals"
"""Of the metadata: device -> name of the refusal, as JSON."""
MOST = 1000
"""Devices that are kept, those that were refused last."""
GIVE_THE_LINE = "give its operator the line that `fleetlearn-device public-key` prints"
TO_DO = {
    RefusalName.UNKNOWN_DEVICE: GIVE_THE_LINE,
    RefusalName.BAD_SIGNATURE: f"it may have another key of this device: {GIVE_THE_LINE} now",
    RefusalName.NOT_OPENED: "the update was masked for another helper's key: compare the key in "
    "the device's settings (secure.helper) with what `fleetlearn-coordinator helper status` prints",
}
"""What a device's owner can do about a refusal. Of others owners are not told."""


class HelperRefusals:
    """Which devices the helper refused last time. What changes is returned as rows to write."""

    def __init__(self, ledger: Ledger) -> None:
        found = ledger.get(KEY)
        self._names = (
            {} if found is None else msgspec.json.decode(found, type=dict[str, RefusalName])
        )

    def refuse(self, devices: Iterable[str], name: RefusalName) -> list[Row]:
        """The helper left these devices' updates out."""
        if name not in TO_DO:
            return []
        for device in sorted(devices):
            self._names.pop(device, None)  # the newest are at the end
            self._names[device] = name
        for device in [*self._names][:-MOST]:
            del self._names[device]
        return [self._row()]

    def take(self, devices: Iterable[str]) -> list[Row]:
        """The helper answered a set with these devices' updates."""
        again = [device for device in devices if self._names.pop(device, None) is not None]
        return [self._row()] if again else []

    def words_for(self, device: str) -> str:
        """Return what the device's owner is told; empty where nothing is wrong."""
        name = self._names.get(device)
        if name is None:
            return ""
        return f"the helper refused this device's last update: {name.value}; {TO_DO[name]}"

    def _row(self) -> Row:
        return Metadata(KEY, msgspec.json.encode(self._names).decode())

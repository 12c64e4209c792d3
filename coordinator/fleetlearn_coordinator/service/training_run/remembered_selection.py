"""What selection remembers of devices, kept in the ledger: in the same batch as the task or the
report behind it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fleetlearn_protocol.errors import MAX_TEXT
from fleetlearn_protocol.messages import CheckIn, Report

from fleetlearn_coordinator.rounds.selection_rules import stated_in
from fleetlearn_coordinator.rounds.strategies.device_memory import DeviceRecord
from fleetlearn_coordinator.rounds.strategies.ruled_selection import RuledSelection
from fleetlearn_coordinator.storage.ledger import DeviceRemembered, Ledger, Row


class RememberedSelection:
    """The selection of a run whose plan has rules for it."""

    def __init__(self, selection: RuledSelection, ledger: Ledger) -> None:
        """Go on with what the ledger has."""
        self.selection = selection
        self._begun: dict[str, float] = {}
        """Running task -> when it was given, on the engine's clock. Tasks of an earlier process are
        not there."""
        if not selection.rules.remember:
            return
        rows = ledger.remembered_devices()
        selection.memory.recall(
            (row.device, DeviceRecord._make(row._replace(labels=tuple(row.labels))[1:]))
            for row in rows
        )
        if selection.pacer is not None:
            for version, summary in ledger.committed_rounds(2 * selection.pacer.rules.window):
                selection.committed(version, summary.get("selection", {}))

    def why_not(self, check_in: CheckIn) -> str:
        """Return why a device that states this gets no task, for its owner; empty if it may get
        one."""
        refused = self.selection.rules.eligibility.refusals(stated_in(check_in))
        return "; ".join(
            f"{stated} (the plan's selection.{key})" for key, stated in refused.items()
        )[:MAX_TEXT]

    def given(self, device: str, task: str, now: float) -> list[Row]:
        """The device was given this task."""
        if self.selection.rules.times_tasks:
            self._begun[task] = now
        return self._rows(device)

    def ended(self, task: str) -> None:
        """The task ended without a report."""
        self._begun.pop(task, None)

    def reported(self, device: str, report: Report, round: int, now: float | None) -> list[Row]:
        """The device's report is about to be saved, and will count for this round. ``now``: None if
        it is not known."""
        begun = self._begun.pop(report.task, None)
        seconds = None if begun is None or now is None else now - begun
        self.selection.learn(device, round, report.loss, report.examples, seconds)
        return self._rows(device)

    def _rows(self, device: str) -> list[Row]:
        record = (
            self.selection.memory.records.get(device) if self.selection.rules.remember else None
        )
        return [] if record is None else [DeviceRemembered(device, *record)]

    def summary(self, devices: Iterable[str]) -> dict[str, Any]:
        """Return what is added to the summary of a committed round, whose reports are these
        devices'."""
        found = self.selection.utility_of(devices)
        return {"selection": found} if found else {}

"""What selection remembers of each device: its tasks and its last report that counted.

The ledger has the same rows, so a restart goes on with the same memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

REMEMBERED = 1_000_000
"""Most devices that are remembered. Those that were given a task longest ago are forgotten
first."""


class DeviceRecord(NamedTuple):
    """One device."""

    given: int
    """The round in which it was given its last task."""
    tasks: int
    """How many tasks it was given."""
    labels: tuple[str, ...] = ()
    """The labels with a quota that the device had then."""
    reported: int | None = None
    """The round for which its last report counted. None, here and below: no report counted yet."""
    loss: float | None = None
    """The mean training loss in that report."""
    examples: int | None = None
    """The examples in that report."""
    seconds: float | None = None
    """The time from the task to the report, as the coordinator saw it. None, too, if it restarted
    in between."""


@dataclass(slots=True)
class DeviceMemory:
    """Device -> its record; the one that was given its last task longest ago is the first."""

    records: dict[str, DeviceRecord] = field(default_factory=dict)

    def give(self, device: str, round: int, labels: tuple[str, ...]) -> None:
        """The device is given a task."""
        before = self.records.pop(device, None)
        if before is None:
            self.records[device] = DeviceRecord(round, 1, labels)
            if len(self.records) > REMEMBERED:
                del self.records[next(iter(self.records))]
        else:
            self.records[device] = before._replace(
                given=round, tasks=before.tasks + 1, labels=labels
            )

    def learn(
        self, device: str, round: int, loss: float, examples: int, seconds: float | None
    ) -> None:
        """A report of the device counts in this round."""
        record = self.records.get(device)
        if record is not None:  # else it was forgotten, or the rules are new to the run
            seconds = record.seconds if seconds is None else seconds
            self.records[device] = record._replace(
                reported=round, loss=loss, examples=examples, seconds=seconds
            )

    def recall(self, rows: Iterable[tuple[str, DeviceRecord]]) -> None:
        """Go on with these, the one that was given its last task longest ago first."""
        self.records = dict(rows)
        for device in [*islice(self.records, max(0, len(self.records) - REMEMBERED))]:
            del self.records[device]

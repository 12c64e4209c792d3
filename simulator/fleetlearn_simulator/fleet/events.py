"""What will happen, in the order of virtual time; and the lines of the event log that are most
frequent."""

from __future__ import annotations

import heapq
from math import inf
from typing import NamedTuple

import msgspec

from fleetlearn_simulator.fleet.running_tasks import RunningTasks


class Event(NamedTuple):
    """Something that happens at its time."""

    time: float
    serial: int
    kind: str
    device: int = -1
    tasks: RunningTasks | None = None
    """For the end of a task: the tasks it is one of. Nothing happens if the device does not have
    the task any more."""
    row: int = -1
    """The task's row in ``tasks``."""


class EventQueue:
    """The virtual time, and the events that are expected."""

    def __init__(self) -> None:
        self.now = 0.0
        self.heap: list[Event] = []
        self.serial = 0
        """The serial number that was given last. Of events at the same time, the first one expected
        happens first."""

    def expect(
        self,
        time: float,
        kind: str,
        device: int = -1,
        tasks: RunningTasks | None = None,
        row: int = -1,
    ) -> None:
        """Add an event, unless it never happens."""
        if time < inf:
            self.serial += 1
            heapq.heappush(self.heap, Event(time, self.serial, kind, device, tasks, row))

    def expect_end(self, tasks: RunningTasks, row: int) -> None:
        """Add the end of the task in this row, and of the tasks after it. The task has its serial
        number already."""
        if tasks.ends[row] < inf:
            event = Event(
                tasks.ends[row], tasks.serial[row], "tasks", tasks.device[row], tasks, row
            )
            heapq.heappush(self.heap, event)

    def pop(self) -> Event:
        """Take the next event, and set the time to its time unless that has passed."""
        event = heapq.heappop(self.heap)
        self.now = max(self.now, event.time)
        return event

    def discard(self) -> Event:
        """Take the next event, and leave the time as it is."""
        return heapq.heappop(self.heap)


class AssignedLine(msgspec.Struct, frozen=True, gc=False):
    """The line of the event log for a task that was assigned."""

    time: float
    event: str
    device: int
    task: str


class AcceptedLine(msgspec.Struct, frozen=True, gc=False):
    """The line of the event log for a report that was accepted."""

    time: float
    event: str
    device: int
    task: str
    steps: int

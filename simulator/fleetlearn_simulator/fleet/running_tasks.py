"""Tasks that devices are working on, as columns. A round may have too many tasks for one object
each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class RunningTask(NamedTuple):
    """A task that a device is working on."""

    ends: float
    """When its update reaches the coordinator, or when it fails on its device."""
    serial: int
    """Of tasks that end at the same time, the one with the smallest number ends first."""
    device: int
    name: str
    """The device's name in the engine."""
    task: str
    """The task's id."""
    round: int
    seed: int
    began: float
    cause: str
    """Why the task will fail on its device; empty if it will not."""
    steps: int | None
    """Steps that the device does. None: all steps."""
    corrupt: str
    """How the device spoils its update: one of ``CORRUPTIONS``; empty if it does not."""
    factor: float
    """The factor of the corruption."""
    tier: int
    trained: float
    """When its training is finished, if nothing ends it before."""


class RunningTasks(NamedTuple):
    """Tasks that devices are working on: the fields of ``RunningTask`` as columns."""

    ends: list[float]
    serial: list[int]
    device: list[int]
    name: list[str]
    task: list[str]
    round: list[int]
    seed: list[int]
    began: list[float]
    cause: list[str]
    steps: list[int | None]
    corrupt: list[str]
    factor: list[float]
    tier: list[int]
    trained: list[float]

    @classmethod
    def from_rows(cls, rows: Iterable[RunningTask]) -> RunningTasks:
        columns = [list(column) for column in zip(*rows, strict=True)]
        return cls._make(columns or ([] for _ in cls._fields))

    @classmethod
    def gather(cls, rows: Sequence[tuple[RunningTasks, int]]) -> RunningTasks:
        """Return these rows of other tasks. This takes a third of the time of ``from_rows``."""
        return cls._make(
            [tasks[column][row] for tasks, row in rows] for column in range(len(cls._fields))
        )

    def row(self, row: int) -> RunningTask:
        return RunningTask._make(column[row] for column in self)

    def select(self, rows: Sequence[int]) -> RunningTasks:
        """Return a copy with only these rows. Return self if they are all rows, in order."""
        if list(rows) == list(range(len(self.task))):
            return self
        return RunningTasks._make([column[row] for row in rows] for column in self)

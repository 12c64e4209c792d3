"""What became of the tasks of one arm, the canary's or the old run's, during one step. Without I/O.

The time that tasks take is counted in classes, each ``CLASSES_TO_DOUBLE``-th of a doubling wide: so
the record is small however many tasks there are, and the median is known to 9 %.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import floor, log2
from typing import Literal, TypeVar

import msgspec

from fleetlearn_coordinator.rounds.commands import (
    FAILED,
    LATE,
    LOST,
    REJECTED,
    STALLED,
    STOPPED,
)

CLASSES_TO_DOUBLE = 8
LEAST_SECONDS = 1e-3
Key = TypeVar("Key")
Outcome = Literal["failed", "lost", "refused"]


def outcome_of(cause: str) -> Outcome | None:
    """Return what a task's end is for a canary. None: nobody's fault, such as a full round or a
    device that its owner stops."""
    if cause in (LOST, LATE, STALLED):
        return "lost"
    if cause.startswith(REJECTED):
        return "refused"
    return "failed" if cause.startswith(FAILED) and cause != STOPPED else None


class Arm(msgspec.Struct, frozen=True):
    """The tasks of one arm in one step."""

    given: int = 0
    """Tasks that devices were given."""
    done: int = 0
    """Tasks whose report counted."""
    causes: dict[str, int] = {}
    """Cause of an end that was somebody's fault -> tasks (``outcome_of``)."""
    interrupted: int = 0
    """Tasks during which the device's connection broke, whatever became of them later."""
    devices: int = 0
    """Devices that were given tasks."""
    seconds: dict[int, int] = {}
    """Class of the time that training took (``class_of``) -> tasks whose report counted."""

    @property
    def ended(self) -> int:
        """Tasks that came to an end which counts here."""
        return self.done + sum(self.causes.values())

    def of(self, outcome: Outcome) -> int:
        """Return how many tasks ended so."""
        return sum(count for cause, count in self.causes.items() if outcome_of(cause) == outcome)

    @property
    def median(self) -> float | None:
        """Seconds that training took in the middle one of the tasks whose report counted."""
        half, seen = sum(self.seconds.values()) / 2, 0
        for each in sorted(self.seconds):
            seen += self.seconds[each]
            if seen >= half:
                return seconds_of(each)
        return None

    def slower_than(self, seconds: float) -> int:
        """Return how many tasks took longer than that."""
        bound = class_of(seconds)
        return sum(count for each, count in self.seconds.items() if each > bound)


def class_of(seconds: float) -> int:
    """Return the class of a task's time."""
    return floor(log2(max(seconds, LEAST_SECONDS)) * CLASSES_TO_DOUBLE)


def seconds_of(number: int) -> float:
    """Return the time in the middle of a class."""
    return float(2 ** ((number + 0.5) / CLASSES_TO_DOUBLE))


def together(one: Mapping[Key, int], other: Mapping[Key, int]) -> dict[Key, int]:
    """Return the sums of two counts, by key."""
    return {key: one.get(key, 0) + other.get(key, 0) for key in (*one, *other)}

"""Counts what becomes of one run's tasks, for a canary: an observer (observers.py)."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from fleetlearn_coordinator.rounds.commands import Assign, Ended, Revived
from fleetlearn_coordinator.service.canary.arms import Arm, class_of, outcome_of, together
from fleetlearn_coordinator.service.observers import DeviceLeft, RunEvent, UpdateSaved


class ArmCounter:
    """An observer of one run. ``add_to`` adds what it counted to an arm."""

    def __init__(self) -> None:
        self._new = Arm()
        self._devices: set[str] = set()
        """Devices that were given tasks in this step, as far as this process has seen."""
        self._unbroken: set[str] = set()
        """Devices that have a task which was given in this step, and whose connection has not
        broken since: a task of an earlier step is not one of ``given``."""

    def begin(self) -> None:
        """Count from now on: another step begins, or another canary."""
        self._new = Arm()
        self._devices.clear()
        self._unbroken.clear()

    def add_to(self, arm: Arm) -> Arm:
        """Return the arm with what was counted since the last call."""
        new, self._new = self._new, Arm()
        return Arm(
            arm.given + new.given,
            arm.done + new.done,
            _counts(arm.causes, new.causes),
            arm.interrupted + new.interrupted,
            max(arm.devices, len(self._devices)),
            together(arm.seconds, new.seconds),
        )

    def __call__(self, events: Sequence[RunEvent]) -> None:
        """Count what happened."""
        for event in events:
            match event:
                case Assign(device, again=False):
                    self._unbroken.add(device)
                    self._devices.add(device)
                    self._new = replace(self._new, given=self._new.given + 1)
                case UpdateSaved(device, report):
                    self._unbroken.discard(device)
                    self._new = replace(
                        self._new,
                        done=self._new.done + 1,
                        seconds=together(self._new.seconds, {class_of(report.seconds): 1}),
                    )
                case Ended(device, _, _, cause):
                    self._unbroken.discard(device)
                    self._count(cause, 1)
                case Revived():
                    self._count("lost", -1)
                case DeviceLeft(device) if device in self._unbroken:
                    self._unbroken.remove(device)
                    self._new = replace(self._new, interrupted=self._new.interrupted + 1)

    def _count(self, cause: str, change: int) -> None:
        if outcome_of(cause) is not None:
            causes = dict(self._new.causes)
            causes[cause] = causes.get(cause, 0) + change
            self._new = replace(self._new, causes=causes)


def _counts(before: dict[str, int], new: dict[str, int]) -> dict[str, int]:
    """Return the sums by cause that are above 0. A sum can fall below: a task that was lost in an
    earlier step may be revived in this one."""
    return {cause: count for cause, count in together(before, new).items() if count > 0}

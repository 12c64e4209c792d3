"""What devices have left of their budgets when their connections end, so that a new connection is
no new budget."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from fleetlearn_coordinator.conversation.limits import (
    ALLOWANCE_INTERVAL,
    DEVICE_BURST,
    DEVICES_KEPT,
    Bucket,
)


class Budgets(NamedTuple):
    """The budgets of one device. They go on filling while it is away."""

    messages: Bucket
    incoming: Bucket
    downloads: Bucket


class DeviceBudgets:
    """The budgets of the devices that went lately, and how often devices check in. Bounded,
    whatever comes."""

    def __init__(self, check_in_rate: float) -> None:
        """``check_in_rate``: check-ins of a device, per second."""
        self._rate = check_in_rate
        self._check_ins: dict[str, Bucket] = {}
        self._allowed: dict[str, float] = {}
        """Device and run -> when it was last allowed what a check-in allows."""
        self._left: dict[str, Budgets] = {}
        """Device -> its budgets when it went."""

    def check_in(self, device: str, now: float) -> float:
        """Count a check-in. Returns 0, or the seconds until the device may check in; then this one
        is not counted."""
        bucket = self._check_ins.get(device) or Bucket(self._rate, DEVICE_BURST, now)
        _put(self._check_ins, device, bucket)
        wait = bucket.wait(now)
        if not wait:
            bucket.tokens -= 1
        return wait

    def allows(self, device: str, now: float, run: str = "") -> bool:
        """Return whether a device that checks in is allowed what a check-in allows: messages, its
        first task's bytes. Once in ALLOWANCE_INTERVAL seconds it is; for each ``run``, where it may
        serve several."""
        key = f"{device} {run}"  # no name has a space
        if now - self._allowed.get(key, -ALLOWANCE_INTERVAL) < ALLOWANCE_INTERVAL:
            return False
        _put(self._allowed, key, now)
        return True

    def keep(self, device: str, budgets: Budgets) -> None:
        """Remember what a device has left that goes."""
        _put(self._left, device, budgets)

    def take(self, device: str) -> Budgets | None:
        """Return what a device has left that comes back; None if it was not here lately."""
        return self._left.pop(device, None)


Value = TypeVar("Value")


def _put(book: dict[str, Value], device: str, value: Value) -> None:
    """Set a device's value, and forget the one that was set first of more than DEVICES_KEPT."""
    book.pop(device, None)
    book[device] = value
    if len(book) > DEVICES_KEPT:
        del book[next(iter(book))]

"""What devices have left of their budgets when their connections end, so that a new connection is no new budget."""

from __future__ import annotations

from typing import NamedTuple

from fleetlearn_coordinator.conversation.limits import DEVICE_BURST, DEVICE_MEMORY, DEVICES_KEPT, Bucket


class Budgets(NamedTuple):
    """The budgets of one device. They go on filling while it is away."""

    messages: Bucket
    incoming: Bucket
    downloads: Bucket


class DeviceBudgets:
    """The budgets of the devices that went lately, and how often devices check in. Bounded, whatever comes."""

    def __init__(self, check_in_rate: float) -> None:
        """``check_in_rate``: check-ins of a device, per second."""
        self._rate = check_in_rate
        self._check_ins: dict[str, Bucket] = {}
        self._left: dict[str, tuple[Budgets, float]] = {}
        """Device -> its budgets, and when it went. The one that went first comes first."""

    def check_in(self, device: str, now: float) -> float:
        """Count a check-in. Returns 0, or the seconds until the device may check in; then this one is not counted."""
        bucket = self._check_ins.pop(device, None) or Bucket(self._rate, DEVICE_BURST, now)
        self._check_ins[device] = bucket
        if len(self._check_ins) > DEVICES_KEPT:
            del self._check_ins[next(iter(self._check_ins))]
        wait = bucket.wait(now)
        if not wait:
            bucket.tokens -= 1
        return wait

    def keep(self, device: str, budgets: Budgets, now: float) -> None:
        """Remember what a device has left that goes."""
        self._left.pop(device, None)
        self._left[device] = budgets, now
        if len(self._left) > DEVICES_KEPT:
            del self._left[next(iter(self._left))]

    def take(self, device: str, now: float) -> Budgets | None:
        """Return what a device has left that comes back; None if it was not here for DEVICE_MEMORY seconds."""
        budgets, went = self._left.pop(device, (None, now))
        return budgets if now - went <= DEVICE_MEMORY else None

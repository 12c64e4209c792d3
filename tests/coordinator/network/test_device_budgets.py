"""A new connection is no new budget, and the memory of devices is bounded."""

from __future__ import annotations

import pytest
from fleetlearn_coordinator.conversation.limits import ALLOWANCE_INTERVAL, DEVICE_BURST, Bucket
from fleetlearn_coordinator.network import device_budgets
from fleetlearn_coordinator.network.device_budgets import Budgets, DeviceBudgets


def spent() -> Budgets:
    return Budgets(
        Bucket(1.0, 10.0, 0.0, 0.0), Bucket(1.0, 10.0, 0.0, 0.0), Bucket(1.0, 10.0, 0.0, 0.0)
    )


def test_a_device_goes_on_with_what_it_left() -> None:
    devices, left = DeviceBudgets(1.0), spent()
    devices.keep("a", left)
    assert devices.take("b") is None
    assert devices.take("a") is left
    assert devices.take("a") is None


def test_a_check_in_allows_something_once_a_minute() -> None:
    devices = DeviceBudgets(1.0)
    times = (0.0, 1.0, ALLOWANCE_INTERVAL - 1, ALLOWANCE_INTERVAL, ALLOWANCE_INTERVAL + 1)
    assert [devices.allows("a", now) for now in times] == [True, False, False, True, False]
    assert devices.allows("b", 1.0)


def test_check_ins_have_a_rate() -> None:
    devices = DeviceBudgets(0.5)
    assert [devices.check_in("a", 0.0) for _ in range(DEVICE_BURST + 2)] == [0.0] * DEVICE_BURST + [
        2.0,
        2.0,
    ]
    assert devices.check_in("b", 0.0) == 0.0
    assert devices.check_in("a", 2.0) == 0.0


def test_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_budgets, "DEVICES_KEPT", 100)
    devices = DeviceBudgets(1.0)
    for number in range(1000):
        devices.check_in(f"d{number}", 0.0)
        devices.allows(f"d{number}", 0.0)
        devices.keep(f"d{number}", spent())
    assert len(devices._left) == len(devices._check_ins) == len(devices._allowed) == 100
    assert devices.take("d0") is None
    assert devices.take("d999") is not None

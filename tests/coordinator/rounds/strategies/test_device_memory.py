"""What selection remembers of devices."""

from __future__ import annotations

import pytest
from fleetlearn_coordinator.rounds.strategies import device_memory
from fleetlearn_coordinator.rounds.strategies.device_memory import DeviceMemory, DeviceRecord


def test_tasks_and_reports_are_remembered() -> None:
    memory = DeviceMemory()
    memory.give("a", 3, ("tag:eu",))
    assert memory.records == {"a": DeviceRecord(3, 1, ("tag:eu",))}
    memory.learn("a", 3, 0.5, 10, 7.0)
    memory.give("a", 5, ())
    assert memory.records == {"a": DeviceRecord(5, 2, (), 3, 0.5, 10, 7.0)}
    memory.learn("a", 5, 0.25, 11, None)
    assert memory.records == {"a": DeviceRecord(5, 2, (), 5, 0.25, 11, 7.0)}, (
        "the time before, if it is not known"
    )


def test_a_report_of_an_unknown_device_is_not_remembered() -> None:
    """The run had no rules when it was given its task."""
    memory = DeviceMemory()
    memory.learn("a", 3, 0.5, 10, 7.0)
    assert memory.records == {}


def test_whose_task_is_the_oldest_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "REMEMBERED", 2)
    memory = DeviceMemory()
    for round, device in enumerate("abac", 1):
        memory.give(device, round, ())
    assert [*memory.records] == ["a", "c"]
    memory.recall((name, DeviceRecord(1, 1)) for name in "xyz")
    assert [*memory.records] == ["y", "z"]

"""What is remembered of devices: points, proven devices, careful rounds."""

from __future__ import annotations

import pytest
from fleetlearn_coordinator.rounds import reliability
from fleetlearn_coordinator.rounds.reliability import DOUBT, MAX_LEVEL, Reliability


def test_points_of_a_device() -> None:
    """Three tasks lost, failed or rejected put it in doubt, or one that stalled; a report clears
    it."""
    memory = Reliability()
    for points, level in ((1, 0), (1, 0), (1, 1), (DOUBT, 2), (100, MAX_LEVEL), (1, MAX_LEVEL)):
        memory.fail("a", points)
        assert memory.level("a") == level
    memory.clear(["a", "b"])
    assert memory.level("a") == 0


def test_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reliability, "REMEMBERED", 100)
    monkeypatch.setattr(reliability, "PROVEN", 10)
    memory = Reliability()
    for number in range(1000):
        memory.fail(f"d{number}", 1)
        memory.fail("often", 1)
        memory.end_round([f"r{number}"], held_up=1, spare=0)
    assert len(memory.points) == 100
    assert "often" in memory.points, "who failed longest ago is forgotten first"
    assert [*memory.proven] == [f"r{number}" for number in range(990, 1000)]


def test_caution_doubles_with_each_round_that_is_held_up_and_goes_when_they_are_not() -> None:
    memory, careful = Reliability(), list[int]()
    for _ in range(9):
        memory.end_round("a", held_up=3, spare=2)
        careful.append(memory.careful)
        while memory.careful:
            memory.end_round("a", held_up=2, spare=2)
    assert careful == [1, 2, 4, 8, 16, 32, 64, 64, 64]
    for _ in range(7):
        assert memory.proven
        memory.end_round("a", held_up=0, spare=2)
    assert memory == Reliability()

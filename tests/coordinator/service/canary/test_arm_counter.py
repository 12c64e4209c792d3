"""What a canary counts of the events of a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fleetlearn_coordinator.rounds.commands import Assign, Ended, Revived
from fleetlearn_coordinator.service.canary.arm_counter import ArmCounter
from fleetlearn_coordinator.service.canary.arms import Arm, class_of
from fleetlearn_coordinator.service.observers import DeviceLeft, UpdateSaved


def given(device: str, task: str, *, again: bool = False) -> Assign:
    return Assign(device, task, 1, 0, 9.0, again, 0)


def saved(device: str, seconds: float) -> UpdateSaved:
    report: Any = SimpleNamespace(seconds=seconds)
    return UpdateSaved(device, report, 1, 0)


def counted(*events: Any) -> Arm:
    counter = ArmCounter()
    counter(events)
    return counter.add_to(Arm())


def test_tasks_and_their_ends() -> None:
    found = counted(
        given("a", "1"), given("b", "2"), given("c", "3"), given("d", "4"),
        saved("a", 2.0),
        Ended("b", "2", 1, "lost"),
        Ended("c", "3", 1, "failed: diverged"),
        Ended("d", "4", 1, "surplus"),
    )  # fmt: skip
    assert found == Arm(4, 1, {"lost": 1, "failed: diverged": 1}, 0, 4, {class_of(2.0): 1})


def test_a_task_is_interrupted_once_however_often() -> None:
    found = counted(
        given("a", "1"), DeviceLeft("a"), given("a", "1", again=True), DeviceLeft("a"),
        given("a", "1", again=True), saved("a", 1.0),
        DeviceLeft("a"), DeviceLeft("b"),
    )  # fmt: skip
    assert (found.given, found.done, found.interrupted) == (1, 1, 1)


def test_a_device_that_returns_with_its_work_was_not_lost() -> None:
    found = counted(
        given("a", "1"), DeviceLeft("a"), Ended("a", "1", 1, "lost"), Revived("a", "1", 1),
        saved("a", 1.0),
    )  # fmt: skip
    assert (found.done, found.causes, found.interrupted) == (1, {}, 1)


def test_a_task_that_was_given_before_the_step_is_not_interrupted_in_it() -> None:
    counter = ArmCounter()
    counter([given("a", "1"), given("b", "2")])
    counter.begin()
    counter([DeviceLeft("a"), DeviceLeft("b"), given("a", "1", again=True), DeviceLeft("a")])
    counter([given("c", "3"), DeviceLeft("c")])
    found = counter.add_to(Arm())
    assert (found.given, found.interrupted) == (1, 1)


def test_a_task_is_interrupted_once_though_it_was_lost_between() -> None:
    found = counted(
        given("a", "1"), DeviceLeft("a"), Ended("a", "1", 1, "lost"), Revived("a", "1", 1),
        given("a", "1", again=True), DeviceLeft("a"),
    )  # fmt: skip
    assert (found.given, found.interrupted) == (1, 1)


def test_what_was_added_is_not_added_again() -> None:
    counter = ArmCounter()
    counter([given("a", "1"), Ended("a", "1", 1, "late")])
    first = counter.add_to(Arm(given=5, causes={"late": 2}, devices=1))
    assert (first.given, first.causes, first.devices) == (6, {"late": 3}, 1)
    assert counter.add_to(first) == first
    counter([given("b", "2")])
    counter.begin()
    assert counter.add_to(Arm()) == Arm()

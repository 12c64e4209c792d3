"""A real coordinator, and devices whose conditions come and go while they train."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from fleetlearn_coordinator import read_status
from peers import plan_text
from processes import Processes, free_port, service_file, wait_for

DEVICE = Path(__file__).with_name("conditioned_device.py")
pytestmark = pytest.mark.slow


class Fleet:
    """A run that needs both of its devices in each round. ``b`` has a condition."""

    def __init__(
        self, run: Processes, bundle: Path, shards: list[Path], **settings: object
    ) -> None:
        self.run, self.shards = run, shards
        port = free_port()
        self.data_dir = run.folder / "run"
        self.url = f"ws://127.0.0.1:{port}"
        values: dict[str, object] = {
            "local__lr": 0.1, "local__mu": 0.01, "local__epochs": 5_000, "round__goal": 2,
            "round__minimum": 2, "round__deadline": 600.0, "round__grace": 300.0,
            "stop__rounds": 1,
        }  # fmt: skip
        plan = run.folder / "plan.toml"
        plan.write_text(plan_text(bundle, self.data_dir, "fedprox", **(values | settings)))
        service_file(plan, port)
        self.condition = run.folder / "may-train"
        self.condition.touch()
        run.coordinator(plan)
        run.device("a", self.url, shards[0])
        self.start_b()

    def start_b(self) -> None:
        state = self.run.folder / "b.state"
        self.run.start(
            "b", sys.executable, DEVICE, self.condition, self.url, self.shards[1], state, "b"
        )

    def status_of_b(self) -> dict[str, Any]:
        return dict(json.loads((self.run.folder / "b.state" / "status.json").read_text()))

    def trains(self) -> None:
        wait_for(lambda: "training" in self.run.log("b"), "device b to train")

    def summary(self) -> dict[str, Any]:
        assert self.run.wait("coordinator") == 0
        (round_,) = read_status(self.data_dir).rounds
        return dict(round_.summary)


def test_a_task_is_given_back_by_name_and_another_is_done_when_the_condition_holds_again(
    run: Processes, bundle_path: Path, shards: list[Path]
) -> None:
    fleet = Fleet(run, bundle_path, shards)
    fleet.trains()
    fleet.condition.unlink()
    wait_for(lambda: "paused: the pump runs" in run.log("b"), "device b to pause")
    wait_for(lambda: "failed task" in run.log("coordinator"), "the task to be given back")
    assert "paused 'the pump runs'" in run.log("coordinator")
    assert fleet.status_of_b()["paused"] == "the pump runs"
    fleet.condition.touch()
    summary = fleet.summary()
    assert summary["reports"] == 2
    assert summary["dropped"] == {"failed: paused": 1}
    assert run.wait("b") == 0
    assert run.log("b").count("paused: the pump runs") == 1


def test_with_a_time_budget_partial_work_counts(
    run: Processes, bundle_path: Path, shards: list[Path]
) -> None:
    fleet = Fleet(run, bundle_path, shards, local__time_budget=500.0, local__epochs=1_000_000)
    fleet.trains()
    run.kill("a")  # it would train on for eight minutes
    fleet.condition.unlink()
    wait_for(lambda: "partial: the device pauses" in run.log("b"), "device b to report")
    wait_for(lambda: "update accepted" in run.log("b"), "its update to be accepted")
    wait_for(lambda: fleet.status_of_b()["paused"] == "the pump runs", "device b to pause")
    wait_for(lambda: "not connected" in fleet.status_of_b()["connection"], "device b to leave")


def test_a_device_that_is_killed_while_it_is_paused_stays_paused_and_goes_on_later(
    run: Processes, bundle_path: Path, shards: list[Path]
) -> None:
    fleet = Fleet(run, bundle_path, shards)
    fleet.trains()
    fleet.condition.unlink()
    wait_for(lambda: "failed task" in run.log("coordinator"), "the task to be given back")
    run.kill("b")
    before = run.log("b")
    fleet.start_b()
    wait_for(lambda: "paused" in run.log("b")[len(before) :], "the next process to pause")
    assert "connected to" not in run.log("b")[len(before) :], "it waits, and asks for no task"
    fleet.condition.touch()
    summary = fleet.summary()
    assert summary["reports"] == 2
    assert summary["dropped"] == {"failed: paused": 1}

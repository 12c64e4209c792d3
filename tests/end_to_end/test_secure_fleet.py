"""Fleets with secure aggregation, as real processes: each model is the sum of its updates, to the
last bit, whoever dies or stays away. Updates follow from the devices' names (``marked_update.py``),
so that a sum can be worked out without any mask."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from pathlib import Path

import pytest
from fleetlearn_coordinator import read_model, read_status
from marked_fleet import MarkedFleet
from processes import Processes, wait_for

pytestmark = pytest.mark.slow
SECONDS = 180.0
"""A run of this file takes a fraction of them."""


def check(fleet: MarkedFleet, left_out: frozenset[str] = frozenset()) -> None:
    """Check that each model is made of the updates that count, exactly."""
    version, model = read_model(fleet.data)
    of_round: dict[int, list[str]] = defaultdict(list)
    for device, number in fleet.accepted():
        of_round[number].append(device)
    rounds = read_status(fleet.data).rounds
    committed = [of_round[row.number] for row in rounds if row.outcome == "committed"]
    assert len(committed) == version
    assert all(len({*names}) == len(names) for names in committed), committed
    assert not left_out & {name for names in committed for name in names}
    assert model.tobytes() == fleet.expected(committed).tobytes()


def test_every_model_is_the_sum_of_its_updates(
    run: Processes, bundle_path: Path, shards: list[Path]
) -> None:
    fleet = MarkedFleet(run, bundle_path, shards)
    fleet.start_all()
    fleet.finished(SECONDS)
    check(fleet)
    assert read_model(fleet.data)[0] == 3
    assert fleet.reports_of_rounds() == [6, 6, 6]
    for name in fleet.names:
        assert run.wait(name) == 0, run.log(name)


def test_a_round_waits_for_a_helper_that_is_away(
    run: Processes, bundle_path: Path, shards: list[Path]
) -> None:
    fleet = MarkedFleet(run, bundle_path, shards, devices=3, stop__rounds=2)
    fleet.start_helper()
    fleet.start_coordinator()
    wait_for(lambda: "listening" in run.log("coordinator"), "the coordinator")
    run.kill("helper")
    for name in fleet.names:
        fleet.start_device(name)
    fleet.wait_for_reports(3)
    wait_for(lambda: "waits for" in run.log("coordinator"), "a line that says so")
    wait_for(
        lambda: "waits for the helper" in run.command("status", fleet.plan).stdout,
        "a status that says so",
    )
    assert read_model(fleet.data)[0] == 0
    fleet.start_helper()
    fleet.finished(SECONDS)
    check(fleet)


def test_a_device_that_is_not_enrolled_is_left_out_by_name(
    run: Processes, bundle_path: Path, shards: list[Path]
) -> None:
    """Its update is taken out of the sum again; the others' sum is exact."""
    fleet = MarkedFleet(
        run, bundle_path, shards, enrolled=4, devices=5, stop__rounds=2, round__gather=1.0
    )
    fleet.start_all()
    fleet.finished(SECONDS)
    check(fleet, left_out=frozenset({"d4"}))
    assert "unknown-device" in run.log("coordinator")
    assert fleet.reports_of_rounds() == [4, 4]


def test_with_too_few_devices_left_the_round_is_abandoned_by_name(
    run: Processes, bundle_path: Path, shards: list[Path]
) -> None:
    fleet = MarkedFleet(run, bundle_path, shards, enrolled=2, devices=3)
    fleet.start_all()
    wait_for(lambda: "unknown-device" in run.log("coordinator"), "the refusal")

    def abandoned() -> bool:
        rounds = read_status(fleet.data).rounds
        return bool(rounds) and rounds[0].outcome == "abandoned"

    wait_for(abandoned, f"an abandoned round: {run.log('coordinator')}")
    assert read_model(fleet.data)[0] == 0
    assert "secure.minimum" in run.log("coordinator")


@pytest.mark.parametrize("seed", range(3))
def test_whoever_is_killed_each_model_is_an_exact_sum(
    run: Processes, bundle_path: Path, shards: list[Path], seed: int
) -> None:
    """Devices, coordinator and helper are killed at random moments, and started again."""
    luck = random.Random(seed)
    fleet = MarkedFleet(run, bundle_path, shards, minimum=3, stop__rounds=8, round__goal=4)
    fleet.start_all()
    until = time.monotonic() + SECONDS
    killed = 0
    while run.running["coordinator"].poll() is None and time.monotonic() < until:
        time.sleep(luck.uniform(0.05, 1.0))
        kind = luck.choice(["helper", "coordinator", "device", "device"])
        name = luck.choice(fleet.names) if kind == "device" else kind
        process = run.running[name]
        if process.poll() is not None or run.running["coordinator"].poll() is not None:
            continue
        run.kill(name)
        killed += 1
        if luck.random() < 0.3:  # it stays away for a moment
            time.sleep(luck.uniform(0.0, 1.5))
        if kind == "helper":
            fleet.start_helper()
        elif kind == "coordinator":
            fleet.start_coordinator()
        else:
            fleet.start_device(name)
    if run.running["coordinator"].poll() is None:
        fleet.finished(SECONDS)
    print(f"{killed} kills")
    assert killed >= 3
    assert read_model(fleet.data)[0] == 8
    check(fleet)

"""Fleets with secure aggregation, as real processes: each model is the sum of its updates, to the
last bit, whoever dies or stays away. Updates follow from the devices' names (``marked_update.py``),
so that a sum can be worked out without any mask."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from fleetlearn_coordinator import read_model, read_status
from marked_fleet import MarkedFleet
from marked_update import marked_update
from processes import Processes, wait_for

pytestmark = pytest.mark.slow
SECONDS = 180.0
"""A run of this file takes a fraction of them."""


def check(fleet: MarkedFleet, left_out: frozenset[str] = frozenset()) -> None:
    """Check that each model is made of the updates that count, exactly."""
    version, model = read_model(fleet.data)
    of_round: dict[int, list[str]] = defaultdict(list)
    for device, number, _ in fleet.accepted():
        of_round[number].append(device)
    rounds = read_status(fleet.data).rounds
    committed = [of_round[row.number] for row in rounds if row.outcome == "committed"]
    assert len(committed) == version
    assert all(len({*names}) == len(names) for names in committed), committed
    assert not left_out & {name for names in committed for name in names}
    assert model.tobytes() == fleet.expected(committed).tobytes()


def wait_for_moment(fleet: MarkedFleet, seconds: float) -> None:
    """Wait for so long, or until the coordinator has ended."""
    with suppress(subprocess.TimeoutExpired):
        fleet.run.running["coordinator"].wait(seconds)


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


def test_an_older_copy_of_the_run_gets_no_second_sum_of_the_same_updates(
    run: Processes, bundle_path: Path, shards: list[Path]
) -> None:
    """A coordinator that puts an older copy of its folder back has devices train the same model
    again. It gets no sum of those that were in one; other devices train on from there."""
    fleet = MarkedFleet(run, bundle_path, shards, stop__rounds=1_000_000, round__goal=3)

    def stop() -> None:
        run.running["coordinator"].send_signal(signal.SIGTERM)
        assert run.wait("coordinator") == 0

    fleet.start_helper()
    fleet.start_coordinator()
    for name in fleet.names[:3]:
        fleet.start_device(name)
    fleet.wait_for_version(1)
    stop()
    copied = read_model(fleet.data)[0]
    shutil.copytree(fleet.data, fleet.data.with_name("copy"))
    fleet.start_coordinator()
    fleet.wait_for_version(copied + 2)
    stop()
    shutil.rmtree(fleet.data)
    fleet.data.with_name("copy").rename(fleet.data)
    fleet.start_coordinator()
    wait_for(lambda: run.log("coordinator").count("listening") == 3, "the coordinator")
    wait_for(
        lambda: "3 had their updates" in run.command("status", fleet.plan).stdout,
        "a status that says why",
    )
    assert "device-twice" in run.log("coordinator")
    assert read_model(fleet.data)[0] == copied
    for name in fleet.names[3:]:
        fleet.start_device(name)
    fleet.wait_for_version(copied + 1)
    stop()
    check(fleet)


@pytest.mark.parametrize("kills", [0, 12])
def test_late_updates_count_for_what_their_devices_were_told(
    run: Processes, bundle_path: Path, shards: list[Path], kills: int
) -> None:
    """FedBuff with devices that die, or not: an update of staleness tau counts (1 + tau)^-1/2 of
    itself, which its device has multiplied before it masked."""
    luck = random.Random(kills)
    fleet = MarkedFleet(
        run, bundle_path, shards, minimum=2, recipe="fedbuff", stop__rounds=12, models__last=20,
        round__goal=3, round__minimum=None, round__concurrency=6, round__over_selection=None,
        round__gather=None,
    )  # fmt: skip
    fleet.start_all()
    for _ in range(kills):
        wait_for_moment(fleet, luck.uniform(0.05, 0.6))
        if run.running["coordinator"].poll() is None:
            name = luck.choice([*fleet.names, "coordinator", "helper"])
            run.kill(name)
            fleet.start(name)
    fleet.finished(SECONDS)
    version, model = read_model(fleet.data)
    assert version == 12
    of_round: dict[int, dict[str, int]] = defaultdict(dict)
    for device, number, staleness in fleet.accepted():
        of_round[number][device] = staleness
    rounds = sorted(read_status(fleet.data).rounds, key=lambda row: row.number)
    committed = [row.number for row in rounds if row.outcome == "committed"]
    stale, before = 0, fleet.initial.astype(np.float64)
    for version, number in enumerate(committed, 1):
        staleness = of_round[number]
        _, model = read_model(fleet.data, version)
        updates = np.array([marked_update(device, len(model)) for device in staleness], np.float64)
        # what each update counted for follows from how the model has moved: 650 elements say it
        counted, *_ = np.linalg.lstsq(updates.T, (model - before) * len(updates), rcond=None)
        told = counted**-2 - 1
        stale += sum(told > 0.5)
        assert told == pytest.approx(np.rint(told), abs=1e-3), "each was (1 + tau)^-1/2"
        # at its weighing; its report may have come a version later
        assert (np.rint(told) <= [*staleness.values()]).all()
        before = model.astype(np.float64)
    assert stale, "no update was late"


@pytest.mark.parametrize("seed", range(3))
def test_whoever_is_killed_each_model_is_an_exact_sum(
    run: Processes, bundle_path: Path, shards: list[Path], seed: int
) -> None:
    """Devices, coordinator and helper are killed at random moments, and started again."""
    luck = random.Random(seed)
    fleet = MarkedFleet(run, bundle_path, shards, minimum=3, stop__rounds=20, round__goal=4)
    fleet.start_all()
    until, killed = time.monotonic() + SECONDS, 0
    while run.running["coordinator"].poll() is None and time.monotonic() < until:
        wait_for_moment(fleet, luck.uniform(0.05, 1.0))
        name = luck.choice(["helper", "coordinator", *luck.sample(fleet.names, 2)])
        if run.running[name].poll() is not None or run.running["coordinator"].poll() is not None:
            continue
        run.kill(name)
        killed += 1
        if luck.random() < 0.3:  # it stays away for a moment
            wait_for_moment(fleet, luck.uniform(0.0, 1.5))
        fleet.start(name)
    fleet.finished(SECONDS)
    print(f"{killed} kills")
    assert killed >= 3
    assert read_model(fleet.data)[0] == 20
    check(fleet)

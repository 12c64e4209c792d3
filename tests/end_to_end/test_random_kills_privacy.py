"""A private run with limits of participation whose coordinator is killed at random instants: no
device counts more often than the noise was computed for, and no release is made twice. Real
devices and processes, real SIGKILL."""

from __future__ import annotations

import random
import signal
import sqlite3
import time
from collections import defaultdict
from itertools import pairwise
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.plan.privacy_terms import noise_multiplier
from fleetlearn_coordinator.privacy.accounting import gaussian_epsilon
from fleetlearn_coordinator.service.training_run.private_budget import read_account
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.ledger import PRIVACY
from fleetlearn_coordinator.storage.sqlite_ledger import DATABASE
from peers import plan_text
from processes import Processes, free_port, service_file, wait_for

pytestmark = pytest.mark.slow

SEPARATION, PARTICIPATIONS, RELEASES, GOAL, DEVICES, KILLS = 2, 3, 10, 2, 8, 12
"""Whoever takes part, a device can be in each release: nine releases have 18 of the 24
participations that 8 devices may have, and two devices that wait have at most 4 of the other 6."""
BUDGET, DELTA = 8.0, 1e-6
LONGEST = 0.12
"""Seconds from a task of a new coordinator until it is killed, at most."""
LIMITS: dict[str, object] = {
    "local__lr": 0.2,
    "local__epochs": 30,
    "round__goal": GOAL,
    "round__over_selection": 1.5,
    "round__deadline": 5.0,
    "stop__rounds": RELEASES,
    "privacy__epsilon": BUDGET,
    "privacy__delta": DELTA,
    "privacy__population": DEVICES,
    "privacy__clip": 0.5,
    "privacy__separation": SEPARATION,
    "privacy__participations": PARTICIPATIONS,
}


def releases_of_devices(data_dir: Path) -> dict[str, list[int]]:
    """Return device -> the releases that a report of it is in, ascending, by the reports that count
    and the rounds that were committed: nothing that the limits themselves keep."""
    with sqlite3.connect(data_dir / DATABASE) as ledger:
        committed = [
            number
            for (number,) in ledger.execute(
                "SELECT number FROM rounds WHERE outcome='committed' ORDER BY number"
            )
        ]
        reports = ledger.execute("SELECT round, device FROM tasks WHERE state='accepted'")
        release = {number: place for place, number in enumerate(committed, 1)}
        found = defaultdict(list)
        for number, device in reports:
            if number in release:
                found[device].append(release[number])
    return {device: sorted(own) for device, own in found.items()}


def broken(found: dict[str, list[int]]) -> list[str]:
    """Return what is wrong with devices' releases, for people."""
    wrong = []
    for device, own in found.items():
        if len(own) > PARTICIPATIONS:
            wrong.append(f"{device} takes part {len(own)} times: {own}")
        apart = [later - one for one, later in pairwise(own)]
        if any(each < SEPARATION for each in apart):
            wrong.append(f"{device} takes part too soon: {own}")
    return wrong


def test_what_is_wrong_is_noticed() -> None:
    assert broken({"a": [1, 3, 5], "b": [2]}) == []
    assert len(broken({"a": [1, 3, 5, 7], "b": [2, 2], "c": [3, 4]})) == 3


def tasks(data_dir: Path) -> int:
    """Return how many tasks were given so far; -1 where there is no ledger yet."""
    try:
        with sqlite3.connect(f"file:{data_dir / DATABASE}?mode=ro", uri=True) as ledger:
            return int(ledger.execute("SELECT count(*) FROM tasks").fetchone()[0])
    except sqlite3.OperationalError:
        return -1


def serve_for_a_while(run: Processes, file: Path, data_dir: Path, luck: random.Random) -> Any:
    """Start the coordinator, and return its process at a random instant: mostly soon after it gave
    a task, sometimes before it gave any."""
    before = max(0, tasks(data_dir))
    process = run.coordinator(file)
    least = before if luck.random() < 0.2 else before + 1
    wait_for(lambda: tasks(data_dir) >= least or process.poll() is not None, "a task")
    time.sleep(luck.uniform(0, LONGEST))
    return process


def test_limits_hold_through_kills_at_random_instants(
    run: Processes, bundle_path: Path, shards: list[Path]
) -> None:
    luck = random.Random(36)
    port, data_dir, file = free_port(), run.folder / "run", run.folder / "plan.toml"
    file.write_text(plan_text(bundle_path, data_dir, "dp-fedavg", **LIMITS))
    service_file(file, port)
    names = [f"d{number}" for number in range(DEVICES)]
    for name, shard in zip(names, shards, strict=True):
        run.device(name, f"ws://127.0.0.1:{port}", shard)

    killed = 0
    while killed < KILLS:
        process = serve_for_a_while(run, file, data_dir, luck)
        if process.poll() is not None:
            assert process.returncode == 0, run.log("coordinator")
            break
        process.send_signal(signal.SIGKILL)
        process.wait()
        killed += 1
        assert broken(releases_of_devices(data_dir)) == []
    if process.returncode != 0:
        run.coordinator(file)
    assert run.wait("coordinator", 240) == 0, run.log("coordinator")
    assert killed >= KILLS // 3

    # each device as often as it may
    found = releases_of_devices(data_dir)
    assert broken(found) == []
    with find_storage(data_dir).read_ledger() as ledger:
        account = read_account(ledger.metadata().get(PRIVACY))
        made = [each.round for each in ledger.known_models() if each.round]
    with sqlite3.connect(data_dir / DATABASE) as kept_rows:
        rows = kept_rows.execute("SELECT device, last, times FROM participations").fetchall()
    kept = {device: (last, times) for device, last, times in rows}
    assert kept == {device: (own[-1], len(own)) for device, own in found.items()}

    # each release once
    assert account is not None
    assert len(made) == len({*made}) == account.releases == RELEASES
    assert {release for own in found.values() for release in own} == {*range(1, RELEASES + 1)}

    # what was spent: by the device that took part most often, and as it is accounted
    noise = noise_multiplier(Plan.load(file))
    most = max(map(len, found.values()))
    assert gaussian_epsilon(sqrt(most) / noise, DELTA) <= account.epsilon <= BUDGET
    print(f"{killed} kills, at most {most} participations, epsilon {account.epsilon:.4f}")

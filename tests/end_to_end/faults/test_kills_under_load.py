"""The coordinator is killed at random instants under load: twenty enrolled devices come and go,
lose their work and change their credentials. What was acknowledged counts, once; nobody who was
enrolled is a stranger afterwards.

    pytest -m slow tests/end_to_end/faults/test_kills_under_load.py --kills 500
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fleetlearn_coordinator import Plan, read_model, read_status
from fleetlearn_coordinator.storage.identities import DATABASE as IDENTITIES
from fleetlearn_coordinator.storage.identities import Identities
from fleetlearn_coordinator.storage.ledger import ROUNDS_KEPT
from fleetlearn_coordinator.storage.sqlite_ledger import DATABASE
from fleetlearn_device.driver.address import Enrolment
from fleetlearn_device.storage.credential import begin_change, read_credential
from peers import BUFFERED, plan_text, write_test_bundle
from processes import Processes, free_port
from random_kills import Devices, by_hand, kill_at_random

KILLS = 25
"""In each run."""
DEVICES = 20
GOAL = 100
"""Updates that make a model: so many that a run of ROUNDS_KEPT models, whose reports the ledger
keeps, outlasts its kills."""
PLANS: dict[str, dict[str, Any]] = {
    "synchronous": {
        "recipe": "fedavg", "round__goal": 12, "round__minimum": 12, "round__over_selection": 1.25,
        "round__gather": 5.0,
    },
    "asynchronous": BUFFERED | {"round__goal": 60, "round__concurrency": 16},
}  # fmt: skip


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    runs = -(-metafunc.config.getoption("kills") // KILLS)
    metafunc.parametrize(("name", "seed"), [([*PLANS][seed % 2], seed) for seed in range(runs)])


@pytest.mark.slow
def test_kills_under_load(run: Processes, tmp_path: Path, name: str, seed: int) -> None:
    settings = PLANS[name] | {
        "round__grace": 0.5,
        "stop__rounds": ROUNDS_KEPT,
        "server__optimizer": "adam",
    }
    plan, port = tmp_path / "plan.toml", free_port()
    bundle = write_test_bundle(tmp_path / "test.bundle")
    plan.write_text(
        plan_text(bundle, tmp_path / "run", settings.pop("recipe"), **settings, server__lr=0.05)
    )
    (tmp_path / "service.toml").write_text(f'port = {port}\nidentities = "identities"\n')
    luck, names = random.Random(seed), [f"device-{number}" for number in range(DEVICES)]
    identities = Identities(tmp_path / "identities")
    token = identities.make_token(DEVICES, time.time() + 3600, [], time.time())
    identities.close()
    enrolments = {}
    for device in names:
        (tmp_path / device).mkdir()
        enrolments[device] = Enrolment(tmp_path / device, device, token)
    devices = Devices(
        f"ws://127.0.0.1:{port}",
        names,
        enrolments=enrolments,
        restless=0.02,
        luck=random.Random(-seed),
    )
    killed = asyncio.run(kill_and_change_credentials(run, plan, devices, luck, tmp_path))
    check_updates(plan, tmp_path / "run", devices.acknowledged, killed, settings["round__goal"])
    check_identities(tmp_path, names)


async def kill_and_change_credentials(
    run: Processes, plan: Path, devices: Devices, luck: random.Random, folder: Path
) -> int:
    async def change_credentials() -> None:
        while True:
            await asyncio.sleep(0.2)
            device = folder / luck.choice(devices.names)
            begin_change(device)

    changes = asyncio.create_task(change_credentials())
    try:
        return await kill_at_random(run, plan, devices, luck, KILLS)
    finally:
        changes.cancel()


def check_updates(plan: Path, data: Path, acknowledged: list[str], killed: int, goal: int) -> None:
    version, model = read_model(data)
    rounds = [row for row in read_status(data).rounds if row.outcome == "committed"]
    with sqlite3.connect(data / DATABASE) as ledger:
        found = ledger.execute(
            "SELECT task, round, staleness FROM tasks WHERE state='accepted'"
        ).fetchall()
    print(f"{killed} kills, {version} models, {len(acknowledged)} updates acknowledged")
    assert killed == KILLS or version == ROUNDS_KEPT
    assert version >= 1
    assert {*acknowledged} <= {task for task, _, _ in found}, "an acknowledged update was lost"
    assert len(acknowledged) == len({*acknowledged}), "an update was acknowledged twice"
    assert [row.number for row in rounds] == [*range(1, version + 1)]
    assert [row.summary["reports"] for row in rounds] == [goal] * version
    counted = Counter(number for _, number, _ in found)
    assert [counted[number] for number in range(1, version + 1)] == [goal] * version, (
        "or counted twice"
    )
    loaded = Plan.load(plan)
    weight = 1 if loaded.round.weighting == "uniform" else 10
    assert by_hand(loaded, found, version, weight).tobytes() == model.tobytes()


def check_identities(folder: Path, names: list[str]) -> None:
    identities = Identities(folder / "identities")
    assert identities.broken_at() is None
    events = Counter(event.what for event in identities.events())
    print(dict(events))
    assert events["enrolled"] == len(names)
    assert [known.device for known in identities.devices()] == sorted(names)
    with sqlite3.connect(folder / "identities" / IDENTITIES) as database:
        assert database.execute("SELECT uses FROM tokens").fetchall() == [(0,)]
    for device in names:
        credential = read_credential(folder / device)
        assert credential is not None
        known = identities.find(credential.secret, 0.0) or identities.find(
            credential.next or "", 0.0
        )
        assert known is not None, "an enrolled device became a stranger"
        assert known.device == device
    identities.close()

"""Clocks jump: the wall clock both ways, and the other one, as after the sleep of a laptop. The run
goes on, what was acknowledged counts, and what is told of times stays possible."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from faults import Clocks, Fault
from fleetlearn_coordinator import Plan, read_model, read_status
from fleetlearn_coordinator.storage.identities import Identities
from fleetlearn_coordinator.storage.ledger import ROUNDS_KEPT
from fleetlearn_coordinator.storage.sqlite_ledger import DATABASE
from fleetlearn_device.driver.address import Enrolment
from peers import plan_text, write_test_bundle
from processes import Processes, free_port, status_of, wait_for
from random_kills import Devices, by_hand

SIZE, DEVICES, DAY = 1000, ("a", "b", "c"), 86400.0
JUMPS = (
    (-DAY, 0.0), (DAY, 0.0), (0.0, 0.0), (-400 * DAY, 0.0), (3600.0, 3600.0), (3600.0, 2 * DAY),
)  # fmt: skip
"""Seconds that the wall clock and the monotonic one are ahead, one after the other."""


def version_of(data: Path) -> int:
    found = status_of(data)
    return 0 if found is None else found.version


def test_the_clocks_of_a_coordinator_jump(run: Processes) -> None:
    """It is killed in between, and started again at another time."""
    folder, data, clocks = run.folder, run.folder / "run", Clocks(run.folder / "clocks")
    plan, port = folder / "plan.toml", free_port()
    bundle = write_test_bundle(folder / "test.bundle", SIZE)
    plan.write_text(
        plan_text(
            bundle,
            data,
            round__goal=2,
            round__minimum=2,
            round__over_selection=1.5,
            round__gather=0.05,
            round__grace=5.0,
            round__deadline=600.0,
            stop__rounds=10_000,
            pace__connected=3,
        )
    )
    (folder / "service.toml").write_text(f'port = {port}\nidentities = "identities"\n')
    identities = Identities(folder / "identities")
    token = identities.make_token(len(DEVICES), time.time() + 3600, [], time.time())
    identities.close()
    enrolments = {}
    for name in DEVICES:
        (folder / name).mkdir()
        enrolments[name] = Enrolment(folder / name, name, token)
    devices = Devices(f"ws://127.0.0.1:{port}", DEVICES, enrolments=enrolments, size=SIZE)
    env = os.environ | Fault(folder / "none", clocks=clocks.path).env()

    async def jump() -> None:
        process = run.coordinator(plan, env=env)

        async def two_rounds() -> None:
            before = await asyncio.to_thread(version_of, data)
            async with asyncio.timeout(60):
                while await asyncio.to_thread(version_of, data) < before + 2:
                    assert process.poll() is None, run.log("coordinator")
                    await asyncio.sleep(0.05)

        async with asyncio.TaskGroup() as group:
            for name in devices.names:
                group.create_task(devices.take_part(name))
            await two_rounds()
            for number, (wall, monotonic) in enumerate(JUMPS):
                clocks.set(wall, monotonic)
                if number % 3 == 2:
                    process.kill()
                    await asyncio.to_thread(process.wait)
                    process = run.coordinator(plan, env=env)
                await two_rounds()
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait) == 0
            devices.over = True

    asyncio.run(jump())
    assert "Traceback" not in run.log("coordinator")
    status = read_status(data)
    committed = [row.number for row in status.rounds if row.outcome == "committed"]
    assert all(row.summary["seconds"] >= 0 for row in status.rounds)
    version, model = read_model(data)
    assert version == len(committed) > 2 * len(JUMPS)
    with closing(sqlite3.connect(data / DATABASE)) as ledger:
        found = ledger.execute("SELECT task, round FROM tasks WHERE state='accepted'").fetchall()
    kept = min(number for _, number in found) + 1  # the ledger keeps no tasks of older rounds
    assert {task for task in devices.acknowledged if int(task.split("-")[-2]) >= kept} <= {
        task for task, _ in found
    }
    if status.rounds[-1].number <= ROUNDS_KEPT:  # of older ones no tasks are kept
        rows = [
            (task, committed.index(number) + 1, 0) for task, number in found if number in committed
        ]
        assert by_hand(Plan.load(plan), rows, version, weight=10).tobytes() == model.tobytes()
    identities = Identities(folder / "identities")
    assert identities.broken_at() is None
    assert [known.device for known in identities.devices()] == [*DEVICES]
    identities.close()


@pytest.mark.slow
def test_the_clocks_of_a_device_jump(run: Processes, bundle_path: Path, shards: list[Path]) -> None:
    data, clocks = run.folder / "run", Clocks(run.folder / "clocks")
    plan, port = run.folder / "plan.toml", free_port()
    plan.write_text(
        plan_text(bundle_path, data, round__goal=1, stop__rounds=10_000, local__lr=0.01)
    )
    (run.folder / "service.toml").write_text(f"port = {port}\n")
    coordinator = run.coordinator(plan)
    env = os.environ | Fault(run.folder / "none", clocks=clocks.path).env()
    device = run.device("a", f"ws://127.0.0.1:{port}", shards[0], env=env)
    for wall, monotonic in ((0.0, 0.0), *JUMPS):
        clocks.set(wall, monotonic)
        before = version_of(data)
        wait_for(lambda before=before: version_of(data) >= before + 2, "two rounds")  # type: ignore[misc]
        assert device.poll() is None, run.log("a")
    for process in (device, coordinator):
        process.terminate()
        assert process.wait(60) == 0
    assert "Traceback" not in run.log("a")

"""For tests: a run whose coordinator dies in its third round, as each version of fleetlearn writes
one. It uses only names that all of them have.

    python tests/support/earlier_run.py FOLDER       # with PYTHONPATH: the packages of that version

``earlier_schemas.py`` does that for all versions.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from fleetlearn_coordinator import Plan
from peers import fleet, plan_text, write_test_bundle

SIZE, DEVICES, ROUNDS = 64, ("a", "b", "c"), 3
SETTINGS: dict[str, Any] = {
    "round__goal": 3, "round__minimum": 3, "round__gather": 10.0, "round__grace": 30.0,
    "server__optimizer": "adam", "server__lr": 0.05, "stop__rounds": ROUNDS,
}  # fmt: skip


def plan_of(folder: Path) -> Plan:
    """The run's plan; its bundle and its data directory lie in the folder."""
    text = plan_text(Path("test.bundle"), Path("run"), **SETTINGS)
    return Plan.parse(text, folder)


def update_of(round: int, device: str) -> Any:
    random = np.random.default_rng([round, *device.encode()])
    return random.normal(size=SIZE).astype(np.float32)


async def report(peer: Any, round: int) -> None:
    """Take the task of a round, and upload the device's update of it."""
    task = await peer.task()
    assert task.round == round, task
    answer = await peer.upload(task, update_of(round, peer.name))
    assert type(answer).__name__ == "Accepted", answer


async def run(folder: Path, last: int) -> None:
    """Do all rounds before the last; in that one the first two devices report, and then this
    process dies."""
    async with fleet(plan_of(folder)) as (_, join):
        peers = [await join(name) for name in DEVICES]
        for round in range(1, last):
            for peer in peers:
                await report(peer, round)
        for peer in peers[:2]:
            await report(peer, last)
        await peers[2].task()
        os._exit(9)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    write_test_bundle(folder / "test.bundle", SIZE)
    asyncio.run(run(folder, ROUNDS))

"""A server and the simulator with rounds that want a share of the devices, in a fleet that grows
and shrinks: each round has the same goal and the same devices, and the same model is made, bit for
bit.

Devices that speak the protocol by hand, and train as a device does, come, report and leave at a
real server in the simulator's order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fleetlearn_coordinator import read_model, read_status
from fleetlearn_coordinator.rounds.engine import Engine
from fleetlearn_coordinator.service.status import read_tasks
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.messages import Accepted
from fleetlearn_simulator.data.factory import source_of
from fleetlearn_simulator.fleet.device_names import device_of, name_of
from fleetlearn_simulator.scenario.scenario import Scenario
from fleetlearn_simulator.training.backend import Job, PerDevice, RoundInputs, local_settings
from line_bundle import write_line_bundle
from peers import Peer, fleet
from virtual import Driven, drive, make_scenario

SIZE, ROUNDS, LONG = 12, 7, 1e6
STEP = 1000.0
"""Seconds that a task takes, and so a round."""
COMES = [0.0] * 4 + [100.0] + [1100.0] * 2 + [2100.0] * 5
"""When each device comes, in seconds."""
LEAVES, AT = 6, (4500.0, 5500.0)
"""How many devices leave at each of these times."""
Script = list[tuple[str, str]]


def scenario_of(folder: Path, leaves: Sequence[float]) -> Scenario:
    rows = (f"{device},{COMES[device]},{leaves[device]}\n" for device in range(SIZE))
    (folder / "trace.csv").write_text("device,on,off\n" + "".join(rows))
    return make_scenario(
        folder,
        folder / "line.bundle",
        SIZE,
        availability={"kind": "trace", "file": str(folder / "trace.csv")},
        plan__local__batch_size=0,  # one step
        compute={"step_seconds": STEP},
        plan__round={
            "goal": 5, "goal_share": 0.5, "minimum": 2, "over_selection": 1.0, "gather": 0.0,
            "deadline": 1e5,
        },
        plan__stop__rounds=ROUNDS,
    )  # fmt: skip


def leavers(folder: Path) -> list[float]:
    """Return when each device leaves, such that none has a task then."""
    leaves = [LONG] * SIZE
    for at in AT:
        events = drive(scenario_of(folder, leaves)).events
        begun = {row["device"] for row in events
                 if row["event"] == "assigned" and at - STEP < row["time"] <= at}  # fmt: skip
        here = [device for device in range(SIZE) if leaves[device] > at and device not in begun]
        for device in here[: LEAVES // len(AT)]:
            leaves[device] = at
    return leaves


def noted(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> tuple[Driven, Script]:
    """Run the scenario; return with it what happened to devices, in order."""
    script: Script = []

    def note(name: str) -> None:
        original: Callable[..., Any] = getattr(Engine, name)

        def noting(engine: Engine, devices: Any, *more: Any) -> Any:
            names = [devices] if isinstance(devices, str) else devices
            script.extend((name, device) for device in names)
            return original(engine, devices, *more)

        changed.setattr(Engine, name, noting)

    with monkeypatch.context() as changed:
        for name in ("check_in", "disconnect", "count_reports"):
            note(name)
        return drive(scenario), script


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


def test_server_and_simulator_want_the_same_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_line_bundle(tmp_path / "line.bundle")
    scenario = scenario_of(tmp_path, leavers(tmp_path))
    simulated, script = noted(scenario, monkeypatch)
    goals = [row["goal"] for row in simulated.rounds]
    assert len(set(goals)) >= 3
    assert max(goals) not in (goals[0], goals[-1]), "the fleet grows, and then shrinks"

    plan = msgspec.structs.replace(scenario.plan, data_dir=tmp_path / "run")
    bundle = open_bundle(plan.bundle)
    trainer = PerDevice(bundle, local_settings(plan, bundle), source_of(scenario, bundle))

    async def play() -> None:
        peers: dict[str, Peer] = {}
        async with fleet(plan, heartbeat=600.0, limits={"device_check_ins": 1e6}) as (server, join):
            for what, device in script:
                match what:
                    case "check_in":
                        peers[device] = await join(device)
                    case "disconnect":
                        await peers.pop(device).connection.close()
                        await until(lambda name=device: name not in server.host.devices)  # type: ignore[misc]
                    case "count_reports":
                        await report(peers[device])

    async def report(peer: Peer) -> None:
        task = await peer.task()
        model = np.frombuffer(await peer.fetch(task.vectors[0].sha256), np.float32)
        job = Job(device_of(peer.name), task.seed, None)
        trained = trainer.train(RoundInputs(model), [job])
        more = {"examples": int(trained.examples[0]), "evaluation": None}
        sent = trained.updates[0], trained.vectors["buffers"][0]
        assert isinstance(await peer.upload(task, *sent, **more), Accepted)

    asyncio.run(play())
    version, model = read_model(plan.data_dir)
    assert version == ROUNDS
    assert [row.summary["goal"] for row in read_status(plan.data_dir).rounds] == goals
    given = [
        {row["device"] for row in simulated.events
         if row["event"] == "assigned" and row["task"].startswith(f"s-{number}-")}
        for number in range(1, ROUNDS + 1)
    ]  # fmt: skip
    served = [
        {device_of(row.device) for row in read_tasks(plan.data_dir, number)[1]}
        for number in range(1, ROUNDS + 1)
    ]
    assert served == given
    assert model.tobytes() == simulated.model.tobytes()
    assert name_of(0) in {device for _, device in script}

"""A server and the simulator with pace steering: the same devices are sent away, and the same model
is made.

Devices that speak the protocol by hand, and train as a device does, check in and report to a real
server in the simulator's order. When they are to come back is not compared: the server's clock is
not the simulator's.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fleetlearn_coordinator import read_model, read_status
from fleetlearn_coordinator.service.status import read_tasks
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.messages import Accepted, ComeBack
from fleetlearn_simulator.data.factory import source_of
from fleetlearn_simulator.fleet.device_names import device_of, name_of
from fleetlearn_simulator.training.backend import Job, PerDevice, RoundInputs, local_settings
from line_bundle import write_line_bundle
from peers import BUFFERED, Peer, fleet
from virtual import make_fleet, make_scenario

SIZE, CONNECTED, ROUNDS = 12, 6, 12
PARTICIPATION: dict[str, dict[str, Any]] = {
    "synchronous": {
        "plan__round": {
            "goal": 3,
            "minimum": 3,
            "over_selection": 1.0,
            "gather": 0.0,
            "deadline": 1e5,
        },
    },
    "asynchronous": {
        "plan__recipe": BUFFERED["recipe"],
        "plan__round": {"goal": 3, "concurrency": 4, "deadline": 1e5},
    },
}


@pytest.mark.parametrize(
    "participation",
    [pytest.param("synchronous", marks=pytest.mark.slow), "asynchronous"],  # 4,840 check-ins
)
def test_server_and_simulator_send_the_same_devices_away(
    tmp_path: Path, participation: str
) -> None:
    write_line_bundle(tmp_path / "line.bundle")
    scenario = make_scenario(
        tmp_path, tmp_path / "line.bundle", SIZE, **PARTICIPATION[participation],
        plan__stop__rounds=ROUNDS, plan__pace={"connected": CONNECTED, "longest": 600.0},
        compute={"step_seconds": 40.0}, tiers={"device": {"latency": 0.0, "spread": 1.0}},
    )  # fmt: skip
    script: list[tuple[str, int]] = []
    """What happens to devices, in order."""

    def note(rows: Any) -> None:
        events = map(msgspec.to_builtins, rows)
        script.extend((row["event"], row["device"]) for row in events if row["event"] == "accepted")

    simulated = make_fleet(scenario, note)
    assert simulated.returns is not None
    send_away = simulated.returns.send_away

    def sent_away(device: int, after: float, leaves: float) -> None:
        script.append(("sent away", device))
        send_away(device, after, leaves)

    simulated.returns.checked_in = lambda device: script.append(("checks in", device))
    simulated.returns.send_away = sent_away  # type: ignore[method-assign]
    while simulated.advance():
        pass
    kinds = [kind for kind, _ in script]
    assert kinds.count("sent away") >= 8
    assert kinds.count("checks in") > SIZE, "some came back"

    plan = msgspec.structs.replace(scenario.plan, data_dir=tmp_path / "run")
    bundle = open_bundle(plan.bundle)
    trainer = PerDevice(bundle, local_settings(plan, bundle), source_of(scenario, bundle))

    async def play() -> None:
        peers: dict[int, Peer] = {}
        async with fleet(plan, heartbeat=600.0, limits={"device_check_ins": 1e6}) as (_, join):
            for kind, device in script:
                match kind:
                    case "checks in":
                        peers[device] = await join(name_of(device))
                    case "sent away":
                        peer = peers.pop(device)
                        await peer.expect(ComeBack)
                        await peer.connection.close()
                    case "accepted":
                        task = await peers[device].task()
                        model = np.frombuffer(
                            await peers[device].fetch(task.vectors[0].sha256), np.float32
                        )
                        trained = trainer.train(RoundInputs(model), [Job(device, task.seed, None)])
                        more = {"examples": int(trained.examples[0]), "evaluation": None}
                        sent = trained.updates[0], trained.vectors["buffers"][0]
                        assert isinstance(await peers[device].upload(task, *sent, **more), Accepted)

    asyncio.run(play())
    version, model = read_model(plan.data_dir)
    assert version == ROUNDS
    rows = [row for row in read_status(plan.data_dir).rounds if row.summary]
    counted = [
        [
            device_of(task.device)
            for task in read_tasks(plan.data_dir, row.number)[1]
            if task.state == "accepted"
        ]
        for row in rows
    ]
    accepted = [device for kind, device in script if kind == "accepted"]
    assert [sorted(devices) for devices in counted] == [
        sorted(accepted[begin : begin + 3]) for begin in range(0, 3 * ROUNDS, 3)
    ]
    assert model.tobytes() == simulated.model.tobytes()

"""A server and the simulator, where SCAFFOLD's updates may be stale: the same model and the same
c_k, bit for bit.

The simulator decides in which order devices finish. Then devices that speak the protocol by hand do
the same on a real server, which is stopped and started again in between. They keep the vectors of
the task that they are told to go on from, and of the one that they do.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fleetlearn_coordinator import read_model
from fleetlearn_device.runtimes.open_runtime import open_runtime
from fleetlearn_device.training.algorithms import Inputs, TaskSettings, run_algorithm
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.encodings import FLOAT32
from fleetlearn_protocol.frames import pack_chunks
from fleetlearn_protocol.messages import Accepted, Grant, Task, Uploaded
from fleetlearn_protocol.vector import Vector
from fleetlearn_simulator.fleet.device_names import name_of
from fleetlearn_simulator.training.kept_rows import NO_ROW
from peers import Peer, fleet, report_of
from quadratics import TWO, Quadratic, quadratics_bundle, quadratics_scenario
from virtual import drive

DEVICES = (
    *TWO,
    Quadratic((2.0, 1.0), (4.0, -3.0), 3),
    Quadratic((0.5, 3.0), (1.0, 8.0), 2),
    Quadratic((1, 1), (0, 9)),
)
RULES: dict[str, dict[str, Any]] = {
    "asynchronous": {
        "plan__recipe": "fedbuff",
        "plan__round": {"goal": 3, "concurrency": 5, "deadline": 1000.0},
    },
    "carried": {
        "plan__recipe": "scaffold",
        "plan__round": {
            "goal": 3,
            "over_selection": 2.0,
            "gather": 5.0,
            "deadline": 1000.0,
            "late": "carry",
        },
    },
}


class ByHand:
    """Devices that train as real ones do."""

    def __init__(self, bundle: Path) -> None:
        self.bundle = open_bundle(bundle)
        self.runtime = open_runtime(self.bundle, "onnx")
        self.tied: dict[int, dict[str, Vector]] = {device: {} for device in range(len(DEVICES))}
        """Device -> task -> the c_k that it made."""
        self.went_on = 0
        """Tasks that went on from vectors of a task of the open round, or of an earlier one."""

    async def do(self, peer: Peer, task: Task, device: int) -> None:
        """Do a task, and report it. The device keeps what it went on from, and what it made."""
        vectors = {
            row.name: np.frombuffer(await peer.fetch(row.sha256), np.float32)
            for row in task.vectors
        }
        model, own = vectors.pop("model"), self.tied[device]
        self.tied[device] = {} if task.kept is None else {task.kept: own[task.kept]}
        self.went_on += task.kept is not None
        kept = {} if task.kept is None else {"control": own[task.kept]}
        given = Inputs(model, None, vectors, kept)
        settings = TaskSettings(task.hyper, task.epochs, task.batch_size, task.seed)
        outcome = run_algorithm(
            task.algorithm, self.runtime, self.bundle, DEVICES[device].data, given, settings
        )
        self.tied[device][task.task] = outcome.tied["control"]

        parts, result = [outcome.parts[name] for name in ("update", "control")], outcome.result
        described = [
            FLOAT32.part(name, part.tobytes()) for name, part in zip(task.parts, parts, strict=True)
        ]
        report = report_of(
            task,
            parts[0],
            examples=result.examples,
            steps=result.steps,
            loss=result.loss,
            evaluation=None,
        )
        await peer.send(msgspec.structs.replace(report, parts=tuple(described)))
        grant: Grant = await peer.expect(Grant)
        for place, part in enumerate(parts):
            for chunk in pack_chunks(
                grant.transfer, bytes(place * part.nbytes) + part.tobytes(), place * part.nbytes
            ):
                await peer.send(chunk)
        await peer.send(Uploaded(task.task))
        await peer.expect(Accepted)


@pytest.mark.parametrize("rule", RULES)
def test_server_and_simulator_keep_the_same(tmp_path: Path, rule: str) -> None:
    bundle = quadratics_bundle(tmp_path / "quadratics.bundle")
    scenario = quadratics_scenario(
        tmp_path,
        bundle.path,
        DEVICES,
        **RULES[rule],
        plan__stop__rounds=8,
        plan__server={"devices": len(DEVICES)},
        plan__local={
            "epochs": 4,
            "batch_size": 1,
            "lr": 0.05,
            "evaluate": False,
            "algorithm": "scaffold",
        },
        tiers={"device": {"latency": 0.0, "download": 1e12, "upload": 1e12, "spread": 1.0}},
    )
    simulated = drive(scenario)
    order = [row["device"] for row in simulated.events if row["event"] == "accepted"]
    plan, by_hand = (
        msgspec.structs.replace(scenario.plan, data_dir=tmp_path / "run"),
        ByHand(bundle.path),
    )

    async def play() -> None:
        rest = list(order)
        while rest:
            part, rest = rest[:7], rest[7:]  # then the server is stopped, and another one goes on
            async with AsyncExitStack() as held:
                _, join = await held.enter_async_context(fleet(plan))
                peers = {
                    device: await join(name_of(device), check_in=False)
                    for device in range(len(DEVICES))
                }
                for peer in peers.values():
                    await peer.check_in(algorithms=("scaffold",))
                for device in part:
                    await by_hand.do(peers[device], await peers[device].task(), device)

    asyncio.run(play())
    version, model = read_model(plan.data_dir)
    assert version == len(simulated.rounds) == 8
    assert max(row["staleness"]["max"] for row in simulated.rounds) >= 1
    assert by_hand.went_on > len(order) / 2
    assert model.tobytes() == simulated.model.tobytes()
    kept = simulated.fleet.coordinator.kept
    assert kept is not None
    assert kept.tied is not None
    for device, row in enumerate(kept.tied.of(range(len(DEVICES)))):
        own = [*by_hand.tied[device].values()]
        assert (row == NO_ROW) == (not own)
        assert not own or kept.tied.file.read(row).tobytes() == own[-1].tobytes()

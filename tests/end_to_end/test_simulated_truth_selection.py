"""A server and the simulator with rules on selection: the same devices are chosen in each round,
and the same model is made, bit for bit.

Devices that speak the protocol by hand, and train as a device does, report to a real server in the
simulator's order.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fleetlearn_coordinator import read_model, read_status
from fleetlearn_coordinator.rounds.selection_rules import Stated
from fleetlearn_coordinator.service.status import read_tasks
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.messages import PROTOCOL_VERSION, Accepted, CheckIn, Welcome
from fleetlearn_simulator.data.factory import source_of
from fleetlearn_simulator.fleet.device_names import device_of, name_of
from fleetlearn_simulator.population.statements import statements_of
from fleetlearn_simulator.training.backend import Job, PerDevice, RoundInputs, local_settings
from line_bundle import write_line_bundle
from peers import Peer, fleet
from virtual import drive, make_scenario

SIZE, GOAL, ROUNDS = 8, 3, 6
SELECTIONS: dict[str, Any] = {
    "weights, quotas, rest": {
        "least_examples": 20,
        "weighting": "examples",
        "tier_quotas": {"pi": 0.67},
        "once_in": 2,
    },
    "power-of-choice": {"strategy": "power-of-choice", "tag_quotas": {"roof": 0.67}},
    # So long that no task is too slow: a real server's seconds are not the simulator's.
    "oort": {
        "strategy": "oort",
        "oort": {"preferred_seconds": 1e6, "exploration": 0.5, "window": 1},
    },
}


def check_in(device: int, stated: Stated) -> CheckIn:
    """What the device says on the wire."""
    tags = [label.partition(":")[2] for label in sorted(stated.labels) if label.startswith("tag:")]
    (tier,) = (label.partition(":")[2] for label in stated.labels if label.startswith("tier:"))
    return CheckIn(
        1,
        name_of(device),
        stated.examples,
        f"{stated.runtime} 1.31.1",
        tags=tuple(tags),
        tier=tier,
        newest_protocol=PROTOCOL_VERSION,
    )


@pytest.mark.parametrize("selection", SELECTIONS)
def test_server_and_simulator_choose_the_same_devices(tmp_path: Path, selection: str) -> None:
    write_line_bundle(tmp_path / "line.bundle")
    scenario = make_scenario(
        tmp_path,
        tmp_path / "line.bundle",
        SIZE,
        plan__round={
            "goal": GOAL,
            "minimum": GOAL,
            "over_selection": 1.0,
            "gather": 0.0,
            "deadline": 1e5,
        },
        plan__stop__rounds=ROUNDS,
        plan__selection=SELECTIONS[selection],
        tiers={
            "pi": {"latency": 0.0, "spread": 1.0},
            "phone": {"share": 0.7, "latency": 0.0, "tags": ["roof"]},
        },
    )
    simulated = drive(scenario)
    order = [row["device"] for row in simulated.events if row["event"] == "accepted"]
    given = [
        (int(row["task"].split("-")[1]), row["device"])
        for row in simulated.events
        if row["event"] == "assigned"
    ]
    plan = msgspec.structs.replace(scenario.plan, data_dir=tmp_path / "run")
    bundle, source = open_bundle(plan.bundle), source_of(scenario, open_bundle(plan.bundle))
    trainer = PerDevice(bundle, local_settings(plan, bundle), source)
    devices = np.arange(SIZE)
    stated = statements_of(scenario, devices, source.examples(devices))

    async def play() -> None:
        """With a new process after each round."""
        rest = list(order)
        while rest:
            part, rest = rest[:GOAL], rest[GOAL:]
            async with AsyncExitStack() as held:
                _, join = await held.enter_async_context(fleet(plan))
                peers: dict[int, Peer] = {}
                for device in arrivals:
                    peer = peers[device] = await join(name_of(device), check_in=False)
                    await peer.send(check_in(device, stated[device]))
                    welcome = await peer.receive()
                    assert isinstance(welcome, Welcome)
                    least = SELECTIONS[selection].get("least_examples", 1)
                    assert bool(welcome.ineligible) == (stated[device].examples < least)
                for device in part:
                    task = await peers[device].task()
                    model = np.frombuffer(
                        await peers[device].fetch(task.vectors[0].sha256), np.float32
                    )
                    trained = trainer.train(RoundInputs(model), [Job(device, task.seed, None)])
                    more = {
                        "examples": int(trained.examples[0]),
                        "loss": float(trained.loss[0]),
                        "metrics": {
                            name: float(column[0]) for name, column in trained.metrics.items()
                        },
                        "evaluation": None,
                    }
                    sent = trained.updates[0], trained.vectors["buffers"][0]
                    assert isinstance(await peers[device].upload(task, *sent, **more), Accepted)

    # A round opens with the device that makes it possible, so who comes first matters for the first
    # round alone.
    arrivals = [*simulated.fleet.connections.connected]
    asyncio.run(play())
    version, model = read_model(plan.data_dir)
    assert version == ROUNDS
    for number in range(1, ROUNDS + 1):
        _, tasks = read_tasks(plan.data_dir, number)
        assert {device_of(row.device) for row in tasks} == {
            device for round, device in given if round == number
        }
    rows = [row.summary for row in read_status(plan.data_dir).rounds]
    assert [row["train"] for row in rows] == [row["train"] for row in simulated.rounds]
    assert [row.get("selection") for row in rows] == [
        row.get("selection") for row in simulated.rounds
    ]
    assert model.tobytes() == simulated.model.tobytes()

"""A server and the simulator, where updates are stale, with the same outcomes in the same order:
the same model, bit for bit. Every aggregator is among them.

The simulator decides in which order devices finish. Then devices that speak the protocol by hand,
and train as a device does, do the same on a real server, which is stopped and started again in
between.
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
from fleetlearn_coordinator.aggregation.robust.rules import RULES as ROBUST
from fleetlearn_coordinator.plan.recipes import RECIPES
from fleetlearn_coordinator.rounds import participation
from fleetlearn_coordinator.service.server import RunServer
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.messages import Accepted, Task
from fleetlearn_protocol.vector import views
from fleetlearn_simulator.data.factory import source_of
from fleetlearn_simulator.fleet.device_names import name_of
from fleetlearn_simulator.training.backend import Job, PerDevice, RoundInputs, local_settings
from line_bundle import write_line_bundle
from peers import Peer, fleet
from safetensors.numpy import save_file
from virtual import drive, make_scenario

CARRY: dict[str, Any] = {
    "goal": 3,
    "over_selection": 2.0,
    "gather": 5.0,
    "deadline": 1000.0,
    "late": "carry",
}
RULES: dict[str, dict[str, Any]] = {
    "fedbuff": {"goal": 3, "concurrency": 5, "deadline": 1000.0},
    "fedasync": {"goal": 1, "concurrency": 5, "deadline": 1000.0},
    "fedavg": CARRY,
    **dict.fromkeys(ROBUST, CARRY),
    "fedbuff-inverse": {
        "goal": 3,
        "concurrency": 5,
        "deadline": 1000.0,
        "weighting": "inverse-participation",
    },
    "fedprox-adaptive": CARRY,
    "fedbuff-scheduled": {"goal": 3, "concurrency": 5, "deadline": 1000.0},
    "fednova": CARRY,
    "q-fedavg": CARRY,
    "fedbuff-weighed": {"goal": 3, "concurrency": 5, "deadline": 1000.0},
    "fedasync-clipped": {"goal": 1, "concurrency": 5, "deadline": 1000.0},
    "median-clipped": CARRY,
}
CLIP: dict[str, Any] = {"max_norm": 0.1, "norm_quantile": 0.5}
WEIGHED: dict[str, dict[str, Any]] = {
    "fedbuff-weighed": {**CLIP, "q": 2.0},
    "fedasync-clipped": CLIP,
    "median-clipped": CLIP,
    "fednova": {**CLIP, "norm_quantile": 0.8},
}
"""Their [aggregation]."""
COSINE = {"kind": "cosine", "warm_up": 2, "start": 0.5}
"""Of the run whose learning rate changes. It begins with weights of a file, too."""
BY_STEP = {"kind": "one-cycle", "warm_up": 4, "steps_per_round": 3}
"""Of the same run: within each task too, whose first step is that of its version."""


@pytest.mark.parametrize(
    ("recipe", "together"), [*((recipe, 100) for recipe in RULES), ("fedbuff", 2)]
)
def test_server_and_simulator_make_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, together: int
) -> None:
    """``together``: with 2, two free slots are given together, as in a fleet of hundreds."""
    monkeypatch.setattr(participation, "TOGETHER", together)
    line = write_line_bundle(tmp_path / "line.bundle", references=["anchor"], optimizer="sgd")
    weights, begun = tmp_path / "weights.safetensors", 0.25 - line.parameters()
    save_file(
        {name: each.copy() for name, each in views(begun, line.manifest.travelling).items()},
        weights,
    )
    scenario = make_scenario(
        tmp_path,
        tmp_path / "line.bundle",
        5,
        plan__recipe=recipe if recipe in RECIPES else recipe.partition("-")[0],
        plan__round=RULES[recipe],
        plan__aggregation=WEIGHED.get(recipe, {}),
        plan__local__evaluate=True,
        **(
            {
                "plan__local__schedule": COSINE,
                "plan__local__step_schedule": BY_STEP,
                "plan__initial": str(weights),
            }
            if recipe.endswith("scheduled")
            else {}
        ),
        plan__stop__rounds=18 // RULES[recipe]["goal"],
        plan__server={} if recipe.startswith("fedasync") else {"optimizer": "adam", "lr": 0.05},
        tiers={"device": {"latency": 0.0, "download": 1e12, "upload": 1e12, "spread": 1.0}},
    )
    simulated = drive(scenario)
    order = [row["device"] for row in simulated.events if row["event"] == "accepted"]
    plan = msgspec.structs.replace(scenario.plan, data_dir=tmp_path / "run")
    bundle = open_bundle(plan.bundle)
    trainer = PerDevice(bundle, local_settings(plan, bundle), source_of(scenario, bundle))

    rates, firsts = set[float](), set[int | None]()

    async def do(
        coordinator: RunServer, peers: dict[int, Peer], tasks: dict[int, Task], device: int
    ) -> None:
        """The device finishes its task."""
        peer = peers[device]
        if device not in tasks:
            tasks[device] = await peer.task()
        task = tasks.pop(device)
        rates.add(task.hyper["lr"])
        firsts.add(None if task.schedule is None else task.schedule.first)
        model = np.frombuffer(await peer.fetch(task.vectors[0].sha256), np.float32)
        trained = trainer.train(
            RoundInputs(model, hyper=task.hyper, schedule=task.schedule),
            [Job(device, task.seed, None)],
        )
        more = {
            "examples": int(trained.examples[0]),
            "loss": float(trained.loss[0]),
            "metrics": {name: float(column[0]) for name, column in trained.metrics.items()},
            "steps": int(trained.steps[0]),
            "evaluation": trainer.evaluate(RoundInputs(model), [Job(device)])[0],
        }
        assert isinstance(
            await peer.upload(task, trained.updates[0], trained.vectors["buffers"][0], **more),
            Accepted,
        )

    async def play() -> None:
        rest = list(order)
        while rest:
            part, rest = rest[:7], rest[7:]  # then the server is stopped, and another one goes on
            async with AsyncExitStack() as held:
                coordinator, join = await held.enter_async_context(fleet(plan))
                peers, tasks = (
                    {device: await join(name_of(device)) for device in range(5)},
                    dict[int, Task](),
                )
                for device in part:
                    await do(coordinator, peers, tasks, device)
            weights.unlink(missing_ok=True)  # read where the run began, and never again

    asyncio.run(play())
    version, model = read_model(plan.data_dir)
    assert version == len(simulated.rounds)
    real = [row.summary for row in read_status(plan.data_dir).rounds]
    assert [row["staleness"] for row in real] == [row["staleness"] for row in simulated.rounds]
    assert max(row["staleness"]["max"] for row in real) >= 1
    for key in ("norm", "weighing", "mu"):
        assert [row.get(key) for row in real] == [row.get(key) for row in simulated.rounds]
    if recipe == "fedprox-adaptive":
        assert len({row["mu"]["used"] for row in real}) > 1
    assert len(rates) == (6 if recipe.endswith("scheduled") else 1)
    scheduled = {0, 3, 6, 9, 12, 15} if recipe.endswith("scheduled") else {None}
    assert firsts == scheduled
    if recipe in WEIGHED:
        assert sum(row["norm"]["clipped"] for row in real) >= 1
    assert [row["train"] for row in real] == [row["train"] for row in simulated.rounds]
    assert model.tobytes() == simulated.model.tobytes()
    if recipe.endswith("scheduled"):
        _, first = read_model(plan.data_dir, 0)
        assert first.tobytes() == begun.tobytes()

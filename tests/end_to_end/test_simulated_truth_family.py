"""A family of three architectures as real processes and in the simulator, with the same devices:
the same models, bit for bit, and the same numbers of each member."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distilling import distillation_bundle
from fleetlearn_coordinator import read_model, read_status
from fleetlearn_simulator import Options, Outcome, simulate
from fleetlearn_simulator.fleet.device_names import name_of
from fleetlearn_simulator.population.members import members_of
from fleetlearn_simulator.results.run_folder import ROUNDS, read_rows
from fleetlearn_simulator.scenario.scenario import Scenario
from peers import plan_text
from processes import Processes, free_port, service_file
from simulated_shards import SHARDS
from torch import nn

from examples import digits

MEMBERS = ("cnn", "mlp", "linear")
SIZE, TURNS = 6, 3
SCENARIO = """
name = "truth"
seed = 10
plan = "plan.toml"
population = { size = 6, connected = 6 }
data = { kind = "function", function = "shards:make" }
compute = { step_seconds = { cnn = 1.0, mlp = 0.5, linear = 0.25 } }
[tiers.gateway]
tags = ["cnn"]
[tiers.phone]
tags = ["mlp"]
[tiers.sensor]
"""
SETTINGS: dict[str, Any] = {
    "local__lr": 0.1,
    "local__epochs": 2,
    "local__batch_size": 16,
    "local__evaluate": True,
    "round__goal": SIZE,
    "round__minimum": SIZE,
    "round__grace": 30.0,
    "round__gather": 60.0,
    "round__deadline": 600.0,
    "server__optimizer": "adam",
    "server__lr": 0.05,
    "stop__rounds": TURNS,
    "encoding__up": "int8",
    "encoding__down": "float16",
}


def distillation_bundles(folder: Path) -> dict[str, Path]:
    """What each member of ``family_bundles`` learns with."""
    x = torch.from_numpy(digits.data().x_test[:4].reshape(-1, 64))
    convolution = (nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    models: dict[str, nn.Module] = {
        "cnn": nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *convolution, nn.Linear(64, 10)),
        "mlp": nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)),
        "linear": nn.Linear(64, 10),
    }
    return {
        name: distillation_bundle(model, x, folder / f"{name}-distil.bundle").path
        for name, model in models.items()
    }


def family_of(bundles: Mapping[str, Path], distilled: Mapping[str, Path]) -> str:
    lines = []
    for name in MEMBERS:
        lines += [f"[family.{name}]", f'bundle = "{bundles[name]}"']
        lines += [f'distil = "{distilled[name]}"'] if distilled else []
        lines += [] if name == "linear" else [f'tags = ["{name}"]']
    return "\n".join(lines)


def simulated(folder: Path, shards: list[Path]) -> tuple[Outcome, list[str]]:
    """The run in the simulator, and the member of each of its devices."""
    for device, shard in enumerate(shards[:SIZE]):
        (folder / f"{device}.npz").write_bytes(shard.read_bytes())
    (folder / "shards.py").write_text(SHARDS)
    (folder / "scenario.toml").write_text(SCENARIO)
    scenario = Scenario.load(folder / "scenario.toml")
    numbers = members_of(scenario, np.arange(SIZE)).tolist()
    assert {*numbers} == {0, 1, 2}, "each member has a device"
    outcome = simulate(scenario, folder / "simulated", Options(backend="bundle", workers=1))
    assert outcome is not None
    return outcome, [MEMBERS[number] for number in numbers]


@pytest.mark.slow
@pytest.mark.parametrize("distil", [False, True], ids=["averaged", "distilled"])
def test_processes_and_simulator_make_the_same_family(
    run: Processes,
    family_bundles: Mapping[str, Path],
    shards: list[Path],
    distil: bool,
) -> None:
    plan, data_dir, port = run.folder / "plan.toml", run.folder / "run", free_port()
    distilled, settings = dict[str, Path](), dict(SETTINGS)
    if distil:
        distilled = distillation_bundles(run.folder)
        np.savez(run.folder / "unlabelled.npz", x=np.load(shards[SIZE])["x"])
        settings |= {"distil__data": str(run.folder / "unlabelled.npz"), "distil__steps": 10}
    text = plan_text(family_bundles["cnn"], data_dir, **settings)
    plan.write_text(f"seed = 10\n{text}\n{family_of(family_bundles, distilled)}\n")
    service_file(plan, port)
    outcome, members = simulated(run.folder, shards)

    coordinator = run.coordinator(plan)
    for device, member in enumerate(members):
        url, options = f"ws://127.0.0.1:{port}", ("--runtime", "onnx", "--tag", member)
        run.device(name_of(device), url, shards[device], options=options)
    assert coordinator.wait(240) == 0, run.log("coordinator")
    version, model = read_model(data_dir)
    assert version == TURNS
    assert model.tobytes() == outcome.model.tobytes()
    rows = read_rows(outcome.folder, ROUNDS)
    for real, row in zip(read_status(data_dir).rounds, rows, strict=True):
        for name, own in real.summary["members"].items():
            simulated_own = row["members"][name]
            # Devices evaluate in other batches than the simulator.
            for key in ("evaluation", "metrics"):
                assert own.pop(key) == pytest.approx(simulated_own[key], rel=1e-6)
            assert own == {key: simulated_own[key] for key in own}
        assert ("distilled" in real.summary) == distil
        if distil:
            assert real.summary["distilled"] == row["distilled"]

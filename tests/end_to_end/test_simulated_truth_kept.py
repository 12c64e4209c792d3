"""The same fleet, whose devices keep something, as real processes and in the simulator: the same
models and the same kept states, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bundle_cache import cached_export
from fleetlearn_coordinator import read_model, read_status
from fleetlearn_export import LocalStep
from fleetlearn_protocol import Bundle
from fleetlearn_simulator import Options, simulate
from fleetlearn_simulator.fleet.device_names import name_of
from fleetlearn_simulator.fleet.device_rows import DeviceRows
from fleetlearn_simulator.fleet.fleet import Fleet
from fleetlearn_simulator.results.run_folder import ROUNDS, read_rows
from fleetlearn_simulator.scenario.scenario import Scenario
from line_bundle import line_data, write_line_bundle
from peers import plan_text
from processes import Processes, free_port, service_file
from torch import nn

DEVICES = 3
SCENARIO = f"""
name = "truth"
plan = "plan.toml"
population = {{ size = {DEVICES}, connected = {DEVICES} }}
data = {{ kind = "function", function = "shards:make" }}
compute = {{ step_seconds = 1.0 }}
"""
SHARDS = """
from pathlib import Path
import numpy as np

def make(device, seed):
    with np.load(Path(__file__).with_name(f"{device}.npz")) as file:
        return {"x": file["x"], "y": file["y"]}
"""


def linear(folder: Path, name: str, **options: Any) -> Bundle:
    """A bundle of a model of two layers, whose loss is that of a line's data."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        module, x, y = (
            nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)),
            torch.randn(4, 3),
            torch.randn(4),
        )
    return cached_export(module, line_loss, (x, y), folder / f"{name}.bundle", **options).bundle


def line_loss(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((outputs.sum(1) - y) ** 2).mean()


def features(outputs: torch.Tensor) -> torch.Tensor:
    return outputs


def moon(folder: Path) -> Bundle:
    """Devices keep the model with which their last task ended."""
    return linear(folder, "moon", step=LocalStep(contrastive=True), features=features)


def all_kinds(folder: Path) -> Bundle:
    """Devices keep a personal parameter, a row of their optimizer's state, and their previous
    model."""
    return write_line_bundle(
        folder / "line.bundle", personal=True, state=True, references=["anchor", "previous"]
    )


def corrected(folder: Path) -> Bundle:
    return linear(folder, "corrected", step=LocalStep("sgd", proximal=True, correction=True))


def head(folder: Path) -> Bundle:
    return linear(folder, "head", step=LocalStep("momentum"), personal=["1.*"])


def proximal(folder: Path) -> Bundle:
    return linear(folder, "proximal", step=LocalStep("momentum", proximal=True))


COUNTED = {"server__devices": DEVICES, "round__weighting": "uniform"}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "moon": (moon, {"recipe": "moon", "local__mu": 0.5}),
    "personal, state and previous": (all_kinds, {}),
    "scaffold": (corrected, {"recipe": "scaffold"} | COUNTED),
    "scaffold-gradient": (
        corrected,
        {"recipe": "scaffold", "local__algorithm": "scaffold-gradient"} | COUNTED,
    ),
    "feddyn": (corrected, {"recipe": "feddyn", "local__mu": 0.1} | COUNTED),
    "ditto": (proximal, {"recipe": "ditto", "local__mu": 0.3, "local__personal_epochs": 3}),
    "pfedme": (
        proximal,
        {"recipe": "pfedme", "local__mu": 0.3, "local__hyper": {"outer_lr": 1.0}},
    ),
    "apfl": (corrected, {"recipe": "apfl"}),
    "ditto with clusters": (
        proximal,
        {
            "recipe": "ditto",
            "local__mu": 0.3,
            "clusters__count": 2,
            "round__weighting": "uniform",
        },
    ),
    "scaffold with top-k": (
        corrected,
        {"recipe": "scaffold", "encoding__up": "topk-0.25-int8"} | COUNTED,
    ),
    "moon with top-k": (moon, {"recipe": "moon", "local__mu": 0.5, "encoding__up": "topk-0.25"}),
    "fedrep": (head, {"recipe": "fedrep", "local__personal_epochs": 3}),
}


@pytest.mark.parametrize("case", CASES)
def test_processes_and_simulator_keep_the_same(run: Processes, case: str) -> None:
    """Three rounds of three devices: from the second on, they go on from what they kept."""
    make, settings = CASES[case]
    bundle = make(run.folder)
    port, data_dir, plan = free_port(), run.folder / "run", run.folder / "plan.toml"
    plan.write_text(
        plan_text(
            bundle.path,
            data_dir,
            local__lr=0.02,
            local__epochs=2,
            local__batch_size=7,
            local__evaluate=True,
            round__goal=DEVICES,
            round__minimum=DEVICES,
            round__gather=30.0,
            round__grace=30.0,
            round__deadline=600.0,
            stop__rounds=3,
            **settings,
        )
    )
    service_file(plan, port)
    (run.folder / "shards.py").write_text(SHARDS)
    (run.folder / "scenario.toml").write_text(SCENARIO)
    run.coordinator(plan)
    for device in range(DEVICES):
        x, y = line_data(10 * (device + 2), seed=device)
        np.savez(run.folder / f"{device}.npz", x=x, y=y)
        run.device(name_of(device), f"ws://127.0.0.1:{port}", run.folder / f"{device}.npz")
    assert run.wait("coordinator", 120) == 0, run.log("coordinator")
    version, model = read_model(data_dir)
    assert version == 3
    real = [row.summary for row in read_status(data_dir).rounds]

    scenario = Scenario.load(run.folder / "scenario.toml")
    options = Options(backend="bundle", workers=1)
    fleets: list[Fleet] = []
    outcome = simulate(scenario, run.folder / "simulated", options, progress=fleets.append)
    assert outcome is not None
    assert outcome.model.tobytes() == model.tobytes()
    for row, summary in zip(read_rows(outcome.folder, ROUNDS), real, strict=True):
        assert row["train"] == summary["train"], "the devices' own losses, to the last bit"
        assert row["evaluation"] == pytest.approx(summary["evaluation"], rel=1e-6)

    kept = fleets[0].coordinator.kept
    assert kept is not None
    for device in range(DEVICES):
        state = run.folder / f"{name_of(device)}.state"
        assert row_of(kept.states, device) == b"".join(kept_states(state, bundle))
        tied = row_of(kept.tied, device) + row_of(kept.residuals, device)
        assert tied == tied_vectors(state, len(tied), bundle)


def row_of(rows: DeviceRows | None, device: int) -> bytes:
    """What a simulated device keeps."""
    return b"" if rows is None else rows.file.read(*rows.of([device])).tobytes()


def kept_states(state: Path, bundle: Bundle) -> Iterator[bytes]:
    """What a real device keeps: its kept state and its personal model, each before a CRC-32 of 4
    bytes."""
    for name in (bundle.sha256, f"{bundle.sha256}.personal"):
        path = state / "kept" / name
        yield path.read_bytes()[:-4] if path.exists() else b""


def tied_vectors(state: Path, size: int, bundle: Bundle) -> bytes:
    """The tied vectors of a real device's last task, in the file's first ``size`` bytes."""
    paths = [*(state / "tied").glob(f"{bundle.sha256}.*")]
    newest = max(paths, key=lambda path: path.stat().st_mtime_ns, default=None)
    return b"" if newest is None else newest.read_bytes()[:size]

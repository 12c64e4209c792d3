"""Ensemble distillation in a process beside the coordinator: what it makes of a round, and what
SIGKILL of either process costs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from distilling import distillation_bundle
from fleetlearn_coordinator import read_model, read_status
from fleetlearn_protocol.vector import digest
from peers import plan_text
from processes import DIGITS, Processes, free_port, processes, service_file, wait_for
from torch import nn

ROUNDS = 2
"""The model of the second is distilled."""
SLOWLY = 15_000
"""Steps of a distillation, enough for somebody to die in it."""


@pytest.fixture(scope="session")
def distillation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the distillation bundles of a linear model, ``bundle_path``'s, and of a small
    network, and scans without their labels."""
    folder = tmp_path_factory.mktemp("distillation")
    x = DIGITS["data"]().x_test.reshape(-1, 64)
    models = {"distil": nn.Linear(64, 10)}
    models["mlp"] = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    for name, model in models.items():
        distillation_bundle(model, torch.from_numpy(x[:4]), folder / f"{name}.bundle")
    np.savez(folder / "unlabelled.npz", x=x)
    return folder


def write_plan(folder: Path, bundle: Path, files: Path, **settings: Any) -> Path:
    plan = folder / "plan.toml"
    values = {
        "local__lr": 0.1,
        "round__goal": 2,
        "round__minimum": 2,
        "round__gather": 30.0,
        "round__grace": 30.0,
        "round__deadline": 600.0,
        "stop__rounds": ROUNDS,
        "distil__bundle": str(files / "distil.bundle"),
        "distil__data": str(files / "unlabelled.npz"),
        "distil__steps": 20,
        "distil__every": 2,
        "distil__batch_size": 64,
    }
    plan.write_text(plan_text(bundle, folder / "run", "feddf", **(values | settings)))
    return plan


def start(run: Processes, plan: Path, shards: list[Path]) -> None:
    port = free_port()
    service_file(plan, port)
    run.coordinator(plan)
    for name, shard in zip("ab", shards, strict=False):
        run.device(name, f"ws://127.0.0.1:{port}", shard)


def models_of(run: Processes) -> list[str]:
    assert run.wait("coordinator", 180) == 0, run.log("coordinator")
    folder = run.folder / "run"
    return [digest(read_model(folder, version)[1]) for version in range(1, ROUNDS + 1)]


def worker_of(run: Processes) -> psutil.Process:
    """The process that distils, once it computes."""
    found = list[psutil.Process]()

    def computes() -> bool:
        coordinator = run.running["coordinator"]
        assert coordinator.poll() is None, run.log("coordinator")
        found[:] = psutil.Process(coordinator.pid).children()
        return bool(found) and found[0].cpu_times().user > 0.5

    wait_for(computes, "the process that distils")
    return found[0]


@pytest.mark.slow
def test_whoever_dies_the_models_are_the_same(
    tmp_path: Path, bundle_path: Path, shards: list[Path], distillation: Path, warm: Path
) -> None:
    """The kills are in the distillation, which takes seconds."""
    digests = list[list[str]]()
    for victim in ("nobody", "worker", "coordinator"):
        folder = tmp_path / victim
        folder.mkdir()
        plan = write_plan(folder, bundle_path, distillation, distil__steps=SLOWLY)
        with processes(folder, warm) as run:
            start(run, plan, shards)
            if victim != "nobody":
                worker = worker_of(run)
                if victim == "worker":
                    worker.kill()
                else:
                    run.kill("coordinator")
                    gone, _ = psutil.wait_procs([worker], 60)
                    assert gone, "its worker ends with it"
                    run.coordinator(plan)
            digests.append(models_of(run))
            if victim == "worker":
                assert "the process that distils died (1)" in run.log("coordinator")
    assert digests[0] == digests[1] == digests[2]


FAMILY = {"mlp": ("a", "b"), "linear": ("c", "d")}
"""Member -> its devices."""


def write_family(folder: Path, bundles: Mapping[str, Path], files: Path) -> Path:
    settings = {"round__goal": 4, "round__minimum": 4, "distil__steps": SLOWLY}
    plan = write_plan(folder, bundles["mlp"], files, **settings)
    text = plan.read_text().replace(f'bundle = "{bundles["mlp"]}"\n', "")
    text = text.replace(f'bundle = "{files / "distil.bundle"}"\n', "")
    for name, own in {"mlp": "mlp", "linear": "distil"}.items():
        text += f'\n[family.{name}]\nbundle = "{bundles[name]}"\n'
        text += f'distil = "{files / own}.bundle"\n' + f'tags = ["{name}"]\n' * (name == "mlp")
    plan.write_text(text)
    return plan


@pytest.mark.slow
def test_members_of_a_family_teach_each_other_whoever_dies(
    tmp_path: Path, family_bundles: Mapping[str, Path], shards: list[Path], distillation: Path,
    warm: Path,
) -> None:  # fmt: skip
    digests = list[list[str]]()
    for victim in ("nobody", "coordinator"):
        folder = tmp_path / victim
        folder.mkdir()
        plan = write_family(folder, family_bundles, distillation)
        service_file(plan, port := free_port())
        with processes(folder, warm) as run:
            run.coordinator(plan)
            names = [(member, name) for member, pair in FAMILY.items() for name in pair]
            for (member, name), shard in zip(names, shards, strict=False):
                options = ["--tag", member]
                run.device(name, f"ws://127.0.0.1:{port}", shard, options=options)
            if victim == "coordinator":
                worker_of(run)
                run.kill("coordinator")
                run.coordinator(plan)
            digests.append(models_of(run))
        told = read_status(folder / "run").rounds[-1].summary["distilled"]
        assert told["teachers"] == 4
        assert {*told["members"]} == {*FAMILY}
        assert all(own["loss_after"] < own["loss_before"] for own in told["members"].values())
    assert digests[0] == digests[1]


@pytest.mark.slow
def test_a_worker_that_always_dies_lets_the_run_wait(
    run: Processes, bundle_path: Path, shards: list[Path], distillation: Path
) -> None:
    plan = write_plan(run.folder, bundle_path, distillation, distil__steps=SLOWLY)
    start(run, plan, shards)
    for _ in range(3):
        worker_of(run).kill()
        time.sleep(0.5)  # it takes that long to be gone
    text = "round 2 waits for its distillation: 3 processes died"
    wait_for(lambda: text in run.log("coordinator"), "the third death to be told")
    status = read_status(run.folder / "run")
    assert status.version == 1
    models_of(run)
    assert read_status(run.folder / "run").version == ROUNDS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"x": np.zeros((3, 5))}, "distil.data: {}: array x has shape [3, 5]; expected [n, 64]"),
        ({"z": np.zeros((3, 64))}, "distil.data: {} has no array x; the model takes x float32"),
        (
            {"x": np.full((3, 64), np.nan)},
            "distil.data: {}: array x has values that are not finite",
        ),
    ],
)
def test_examples_that_do_not_fit_are_refused_by_name(
    run: Processes, bundle_path: Path, distillation: Path, arrays: dict[str, Any], text: str
) -> None:
    data = run.folder / "bad.npz"
    np.savez(data, **arrays)
    plan = write_plan(run.folder, bundle_path, distillation, distil__data=str(data))
    service_file(plan)
    run.coordinator(plan)
    assert run.wait("coordinator") != 0
    assert text.format(data) in run.log("coordinator").replace("\n", " ")


@pytest.mark.slow
def test_a_bundle_of_another_model_is_refused_by_name(
    run: Processes, own_bundle_path: Path, distillation: Path
) -> None:
    plan = write_plan(run.folder, own_bundle_path, distillation)
    service_file(plan)
    run.coordinator(plan)
    assert run.wait("coordinator") != 0
    assert "distil.bundle: bundle own has parameters that never leave" in run.log("coordinator")

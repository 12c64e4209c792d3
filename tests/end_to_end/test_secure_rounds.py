"""Rounds of masked updates with a helper, a coordinator and devices as processes: they make the
model of the same devices without [secure], whoever is away or dies meanwhile."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fleetlearn_coordinator import read_model, read_status
from peers import plan_text
from processes import Processes, free_port, processes, service_file
from secure_fleet import SecureFleet

pytestmark = pytest.mark.slow
NAMES = ["d0", "d1", "d2"]


def finished(fleet: SecureFleet) -> np.ndarray:
    """The model when all is over."""
    run = fleet.run
    for name in ("coordinator", *fleet.names):
        assert run.wait(name) == 0, run.log(name)
    version, model = read_model(fleet.data)
    assert version == 3
    return model


def plain_model(folder: Path, warm: Path, bundle: Path, shards: list[Path]) -> np.ndarray:
    """The model of the same devices without [secure]."""
    with processes(folder, warm) as run:
        port, plan = free_port(), folder / "plan.toml"
        settings: dict[str, object] = {
            "local__lr": 0.2,
            "round__goal": 3,
            "round__minimum": 3,
            "round__gather": 30.0,
            "round__grace": 30.0,
            "round__weighting": "uniform",
            "stop__rounds": 3,
        }
        plan.write_text(plan_text(bundle, folder / "run", "fedavg", **settings))  # type: ignore[arg-type]
        service_file(plan, port)
        run.coordinator(plan)
        for name, shard in zip(NAMES, shards, strict=False):
            run.device(name, f"ws://127.0.0.1:{port}", shard)
        assert run.wait("coordinator") == 0, run.log("coordinator")
        return read_model(folder / "run")[1]


def test_a_fleet_with_a_helper_makes_the_model_of_a_fleet_without(
    run: Processes,
    warm: Path,
    bundle_path: Path,
    shards: list[Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    fleet = SecureFleet(run, 3, NAMES)
    fleet.write_plan(bundle_path)
    fleet.start_helper()
    run.coordinator(fleet.plan)
    fleet.start_devices(shards)
    model = finished(fleet)
    plain = plain_model(tmp_path_factory.mktemp("plain"), warm, bundle_path, shards)
    assert np.abs(model - plain).max() < 1e-3
    rounds = read_status(fleet.data).rounds
    assert [row.outcome for row in rounds] == ["committed"] * 3

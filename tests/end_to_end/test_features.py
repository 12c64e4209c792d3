"""A fleet that trains a new head on a frozen model, with devices that keep features and devices
that do not."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
from features import examples, features_bundle
from fleetlearn_coordinator import read_model
from peers import plan_text
from processes import free_port, processes, service_file

DEVICES, ROUNDS, N = 3, 3, 60
KEPT = re.compile(rf"features of {N} of {N} examples are kept")


def trained_model(folder: Path, bundle: Path, *options: str) -> tuple[np.ndarray, list[str]]:
    """Run three rounds of three devices with these options. Returns the last model, and the
    devices' logs."""
    folder.mkdir()
    port, plan = free_port(), folder / "plan.toml"
    settings = {
        "round__goal": DEVICES,
        "round__minimum": DEVICES,
        "stop__rounds": ROUNDS,
        "local__lr": 0.2,
    }
    plan.write_text(
        plan_text(bundle, folder / "run", **settings, local__epochs=2, local__batch_size=8)
    )
    service_file(plan, port)
    with processes(folder) as run:
        run.coordinator(plan)
        names = [f"device-{number}" for number in range(DEVICES)]
        for number, name in enumerate(names):
            x, y = examples(N, seed=number)
            data = folder / f"{name}.npz"
            np.savez(data, x=x.numpy(), y=y.numpy())
            command = [
                sys.executable,
                "-m",
                "fleetlearn_device",
                "run",
                "--coordinator",
                f"ws://127.0.0.1:{port}",
            ]
            command += [
                "--data",
                str(data),
                "--state",
                str(folder / name),
                "--name",
                name,
                "--until-finished",
            ]
            run.start(name, *command, *options)
        assert run.wait("coordinator") == 0, run.log("coordinator")
        for name in names:
            assert run.wait(name) == 0, run.log(name)
        return read_model(folder / "run")[1], [run.log(name) for name in names]


def test_the_fleet_learns_the_same(tmp_path: Path) -> None:
    bundle = features_bundle(tmp_path / "features.bundle").bundle
    kept, logs = trained_model(tmp_path / "kept", bundle.path)
    assert [len(KEPT.findall(log)) for log in logs] == [ROUNDS] * DEVICES
    whole, others = trained_model(tmp_path / "whole", bundle.path, "--feature-cache", "0")
    assert not any("features" in log for log in others)
    assert np.abs(kept - bundle.parameters()).max() > 0.05
    np.testing.assert_allclose(kept, whole, atol=1e-5)

"""A private run in real processes: SIGKILL between noise and commit releases no second noising of
one sum."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fleetlearn_coordinator import read_model, read_status
from peers import plan_text
from processes import Processes, free_port, processes, service_file

CRASH = Path(__file__).with_name("crash_privacy.py")
DEVICES = 3
SETTINGS = {
    "round__goal": DEVICES,
    "round__minimum": DEVICES,
    "round__gather": 30.0,
    "round__grace": 30.0,
    "stop__rounds": 3,
    "local__lr": 0.1,
    "local__epochs": 1,
    "privacy__noise": 0.5,
    "privacy__delta": 1e-6,
    "privacy__population": 100,
    "privacy__clip": 0.2,
}


def train(
    run: Processes, bundle: Path, shards: list[Path], point: str = "nowhere", turn: int = 0
) -> bytes:
    """Three rounds of three devices, all of whom must report; the final model's bytes. ``point``:
    where the coordinator dies before it is started again, the ``turn``-th time."""
    port, data_dir = free_port(), run.folder / "run"
    path = run.folder / "plan.toml"
    path.write_text(plan_text(bundle, data_dir, "dp-fedavg", **SETTINGS))
    service_file(path, port)
    names = [f"device-{number}" for number in range(DEVICES)]
    for name, shard in zip(names, shards, strict=False):
        run.device(name, f"ws://127.0.0.1:{port}", shard)
    process = run.coordinator(path, CRASH, point, str(turn), path)
    if point != "nowhere":
        assert process.wait(60) == -9, f"it was to die as {point}: {run.log('coordinator')}"
        process = run.coordinator(path, CRASH, "nowhere", "0", path)
    assert process.wait(60) == 0, run.log("coordinator")
    version, model = read_model(data_dir)
    assert version == 3
    assert [row.outcome for row in read_status(data_dir).rounds] == ["committed"] * 3
    for name in names:
        assert run.wait(name) == 0, run.log(name)
    return model.tobytes()


@pytest.fixture(scope="session")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, warm: Path, bundle_path: Path, shards: list[Path]
) -> bytes:
    with processes(tmp_path_factory.mktemp("private"), warm) as run:
        return train(run, bundle_path, shards)


@pytest.mark.slow
@pytest.mark.parametrize("turn", [1, 2])
@pytest.mark.parametrize(
    "point", ["a release is made", "its model is in its place but not recorded"]
)
def test_the_coordinator_killed_between_noise_and_commit_makes_the_same_model(
    run: Processes,
    bundle_path: Path,
    shards: list[Path],
    undisturbed: bytes,
    point: str,
    turn: int,
) -> None:
    # A new run's first model is a file without a release.
    turn += point != "a release is made"
    assert train(run, bundle_path, shards, point, turn) == undisturbed
    assert np.isfinite(np.frombuffer(undisturbed, np.float32)).all()

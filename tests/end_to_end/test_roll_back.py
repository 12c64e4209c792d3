"""Rolling back with real processes: under way with devices connected, and killed between any two
writes."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path

import numpy as np
import pytest
from fleetlearn_coordinator import read_model, read_status
from peers import plan_text
from processes import Processes, free_port, processes, service_file, status_of, wait_for

CRASH = Path(__file__).with_name("crash_roll_back.py")
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(CRASH.parent))
    POINTS = list(runpy.run_path(str(CRASH))["POINTS"])
USUAL = POINTS[2], POINTS[5]
"""The points that the usual tests try. The slow tests try each."""


def write_plan(folder: Path, bundle: Path, port: int, **settings: object) -> Path:
    values: dict[str, object] = {
        "local__lr": 0.1,
        "local__epochs": 1,
        "round__goal": 4,
        "round__minimum": 4,
        "round__gather": 30.0,
        "round__grace": 30.0,
        "server__optimizer": "adam",
        "server__lr": 0.05,
    }
    path = folder / "plan.toml"
    path.write_text(plan_text(bundle, folder / "run", **(values | settings)))  # type: ignore[arg-type]
    service_file(path, port)
    return path


def start_devices(run: Processes, url: str, shards: list[Path]) -> list[str]:
    names = [f"device-{number}" for number in range(4)]
    for name, shard in zip(names, shards, strict=False):
        run.device(name, url, shard)
    return names


def trainings(run: Processes, name: str) -> int:
    """How often the device has said that it trains."""
    return run.log(name).count("training")


def test_a_run_is_rolled_back_with_its_devices_connected(
    run: Processes, bundle_path: Path, shards: list[Path]
) -> None:
    """Its devices train for long. After the roll back the coordinator is killed, and started
    again."""
    port = free_port()
    url = f"ws://127.0.0.1:{port}"
    plan, data_dir = write_plan(run.folder, bundle_path, port, stop__rounds=2), run.folder / "run"
    run.coordinator(plan)
    names = start_devices(run, url, shards)
    assert run.wait("coordinator") == 0, run.log("coordinator")
    for name in names:
        assert run.wait(name) == 0, run.log(name)
    earlier = read_model(data_dir, 1)[1]
    before = {name: trainings(run, name) for name in names}
    write_plan(
        run.folder,
        bundle_path,
        port,
        stop__rounds=4,
        local__epochs=100_000,
        local__time_budget=30.0,
    )
    run.coordinator(plan)
    start_devices(run, url, shards)
    wait_for(
        lambda: all(trainings(run, name) > before[name] for name in names), "every device to train"
    )
    before = {name: trainings(run, name) for name in names}
    run.command("roll-back", plan, "1")
    wait_for(lambda: (status_of(data_dir) or read_status(data_dir)).version == 3, "the roll back")
    np.testing.assert_array_equal(read_model(data_dir, 3)[1], earlier)
    wait_for(
        lambda: all(trainings(run, name) > before[name] for name in names),
        "every device's next task",
    )
    run.kill("coordinator")
    write_plan(run.folder, bundle_path, port, stop__rounds=4, local__epochs=1)
    for name in names:  # their task is of the plan before, and takes long
        run.kill(name)
    run.coordinator(plan)
    start_devices(run, url, shards)
    assert run.wait("coordinator") == 0, run.log("coordinator")
    status = read_status(data_dir)
    assert [(row.number, row.outcome) for row in status.rounds] == [
        (1, "committed"), (2, "committed"), (3, "abandoned"), (4, "committed")
    ]  # fmt: skip
    rows = json.loads(run.command("models", plan, "--json").stdout)
    assert [(row["version"], row["restores"]) for row in rows] == [
        (0, None),
        (2, None),
        (3, 1),
        (4, None),
    ]


def roll_back_and_go_on(
    run: Processes, bundle: Path, shards: list[Path], before: Path, point: str | None
) -> bytes:
    """From a copy of a finished run: back to version 1, and two more rounds. Returns the last
    model's bytes."""
    port = free_port()
    plan, data_dir = write_plan(run.folder, bundle, port, stop__rounds=5), run.folder / "run"
    shutil.copytree(before, data_dir)
    run.command("roll-back", plan, "1")
    if point is not None:
        assert run.coordinator(plan, CRASH, point, "1", plan).wait(60) == -9, run.log("coordinator")
    run.coordinator(plan)
    names = start_devices(run, f"ws://127.0.0.1:{port}", shards)
    assert run.wait("coordinator") == 0, run.log("coordinator")
    for name in names:
        assert run.wait(name) == 0, run.log(name)
    assert not list(data_dir.glob("*.request"))
    rows = json.loads(run.command("models", plan, "--json", "--all").stdout)
    assert [(row["version"], row["restores"]) for row in rows] == [
        (0, None), (1, None), (2, None), (3, 1), (4, None), (5, None)
    ]  # fmt: skip
    return read_model(data_dir)[1].tobytes()


@pytest.fixture(scope="session")
def finished(
    tmp_path_factory: pytest.TempPathFactory, warm: Path, bundle_path: Path, shards: list[Path]
) -> Path:
    """The data directory of a run that ended after two rounds."""
    with processes(tmp_path_factory.mktemp("finished"), warm) as run:
        port = free_port()
        run.coordinator(write_plan(run.folder, bundle_path, port, stop__rounds=2))
        start_devices(run, f"ws://127.0.0.1:{port}", shards)
        assert run.wait("coordinator") == 0, run.log("coordinator")
        return run.folder / "run"


@pytest.fixture(scope="session")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory,
    warm: Path,
    bundle_path: Path,
    shards: list[Path],
    finished: Path,
) -> bytes:
    with processes(tmp_path_factory.mktemp("undisturbed"), warm) as run:
        return roll_back_and_go_on(run, bundle_path, shards, finished, None)


@pytest.mark.parametrize(
    "point",
    [pytest.param(point, marks=() if point in USUAL else pytest.mark.slow) for point in POINTS],
)
def test_a_roll_back_that_is_killed_changes_nothing(
    run: Processes,
    bundle_path: Path,
    shards: list[Path],
    finished: Path,
    undisturbed: bytes,
    point: str,
) -> None:
    """SIGKILL at each point, and a new start: the undisturbed run's model, bit for bit."""
    assert roll_back_and_go_on(run, bundle_path, shards, finished, point) == undisturbed

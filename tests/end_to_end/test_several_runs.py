"""Several runs on one coordinator, with the commands of docs/operate/several-runs.md.

Real processes, one of them killed.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

from fleetlearn_coordinator import read_model, read_status
from peers import plan_text
from processes import Processes, free_port, processes, service_file, status_of, wait_for

ROUNDS = 3
DEVICES = ("north", "south")
DIVERGING = Path(__file__).with_name("diverging_coordinator.py")
SETTINGS: dict[str, dict[str, Any]] = {
    "steady": {"recipe": "fedadam", "server__lr": 0.02},
    "diverging": {"recipe": "fedyogi"},
    "late": {"recipe": "fedprox", "local__mu": 0.01, "local__epochs": 2},
}


def write_plan(folder: Path, name: str, bundle: Path) -> Path:
    """A plan whose rounds need both devices, so that who takes part is the same in every run of
    it."""
    both = {
        "round__goal": 2,
        "round__minimum": 2,
        "round__gather": 60.0,
        "round__deadline": 120.0,
    }
    settings = SETTINGS[name] | both | {"local__lr": 0.1, "stop__rounds": ROUNDS}
    file = folder / f"{name}.toml"
    file.write_text(plan_text(bundle, folder / f"{name}.run", settings.pop("recipe"), **settings))
    return file


def operate(run: Processes, *arguments: str | Path) -> str:
    return run.command(*arguments, cwd=run.folder).stdout


def states(run: Processes) -> dict[str, dict[str, Any]]:
    rows = json.loads(operate(run, "run", "list", "service.toml", "--json"))
    return {row["name"]: row for row in rows}


def version(data: Path) -> int:
    found = status_of(data)
    return 0 if found is None else found.version


def model_alone(folder: Path, name: str, bundle: Path, shards: list[Path]) -> bytes:
    """Return the model of a coordinator that serves this run alone, to the same devices."""
    folder.mkdir()
    port, file = free_port(), write_plan(folder, name, bundle)
    service_file(file, port)
    with processes(folder) as alone:
        alone.coordinator(file)
        for device, shard in zip(DEVICES, shards, strict=False):
            alone.device(device, f"ws://127.0.0.1:{port}", shard)
        assert alone.wait("coordinator") == 0, alone.log("coordinator")
    return read_model(folder / f"{name}.run")[1].tobytes()


def test_runs_come_go_fail_and_survive_a_kill(
    run: Processes, tmp_path: Path, bundle_path: Path, shards: list[Path]
) -> None:
    port, folder = free_port(), tmp_path
    (folder / "service.toml").write_text(
        f'port = {port}\nruns = "runs"\nidentities = "ids"\nopen = false\n'
    )
    plans = {name: write_plan(folder, name, bundle_path) for name in SETTINGS}
    for name in ("steady", "diverging"):
        operate(run, "run", "add", "service.toml", name, plans[name])
    run.start("coordinator", sys.executable, DIVERGING, "serve", folder / "service.toml")
    token = operate(run, "token", "service.toml", "--uses", "2").strip()
    for device, shard in zip(DEVICES, shards, strict=False):
        run.start(
            device,
            sys.executable,
            "-m",
            "fleetlearn_device",
            "run",
            "--coordinator",
            f"ws://127.0.0.1:{port}",
            "--data",
            shard,
            "--state",
            folder / f"{device}.state",
            "--name",
            device,
            "--token",
            token,
        )
    wait_for(lambda: states(run)["diverging"]["state"] == "failed", "the failure of one run")
    wait_for(lambda: version(folder / "steady.run") >= 1, "a round of the other run")
    operate(run, "run", "pause", "service.toml", "steady")
    operate(run, "run", "add", "service.toml", "late", plans["late"])
    wait_for(lambda: version(folder / "late.run") >= 1, "a round of the run that was added")
    run.kill("coordinator")
    operate(run, "run", "resume", "service.toml", "steady")  # while no coordinator runs
    run.start("coordinator", sys.executable, DIVERGING, "serve", folder / "service.toml")
    for name in ("steady", "late"):
        wait_for(lambda name=name: states(run)[name]["state"] == "finished", f"the end of {name}")  # type: ignore[misc]
    found = states(run)
    assert found["diverging"]["state"] == "failed", "a restart does not try it again"
    assert "Training has diverged" in found["diverging"]["failed"]
    assert all(run.running[device].poll() is None for device in DEVICES), (
        "the devices stay connected"
    )
    run.running["coordinator"].send_signal(signal.SIGTERM)
    assert run.wait("coordinator") == 0, run.log("coordinator")
    events = [
        json.loads(line) for line in operate(run, "audit", "service.toml", "--json").splitlines()
    ]
    assert [row["about"]["run"] for row in events if row["what"] == "failed"] == ["diverging"]
    for name in ("steady", "late"):
        assert read_status(folder / f"{name}.run").version == ROUNDS
        alone = model_alone(folder / f"{name}-alone", name, bundle_path, shards)
        assert read_model(folder / f"{name}.run")[1].tobytes() == alone, (
            f"{name} learnt something else"
        )

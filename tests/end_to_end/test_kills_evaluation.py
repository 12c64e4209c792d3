"""Evaluations in real processes, through SIGKILL of the coordinator and of a device: nothing that
was acknowledged is lost, each device counts once, and the figures are those of an undisturbed
run."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from fleetlearn_coordinator import read_model, read_status
from peers import plan_text
from processes import Processes, free_port, processes, service_file

CRASH = Path(__file__).with_name("crash_evaluation.py")
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(CRASH.parent))
    _names = runpy.run_path(str(CRASH))
    COORDINATOR, DEVICE = list(_names["COORDINATOR"]), list(_names["DEVICE"])
SLOW = {
    "an evaluation is decided but not recorded",
    "a measurement came and is not recorded",
    "a measurement is acknowledged but not counted",
    "an evaluation is recorded as over",
    "the device has to evaluate",
}
"""Points that the slow tests try: those beside them are next to the same batch of rows."""
NAMES = [f"device-{number}" for number in range(3)]


def train(
    run: Processes, bundle: Path, shards: list[Path], crash: str | None, turn: int = 1
) -> dict[str, Any]:
    """Two rounds of three devices, each model evaluated by all three. Returns what is to be the
    same each time."""
    port, data_dir, plan = free_port(), run.folder / "run", run.folder / "plan.toml"
    plan.write_text(
        plan_text(
            bundle,
            data_dir,
            local__lr=0.1,
            local__epochs=1,
            round__goal=3,
            round__minimum=3,
            round__gather=30.0,
            round__grace=30.0,
            round__deadline=600.0,
            stop__rounds=2,
            evaluation__every=1,
            evaluation__devices=3,
            evaluation__minimum=3,
        )
    )
    service_file(plan, port)
    url = f"ws://127.0.0.1:{port}"
    if crash in COORDINATOR:
        process = run.coordinator(plan, CRASH, crash, str(turn), "serve", plan)
    else:
        process = run.coordinator(plan)
    for name, shard in zip(NAMES, shards, strict=False):
        run.device(
            name,
            url,
            shard,
            *([CRASH, crash, str(turn)] if crash in DEVICE and name == NAMES[0] else []),
        )
    if crash in COORDINATOR:
        assert process.wait(60) == -9, f"it was to die at {crash}: {run.log('coordinator')}"
        process = run.coordinator(plan)
    elif crash is not None:
        assert run.wait(NAMES[0]) == -9, f"it was to die at {crash}: {run.log(NAMES[0])}"
        run.device(NAMES[0], url, shards[0])
    assert process.wait(60) == 0, run.log("coordinator")
    for name in NAMES:
        assert run.wait(name) == 0, run.log(name)
    status = read_status(data_dir)
    assert [row.summary["reports"] for row in status.rounds] == [3, 3]
    return {
        "model": read_model(data_dir)[1].tobytes(),
        "evaluations": [
            (
                row.version,
                row.outcome,
                {key: row.summary[key] for key in ("devices", "examples", "metrics", "behind")},
            )
            for row in status.evaluations
        ],
    }


@pytest.fixture(scope="session")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, warm: Path, bundle_path: Path, shards: list[Path]
) -> dict[str, Any]:
    with processes(tmp_path_factory.mktemp("evaluated"), warm) as run:
        found = train(run, bundle_path, shards, None)
    assert [row[:2] for row in found["evaluations"]] == [(1, "valid"), (2, "valid")]
    assert [row[2]["devices"] for row in found["evaluations"]] == [3, 3]
    return found


def tried(points: list[str]) -> list[Any]:
    return [
        pytest.param(point, marks=pytest.mark.slow if point in SLOW else ()) for point in points
    ]


@pytest.mark.parametrize("point", tried(COORDINATOR))
def test_the_coordinator_dies_in_an_evaluation(
    run: Processes, bundle_path: Path, shards: list[Path], undisturbed: dict[str, Any], point: str
) -> None:
    turn = 2 if "measurement" in point or "committed" in point else 1
    assert train(run, bundle_path, shards, point, turn) == undisturbed


@pytest.mark.parametrize("point", tried(DEVICE))
def test_a_device_dies_in_an_evaluation(
    run: Processes, bundle_path: Path, shards: list[Path], undisturbed: dict[str, Any], point: str
) -> None:
    assert train(run, bundle_path, shards, point) == undisturbed


def test_an_evaluation_on_request(run: Processes, bundle_path: Path, shards: list[Path]) -> None:
    """The coordinator is killed after the request was made, and the next one carries it out."""
    plan, data_dir, port = run.folder / "plan.toml", run.folder / "run", free_port()
    plan.write_text(
        plan_text(
            bundle_path,
            data_dir,
            local__lr=0.1,
            round__goal=1,
            stop__rounds=1,
            evaluation__devices=1,
        )
    )
    service_file(plan, port)
    refused = run.command("evaluate", plan, expected=1)
    assert "serve the plan first" in " ".join(refused.stderr.split())
    run.coordinator(plan)
    run.device("a", f"ws://127.0.0.1:{port}", shards[0])
    assert run.wait("a") == 0
    assert run.wait("coordinator") == 0
    asked = run.command("evaluate", plan)
    assert "when the plan is served again" in " ".join(asked.stderr.split())
    run.coordinator(plan)
    run.device("a", f"ws://127.0.0.1:{port}", shards[0])
    assert run.wait("a") == 0
    assert run.wait("coordinator") == 0
    (found,) = read_status(data_dir).evaluations
    assert (found.version, found.outcome, found.summary["devices"]) == (1, "valid", 1)
    shown = run.command("status", plan).stdout
    assert "evaluations on devices" in shown

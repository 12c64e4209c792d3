"""k-means of three devices' tables by an own function, over real sockets between real processes:
the last state is that of the same functions without any network, bit for bit, whoever is killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator import read_model, read_status
from fleetlearn_protocol.computations.bundle import write_computation_bundle
from own_functions import EXAMPLES, allowed_examples, computed_by, points, questions
from processes import ROOT, Processes, free_port, service_file, wait_for

CRASH = Path(__file__).with_name("crash_coordinator.py")
CRASH_DEVICE = Path(__file__).with_name("crash_device.py")
NAMES = "abc"
TABLES = dict(zip(NAMES, points(3), strict=True))
ALLOW = ("--allow-function", "kmeans:sums")
COORDINATOR_DIES = {
    "tasks are recorded but not sent": 2,
    "an update is complete but not recorded": 5,
    "an update is recorded but not acknowledged": 7,
    "a round is closed and its commit not begun": 2,
    "the new model is in its place but not recorded": 3,
}
"""Point -> which time it kills."""
DEVICE_DIES = {
    "the work is done but not on disk": "1",
    "the work is on disk and not reported": "2",
    "the update is acknowledged but not forgotten": "1",
}
SECURE = '[secure]\nmode = "pairwise"\ndropouts = 0.0\n'


def begin(run: Processes, more: str = "", more_service: str = "") -> tuple[Path, str]:
    """Write a plan, its bundle and the devices' tables. Returns the plan and the coordinator's
    address."""
    bundle = write_computation_bundle(run.folder / "a.bundle", "centres", questions("kmeans"))
    plan = run.folder / "plan.toml"
    plan.write_text(
        f'recipe = "function"\nname = "centres"\nbundle = "{bundle}"\ndata_dir = "run"\n'
        "[round]\ngoal = 3\nminimum = 3\nover_selection = 1.0\ngrace = 60.0\ndeadline = 300.0\n"
        f"{more}"
    )
    for name, table in TABLES.items():
        height, weight = table["x"].T
        np.savez(run.folder / f"{name}.npz", height=height, weight=weight)
    port = free_port()
    service = service_file(plan, port)
    plugins = f'[plugins]\nmodules = ["kmeans"]\nfolder = "{EXAMPLES}"\n'
    service.write_text(f"{service.read_text()}{more_service}{plugins}")
    return plan, f"ws://127.0.0.1:{port}"


def device(run: Processes, name: str, url: str, *wrapper: str | Path) -> Any:
    command = [*(wrapper or ("-m", "fleetlearn_device")), "run", "--coordinator", url]
    command += ["--data", run.folder / f"{name}.npz", "--state", run.folder / f"{name}.state"]
    command += ["--name", name, "--until-finished", *ALLOW]
    # Functions are looked for in the current folder too.
    return run.start(name, sys.executable, *command, cwd=EXAMPLES)


@pytest.fixture(scope="module")
def expected() -> tuple[bytes, dict[str, Any]]:
    with allowed_examples() as functions:
        found, states = computed_by(questions("kmeans"), [*TABLES.values()], functions)
    return states[-1].tobytes(), found


def check(run: Processes, plan: Path, expected: tuple[bytes, dict[str, Any]]) -> None:
    for name in ("coordinator", *NAMES):
        assert run.wait(name) == 0, run.log(name)
    assert read_model(run.folder / "run")[1].tobytes() == expected[0]
    status = read_status(run.folder / "run")
    assert status.finished is not None
    assert status.finished.startswith("the computation is done: ")
    assert [row.summary["reports"] for row in status.rounds] == [3] * status.version
    found = json.loads(run.command("result", plan, "--json").stdout)
    assert found["result"] == json.loads(json.dumps(expected[1]))


def test_the_centres_are_those_of_the_same_functions_without_a_network(
    run: Processes, expected: tuple[bytes, dict[str, Any]]
) -> None:
    plan, url = begin(run)
    run.coordinator(plan)
    for name in NAMES:
        device(run, name, url)
    check(run, plan, expected)
    shown = run.command("result", plan).stdout
    assert "inertia" in shown
    assert "centres" in shown


def test_a_device_whose_owner_does_not_allow_the_function_is_told_and_left_out(
    run: Processes, expected: tuple[bytes, dict[str, Any]]
) -> None:
    plan, url = begin(run)
    run.coordinator(plan)
    run.device("d", url, run.folder / "a.npz")
    text = "this run computes by the function kmeans:sums; the device's owner allows none"
    wait_for(lambda: text in run.log("d"), "the device to be told")
    assert "--allow-function kmeans:sums allows it" in run.log("d")
    for name in NAMES:
        device(run, name, url)
    check(run, plan, expected)
    assert run.wait("d") == 0, run.log("d")


@pytest.mark.slow
def test_masked_sums_give_the_same_state(
    run: Processes, expected: tuple[bytes, dict[str, Any]]
) -> None:
    plan, url = begin(run, SECURE)
    run.coordinator(plan)
    for name in NAMES:
        device(run, name, url)
    check(run, plan, expected)


@pytest.mark.slow
@pytest.mark.parametrize("point", COORDINATOR_DIES)
def test_the_coordinator_killed_changes_nothing(
    run: Processes, expected: tuple[bytes, dict[str, Any]], point: str
) -> None:
    plan, url = begin(run)
    process = run.coordinator(plan, CRASH, point, str(COORDINATOR_DIES[point]), plan)
    for name in NAMES:
        device(run, name, url)
    assert process.wait(60) == -9, f"it was to die where {point}: {run.log('coordinator')}"
    run.coordinator(plan)
    check(run, plan, expected)


@pytest.mark.slow
@pytest.mark.parametrize("point", DEVICE_DIES)
def test_a_device_killed_changes_nothing(
    run: Processes, expected: tuple[bytes, dict[str, Any]], point: str
) -> None:
    plan, url = begin(run)
    run.coordinator(plan)
    for name in "ab":
        device(run, name, url)
    crashing = device(run, "c", url, CRASH_DEVICE, point, DEVICE_DIES[point])
    assert crashing.wait(60) == -9, run.log("c")
    device(run, "c", url)
    check(run, plan, expected)


@pytest.mark.slow
def test_gateways_change_nothing(run: Processes, expected: tuple[bytes, dict[str, Any]]) -> None:
    plan, url = begin(run, more_service="gateways = 2\n")
    run.coordinator(plan)
    for name in NAMES:
        device(run, name, url)
    check(run, plan, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kmeans", "newton"])
def test_the_example_shows_it(tmp_path: Path, name: str) -> None:
    pytest.importorskip("sklearn")
    script = ROOT / "examples" / "own_functions.py"
    command = [sys.executable, script, name, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    last = done.stdout.splitlines()[-1]
    assert "of all rows: " in last
    assert float(last.rpartition(" ")[2]) < 1e-6


def test_a_module_that_the_service_does_not_list_is_said_before_anything_runs(
    run: Processes,
) -> None:
    plan, _ = begin(run)
    service_file(plan, free_port())  # without [plugins]
    process = run.coordinator(plan)
    assert process.wait(60) == 1
    assert "the module kmeans is not allowed here" in run.log("coordinator")
    assert '[plugins] modules = ["kmeans"]' in run.log("coordinator")

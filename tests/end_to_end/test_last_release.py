"""Devices of the last release with this coordinator, and this device with the last one's: they
train, over real sockets."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_coordinator import read_status
from fleetlearn_coordinator.storage.find_storage import find_storage
from last_release import LAST_RELEASE, unpack
from line_bundle import write_line_bundle
from peers import BUFFERED, plan_text
from processes import free_port, processes, service_file, wait_for

TOGETHER: dict[str, Any] = {"round__goal": 2, "round__minimum": 2, "round__gather": 30.0}
PLANS: dict[str, dict[str, Any]] = {
    "fedprox": TOGETHER
    | {
        "local__mu": 0.01,
        "evaluation__every": 1,
        "evaluation__minimum": 1,
        "evaluation__deadline": 1.0,  # the other release cannot answer: nothing to wait for
    },
    "fedadam": TOGETHER
    | {"server__lr": 0.02, "encoding__up": "topk-0.1", "encoding__down": "delta"},
    "fedbuff": BUFFERED | {"encoding__up": "int8"},
}
"""Recipe -> settings: evaluations, tied vectors, encodings, and stale updates."""


@pytest.fixture(scope="module")
def last(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of the last release's processes."""
    return unpack(LAST_RELEASE, tmp_path_factory.mktemp("last"))


def test_the_last_release_is_what_its_processes_import(last: dict[str, str]) -> None:
    script = (
        "import fleetlearn_device as d, fleetlearn_protocol as p; print(d.__file__, p.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=last, capture_output=True, text=True, check=True
    )
    folder = last["PYTHONPATH"].split("/coordinator")[0].split(":")[-1]
    assert all(path.startswith(folder) for path in done.stdout.split()), done.stdout


@pytest.mark.parametrize(
    "recipe",
    [
        "fedprox",
        *(pytest.param(each, marks=pytest.mark.slow) for each in PLANS if each != "fedprox"),
    ],
)
@pytest.mark.parametrize("older", ["devices", "coordinator"])
def test_both_releases_train_together(
    tmp_path: Path,
    last: dict[str, str],
    bundle_path: Path,
    shards: list[Path],
    recipe: str,
    older: str,
) -> None:
    plan, port = tmp_path / "plan.toml", free_port()
    settings = PLANS[recipe] | {"local__lr": 0.1, "stop__rounds": 3}
    recipe = settings.pop("recipe", recipe)
    plan.write_text(plan_text(bundle_path, tmp_path / "run", recipe, **settings))
    service_file(plan, port)
    with processes(tmp_path) as run:
        run.coordinator(plan, env=last if older == "coordinator" else None)
        for number, name in enumerate(("a", "b")):
            env = last if older == "devices" else None
            run.device(name, f"ws://127.0.0.1:{port}", shards[number], env=env)
        assert run.wait("coordinator", 120) == 0, run.log("coordinator")
        found = read_status(tmp_path / "run")
        assert found.version == 3
        assert {key for row in found.rounds for key in row.summary["dropped"]} <= {"surplus"}
        with find_storage(tmp_path / "run").read_ledger() as ledger:
            rows = [row for number in (1, 2, 3) for row in ledger.tasks(number)]
        accepted = Counter(device for _, device, state, _ in rows if state == "accepted")
        assert accepted.total() == 6
        assert recipe == "fedbuff" or accepted == {"a": 3, "b": 3}, "each round needs both"
        if recipe != "fedbuff":  # there one of them may come when the run is over
            assert [run.wait(name) for name in ("a", "b")] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("older", ["devices", "coordinator"])
def test_a_model_with_buffers_is_declined_in_words_and_not_trained_wrongly(
    tmp_path: Path, last: dict[str, str], older: str
) -> None:
    """BatchNorm's statistics travel otherwise since then: the one exception. This coordinator tells
    the older device at once; the older coordinator gives this device a task, which it declines."""
    settings = {"local__lr": 0.05, "round__goal": 1, "stop__rounds": 1}
    bundle, data, plan = (tmp_path / name for name in ("line.bundle", "data.npz", "plan.toml"))
    write_line_bundle(bundle)
    random = np.random.default_rng(1)
    x, y = random.normal(size=(40, 3)).astype("f4"), random.normal(size=40).astype("f4")
    np.savez(data, x=x, y=y)
    plan.write_text(plan_text(bundle, tmp_path / "run", **settings))
    port = free_port()
    service_file(plan, port)
    with processes(tmp_path) as run:
        run.coordinator(plan, env=last if older == "coordinator" else None)
        env = last if older == "devices" else None
        run.device("a", f"ws://127.0.0.1:{port}", data, env=env)
        if older == "devices":
            wait_for(lambda: "there will be no task" in run.log("a"), "the coordinator's word")
            assert "the device speaks version 1. Update its fleetlearn" in run.log("a")
            assert "unsupported" not in run.log("coordinator")
        else:
            wait_for(lambda: "unsupported" in run.log("coordinator"), "the device's refusal")
            assert "buffers" in run.log("coordinator")
        assert read_status(tmp_path / "run").version == 0


@pytest.mark.slow
def test_the_last_release_s_state_directory_goes_on(
    tmp_path: Path, last: dict[str, str], bundle_path: Path, shards: list[Path]
) -> None:
    """With its name, its bundle and its tied vectors (what top-k left out), in the middle of a run;
    and the last release still reads what this one left."""
    plan, port = tmp_path / "plan.toml", free_port()
    settings = PLANS["fedadam"] | {"local__lr": 0.1, "stop__rounds": 5, "round__grace": 60.0}
    plan.write_text(plan_text(bundle_path, tmp_path / "run", "fedadam", **settings))
    service_file(plan, port)
    url, state = f"ws://127.0.0.1:{port}", tmp_path / "a.state"
    with processes(tmp_path) as run:
        run.coordinator(plan)
        older = run.device("a", url, shards[0], env=last)
        run.device("b", url, shards[1])
        wait_for(lambda: any((state / "tied").glob("*")), "a tied vector of the last release")
        older.terminate()
        older.wait(60)
        name = (state / "identity.json").read_bytes()
        run.device("a", url, shards[0])
        assert run.wait("coordinator", 120) == 0, run.log("coordinator")
        assert [run.wait(each) for each in ("a", "b")] == [0, 0], run.log("a")
        assert (state / "identity.json").read_bytes() == name
        for damage in ("is lost", "is damaged", "begins again"):
            assert damage not in run.log("a")
        found = read_status(tmp_path / "run")
        assert found.version == 5
        command = [sys.executable, "-m", "fleetlearn_device", "info", "--state", str(state)]
        assert subprocess.run(command, env=last, capture_output=True, check=False).returncode == 0

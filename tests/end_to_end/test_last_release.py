"""Devices of the last release with this coordinator, and this device with the last one's: they
train, over real sockets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fleetlearn_coordinator import read_status
from last_release import LAST_RELEASE, unpack
from peers import BUFFERED, plan_text
from processes import free_port, processes, service_file

TOGETHER: dict[str, Any] = {"round__goal": 2, "round__minimum": 2, "round__gather": 30.0}
PLANS: dict[str, dict[str, Any]] = {
    "fedprox": TOGETHER | {"local__mu": 0.01, "evaluation__every": 1, "evaluation__minimum": 1},
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


@pytest.mark.parametrize("recipe", PLANS)
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
        for name in ("a", "b"):
            assert run.wait(name) == 0, run.log(name)
        found = read_status(tmp_path / "run")
        assert found.version == 3
        assert {key for row in found.rounds for key in row.summary["dropped"]} <= {"surplus"}
        assert "refused" not in "".join(map(run.log, ("a", "b")))

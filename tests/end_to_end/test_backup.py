"""Backups of a run that is served, restored elsewhere: real processes, real sockets, real
SIGKILL."""

from __future__ import annotations

import json
import runpy
import shutil
import signal
import sys
from pathlib import Path

import pytest
from fleetlearn_coordinator import read_model, read_status
from peers import plan_text
from processes import Processes, free_port, service_file, status_of, wait_for

CRASH = Path(__file__).with_name("crash_backup.py")
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(CRASH.parent))
    _names = runpy.run_path(str(CRASH))
    POINTS, RESTORED = [*_names["POINTS"]], [*_names["RESTORED"]]
DEVICES = 4
ROUNDS = 40


def write_plan(home: Path, bundle: Path) -> Path:
    """A plan whose rounds need each device, so that its models are the same in every run of it. All
    of them are kept."""
    home.mkdir()
    settings = {
        "round__goal": DEVICES, "round__minimum": DEVICES, "round__gather": 60.0,
        "round__grace": 30.0, "round__deadline": 120.0, "stop__rounds": ROUNDS,
        "models__every": 1, "local__lr": 0.1, "local__epochs": 3, "server__lr": 0.02,
    }  # fmt: skip
    shutil.copytree(bundle, home / "model.bundle")
    plan = home / "plan.toml"
    plan.write_text(plan_text(Path("model.bundle"), "data", "fedadam", **settings))
    service_file(plan, free_port())
    return plan


def start_devices(run: Processes, plan: Path, shards: list[Path]) -> None:
    port = plan.with_name("service.toml").read_text().split()[-1]
    for number in range(DEVICES):
        run.device(f"d{number}", f"ws://127.0.0.1:{port}", shards[number])


def test_backups_under_load_go_on_elsewhere_with_the_same_models(
    run: Processes, tmp_path: Path, bundle_path: Path, shards: list[Path]
) -> None:
    plan = write_plan(tmp_path / "original", bundle_path)
    data, service = plan.parent / "data", plan.with_name("service.toml")
    run.coordinator(plan)
    start_devices(run, plan, shards)
    taken: list[tuple[int, Path]] = []
    wait_for(lambda: (found := status_of(data)) is not None and found.version > 0, "a round")
    while run.running["coordinator"].poll() is None and len(taken) < 8:
        target = tmp_path / "backups" / str(len(taken))
        done = run.command("backup", plan, target, "--service", service, "--json")
        (about,) = json.loads(done.stdout)["runs"]
        assert not about["given_up"]
        taken.append((about["version"], target))
    assert run.wait("coordinator") == 0, run.log("coordinator")
    models = {version: read_model(data, version)[1].tobytes() for version in range(ROUNDS + 1)}
    early = [(version, target) for version, target in taken if version < ROUNDS]
    assert len(early) >= 2, f"no two backups were taken while the run was going: {taken}"
    for version, target in taken:
        run.command("backup", "--verify", target)
        assert read_status(target / "files" / "data").version == version
        assert read_model(target / "files" / "data")[1].tobytes() == models[version]
    # The same devices, which trained up to the last round meanwhile, go on from before it.
    for number in range(DEVICES):
        assert run.wait(f"d{number}") == 0, run.log(f"d{number}")
    home = tmp_path / "elsewhere"
    run.command("restore", early[0][1], home)
    shutil.rmtree(plan.parent)
    run.coordinator(home / "plan.toml")
    start_devices(run, home / "plan.toml", shards)
    assert run.wait("coordinator") == 0, run.log("coordinator")
    for version, model in models.items():
        found = read_model(home / "data", version)[1].tobytes()
        assert found == model, f"version {version} is another model"


@pytest.mark.parametrize("point", POINTS)
def test_a_backup_that_is_killed_leaves_nothing_and_the_next_one_is_whole(
    run: Processes, tmp_path: Path, bundle_path: Path, point: str
) -> None:
    plan, target = served_once(run, tmp_path, bundle_path), tmp_path / "backups" / "a"
    process = run.start("backup", sys.executable, CRASH, point, "1", "backup", plan, target)
    assert process.wait(60) == -signal.SIGKILL, run.log("backup")
    (left,) = target.parent.iterdir()
    assert left != target
    run.command("backup", plan, target)
    assert [*target.parent.iterdir()] == [target], "what the dead one left is gone"
    run.command("backup", "--verify", target)


@pytest.mark.parametrize("point", RESTORED)
def test_a_restore_that_is_killed_leaves_nothing(
    run: Processes, tmp_path: Path, bundle_path: Path, point: str
) -> None:
    plan, backup = served_once(run, tmp_path, bundle_path), tmp_path / "backup"
    home = tmp_path / "new" / "home"
    run.command("backup", plan, backup)
    process = run.start("restore", sys.executable, CRASH, point, "1", "restore", backup, home)
    assert process.wait(60) == -signal.SIGKILL, run.log("restore")
    (left,) = home.parent.iterdir()
    assert left != home
    run.command("restore", backup, home)
    assert [*home.parent.iterdir()] == [home]
    assert read_model(home / "data")[0] == 0


def served_once(run: Processes, tmp_path: Path, bundle_path: Path) -> Path:
    """A plan that was served and stopped."""
    plan = write_plan(tmp_path / "original", bundle_path)
    run.coordinator(plan)
    wait_for(lambda: status_of(plan.parent / "data") is not None, "the first model")
    run.running["coordinator"].send_signal(signal.SIGTERM)
    assert run.wait("coordinator") == 0, run.log("coordinator")
    return plan

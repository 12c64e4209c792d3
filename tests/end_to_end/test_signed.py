"""Signed tasks with real processes: another bundle on the way or on the disk, another key, a key
that is changed."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fleetlearn_coordinator import read_status
from peers import plan_text
from processes import Processes, free_port, status_of, wait_for

COORDINATOR = [sys.executable, "-m", "fleetlearn_coordinator"]
DEVICE = [sys.executable, "-m", "fleetlearn_device", "run", "--until-finished"]
MIDDLE = Path(__file__).with_name("man_in_the_middle.py")


def signing_key(folder: Path, name: str) -> str:
    """Make a key with the command. Returns its public key."""
    command = [*COORDINATOR, "signing-key", folder / name]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def serve(run: Processes, port: int, *keys: str) -> None:
    """(Re)start the coordinator with these files of keys."""
    if "coordinator" in run.running and run.running["coordinator"].poll() is None:
        run.running["coordinator"].send_signal(signal.SIGTERM)
        assert run.wait("coordinator") == 0
    listed = ", ".join(f'"{key}"' for key in keys)
    (run.folder / "service.toml").write_text(f"port = {port}\nsigning_keys = [{listed}]\n")
    run.coordinator(run.folder / "plan.toml")


def device(run: Processes, name: str, port: int, data: Path, *options: str) -> None:
    given = ["--data", data, "--state", run.folder / f"{name}.state", "--name", name, *options]
    run.start(name, *DEVICE, "--coordinator", f"ws://127.0.0.1:{port}", *given)


@pytest.mark.parametrize("how", ["changed", pytest.param("stripped", marks=pytest.mark.slow)])
def test_a_man_in_the_middle_has_nothing_trained(
    run: Processes, bundle_path: Path, shards: list[Path], how: str
) -> None:
    port, between = free_port(), free_port()
    settings = {"round__goal": 1, "round__deadline": 5.0, "stop__rounds": 1}
    text = plan_text(bundle_path, run.folder / "run", local__lr=0.1, **settings)
    (run.folder / "plan.toml").write_text(text)
    key = signing_key(run.folder, "key.pem")
    serve(run, port, "key.pem")
    run.start("middle", sys.executable, MIDDLE, str(between), f"ws://127.0.0.1:{port}", how)
    device(run, "a", between, shards[0], "--trust", key)
    why = "its signature is wrong" if how == "changed" else "it is not signed"
    wait_for(
        lambda: "closing the connection: a task is not trusted" in run.log("a"),
        "the device's refusal",
    )
    assert f"is not trained: {why}" in run.log("a")
    run.kill("a")
    assert not [*(run.folder / "a.state" / "bundles").iterdir()], "nothing was fetched"
    device(run, "without-keys", between, shards[0])  # the attack is one
    wait_for(
        lambda: "fetching manifest.json (000000000000)" in run.log("without-keys"),
        "a device that is taken in",
    )
    run.kill("without-keys")
    run.kill("middle")
    device(run, "a", port, shards[0])  # without --trust: the key is in its state directory
    assert run.wait("a") == 0, run.log("a")
    assert run.wait("coordinator") == 0, run.log("coordinator")
    rows = read_status(run.folder / "run").rounds
    assert sum(row.summary["reports"] for row in rows) == 1
    assert any("failed: untrusted" in row.summary["dropped"] for row in rows)


@pytest.mark.slow
def test_a_key_is_changed_while_devices_stay_where_they_are(
    run: Processes, bundle_path: Path, shards: list[Path]
) -> None:
    port = free_port()
    text = plan_text(
        bundle_path, run.folder / "run", local__lr=0.1, round__goal=1, stop__rounds=100000
    )
    (run.folder / "plan.toml").write_text(text)
    old, new = signing_key(run.folder, "old.pem"), signing_key(run.folder, "new.pem")
    signing_key(run.folder, "strange.pem")

    def trains_on() -> None:
        wait_for(
            lambda: bool((found := status_of(run.folder / "run")) and found.running),
            "the coordinator",
        )
        before = read_status(run.folder / "run").version
        wait_for(lambda: read_status(run.folder / "run").version > before, "a round")

    serve(run, port, "old.pem")
    device(run, "a", port, shards[0], "--trust", old)
    trains_on()
    serve(run, port, "new.pem", "old.pem")
    trains_on()
    assert f"the coordinator's keys are now {new}, {old}" in run.log("a")
    serve(run, port, "new.pem")
    trains_on()
    wait_for(lambda: f"the coordinator's keys are now {new}\n" in run.log("a"), "the old key's end")
    serve(run, port, "strange.pem")
    wait_for(
        lambda: f"does only tasks signed with {new}, and this coordinator cannot" in run.log("a"),
        "the refusal",
    )
    run.kill("a")
    serve(run, port, "old.pem")
    device(run, "a", port, shards[0], "--trust", old)
    wait_for(
        lambda: f"trusts {new}, and goes on so: {old} was given" in run.log("a"), "the warning"
    )


def test_a_bundle_that_is_exchanged_on_the_disk_is_not_signed(
    run: Processes, bundle_path: Path, shards: list[Path]
) -> None:
    port, bundle = free_port(), run.folder / "bundle"
    shutil.copytree(bundle_path, bundle)
    (run.folder / "plan.toml").write_text(
        plan_text(bundle, run.folder / "run", local__lr=0.1, round__goal=1)
    )
    key = signing_key(run.folder, "key.pem")
    serve(run, port, "key.pem")
    device(run, "a", port, shards[0], "--trust", key)
    wait_for(lambda: bool((found := status_of(run.folder / "run")) and found.version), "a round")
    run.running["coordinator"].send_signal(signal.SIGTERM)
    assert run.wait("coordinator") == 0
    manifest = bundle / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"name": "another"}))
    serve(run, port, "key.pem")
    assert run.wait("coordinator") == 1
    assert "another bundle" in run.log("coordinator").replace("\n", " ")

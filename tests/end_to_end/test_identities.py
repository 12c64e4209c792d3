"""Enrolment with the commands of docs/operate/identities.md: real processes, one of them killed in
the middle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from fleetlearn_coordinator import read_status
from peers import plan_text
from processes import Processes, free_port, status_of, wait_for


def command(folder: Path, *arguments: str, expected: int = 0) -> str:
    """A command of the coordinator's; returns what it prints."""
    whole = [sys.executable, "-m", "fleetlearn_coordinator", *arguments]
    done = subprocess.run(whole, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == expected, done.stderr
    return done.stdout.strip()


def test_devices_are_enrolled_once_and_revoked(
    run: Processes, bundle_path: Path, shards: list[Path]
) -> None:
    port, plan, folder = free_port(), run.folder / "plan.toml", run.folder
    plan.write_text(
        plan_text(
            bundle_path,
            folder / "run",
            local__lr=0.1,
            round__goal=2,
            round__minimum=2,
            round__gather=60.0,
            stop__rounds=3,
        )
    )  # fmt: skip
    (folder / "service.toml").write_text(f'port = {port}\nidentities = "identities"\n')
    run.coordinator(plan)
    url = f"ws://127.0.0.1:{port}"
    run.device("stranger", url, shards[0])
    wait_for(
        lambda: "takes enrolled devices alone" in run.log("stranger"), "the stranger's refusal"
    )
    run.kill("stranger")
    token = command(folder, "token", "service.toml", "--uses", "2", "--tag", "roof")
    for name, shard in (("a", shards[0]), ("b", shards[1])):
        given = {"FLEETLEARN_TOKEN": token} if name == "a" else {}
        arguments = [] if name == "a" else ["--token", token]
        run.start(
            name,
            sys.executable,
            "-m",
            "fleetlearn_device",
            "run",
            "--coordinator",
            url,
            "--data",
            shard,
            "--state",
            folder / f"{name}.state",
            "--name",
            name,
            "--until-finished",
            *arguments,
            env={**os.environ, **given},
        )
    wait_for(
        lambda: bool((found := status_of(folder / "run")) and found.version),
        "a round of enrolled devices",
    )
    if run.running["a"].poll() is None:
        run.kill("a")
        subprocess.run(
            [sys.executable, "-m", "fleetlearn_device", "rotate", "--state", folder / "a.state"],
            check=True,
        )
        run.device("a", url, shards[0])  # without the token, and with its next credential
    for name in ("a", "b", "coordinator"):
        assert run.wait(name) == 0, run.log(name)
    assert read_status(folder / "run").version == 3
    devices = json.loads(command(folder, "devices", "service.toml", "--json"))
    assert [(row["device"], row["tags"]) for row in devices] == [("a", ["roof"]), ("b", ["roof"])]
    command(folder, "revoke", "service.toml", "b")
    command(folder, "revoke", "service.toml", "b", expected=1)
    events = [
        json.loads(line)["what"]
        for line in command(folder, "audit", "service.toml", "--json").splitlines()
    ]
    assert [what for what in events if what != "rotated"] == [
        "started", "token", "enrolled", "enrolled", "stopped", "revoked"
    ]  # fmt: skip
    assert token not in "".join(path.read_text(errors="replace") for path in folder.glob("*.log"))

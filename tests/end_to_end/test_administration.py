"""An administrator at work over HTTP: real processes, enrolled devices, a roll back under way, and
SIGKILL after it."""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import numpy as np
from fleetlearn_coordinator import read_model, read_status
from peers import plan_text
from processes import Processes, free_port, status_of, wait_for


def test_a_run_is_operated_over_http(run: Processes, bundle_path: Path, shards: list[Path]) -> None:
    folder, data_dir, plan = run.folder, run.folder / "run", run.folder / "plan.toml"
    port, admin_port = free_port(), free_port()

    def write_plan(**settings: Any) -> None:
        usual = {
            "local__lr": 0.1,
            "round__goal": 2,
            "round__minimum": 2,
            "round__gather": 60.0,
            "round__grace": 60.0,
        }
        plan.write_text(plan_text(bundle_path, data_dir, **(usual | settings)))

    def ask(token: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{admin_port}/v1/{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {token}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.load(answer)
        except HTTPError as error:
            return error.code, json.load(error)["error"]

    write_plan(stop__rounds=2)
    (folder / "service.toml").write_text(
        f'port = {port}\nidentities = "ids"\n[admin]\nport = {admin_port}\n'
    )
    olga = run.command(
        "administrator", "add", "service.toml", "olga", "--role", "operate", cwd=folder
    ).stdout.strip()
    vera = run.command(
        "administrator", "add", "service.toml", "vera", "--role", "view", cwd=folder
    ).stdout.strip()
    run.coordinator(plan)
    wait_for(
        lambda: "administrators: http://127.0.0.1:" in run.log("coordinator"),
        "the administrators' port",
    )
    token = ask(olga, "tokens", {"uses": 2})["token"]
    assert ask(vera, "tokens", {"uses": 2})[0] == 403
    assert ask("x", "status")[0] == 401

    def start_devices() -> None:
        for name, shard in zip("ab", shards, strict=False):
            run.start(
                name,
                sys.executable,
                "-m",
                "fleetlearn_device",
                "run",
                "--coordinator",
                f"ws://127.0.0.1:{port}",
                "--data",
                shard,
                "--state",
                folder / f"{name}.state",
                "--name",
                name,
                "--until-finished",
                "--token",
                token,
            )

    start_devices()
    assert run.wait("coordinator") == 0, run.log("coordinator")
    for name in "ab":
        assert run.wait(name) == 0, run.log(name)
    earlier = read_model(data_dir, 1)[1]

    write_plan(stop__rounds=4, local__epochs=100_000, local__time_budget=30.0)
    run.coordinator(plan)
    start_devices()
    wait_for(
        lambda: bool((found := status_of(data_dir)) and found.live.get("leases") == 2),
        "both devices to train",
    )
    (described,) = ask(vera, "status")["runs"]
    assert (described["version"], described["connected"], described["phase"]) == (2, 2, "open")
    assert ask(vera, "runs/test/roll-back", {"version": 1})[0] == 403
    assert ask(olga, "runs/test/roll-back", {"version": 1}) == {"name": "test", "version": 1}
    wait_for(lambda: (status_of(data_dir) or read_status(data_dir)).version == 3, "the roll back")
    run.kill("coordinator")
    np.testing.assert_array_equal(read_model(data_dir)[1], earlier)
    for name in "ab":  # their tasks are of the plan before, and take long
        run.kill(name)
    write_plan(stop__rounds=4, local__epochs=1)
    run.coordinator(plan)
    start_devices()
    assert run.wait("coordinator") == 0, run.log("coordinator")
    assert [row.outcome for row in read_status(data_dir).rounds] == [
        "committed",
        "committed",
        "abandoned",
        "committed",
    ]
    events = [
        json.loads(line)
        for line in run.command("audit", "service.toml", "--json", cwd=folder).stdout.splitlines()
    ]
    assert [row["what"] for row in events if row["about"].get("who") == "olga"] == [
        "token",
        "rolled back",
    ]
    assert "Traceback" not in run.log("coordinator")
    for secret in (olga, vera):
        assert secret not in run.log("coordinator")

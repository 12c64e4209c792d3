"""Signed tasks with the SDK for browsers: a man in the middle, keys in a token, a coordinator
without them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fleetlearn_coordinator import read_status
from line_bundle import line_data, write_line_bundle
from peers import plan_text
from processes import Processes, free_port, processes, status_of, wait_for
from web_sdk import script

COORDINATOR = [sys.executable, "-m", "fleetlearn_coordinator"]
MIDDLE = Path(__file__).parents[2] / "end_to_end" / "man_in_the_middle.py"


def asked(*arguments: object) -> str:
    """What a command of the coordinator's prints."""
    command = [*COORDINATOR, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def prepare(folder: Path, rounds: int) -> tuple[int, str]:
    """Write data, a plan and a service file with a signing key. Returns the port and the public
    key."""
    port = free_port()
    x, y = line_data(20)
    np.savez(folder / "data.npz", x=x, y=y)
    bundle = write_line_bundle(folder / "line.bundle", references=("anchor",))
    settings = {"local__lr": 0.05, "round__goal": 1, "round__deadline": 5.0, "stop__rounds": rounds}
    (folder / "plan.toml").write_text(plan_text(bundle.path, folder / "run", **settings))
    key = asked("signing-key", folder / "key.pem")
    (folder / "service.toml").write_text(f'port = {port}\nsigning_keys = ["key.pem"]\n')
    return port, key


def device(run: Processes, name: str, port: int, *options: str) -> None:
    given = (
        str(run.folder / "data.npz"),
        str(run.folder / f"{name}.state"),
        "--base",
        "0.05",
        "--until-finished",
    )
    run.start(name, *script("node_device"), f"ws://127.0.0.1:{port}", *given, *options)


def stored(run: Processes, name: str) -> list[str]:
    """The keys of a device's store."""
    return sorted(json.loads((run.folder / f"{name}.state" / "index.json").read_text()))


@pytest.mark.parametrize("how", ["changed", pytest.param("stripped", marks=pytest.mark.slow)])
def test_a_man_in_the_middle_has_nothing_trained(tmp_path: Path, how: str) -> None:
    between = free_port()
    with processes(tmp_path) as run:
        port, key = prepare(tmp_path, rounds=1)
        run.coordinator(tmp_path / "plan.toml")
        run.start("middle", sys.executable, MIDDLE, str(between), f"ws://127.0.0.1:{port}", how)
        device(run, "a", between, "--trust", key)
        why = "its signature is wrong" if how == "changed" else "it is not signed"
        wait_for(
            lambda: "closing the connection: a task is not trusted" in run.log("a"),
            "the device's refusal",
        )
        assert f"is not trained: {why}" in run.log("a")
        run.kill("a")
        assert stored(run, "a") == ["identity", "trusted"], "nothing was fetched"
        device(run, "without-keys", between)  # the attack is one
        fetching = "fetching manifest.json (000000000000)"
        wait_for(lambda: fetching in run.log("without-keys"), "a device that is taken in")
        run.kill("without-keys")
        run.kill("middle")
        device(run, "a", port)  # without --trust: the key is in its store
        assert run.wait("a") == 0, run.log("a")
        assert run.wait("coordinator") == 0, run.log("coordinator")
        rows = read_status(tmp_path / "run").rounds
        assert sum(row.summary["reports"] for row in rows) == 1
        assert any("failed: untrusted" in row.summary["dropped"] for row in rows)


@pytest.mark.slow
def test_a_token_brings_the_key_and_the_coordinator_s_word_changes_it(tmp_path: Path) -> None:
    with processes(tmp_path) as run:
        port, old = prepare(tmp_path, rounds=100_000)
        service = tmp_path / "service.toml"
        service.write_text(service.read_text() + 'identities = "identities"\n')
        new = asked("signing-key", tmp_path / "new.pem")
        token = asked("token", service)
        assert token.endswith(f".{old}")

        def trains_on() -> None:
            wait_for(
                lambda: bool((found := status_of(tmp_path / "run")) and found.running),
                "the coordinator",
            )
            before = read_status(tmp_path / "run").version
            wait_for(lambda: read_status(tmp_path / "run").version > before, "a round")

        run.coordinator(tmp_path / "plan.toml")
        device(run, "a", port, "--token", token)
        trains_on()
        run.running["coordinator"].send_signal(signal.SIGTERM)
        assert run.wait("coordinator") == 0
        service.write_text(service.read_text().replace('["key.pem"]', '["new.pem", "key.pem"]'))
        run.coordinator(tmp_path / "plan.toml")
        trains_on()
        assert f"the coordinator's keys are now {new}, {old}" in run.log("a")

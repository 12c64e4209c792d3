"""Two processes and a private CA, with the commands of docs/operate/identities.md.

A round over TLS, and who is kept out.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fleetlearn_coordinator import read_status
from peers import plan_text
from processes import Processes, free_port, status_of, wait_for

GATEWAYS = pytest.mark.parametrize("gateways", [0, pytest.param(2, marks=pytest.mark.slow)])
COORDINATOR = [sys.executable, "-m", "fleetlearn_coordinator"]
DEVICE = [sys.executable, "-m", "fleetlearn_device", "run", "--until-finished"]


@GATEWAYS
def test_a_device_with_the_ca_trains_and_one_without_does_not(
    run: Processes, bundle_path: Path, shards: list[Path], gateways: int
) -> None:
    port, plan, folder = free_port(), run.folder / "plan.toml", run.folder
    made = subprocess.run(
        [*COORDINATOR, "certificate", "127.0.0.1"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "for devices: --ca ca.pem" in made.stderr
    plan.write_text(
        plan_text(bundle_path, folder / "run", local__lr=0.1, round__goal=1, stop__rounds=1)
    )
    (folder / "service.toml").write_text(
        f"port = {port}\ngateways = {gateways}\n"
        '[tls]\ncertificate = "tls/certificate.pem"\nkey = "tls/key.pem"\n'
    )
    run.coordinator(plan)
    url, data = f"wss://127.0.0.1:{port}", shards[0]
    stranger = ["--coordinator", url, "--data", data, "--state", folder / "stranger.state"]
    run.start("stranger", *DEVICE, *stranger)
    assert run.wait("stranger") == 5
    assert "give the CA's file, ca.pem of the coordinator, with --ca" in run.log("stranger")
    found = status_of(folder / "run")
    assert found is not None
    assert (found.version, found.running) == (0, True)
    known = [
        "--coordinator",
        url,
        "--ca",
        folder / "tls" / "ca.pem",
        "--data",
        data,
        "--state",
        folder / "a.state",
    ]
    run.start("a", *DEVICE, *known)
    assert run.wait("a") == 0, run.log("a")
    assert run.wait("coordinator") == 0, run.log("coordinator")
    assert read_status(folder / "run").version == 1


@GATEWAYS
def test_a_device_with_a_certificate_trains_until_it_is_revoked(
    run: Processes, bundle_path: Path, shards: list[Path], gateways: int
) -> None:
    port, plan, folder = free_port(), run.folder / "plan.toml", run.folder
    for command in (["certificate", "127.0.0.1"], ["device-certificate", "roof-7"]):
        subprocess.run([*COORDINATOR, *command], cwd=folder, capture_output=True, check=True)
    plan.write_text(
        plan_text(bundle_path, folder / "run", local__lr=0.1, round__goal=1, stop__rounds=100000)
    )
    (folder / "service.toml").write_text(
        f'port = {port}\ngateways = {gateways}\nidentities = "identities"\n'
        '[tls]\ncertificate = "tls/certificate.pem"\n'
        'key = "tls/key.pem"\nclients = "tls/ca.pem"\n'
    )
    run.coordinator(plan)
    files = {
        "--certificate": folder / "tls/devices/roof-7.pem",
        "--key": folder / "tls/devices/roof-7.key",
    }
    shared = [
        "--coordinator",
        f"wss://127.0.0.1:{port}",
        "--ca",
        folder / "tls" / "ca.pem",
        "--data",
        shards[0],
    ]
    shared += [part for option in files.items() for part in option]
    run.start("another", *DEVICE, *shared, "--name", "another", "--state", folder / "another.state")
    assert run.wait("another") == 1
    assert "is of roof-7, and another checked in" in run.log("another")
    run.start("a", *DEVICE, *shared, "--name", "roof-7", "--state", folder / "a.state")
    wait_for(lambda: bool((found := status_of(folder / "run")) and found.version), "a round")
    subprocess.run(
        [*COORDINATOR, "revoke", "service.toml", "roof-7"],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    assert run.wait("a") == 4
    assert "the certificate of roof-7 was revoked" in run.log("a")


def test_without_tls_both_sides_refuse_other_machines(
    run: Processes, bundle_path: Path, shards: list[Path]
) -> None:
    plan = run.folder / "plan.toml"
    plan.write_text(plan_text(bundle_path, run.folder / "run"))
    (run.folder / "service.toml").write_text('host = "0.0.0.0"\nport = 0\n')
    run.coordinator(plan)
    assert run.wait("coordinator") == 1
    assert "insecure = true" in run.log("coordinator").replace("\n", " ")
    run.start(
        "a",
        *DEVICE,
        "--coordinator",
        "ws://192.0.2.1:1",
        "--data",
        shards[0],
        "--state",
        run.folder / "a.state",
    )
    assert run.wait("a") == 2
    assert "--insecure" in run.log("a")

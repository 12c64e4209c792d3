"""The service that install-service writes, judged by systemd's own tools."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from fleetlearn_coordinator.__main__ import app
from fleetlearn_coordinator.service import systemd_unit
from line_bundle import write_line_bundle
from peers import plan_text
from processes import ROOT, processes, service_file
from systemd_checks import exposure, needs_systemd, verified
from typer.testing import CliRunner, Result

PAGE = (ROOT / "docs" / "operate" / "operating.md").read_text()
MOST = 1.3
"""Exposure, of 10: what systemd says of a service that may listen and write its own folder."""


def type_in(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host's service file in the folder that systemd gives a service."""
    monkeypatch.setattr(systemd_unit, "STATE", tmp_path)
    folder = tmp_path / "fleetlearn"
    folder.mkdir()
    file = folder / "service.toml"
    file.write_text('runs = "runs"\nidentities = "ids"\n')
    return file


def installed(service: Path, *options: object) -> Path:
    folder = service.parent.parent
    done = type_in("install-service", service, "--folder", folder, *options)
    assert done.exit_code == 0, done.output
    assert "sudo systemctl enable --now fleetlearn" in done.stderr
    return folder / "fleetlearn.service"


@needs_systemd
@pytest.mark.parametrize("options", [(), ("--user", "daemon")])
def test_systemd_takes_the_unit_and_finds_it_safe(service: Path, options: tuple[str, ...]) -> None:
    unit = installed(service, *options)
    assert not verified(unit)
    found = exposure(unit)
    assert float(found) <= MOST
    if not options:
        assert f"an exposure of {found}" in PAGE


@needs_systemd
def test_mistakes_in_a_unit_are_noticed(service: Path) -> None:
    unit = installed(service)
    text = unit.read_text()
    unit.write_text(text.replace("ProtectSystem=strict", "ProtectSystem=strictly"))
    assert any("protect system" in line for line in verified(unit))
    unit.write_text(text.replace("SystemCallFilter", "# SystemCallFilter"))
    assert float(exposure(unit)) > MOST


def test_a_dry_run_writes_nothing(service: Path) -> None:
    done = type_in("install-service", service, "--folder", service.parent / "units", "--dry-run")
    assert done.exit_code == 0, done.output
    assert "DynamicUser=yes\nStateDirectory=fleetlearn" in done.stdout
    assert f"serve {service}\n" in done.stdout
    assert "nothing was written" in done.stderr
    assert not (service.parent / "units").exists()


def test_what_the_service_could_not_write_is_refused_or_made_writable(
    tmp_path: Path, bundle_path: Path
) -> None:
    plan = tmp_path / "my plans" / "plan.toml"
    plan.parent.mkdir()
    plan.write_text(plan_text(bundle_path, "data"))
    done = type_in("install-service", plan, "--dry-run")
    assert done.exit_code == 1
    assert "may write in /var/lib/fleetlearn alone" in done.stderr
    done = type_in("install-service", plan, "--user", "ann", "--dry-run")
    assert f'User=ann\nReadWritePaths="{plan.parent}"' in done.stdout
    assert f'serve "{plan}"\n' in done.stdout


def test_gateways_are_the_main_process_s_affair(tmp_path: Path) -> None:
    """SIGTERM goes to it alone, and the engine process says how the service is."""
    bundle = write_line_bundle(tmp_path / "line.bundle")
    plan = tmp_path / "plan.toml"
    plan.write_text(plan_text(bundle, tmp_path / "run"))
    own = service_file(plan)
    texts = {}
    for gateways in (0, 2):
        own.write_text(f"gateways = {gateways}\n")
        made = systemd_unit.make_unit(plan, name="fleetlearn", service=own, user="daemon")
        texts[gateways] = made.text.splitlines()
    assert "NotifyAccess=main" in texts[0]
    assert not [line for line in texts[0] if line.startswith("KillMode")]
    more = {line for line in texts[2] if not line.startswith("#")} - {*texts[0]}
    reload = "ExecReload=/bin/kill -USR1 $MAINPID"
    assert more == {"NotifyAccess=all", "KillMode=mixed", reload}


@pytest.mark.parametrize(
    ("text", "capabilities", "private_users"),
    [("port = 443\n", "CAP_NET_BIND_SERVICE", "no"), ("port = 8765\n", "", "yes")],
)
def test_a_low_port_needs_a_right(
    service: Path, text: str, capabilities: str, private_users: str
) -> None:
    service.write_text(f'runs = "runs"\n{text}')
    shown = type_in("install-service", service, "--dry-run").stdout.splitlines()
    assert f"CapabilityBoundingSet={capabilities}" in shown
    assert f"PrivateUsers={private_users}" in shown


def test_a_coordinator_tells_systemd_that_it_listens_lives_and_stops(
    tmp_path: Path, bundle_path: Path
) -> None:
    plan, address = tmp_path / "plan.toml", tmp_path / "notify"
    plan.write_text(plan_text(bundle_path, tmp_path / "run"))
    service_file(plan, 0)
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager,
        processes(tmp_path) as run,
    ):
        manager.bind(str(address))
        manager.settimeout(60)
        run.coordinator(plan, env={**os.environ, "NOTIFY_SOCKET": str(address)})
        told = told_until(manager, "READY=1")
        assert "STOPPING=1" not in told
        assert told_until(manager, "WATCHDOG=1") == ["WATCHDOG=1"]
        assert "listening on" in run.log("coordinator") or manager.recv(100)
        run.running["coordinator"].send_signal(signal.SIGTERM)
        told_until(manager, "STOPPING=1")
        assert run.wait("coordinator") == 0


def told_until(manager: socket.socket, last: str) -> list[str]:
    found: list[str] = []
    while not found or found[-1] != last:
        found.append(manager.recv(100).decode())
    return found


ALONE = """\
import ctypes, mmap, sys
PR_SET_MDWE, REFUSE_EXEC_GAIN = 65, 1
if ctypes.CDLL(None).prctl(PR_SET_MDWE, REFUSE_EXEC_GAIN, 0, 0, 0):
    sys.exit(77)
try:
    mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    sys.exit("memory that is written and executed is not refused")
except PermissionError:
    pass
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from fleetlearn_device import open_runtime
Ed25519PrivateKey.generate().sign(b"x")
data = {"x": np.ones((20, 3), np.float32), "y": np.zeros(20, np.float32)}
print(open_runtime(sys.argv[1]).evaluate(data))
"""


def test_onnx_runtime_and_signatures_need_no_memory_that_is_written_and_executed(
    tmp_path: Path,
) -> None:
    """MemoryDenyWriteExecute=, by what the kernel has for that since 6.3. A coordinator's held-out
    data are measured with ONNX Runtime."""
    write_line_bundle(tmp_path / "line.bundle")
    words = [sys.executable, "-c", ALONE, str(tmp_path / "line.bundle")]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip("this kernel has no PR_SET_MDWE")
    assert done.returncode == 0, done.stderr
    assert "loss" in done.stdout

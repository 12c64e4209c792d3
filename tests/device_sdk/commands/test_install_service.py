"""The service that install-service writes, judged by systemd's own tools; and what a device as a
service tells systemd."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from pathlib import Path

import numpy as np
import pytest
from fleetlearn_device.__main__ import main
from fleetlearn_device.commands import systemd_unit
from fleetlearn_device.commands.exits import EXIT
from fleetlearn_device.commands.systemd_unit import NO_RESTART
from processes import ROOT, processes
from systemd_checks import exposure, needs_systemd, verified

PAGE = (ROOT / "docs" / "start" / "device-service.md").read_text("utf-8")
MOST = 1.3
"""Exposure, of 10: what systemd says of a service that may connect and write its own folder."""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A settings file; systemd's folders of state are in this test's folder."""
    monkeypatch.setattr(systemd_unit, "STATE", tmp_path / "lib")
    file = tmp_path / "device.toml"
    file.write_text('coordinator = "wss://fleet.example"\n[data]\nsource = "/srv/mine.npz"\n')
    return file


def installed(config: Path, *options: str) -> Path:
    """Install it, and return the unit."""
    words = ["install-service", "--config", str(config), "--folder", str(config.parent / "units")]
    assert main([*words, *options]) == 0
    return config.parent / "units" / "fleetlearn-device.service"


@needs_systemd
@pytest.mark.parametrize(
    "options", [(), ("--user", "daemon"), ("--credential", "/etc/fleetlearn/token")]
)
def test_systemd_takes_the_unit_and_finds_it_safe(config: Path, options: tuple[str, ...]) -> None:
    unit = installed(config, *options)
    assert not verified(unit)
    found = exposure(unit)
    assert float(found) <= MOST
    if not options:
        assert f"an exposure of {found}" in PAGE


@needs_systemd
def test_systemd_takes_the_unit_of_one_user(config: Path) -> None:
    config.write_text(f'state = "{config.parent}/state"\n{config.read_text()}')
    unit = installed(config, "--user-unit")
    assert not verified(unit, "--user")
    text = unit.read_text()
    assert "WantedBy=default.target" in text
    assert "ProtectSystem" not in text
    assert "SystemCallFilter" in text


@needs_systemd
def test_mistakes_in_a_unit_are_noticed(config: Path) -> None:
    unit = installed(config)
    text = unit.read_text()
    unit.write_text(text.replace("ProtectSystem=strict", "ProtectSystem=strictly"))
    assert any("protect system" in line for line in verified(unit))
    unit.write_text(text.replace("SystemCallFilter", "# SystemCallFilter"))
    assert float(exposure(unit)) > MOST


def test_it_says_what_to_do_next(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    installed(config, "--credential", str(config.parent / "token"))
    shown = capsys.readouterr().err
    assert f"first: put the token into {config.parent / 'token'}" in shown
    assert "sudo systemctl enable --now fleetlearn-device" in shown
    installed(config, "--user", "ann")
    (config.parent / "s").mkdir()
    config.write_text(f'state = "{config.parent}/s"\n{config.read_text()}')
    capsys.readouterr()
    installed(config, "--user-unit")
    shown = capsys.readouterr().err
    assert "    systemctl --user enable --now fleetlearn-device" in shown
    assert "loginctl enable-linger" in shown


def test_a_dry_run_writes_nothing(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    installed(config, "--dry-run", "--credential", "/etc/fleetlearn/token")
    shown = capsys.readouterr()
    assert not (config.parent / "units").exists()
    assert "nothing was written" in shown.err
    lines = shown.out.splitlines()
    state = config.parent / "lib" / "fleetlearn-device"
    (command,) = (line for line in lines if line.startswith("ExecStart="))
    assert command.endswith(
        f"run --config {config} --state {state} --token-file ${{CREDENTIALS_DIRECTORY}}/token"
    )
    for line in (
        "DynamicUser=yes", "StateDirectory=fleetlearn-device", "Type=notify", "WatchdogSec=120",
        "LoadCredential=token:/etc/fleetlearn/token", "RestartPreventExitStatus=2 3 4",
    ):  # fmt: skip
        assert line in lines


def test_what_the_service_writes_elsewhere_is_allowed_or_refused(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = config.read_text()
    config.write_text(f'state = "/srv/fleet state"\n{text}[log]\nmetrics_file = "/m/f.prom"\n')
    assert main(["install-service", "--config", str(config), "--dry-run"]) == 2
    assert "may write in" in capsys.readouterr().err
    installed(config, "--user", "ann", "--dry-run")
    shown = capsys.readouterr()
    assert 'User=ann\nReadWritePaths=/m "/srv/fleet state"\n' in shown.out
    assert "must be able to write in /m" in shown.err
    config.write_text(f'{text}[log]\nmetrics_file = "/m/f.prom"\n')
    installed(config, "--dry-run")
    assert "StateDirectoryMode=0700\nReadWritePaths=/m\n" in capsys.readouterr().out


def test_a_socket_has_a_folder_for_as_long_as_the_service_runs(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(f'socket = "/run/fleet/agent.sock"\n{config.read_text()}')
    installed(config, "--dry-run", "--user", "ann")
    shown = capsys.readouterr()
    assert "\nRuntimeDirectory=fleet\n" in shown.out
    assert "ReadWritePaths" not in shown.out
    assert "must be able to write" not in shown.err
    installed(config, "--dry-run")
    assert "the socket is for the service's account alone" in capsys.readouterr().err


def test_a_gpu_has_its_device_files(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(f'{config.read_text()}[training]\nprovider = "cuda"\n')
    installed(config, "--dry-run")
    shown = capsys.readouterr().out
    assert "PrivateDevices=no" in shown
    assert "MemoryDenyWriteExecute" not in shown


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ((), "a service has its settings in a file: give --config FILE"),
        (("--config", "{}", "--user-unit"), "a service of yours alone needs it"),
        (("--config", "{}", "--user-unit", "--user", "ann"), "expected one of them"),
    ],
)
def test_what_cannot_be_a_service_is_refused(
    config: Path, options: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [each.format(config) for each in options]
    assert main(["install-service", "--dry-run", *words]) == 2
    assert text in capsys.readouterr().err


def test_this_shells_variables_are_not_the_services(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLEETLEARN_STATE", "/home/ann/state")
    monkeypatch.setenv("FLEETLEARN_PROVIDER", "cuda")
    installed(config, "--dry-run")
    shown = capsys.readouterr().out
    assert "/home/ann" not in shown
    assert "PrivateDevices=yes" in shown


def test_each_exit_status_that_is_not_restarted_is_explained() -> None:
    for status in NO_RESTART:
        assert re.search(rf"^  {status}    \w", EXIT, re.MULTILINE)
        assert re.search(rf"^\| {status} \| no \|", PAGE, re.MULTILINE)
    listed = {int(each) for each in re.findall(r"^  (\d)    ", EXIT, re.MULTILINE)} - {0}
    restarted = {int(each) for each in re.findall(r"^\| (\d) \| yes \|", PAGE, re.MULTILINE)}
    assert restarted == listed - NO_RESTART.keys()


@pytest.mark.slow
def test_a_device_tells_systemd_that_it_is_ready_lives_and_stops(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", x=np.zeros((4, 3), "f4"), y=np.zeros(4))
    (tmp_path / "token").write_text("\n")
    address = tmp_path / "notify"
    variables = {
        "NOTIFY_SOCKET": str(address), "WATCHDOG_USEC": "300000", "PYTHONUNBUFFERED": "1",
        "FLEETLEARN_COORDINATOR": "ws://127.0.0.1:9", "FLEETLEARN_TOKEN_FILE": f"{tmp_path}/token",
        "FLEETLEARN_DATA": f"{tmp_path}/mine.npz", "FLEETLEARN_STATE": f"{tmp_path}/state",
    }  # fmt: skip
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager,
        processes(tmp_path) as run,
    ):
        manager.bind(str(address))
        manager.settimeout(60)
        run.start(
            "device",
            sys.executable,
            "-m",
            "fleetlearn_device",
            "run",
            env={**os.environ, **variables},
        )
        assert manager.recv(100) == b"READY=1"
        assert [manager.recv(100) for _ in range(3)] == [b"WATCHDOG=1"] * 3
        run.running["device"].send_signal(signal.SIGTERM)
        while (told := manager.recv(100)) != b"STOPPING=1":
            assert told == b"WATCHDOG=1"
        assert run.wait("device") == 0

"""What doctor says of the machine, each finding with a fault that was planted."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fleetlearn_device.__main__ import main
from fleetlearn_device.doctor import machine
from fleetlearn_device.doctor.finding import Finding
from fleetlearn_device.runtimes.import_onnxruntime import RuntimeUnavailableError
from fleetlearn_device.storage.content_cache import cached_manifest
from fleetlearn_device.storage.credential import make_credential, note_let_in
from fleetlearn_device.storage.device_key import device_key
from fleetlearn_device.storage.state_directory import StateDirectory

NOW = datetime(2026, 11, 27, 10, 0, 0, tzinfo=UTC).timestamp()


def by_name(findings: Iterable[Finding]) -> dict[str, Finding]:
    found = {each.what: each for each in findings}
    for each in found.values():
        assert each.do or each.state == "good" or "this system" in each.found or "no other" in (
            each.found
        ), "every fault says what to do"  # fmt: skip
    return found


def test_software_that_is_there_is_good() -> None:
    found = by_name(machine.check_software("auto", "cpu", trusts=True))
    assert {each.state for each in found.values()} == {"good"}
    assert "ONNX Runtime 1." in found["runtime"].found


def test_a_runtime_that_cannot_be_loaded_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise RuntimeUnavailableError("onnxruntime is not installed")

    monkeypatch.setattr(machine, "import_onnxruntime", broken)
    found = by_name(machine.check_software("auto", "cpu", trusts=False))["runtime"]
    assert (found.state, found.found) == ("bad", "onnxruntime is not installed")
    assert "pip install" in found.do


def test_a_system_of_32_bit_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.sys, "maxsize", 2**31 - 1)
    found = by_name(machine.check_software("auto", "cpu", trusts=False))["python"]
    assert found.state == "bad"
    assert "64-bit system" in found.do


def test_keys_that_cannot_be_checked_are_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    found = by_name(machine.check_software("auto", "cpu", trusts=True))
    assert found["signatures"].state == "bad"
    assert "signatures" not in by_name(machine.check_software("auto", "cpu", trusts=False))


def test_a_state_directory_with_a_credential_is_good(tmp_path: Path) -> None:
    state = StateDirectory(tmp_path / "s", "sensor-7")
    make_credential(state.path)
    found = by_name(machine.check_state(state.path, token=False))
    assert found["device"].found == "sensor-7; a device runs with it"
    assert "was never let in" in found["credential"].found
    note_let_in(state.path)
    state.close()
    found = by_name(machine.check_state(state.path, token=False))
    assert found["device"].found == "sensor-7; no device runs with it now"
    assert "was let in with it" in found["credential"].found
    assert {each.state for each in found.values()} == {"good"}


def test_what_is_wrong_with_a_state_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "s"
    found = by_name(machine.check_state(folder, token=False))
    assert "is not there yet, and can be made" in found["state"].found
    assert found["credential"].state == "unknown"
    assert by_name(machine.check_state(folder, token=True))["credential"].state == "good"
    StateDirectory(folder, "sensor-7").close()
    note_let_in(folder)
    assert "let the device in without one" in list(machine.check_state(folder, token=False))[-1][2]
    make_credential(folder)
    (folder / "credential.json").chmod(0o644)
    found = by_name(machine.check_state(folder, token=False))
    assert found["credential"].state == "bad"
    assert "chmod 600" in found["credential"].do
    device_key(folder)
    assert "device key" not in by_name(machine.check_state(folder, token=False))
    (folder / "device_key.json").chmod(0o640)
    found = by_name(machine.check_state(folder, token=False))
    assert found["device key"].state == "bad"
    assert "public-key" in found["device key"].do
    (folder / "credential.json").write_bytes(b"{")
    (folder / "credential.json").chmod(0o600)
    found = by_name(machine.check_state(folder, token=False))
    assert "is damaged" in list(machine.check_state(folder, token=False))[-1].found
    monkeypatch.setattr(machine.os, "access", lambda *_: False)
    first = next(machine.check_state(folder, token=False))
    assert (first.state, first.found) == ("bad", f"{folder}: this user may not write there")
    assert f"sudo -u '#{os.geteuid()}'" in first.do
    first = next(machine.check_state(tmp_path / "none" / "s", token=False))
    assert first.found == f"{tmp_path}: this user may not write there"
    made = f"sudo install -d -o $(id -un) {tmp_path / 'none' / 's'};"
    assert first.do.startswith(made), "the folder above, such as /var/lib, keeps its owner"


def _refuse(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a folder that the tests' user may not enter, whoever that is."""
    inside = f"{folder}{os.sep}"

    def refusing(original: Any) -> Any:
        def call(path: Any = ".", *arguments: Any, **options: Any) -> Any:
            if not isinstance(path, int) and os.fspath(path).startswith(inside):
                raise PermissionError(13, "Permission denied", os.fspath(path))
            return original(path, *arguments, **options)

        return call

    for name in ("stat", "listdir", "scandir"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    monkeypatch.setattr(io, "open", refusing(open))
    monkeypatch.setattr(os, "access", lambda path, _: not f"{path}{os.sep}".startswith(inside))


def test_the_state_directory_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "s"
    StateDirectory(folder).close()
    _refuse(folder, monkeypatch)
    found = list(machine.check_state(folder, token=False))
    assert [each.found for each in found] == [f"{folder}: this user may not write there"]
    below = list(machine.check_state(folder / "a" / "b", token=False))
    assert below[0].found == f"{folder}: this user may not write there"
    assert cached_manifest(folder) is None
    for command in (["status"], ["predict", "new.npz"], ["trust", "KEY"]):
        assert main([*command, "--state", str(folder)]) == 1
        text = capsys.readouterr().err
        assert "Permission denied; this user may not use it: be its owner" in text, command


class _Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.mark.parametrize(("free", "state"), [(2**36, "good"), (2**29, "warning"), (2**20, "bad")])
def test_the_room_on_the_disk(
    free: int, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: _Usage(2**40, 0, free))
    found = by_name(machine.check_disk(tmp_path / "not" / "yet"))
    assert found["disk"].state == state
    assert str(tmp_path) in found["disk"].found
    assert not [*tmp_path.iterdir()], "the probe is gone"


def test_a_slow_disk_and_one_that_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: _Usage(2**40, 0, 2**36))
    times = iter([0.0, 0.5, 1.0, 8.25])
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(times))
    assert by_name(machine.check_disk(tmp_path))["disk speed"].state == "good"
    found = by_name(machine.check_disk(tmp_path))["disk speed"]
    assert (found.state, found.found) == ("warning", "4 MiB were written and synced in 7.25 s")
    monkeypatch.undo()

    def worn_out(number: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", worn_out)
    found = by_name(machine.check_disk(tmp_path))["disk speed"]
    assert found.state == "bad"
    assert "input/output error" in found.found
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("free", "state"), [(500_000, "good"), (150_000, "warning"), (30_000, "bad")]
)
def test_the_memory(free: int, state: str, tmp_path: Path) -> None:
    file = tmp_path / "meminfo"
    file.write_text(f"MemTotal:  1000000 kB\nMemFree: 1 kB\nMemAvailable: {free} kB\n")
    found = machine.check_memory(file)
    assert found.state == state
    assert found.found == f"{free / 1024:.0f} MiB of 977 MiB can be used"
    assert machine.check_memory(tmp_path / "none").state == "unknown"


@pytest.mark.parametrize(
    ("theirs", "state", "text"),
    [
        ("Fri, 27 Nov 2026 10:00:30 GMT", "good", "as the coordinator's"),
        ("Fri, 27 Nov 2026 10:05:00 GMT", "warning", "300 s behind the coordinator's"),
        ("Fri, 27 Nov 2026 09:58:00 GMT", "warning", "120 s ahead of the coordinator's"),
        ("Thu, 26 Nov 2026 09:00:00 GMT", "bad", "90000 s ahead of"),
        ("soon", "unknown", "there was no other clock"),
        (None, "unknown", "there was no other clock"),
    ],
)
def test_the_clock(theirs: str | None, state: str, text: str) -> None:
    found = machine.check_clock(theirs, NOW)
    assert (found.state, text in found.found) == (state, True), found


def test_a_clock_of_1970_is_bad() -> None:
    found = machine.check_clock("Fri, 27 Nov 2026 10:00:30 GMT", 1000.0)
    assert (found.state, "timedatectl" in found.do) == ("bad", True)


def test_the_name_of_a_damaged_identity(tmp_path: Path) -> None:
    StateDirectory(tmp_path / "s", "sensor-7").close()
    (tmp_path / "s" / "identity.json").write_text(json.dumps({"device": 3}))
    found = by_name(machine.check_state(tmp_path / "s", token=False))
    assert found["state"].state == "bad"

"""``fleetlearn-device config``, and settings from a file in the other commands."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fleetlearn_device.__main__ import main
from fleetlearn_device.settings.table import SETTINGS
from fleetlearn_device.storage.state_directory import StateDirectory


def test_it_shows_each_setting_and_who_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "device.toml"
    file.write_text('[connection]\ntoken = "t0p-secret"\n[limits]\nthreads = 4\n')
    monkeypatch.setenv("FLEETLEARN_TAG", "roof eu")
    assert main(["config", "--config", str(file), "--log-level", "debug", "--insecure"]) == 0
    shown = capsys.readouterr().out
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in shown.splitlines()}
    assert [*rows] == [row.key for row in SETTINGS]
    assert rows["connection.token"] == f"(not shown) {file}, line 2"
    assert rows["limits.threads"] == f"4 {file}, line 4"
    assert rows["states.tags"] == "roof, eu FLEETLEARN_TAG"
    assert rows["log.level"] == "debug --log-level"
    assert rows["connection.insecure"] == "true --insecure"
    assert rows["connection.ca"] == "- default"
    assert "t0p-secret" not in shown


def test_run_takes_its_settings_from_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "mine.npz", x=np.zeros((4, 3)), y=np.zeros(5))
    file = tmp_path / "device.toml"
    file.write_text('coordinator = "ws://127.0.0.1:9"\nstate = "s"\n[data]\nsource = "mine.npz"\n')
    assert main(["run", "--config", str(file)]) == 2
    assert "'x': 4, 'y': 5" in capsys.readouterr().err, "of the data beside the file"


def test_the_state_directory_of_every_command_may_be_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    StateDirectory(tmp_path / "s", "sensor-7").close()
    file = tmp_path / "device.toml"
    file.write_text('state = "s"\n')
    assert main(["status", "--config", str(file)]) == 3
    assert "sensor-7" in capsys.readouterr().out
    assert main(["trust", "0f" * 32, "--config", str(file)]) == 0
    monkeypatch.setenv("FLEETLEARN_STATE", str(tmp_path / "s"))
    assert main(["status"]) == 3
    file.write_text('sate = "s"\n')
    assert main(["status", "--config", str(file)]) == 2
    assert "sate is not a setting; did you mean state?" in capsys.readouterr().err

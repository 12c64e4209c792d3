"""The state directory as a whole: one process uses it, and it is described for people."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fleetlearn_device.storage.errors import StateError
from fleetlearn_device.storage.state_directory import StateDirectory, describe
from fleetlearn_protocol.messages import Report
from line_bundle import write_line_bundle


def test_one_process_uses_a_directory(tmp_path: Path) -> None:
    held = StateDirectory(tmp_path)
    program = f"from fleetlearn_device.storage.state_directory import StateDirectory; StateDirectory({str(tmp_path)!r})"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert other.returncode == 1
    assert "in use by another process" in other.stderr
    held.close()
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_path_that_cannot_be_a_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="a part of the path is a file"):
        StateDirectory(tmp_path / "file" / "state")


def test_a_directory_is_described_while_it_is_in_use(state: StateDirectory, tmp_path: Path) -> None:
    bundle = write_line_bundle(tmp_path / "line.bundle")
    state.contents.bundle_path(bundle.sha256).mkdir()
    (state.contents.bundle_path(bundle.sha256) / "manifest.json").write_bytes(bundle.read("manifest.json"))
    report = Report("t1", 3, 12, 4, 7, 3, 2.0, True, 0.5)
    state.outbox.save(report, b"1234", "b" * 64, np.zeros(2, np.float32))
    expected = (state.device, [(bundle.sha256, bundle.manifest.name)], report, [("b" * 64, 12)])
    assert describe(state.path) == expected


def test_what_is_no_state_directory_is_not_described(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="is not a state directory"):
        describe(tmp_path)

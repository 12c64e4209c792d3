"""With which command a supervisor starts its processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fleetlearn_coordinator.commands import serving


def test_processes_are_started_through_the_link_that_started_the_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "0.3").mkdir()
    (tmp_path / "now").symlink_to(tmp_path / "0.3")
    started = tmp_path / "now" / "fleetlearn-coordinator"
    monkeypatch.setattr(sys, "argv", [str(started), "serve"])
    assert serving._program() == [str(started)]


def test_a_supervisor_that_was_started_as_a_module_starts_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["/env/fleetlearn_coordinator/__main__.py", "serve"])
    assert serving._program() == [sys.executable, "-m", "fleetlearn_coordinator"]

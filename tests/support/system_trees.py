"""Folders that look like Linux's /sys and /proc."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fleetlearn_device.conditions.condition import SystemFiles

SUPPLY = "sys/class/power_supply"
THERMAL = "sys/class/thermal"
BATTERY_12 = {f"{SUPPLY}/BAT0/type": "Battery", f"{SUPPLY}/BAT0/status": "Discharging",
              f"{SUPPLY}/BAT0/capacity": 12}  # fmt: skip


def plant(folder: Path, files: dict[str, object] | None = None) -> SystemFiles:
    """Write these files below ``folder``, by their paths: ``sys/...`` and ``proc/...``."""
    for path, text in {"sys/.there": "", "proc/.there": "", **(files or {})}.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    return SystemFiles(folder / "sys", folder / "proc")


def program(folder: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a program of sh that is found by its name."""
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

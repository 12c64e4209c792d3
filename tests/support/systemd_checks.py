"""For tests: what systemd says of a unit that a command wrote."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here"
)


def verified(unit: Path, *options: str) -> list[str]:
    """Return what `systemd-analyze verify` says of the unit."""
    words = ["systemd-analyze", *options, "verify", str(unit)]
    done = subprocess.run(words, capture_output=True, text=True)
    return [line for line in done.stderr.splitlines() if unit.name in line]


def exposure(unit: Path) -> str:
    """Return how exposed the service is, of 10, by `systemd-analyze security`."""
    words = ["systemd-analyze", "security", "--no-pager", "--offline=yes", str(unit)]
    shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    (found,) = re.findall(r"Overall exposure level for .*: ([0-9.]+)", shown)
    return str(found)

"""Windows and macOS: what the device uses that they lack is asked for first, or never reached
there. mypy knows what each system's Python has."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SYSTEMD = {"systemd.py": {"SOCK_CLOEXEC", "SOCK_NONBLOCK"}}
"""Used where NOTIFY_SOCKET is set: systemd is on Linux alone."""
GUARDED = {
    "darwin": SYSTEMD,
    "win32": {
        "systemd.py": {"SOCK_CLOEXEC", "SOCK_NONBLOCK", "AF_UNIX"},
        # after files below /proc were read, or where os has it, or AttributeError is caught
        "limits/memory.py": {"sysconf"},
        "conditions/machine.py": {"sysconf", "statvfs"},
        "driver/describing.py": {"sysconf"},
        "conditions/own_check.py": {"SIGKILL"},
        "limits/priority.py": {"getpriority", "setpriority", "PRIO_PROCESS"},
        # the socket of the agent is refused before
        "agent.py": {"AF_UNIX"},
    },
}
"""System -> file -> names that its Python lacks, and that the file guards."""


def lacking(system: str, *what: str | Path) -> dict[str, set[str]]:
    """Return the names of modules that this system's Python lacks, by file."""
    words = [sys.executable, "-m", "mypy", "--platform", system, *map(str, what)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    found: dict[str, set[str]] = {}
    pattern = r'(\S+\.py):\d+: error: Module has no attribute "(\w+)"'
    for file, name in re.findall(pattern, done.stdout):
        short = re.sub(r".*fleetlearn_(device|protocol)/", "", file)
        found.setdefault(short, set()).add(name)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("system", GUARDED)
def test_what_a_system_lacks_is_guarded(system: str, tmp_path: Path) -> None:
    assert (
        lacking(system, "-p", "fleetlearn_device", "-p", "fleetlearn_protocol") == (GUARDED[system])
    )
    planted = tmp_path / "planted.py"
    planted.write_text("import os, socket\n\nprint(os.getpriority, socket.SOCK_CLOEXEC)\n")
    found = lacking(system, planted)
    assert "SOCK_CLOEXEC" in next(iter(found.values())), "a mistake is noticed"

"""A simulation starts in each of its processes: nothing is imported there that serves runs."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
for name in ("asyncio", "ssl", "sqlite3", "websockets", "torch"):
    sys.modules[name] = None  # to import it is an error
import fleetlearn_simulator.run
"""


def test_a_simulation_needs_nothing_that_serves() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

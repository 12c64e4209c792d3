"""The engine runs where there is nothing but the standard library and two pure packages."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
for name in ("numpy", "sqlite3", "fcntl", "websockets", "asyncio", "socket"):
    sys.modules[name] = None  # to import it is an error
from fleetlearn_coordinator import Engine, Settings
from fleetlearn_coordinator.rounds.commands import Commit
engine = Engine(Settings(goal=1, cohort=1, minimum=1, deadline=60.0, grace=5.0, gather=4.0))
opened, task = engine.check_in("a", None, 0.0)
assert engine.count_report("a", task.task, 1.0) == [Commit(1, {})]
"""


def test_the_engine_needs_neither_numpy_nor_a_database_nor_sockets() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

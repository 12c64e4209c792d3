"""What a command of fleetlearn-coordinator costs: CPU time of its process, over the port of a
coordinator that runs, by its files, and for a process that does nothing.

A person types these all day, and scripts call them each minute.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import _measure as measure

COMMANDS = (
    ("--version",),
    ("--help",),
    ("status",),
    ("status", "--json"),
    ("rounds",),
    ("devices",),
    ("models",),
    ("doctor",),
)
FLOOR = "python -c pass"


def cpu_of(words: list[str], folder: Path) -> float:
    """Return the CPU seconds of a process, from its begin to its end."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(words, cwd=folder, capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 3):  # 3: no coordinator runs
        sys.exit(f"{' '.join(words)}: {done.stderr.decode()}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument("plan", type=Path, help="PLAN.toml of a run that has begun")
    options.add_argument("--repeats", type=int, default=5, help="turns (%(default)s)")
    chosen = options.parse_args()
    folder, plan = chosen.plan.absolute().parent, chosen.plan.name
    program = [sys.executable, "-m", "fleetlearn_coordinator"]
    calls: dict[str, list[str]] = {FLOOR: [sys.executable, "-c", "pass"]}
    for first, *rest in COMMANDS:
        place = [] if first.startswith("--") else [plan]
        calls[" ".join([first, *rest])] = [*program, first, *place, *rest]
    if "FLEETLEARN_ADMIN" in os.environ:
        port = os.environ["FLEETLEARN_ADMIN"]
        calls["status, over the port"] = [*program, "status", port]
        calls["devices, over the port"] = [*program, "devices", port]
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in calls}
    for _ in range(chosen.repeats):
        for name, words in calls.items():
            runs[name].append({"cpu_ms": 1e3 * cpu_of(words, folder)})
    results: dict[str, Any] = {
        name: measure.middle([each["cpu_ms"] for each in rows]) for name, rows in runs.items()
    }
    rows = [(name, measure.show(values)) for name, values in results.items()]
    print(measure.table([("command", "CPU, ms"), *rows]))
    measure.write_json(chosen.json, {"repeats": chosen.repeats}, results)


if __name__ == "__main__":
    main()

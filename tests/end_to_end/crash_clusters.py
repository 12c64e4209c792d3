"""Serve a plan with clusters, or run a device of it, in a process that kills itself with SIGKILL at
a named point of its first exchange of the kind fit.

python crash_clusters.py POINT serve PLAN.toml --service SERVICE.toml
python crash_clusters.py POINT run --coordinator URL --data ... --name device-N ...
"""

from __future__ import annotations

import sys

from dying import Point, signal_at
from dying_in_phases import PhasesOf
from fleetlearn_coordinator import __main__ as coordinator
from fleetlearn_coordinator.service import server
from fleetlearn_device import __main__ as device
from fleetlearn_protocol.exchanges import FIT

PHASES = PhasesOf(FIT, "f")
COORDINATOR = {
    **PHASES.of_coordinator(),
    "a task is given and not told": lambda at: Point(server.RunServer, "_assign", False),
}
DEVICE = PHASES.of_device()

if __name__ == "__main__":
    point, *arguments = sys.argv[1:]
    signal_at((COORDINATOR | DEVICE)[point](1), 1)
    sys.argv = ["fleetlearn", *arguments]
    if sys.argv[1] == "serve":
        coordinator.main()
    else:
        sys.exit(device.main(sys.argv[1:]))

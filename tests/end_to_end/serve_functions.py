"""Serve a plan in a process that allows the examples' functions, and that kills itself at a point
of crash_coordinator.py where one is named.

    python serve_functions.py POINT N PLAN.toml --service SERVICE.toml     (POINT "": none)
"""

from __future__ import annotations

import sys
from pathlib import Path

from crash_coordinator import POINTS, SMALL
from dying import signal_at
from fleetlearn_coordinator import Plan, ServiceSettings, serve
from fleetlearn_coordinator.service import server
from fleetlearn_protocol import extensions

EXAMPLES = Path(__file__).parents[2] / "examples" / "functions"

if __name__ == "__main__":
    extensions.allow(["kmeans", "newton", "partial_fit"], EXAMPLES)
    if point := sys.argv[1]:
        if point not in SMALL:
            server.LARGE_MODEL = 0
        signal_at(POINTS[point], int(sys.argv[2]))
    serve(Plan.load(sys.argv[3]), service=ServiceSettings.load(sys.argv[5]))

"""Serve a plan with regions in a process that kills itself with SIGKILL at a named point: where a
region's part of a round ends, or at a point of crash_coordinator.py.

python crash_regions.py POINT TURN PLAN.toml --service SERVICE.toml
"""

from __future__ import annotations

import sys

from crash_coordinator import POINTS as OF_ROUNDS
from dying import Point, signal_at
from fleetlearn_coordinator import Plan, serve
from fleetlearn_coordinator.aggregation import regional_round
from fleetlearn_coordinator.plan.service_settings import ServiceSettings
from fleetlearn_coordinator.service.training_run import run_regions
from fleetlearn_coordinator.storage import store

POINTS = {
    **OF_ROUNDS,
    "a region's end is decided but not recorded": Point(run_regions.RunRegions, "row_of", True),
    "the regions that count are known": Point(regional_round.RegionalRound, "end_regions", True),
    "the regions' sums are merged": Point(regional_round.RegionalRound, "commit", True),
}

if __name__ == "__main__":
    store.SPOOL_FILES_HELD = 2
    signal_at(POINTS[sys.argv[1]], int(sys.argv[2]))
    serve(Plan.load(sys.argv[3]), service=ServiceSettings.load(sys.argv[5]))

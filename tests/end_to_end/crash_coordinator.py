"""Serve a plan in a process that kills itself with SIGKILL at a named point, the N-th time that it comes by.

    python crash_coordinator.py POINT N PLAN.toml

The points are placed here, around the real functions, so that the coordinator carries no hooks for its tests.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from dying import Point, die_at
from fleetlearn_coordinator import Plan, serve
from fleetlearn_coordinator.conversation import uploads
from fleetlearn_coordinator.service import run, server
from fleetlearn_coordinator.storage import store

POINTS = {
    "a round is decided but not recorded": Point(run.Run, "carry_out", False),
    "tasks are recorded but not sent": Point(server.Coordinator, "_assign", False),
    "a task was sent": Point(server.Coordinator, "_assign", True),
    "an upload is granted": Point(uploads.Uploads, "renew", True),
    "a chunk is spooled": Point(uploads.Upload, "take", True),
    "an update is complete but not recorded": Point(store.Store, "accept", False),
    "an update is recorded but not summed": Point(store.Store, "accept", True),
    "an update is summed but not acknowledged": Point(run.Run, "save_update", True),
    "a sum is written but not recorded": Point(os, "pwrite", True),
    "a sum is recorded": Point(store.Store, "_free_held", True),
    "the new model is made but not written": Point(run, "next_model", True),
    "the new model is written but not recorded": Point(store.Store, "save_model", True),
    "a round is closed but not recorded": Point(store.Store, "close_round", True),
    "a round is recorded and nobody told": Point(run.Run, "carry_out", True),
}


if __name__ == "__main__":
    store.SLOTS_HELD = 3  # so that sums are written in a small fleet too
    die_at(POINTS[sys.argv[1]], int(sys.argv[2]))
    serve(Plan.load(Path(sys.argv[3])))

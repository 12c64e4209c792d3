"""Serve a private plan in a process that kills itself with SIGKILL at a named point, the N-th time
that it comes by. The secret is always the same: a test compares runs bit for bit.

python crash_privacy.py POINT N PLAN.toml --service SERVICE.toml
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

from dying import Point, signal_at
from fleetlearn_coordinator import Plan, ServiceSettings, serve
from fleetlearn_coordinator.aggregation import open_round
from fleetlearn_coordinator.service.training_run import saved_privacy
from fleetlearn_coordinator.storage.file_blobs import FileBlobs

POINTS = {
    "nowhere": None,
    "a release is made": Point(open_round, "release_round", True),
    "its model is in its place but not recorded": Point(FileBlobs, "save_model", True),
}


if __name__ == "__main__":
    vars(saved_privacy)["secrets"] = SimpleNamespace(token_hex=lambda count: "5a" * count)
    if (point := POINTS[sys.argv[1]]) is not None:
        signal_at(point, int(sys.argv[2]))
    serve(Plan.load(sys.argv[3]), service=ServiceSettings.load(sys.argv[5]))

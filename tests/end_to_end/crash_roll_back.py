"""As crash_coordinator.py, with points in a roll back.

python crash_roll_back.py POINT N PLAN.toml --service SERVICE.toml
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dying import Point, signal_at
from fleetlearn_coordinator import Plan, ServiceSettings, serve
from fleetlearn_coordinator.service.training_run.roll_back import RollBacks
from fleetlearn_coordinator.storage.file_blobs import FileBlobs
from fleetlearn_coordinator.storage.file_requests import FileRequests
from fleetlearn_coordinator.storage.ledger import Metadata, ModelMade, Row
from fleetlearn_coordinator.storage.sqlite_ledger import SqliteLedger


def answers(ledger: SqliteLedger, rows: Sequence[Row]) -> bool:
    return any(isinstance(row, Metadata) and row.key == "rolled_back" for row in rows)


def is_model(path: Path, *target: Any) -> bool:
    return path.suffix == ".draft" and path.parent.name == "models"


POINTS = {
    "the request is found": Point(RollBacks, "restore", False),
    "the model is written but not in its place": Point(Path, "replace", False, is_model),
    "the model is in its place": Point(FileBlobs, "save_model", True),
    "the rows are not written": Point(SqliteLedger, "write", False, answers),
    "the rows are half written": Point(
        SqliteLedger, "_write", True, lambda ledger, row: isinstance(row, ModelMade)
    ),
    "the rows are written": Point(SqliteLedger, "write", True, answers),
    "the request is removed": Point(FileRequests, "remove_roll_back", True),
}


if __name__ == "__main__":
    signal_at(POINTS[sys.argv[1]], int(sys.argv[2]))
    serve(Plan.load(sys.argv[3]), service=ServiceSettings.load(sys.argv[5]))

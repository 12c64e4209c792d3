"""Serve a host whose process kills itself with SIGKILL at a named point of a canary, the N-th time
that it comes by.

python crash_canary.py POINT N serve SERVICE.toml
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from dying import Point, signal_at
from fleetlearn_coordinator.__main__ import main
from fleetlearn_coordinator.service.canary import first_model, watch
from fleetlearn_coordinator.service.hosted_run import HostedRun
from fleetlearn_coordinator.storage.canaries import Canaries
from fleetlearn_coordinator.storage.file_blobs import FileBlobs
from fleetlearn_coordinator.storage.ledger import Metadata, ModelMade, Row
from fleetlearn_coordinator.storage.sqlite_ledger import SqliteLedger
from fleetlearn_coordinator.storage.store import BEGINS_AT


def has(rows: Sequence[Row], key: str) -> bool:
    return any(isinstance(row, Metadata) and row.key == key for row in rows)


def begins(ledger: SqliteLedger, rows: Sequence[Row]) -> bool:
    return has(rows, BEGINS_AT)


def takes(ledger: SqliteLedger, rows: Sequence[Row]) -> bool:
    return has(rows, first_model.TOOK)


def is_first(ledger: SqliteLedger, rows: Sequence[Row]) -> bool:
    """Whether these are the rows of a canary's first model: no round made it."""
    return any(isinstance(row, ModelMade) and not row.round and row.version for row in rows)


def is_canary(run: HostedRun, *rest: Any) -> bool:
    return ".canary" in str(run.plan.data_dir)


POINTS: dict[str, tuple[Point, int]] = {
    "the number of the first model is written": (Point(SqliteLedger, "write", True, begins), 1),
    "the first model is in its place": (Point(SqliteLedger, "write", False, is_first), 1),
    "the first model counts": (Point(SqliteLedger, "write", True, is_first), 1),
    "what the arms did is written": (Point(Canaries, "note", True), 2),
    "a step is decided": (Point(Canaries, "change", False), 1),
    "a step is written, not committed": (Point(Canaries, "change", True), 1),
    "a step is committed": (Point(watch, "act", True), 1),
    "the canary's run is closed": (Point(HostedRun, "close", True, is_canary), 1),
    "the last step is committed": (Point(watch, "act", True), 2),
    "the old run's newest model is in its place": (
        Point(SqliteLedger, "write", False, takes),
        1,
    ),
    "the old run's newest model counts": (Point(SqliteLedger, "write", True, takes), 1),
    "the names are changed, not committed": (Point(Canaries, "take_place", True), 1),
    "the names are committed": (Point(watch, "act", True), 3),
    "the run is closed under its old name": (Point(HostedRun, "close", True, is_canary), 3),
}
"""Name -> the point, and its turn in a canary of three steps that finishes."""


if __name__ == "__main__":
    assert FileBlobs  # its files are in their places before the rows are written
    point, turn = POINTS[sys.argv[1]]
    signal_at(point, turn)
    sys.argv[1:] = sys.argv[3:]
    main()

"""Serve a plan in a process that kills itself with SIGKILL at a named point, the N-th time that it
comes by.

    python crash_coordinator.py POINT N PLAN.toml --service SERVICE.toml

The points are placed here, around the real functions, so that the coordinator carries no hooks for
its tests. Most are before or after a batch of rows is written, told apart by what is in it. Updates
are added, saved and committed in another thread, as those of large models are, except on the way to
the points of SMALL.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dying import Point, signal_at
from fleetlearn_coordinator import Plan, ServiceSettings, serve
from fleetlearn_coordinator.aggregation import exact_mean, open_round
from fleetlearn_coordinator.aggregation.open_round import OpenRound
from fleetlearn_coordinator.conversation import uploads
from fleetlearn_coordinator.rounds.engine import Engine
from fleetlearn_coordinator.service import server
from fleetlearn_coordinator.service.training_run import run
from fleetlearn_coordinator.service.training_run.round_work import RoundWork
from fleetlearn_coordinator.storage import store
from fleetlearn_coordinator.storage.file_blobs import FileBlobs
from fleetlearn_coordinator.storage.ledger import (
    AggregatorSaved,
    ModelMade,
    ReportAccepted,
    RoundClosed,
    Row,
    TaskGiven,
)
from fleetlearn_coordinator.storage.sqlite_ledger import SqliteLedger


def writes(kind: type) -> Callable[[SqliteLedger, Sequence[Row]], bool]:
    """Whether a batch has a row of this kind."""
    return lambda ledger, rows: any(isinstance(row, kind) for row in rows)


def batch(kind: type, *, after: bool) -> Point:
    """Before or after a batch with a row of this kind is written."""
    return Point(SqliteLedger, "write", after, writes(kind))


def row(kind: type) -> Point:
    """Within a batch: a row of this kind is written, and the batch does not count yet."""
    return Point(SqliteLedger, "_write", True, lambda ledger, row: isinstance(row, kind))


def is_sum(descriptor: int, *target: Any) -> bool:
    return "/sums/" in str(Path(f"/proc/self/fd/{descriptor}").readlink())


def is_model(path: Path, *target: Any) -> bool:
    return path.suffix == ".draft"


POINTS = {
    "tasks are decided but not recorded": batch(TaskGiven, after=False),
    "tasks are recorded but not sent": batch(TaskGiven, after=True),
    "a task was sent": Point(server.RunServer, "_assign", True),
    "an upload is granted": Point(uploads.Uploads, "renew", True),
    "a chunk is spooled": Point(uploads.Upload, "receive", True),
    "an update is complete but not recorded": batch(ReportAccepted, after=False),
    "an update is recorded but not acknowledged": batch(ReportAccepted, after=True),
    "an update is acknowledged but not summed": Point(OpenRound, "add", False),
    "an update is half summed": Point(exact_mean, "_round", True),
    "an update is summed": Point(OpenRound, "add", True),
    "a small update is summed and counted": Point(RoundWork, "do_work", True),
    "a small sum is being written": Point(os, "pwrite", True, is_sum),
    "a small sum is written but not recorded": batch(AggregatorSaved, after=False),
    "a sum is to be written": Point(FileBlobs, "save_aggregator", False),
    "a sum is being written": Point(os, "pwrite", True, is_sum),
    "a sum is written but not recorded": batch(AggregatorSaved, after=False),
    "a sum is recorded": batch(AggregatorSaved, after=True),
    "a round is closed and its commit not begun": Point(run.Run, "begin_commit", False),
    "the new model is made but not written": Point(open_round, "next_model", True),
    "the new model is written but not in its place": Point(Path, "replace", False, is_model),
    "the new model is in its place but not recorded": Point(FileBlobs, "save_model", True),
    "the thread has made the new model": batch(ModelMade, after=False),
    "the new model is half recorded": row(ModelMade),
    "a round is committed but its batch is open": row(RoundClosed),
    "a round is recorded and the engine not told": Point(Engine, "committed", False),
    "a round is recorded and nobody told": Point(RoundWork, "_end_commit", True),
}
SYNCHRONOUS = {
    "an upload is granted",
    "an update is recorded but not acknowledged",
    "an update is acknowledged but not summed",
    "a small update is summed and counted",
    "a sum is being written",
    "a sum is written but not recorded",
    "a sum is recorded",
    "a round is closed and its commit not begun",
    "the new model is in its place but not recorded",
    "a round is recorded and nobody told",
}
"""Points that the usual tests try in synchronous rounds, with devices of their own processes. They
try the others in asynchronous rounds; the slow tests try each in both."""
SMALL = {point for point in POINTS if point.startswith("a small ")}
"""The points of a model whose updates are added in the event loop's thread."""


if __name__ == "__main__":
    # so that sums are written in a small fleet too, and before its last report; after each update
    # where the point is in a sum, as none is written while the next update is there already
    store.SPOOL_FILES_HELD = 1 if sys.argv[1].startswith("a sum ") else 2
    if sys.argv[1] not in SMALL:
        server.LARGE_MODEL = 0
    signal_at(POINTS[sys.argv[1]], int(sys.argv[2]))
    serve(Plan.load(sys.argv[3]), service=ServiceSettings.load(sys.argv[5]))

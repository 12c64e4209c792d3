"""Train a private run whose devices answer at once, in a process that kills itself with SIGKILL at
a named point, the N-th time that it comes by. The last word that it prints is why the run is over.

    python crash_private_run.py POINT N BUNDLE DATA_DIR

Without a network: what a kill leaves in the data directory is the same. N = 0: it is not killed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dying import Point, signal_at
from fleetlearn_coordinator import Plan
from fleetlearn_coordinator.aggregation import open_round
from fleetlearn_coordinator.aggregation.privacy import release
from fleetlearn_coordinator.rounds.engine import Engine
from fleetlearn_coordinator.storage.file_blobs import FileBlobs
from fleetlearn_coordinator.storage.ledger import PRIVACY, Metadata, ModelMade, RoundClosed, Row
from fleetlearn_coordinator.storage.sqlite_ledger import SqliteLedger

PLAN = """
name = "private"
recipe = "dp-fedavg"
bundle = "BUNDLE"
data_dir = "DATA_DIR"
[round]
goal = 1
over_selection = 1
[stop]
rounds = 1000
[privacy]
noise = 4.0
epsilon = 2.8
delta = 1e-6
population = 100
clip = 1.0
"""
"""A budget of five releases."""


def is_release(ledger: SqliteLedger, rows: Sequence[Row]) -> bool:
    return any(isinstance(row, ModelMade) and row.version for row in rows)


def row(kind: type) -> Point:
    """Within a batch: a row of this kind is written, and the batch does not count yet."""
    return Point(SqliteLedger, "_write", True, lambda ledger, row: isinstance(row, kind))


def is_account(ledger: SqliteLedger, row: Row) -> bool:
    return isinstance(row, Metadata) and row.key == PRIVACY


def is_model(path: Path, *target: Any) -> bool:
    return path.suffix == ".draft" and path.parent.name == "models"


POINTS = {
    "the noise is about to be drawn": Point(release, "noise_secret", False),
    "the noise is drawn and no model made": Point(open_round, "next_model", False),
    "the model is written but not in its place": Point(Path, "replace", False, is_model),
    "the model is in its place but not recorded": Point(FileBlobs, "save_model", True),
    "the batch is not written": Point(SqliteLedger, "write", False, is_release),
    "the model's row is written in an open batch": row(ModelMade),
    "the round's row is written in an open batch": row(RoundClosed),
    "the account is written in an open batch": Point(SqliteLedger, "_write", True, is_account),
    "the batch is written and the engine not told": Point(Engine, "committed", False),
    "the engine is told": Point(Engine, "committed", True),
}


def train(plan: Plan) -> str:
    """Let one device after the other take part until the run is over."""
    from answering import NOW, Fleet, leases
    from peers import update_of

    fleet = Fleet(plan)
    for command in leases(fleet.run.resume(NOW)):
        raise AssertionError(f"no device is connected, and {command} was given")
    for turn in range(100):
        if fleet.run.finished is not None:
            fleet.store.close()
            return fleet.run.finished
        tasks = leases(fleet.check_in("device"))
        while tasks:
            tasks = leases(fleet.report(tasks[0], update_of(0.01 * (turn + 1))))
    raise AssertionError("the run does not end")


if __name__ == "__main__":
    point, turn, bundle, data_dir = sys.argv[1:]
    if int(turn):
        signal_at(POINTS[point], int(turn))
    text = PLAN.replace("BUNDLE", bundle).replace("DATA_DIR", data_dir)
    print(train(Plan.parse(text, Path(data_dir).parent)))

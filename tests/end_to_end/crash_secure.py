"""Serve a plan with [secure] in a process that kills itself with SIGKILL at a named point, the N-th
time that it comes by.

    python crash_secure.py POINT N PLAN.toml --service SERVICE.toml

N = 0: it is not killed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dying import Point, signal_at
from fleetlearn_coordinator import Plan, ServiceSettings, serve
from fleetlearn_coordinator.aggregation.open_round import OpenRound
from fleetlearn_coordinator.rounds.engine import Engine
from fleetlearn_coordinator.service import helper_asker
from fleetlearn_coordinator.service.helper_asker import HelperAsker
from fleetlearn_coordinator.service.training_run.mask_sum import KEY, MaskSums
from fleetlearn_coordinator.storage.file_blobs import FileBlobs
from fleetlearn_coordinator.storage.ledger import Metadata, RoundClosed, Row
from fleetlearn_coordinator.storage.sqlite_ledger import SqliteLedger


def has_set(ledger: SqliteLedger, rows: Sequence[Row]) -> bool:
    return any(isinstance(row, Metadata) and row.key == KEY for row in rows)


def closes_round(ledger: SqliteLedger, rows: Sequence[Row]) -> bool:
    return any(isinstance(row, RoundClosed) for row in rows)


POINTS = {
    "nowhere": Point(Engine, "committed", True),
    "the set is not written": Point(SqliteLedger, "write", False, has_set),
    "the set is written and nobody asked": Point(SqliteLedger, "write", True, has_set),
    "the helper is about to be asked": Point(helper_asker, "ask_for_sum", False),
    "the helper has answered and nobody heard": Point(HelperAsker, "_hand_in", False),
    "the answer is heard": Point(MaskSums, "answered", True),
    "a device is left out and that is not written": Point(Engine, "leave_out", True),
    "an update is taken off the sum": Point(OpenRound, "subtract", True),
    "the model is in its place but not recorded": Point(FileBlobs, "save_model", True),
    "the round's rows are not written": Point(SqliteLedger, "write", False, closes_round),
    "the round is recorded and the engine not told": Point(Engine, "committed", False),
}
WITH_A_REFUSAL = {
    "the set is written and nobody asked",
    "the helper has answered and nobody heard",
    "a device is left out and that is not written",
    "an update is taken off the sum",
}
"""Points that are tried where the helper refuses a device: the second set is then another one."""


if __name__ == "__main__":
    if int(sys.argv[2]):
        signal_at(POINTS[sys.argv[1]], int(sys.argv[2]))
    serve(Plan.load(sys.argv[3]), service=ServiceSettings.load(sys.argv[5]))

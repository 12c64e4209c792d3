"""Serve a plan, or run a device, in a process that kills itself with SIGKILL at a named point of an
evaluation.

python crash_evaluation.py POINT N serve PLAN.toml --service SERVICE.toml
python crash_evaluation.py POINT N run --coordinator URL ...
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from dying import Point, signal_at
from fleetlearn_coordinator import __main__ as coordinator
from fleetlearn_coordinator.rounds.engine import Engine
from fleetlearn_coordinator.service import server
from fleetlearn_coordinator.service.training_run import run
from fleetlearn_coordinator.storage.ledger import (
    AnswerAccepted,
    DeviceAsked,
    ExchangeBegun,
    ExchangeEnded,
    Row,
)
from fleetlearn_coordinator.storage.sqlite_ledger import SqliteLedger
from fleetlearn_device import __main__ as device
from fleetlearn_device.session.session import Session
from fleetlearn_device.training.trainer import Trainer


def batch(kind: type, *, after: bool) -> Point:
    """Before or after a batch with a row of this kind is written."""

    def counts(ledger: SqliteLedger, rows: Sequence[Row]) -> bool:
        return any(isinstance(row, kind) for row in rows)

    return Point(SqliteLedger, "write", after, counts)


COORDINATOR: dict[str, Point] = {
    "a model is committed and its evaluation is not opened": Point(
        Engine, "_begin_exchanges", False
    ),
    "an evaluation is decided but not recorded": batch(ExchangeBegun, after=False),
    "an evaluation is recorded and nobody told": batch(ExchangeBegun, after=True),
    "a measurement is given but not sent": batch(DeviceAsked, after=True),
    "a measurement came and is not recorded": batch(AnswerAccepted, after=False),
    "a measurement is recorded but not acknowledged": Point(run.Run, "save_answer", True),
    "a measurement is acknowledged but not counted": Point(server.RunServer, "count_answer", False),
    "an evaluation is over but not recorded": batch(ExchangeEnded, after=False),
    "an evaluation is recorded as over": batch(ExchangeEnded, after=True),
}
DEVICE: dict[str, Point] = {
    "the device has to evaluate": Point(Trainer, "answer", False),
    "the device has measured and told nobody": Point(Trainer, "answer", True),
    "the device has told what it measured": Point(Session, "answered", True),
}

if __name__ == "__main__":
    point, turn = sys.argv[1:3]
    signal_at((COORDINATOR | DEVICE)[point], int(turn))
    main: Callable[..., object] = coordinator.main if point in COORDINATOR else device.main
    if point in COORDINATOR:
        sys.argv = ["fleetlearn-coordinator", *sys.argv[3:]]
        main()
    else:
        sys.exit(main(sys.argv[3:]))

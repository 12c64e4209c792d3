"""Serve a plan with pairwise masks, or run a device, in a process that kills itself with SIGKILL at
a named point of one of the phases of the first round.

python crash_pairwise.py POINT PHASE serve PLAN.toml --service SERVICE.toml
python crash_pairwise.py POINT PHASE run --coordinator URL ...
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from dying import Point, signal_at
from fleetlearn_coordinator import __main__ as coordinator
from fleetlearn_coordinator.service import server
from fleetlearn_coordinator.service.training_run import run
from fleetlearn_coordinator.service.training_run.pairwise_records import PairwiseRecords
from fleetlearn_coordinator.service.training_run.written_model import ModelWriter
from fleetlearn_coordinator.storage.ledger import AnswerAccepted, ExchangeBegun, ExchangeEnded, Row
from fleetlearn_coordinator.storage.sqlite_ledger import SqliteLedger
from fleetlearn_device import __main__ as device
from fleetlearn_device.session.session import Session
from fleetlearn_device.storage.outbox import Outbox
from fleetlearn_device.training.pairwise_sessions import PairwiseSessions
from fleetlearn_device.training.trainer import Trainer
from fleetlearn_protocol.messages import Question, Reply
from fleetlearn_protocol.secure.pairwise_messages import PAIRWISE


def phase_of(task: str) -> int:
    """Return the phase in which a task of the first series was given; 0: it is of none."""
    place = task.rpartition("-p")[2].rpartition("-")[0]
    series, _, phase = place.partition(".")
    return int(phase or 1) if series == "1" else 0


def batch(kind: type, phase: int, *, after: bool) -> Point:
    """Before or after a batch with a row of this kind is written, in this phase."""

    def of_phase(row: Row) -> bool:
        if isinstance(row, ExchangeBegun | ExchangeEnded):
            return row[:3] == (PAIRWISE, 1, phase)
        return isinstance(row, AnswerAccepted) and phase_of(row.task) == phase

    def counts(ledger: SqliteLedger, rows: Sequence[Row]) -> bool:
        return any(isinstance(row, kind) and of_phase(row) for row in rows)

    return Point(SqliteLedger, "write", after, counts)


def answers(owner: type, function: str, phase: int, *, after: bool) -> Point:
    """Before or after a call with the task, the question or the reply of a device in this phase."""

    def counts(self: object, *arguments: object) -> bool:
        given = [each for each in arguments if isinstance(each, str | Question | Reply)][-1]
        return phase_of(given if isinstance(given, str) else given.task) == phase

    return Point(owner, function, after, counts)


COORDINATOR: dict[str, Callable[[int], Point]] = {
    "a phase is recorded and nobody told": lambda at: batch(ExchangeBegun, at, after=True),
    "an answer is recorded but not acknowledged": (
        lambda at: answers(run.Run, "save_answer", at, after=True)
    ),
    "an answer is acknowledged but not counted": (
        lambda at: answers(server.RunServer, "count_answer", at, after=False)
    ),
    "a phase is recorded as over": lambda at: batch(ExchangeEnded, at, after=True),
    "the masks are to be put together": lambda at: Point(PairwiseRecords, "masks", False),
    "the model is made and not recorded": lambda at: Point(ModelWriter, "commit", True),
}
DEVICE: dict[str, Callable[[int], Point]] = {
    "the device has to answer": lambda at: answers(Trainer, "answer", at, after=False),
    "the device has told its answer": lambda at: answers(Session, "answered", at, after=True),
    "the update is masked and not saved": lambda at: Point(PairwiseSessions, "masked", True),
    "the masked update is saved": lambda at: Point(Outbox, "save", True),
}


if __name__ == "__main__":
    point, phase = sys.argv[1:3]
    if point != "-":
        signal_at((COORDINATOR | DEVICE)[point](int(phase)), 1)
    sys.argv = ["fleetlearn", *sys.argv[3:]]
    if sys.argv[1] == "serve":
        coordinator.main()
    else:
        sys.exit(device.main(sys.argv[1:]))

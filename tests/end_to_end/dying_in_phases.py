"""Points of one phase of an exchange's first series at which a process kills itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from dying import Point
from fleetlearn_coordinator.service import server
from fleetlearn_coordinator.service.training_run import run
from fleetlearn_coordinator.storage.ledger import AnswerAccepted, ExchangeBegun, ExchangeEnded, Row
from fleetlearn_coordinator.storage.sqlite_ledger import SqliteLedger
from fleetlearn_device.session.session import Session
from fleetlearn_device.training.trainer import Trainer
from fleetlearn_protocol.messages import Question, Reply

Points = dict[str, Callable[[int], Point]]
"""Name -> phase -> the point."""


class PhasesOf(NamedTuple):
    """The phases of a kind of exchange."""

    kind: str
    letter: str
    """As in ``ExchangePolicy.letter``."""

    def phase_of(self, task: str) -> int:
        """Return the phase in which a task of the first series was given; 0: it is of none."""
        place = task.rpartition(f"-{self.letter}")[2].rpartition("-")[0]
        series, _, phase = place.partition(".")
        return int(phase or 1) if series == "1" else 0

    def batch(self, row_kind: type, phase: int, *, after: bool) -> Point:
        """Before or after a batch with a row of this kind is written, in this phase."""

        def of_phase(row: Row) -> bool:
            if isinstance(row, ExchangeBegun | ExchangeEnded):
                return row[:3] == (self.kind, 1, phase)
            return isinstance(row, AnswerAccepted) and self.phase_of(row.task) == phase

        def counts(ledger: SqliteLedger, rows: Sequence[Row]) -> bool:
            return any(isinstance(row, row_kind) and of_phase(row) for row in rows)

        return Point(SqliteLedger, "write", after, counts)

    def answers(self, owner: type, function: str, phase: int, *, after: bool) -> Point:
        """Before or after a call with the task, the question or the reply of a device in this
        phase."""

        def counts(self_: object, *arguments: object) -> bool:
            given = [each for each in arguments if isinstance(each, str | Question | Reply)][-1]
            return self.phase_of(given if isinstance(given, str) else given.task) == phase

        return Point(owner, function, after, counts)

    def of_coordinator(self) -> Points:
        """Return points of a coordinator."""
        return {
            "a phase is recorded and nobody told": (
                lambda at: self.batch(ExchangeBegun, at, after=True)
            ),
            "an answer is recorded but not acknowledged": (
                lambda at: self.answers(run.Run, "save_answer", at, after=True)
            ),
            "an answer is acknowledged but not counted": (
                lambda at: self.answers(server.RunServer, "count_answer", at, after=False)
            ),
            "a phase is recorded as over": lambda at: self.batch(ExchangeEnded, at, after=True),
        }

    def of_device(self) -> Points:
        """Return points of a device."""
        return {
            "the device has to answer": lambda at: self.answers(Trainer, "answer", at, after=False),
            "the device has told its answer": (
                lambda at: self.answers(Session, "answered", at, after=True)
            ),
        }

"""Serve a plan, or run a device, that knows the tests' roll call, an exchange of three phases. The
process may kill itself with SIGKILL at a named point of one of its phases.

python crash_roll_call.py POINT PHASE MINIMUM TRAINING serve PLAN.toml --service SERVICE.toml
python crash_roll_call.py POINT PHASE MINIMUM TRAINING run --coordinator URL ... --name device-N ...

POINT is "-" where the process is not to kill itself. The first series alone counts. MINIMUM: fewest
answers of a phase, of three devices. TRAINING: after how many phases the devices train; "-": a
series comes after each round.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from dying import Point, signal_at
from fleetlearn_coordinator import __main__ as coordinator
from fleetlearn_coordinator.service import server
from fleetlearn_coordinator.service.training_run import run
from fleetlearn_coordinator.storage.ledger import (
    AnswerAccepted,
    ExchangeBegun,
    ExchangeEnded,
    Row,
)
from fleetlearn_coordinator.storage.sqlite_ledger import SqliteLedger
from fleetlearn_device import __main__ as device
from fleetlearn_device.session.session import Session
from fleetlearn_device.training.trainer import ANSWERS, Trainer
from fleetlearn_protocol.exchanges import content_of
from fleetlearn_protocol.messages import Question, Reply

sys.path.append(str(Path(__file__).parents[1] / "support"))
from roll_call import ROLL_CALL, RollCall, Sent, register


def phase_of(task: str) -> int:
    """Return the phase in which a task of the first series was given; 0: it is of none."""
    place = task.rpartition("-r")[2].rpartition("-")[0]
    series, _, phase = place.partition(".")
    return int(phase or 1) if series == "1" else 0


def batch(kind: type, phase: int, *, after: bool) -> Point:
    """Before or after a batch with a row of this kind is written, in this phase."""

    def counts(ledger: SqliteLedger, rows: Sequence[Row]) -> bool:
        return any(isinstance(row, kind) and of_phase(row) for row in rows)

    def of_phase(row: Row) -> bool:
        if isinstance(row, ExchangeBegun | ExchangeEnded):
            return row[:3] == (ROLL_CALL, 1, phase)
        return isinstance(row, AnswerAccepted) and phase_of(row.task) == phase

    return Point(SqliteLedger, "write", after, counts)


def answers(owner: type, function: str, phase: int, *, after: bool) -> Point:
    """Before or after a call with the task, the question or the reply of a device in this phase."""

    def counts(self: object, *arguments: object) -> bool:
        given = [each for each in arguments if isinstance(each, str | Question | Reply)][-1]
        return phase_of(given if isinstance(given, str) else given.task) == phase

    return Point(owner, function, after, counts)


COORDINATOR: dict[str, Callable[[int], Point]] = {
    "a phase is decided but not recorded": lambda at: batch(ExchangeBegun, at, after=False),
    "a phase is recorded and nobody told": lambda at: batch(ExchangeBegun, at, after=True),
    "an answer came and is not recorded": lambda at: batch(AnswerAccepted, at, after=False),
    "an answer is recorded but not acknowledged": (
        lambda at: answers(run.Run, "save_answer", at, after=True)
    ),
    "an answer is acknowledged but not counted": (
        lambda at: answers(server.RunServer, "count_answer", at, after=False)
    ),
    "a phase is over but not recorded": lambda at: batch(ExchangeEnded, at, after=False),
    "a phase is recorded as over": lambda at: batch(ExchangeEnded, at, after=True),
}
DEVICE: dict[str, Callable[[int], Point]] = {
    "the device has to answer": lambda at: answers(Trainer, "answer", at, after=False),
    "the device has answered and told nobody": lambda at: answers(
        Trainer, "answer", at, after=True
    ),
    "the device has told its answer": lambda at: answers(Session, "answered", at, after=True),
}


def answer(trainer: Trainer, question: Question, seconds: float) -> Sent:
    """Send the device's number, and then the sum of those that the device is told."""
    who = content_of(question).who
    own = int(sys.argv[sys.argv.index("--name") + 1].rpartition("-")[2]) + 1
    return Sent(sum(who.values()) if who else own)


if __name__ == "__main__":
    point, phase, minimum, training = sys.argv[1:5]
    rules = RollCall(devices=3, minimum=int(minimum), deadline=600.0, every=1)
    if training != "-":
        rules = rules._replace(every=0, training_after=int(training))
    register(dict.__setitem__, rules)
    ANSWERS[ROLL_CALL] = answer
    if point != "-":
        signal_at((COORDINATOR | DEVICE)[point](int(phase)), 1)
    sys.argv = ["fleetlearn", *sys.argv[5:]]
    if sys.argv[1] == "serve":
        coordinator.main()
    else:
        sys.exit(device.main(sys.argv[1:]))

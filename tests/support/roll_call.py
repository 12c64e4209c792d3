"""A kind of exchange for tests alone, of three phases: each device sends a number, is told who sent
one, and answers that; then those that answered are told the same once more. Whoever is missing in a
phase is not asked in the next."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.rounds import round_state
from fleetlearn_coordinator.rounds.commands import Ask
from fleetlearn_coordinator.rounds.exchange import ExchangePolicy, ExchangeTerms
from fleetlearn_coordinator.rounds.settings import Settings
from fleetlearn_coordinator.service.training_run import run
from fleetlearn_coordinator.service.training_run.exchange_records import ExchangeRecords
from fleetlearn_coordinator.service.training_run.members import Members
from fleetlearn_coordinator.storage.find_storage import find_storage
from fleetlearn_coordinator.storage.store import Store
from fleetlearn_protocol.exchanges import EXCHANGE_KINDS, ExchangeKind

ROLL_CALL = "roll-call"
PHASES = 3


class RollCall(NamedTuple):
    """A series is opened by request, and every few versions of the model if ``every`` says so."""

    devices: int = 4
    minimum: int = 2
    deadline: float = 15.0
    kind: str = ROLL_CALL
    letter: str = "r"
    every: int = 0
    training_after: int | None = None

    def due(self, last: int, newest: int, *, final: bool) -> bool:
        return self.every > 0 and newest // self.every > last // self.every

    def terms(self, phase: int) -> ExchangeTerms:
        return ExchangeTerms(self.devices, self.minimum, self.deadline)

    def next_members(self, phase: int, answered: Collection[str]) -> Collection[str] | None:
        return answered if phase < PHASES else None


def roll_call(rules: RollCall) -> Callable[[Settings], ExchangePolicy]:
    """Return a row of ``round_state.EXCHANGE_POLICIES``."""
    return lambda settings: rules


class WhoAnswered(msgspec.Struct, frozen=True):
    """The content of a question: who sent a number before, with it. In the first phase nobody."""

    who: dict[str, int] = {}


class Sent(msgspec.Struct, frozen=True):
    """The content of a reply: first any number, then the sum of those that the device was told."""

    number: int


CONTENTS = ExchangeKind(WhoAnswered, Sent)


class RollCallRecords(ExchangeRecords):
    """A question says who answered in the phase before."""

    def __init__(self, plan: Plan, members: Members, store: Store) -> None:
        super().__init__(ROLL_CALL, store.ledger)

    def content(self, lease: Ask) -> dict[str, Any]:
        return {"who": {} if lease.phase == 1 else self._who(lease.phase - 1)}

    def summary(self, *, valid: bool) -> dict[str, Any]:
        return {"who": self._who(len(self.answers))}

    def _who(self, phase: int) -> dict[str, int]:
        return {device: sent.number for device, sent in self.answers[phase - 1].items()}


def register(put: Callable[[dict[str, Any], str, Any], None], rules: RollCall) -> None:
    """Let coordinators know roll calls. ``put``: sets a dictionary's item, and may undo that
    later (``MonkeyPatch.setitem``)."""
    put(round_state.EXCHANGE_POLICIES, ROLL_CALL, roll_call(rules))
    put(EXCHANGE_KINDS, ROLL_CALL, CONTENTS)
    put(run.EXCHANGE_RECORDS, ROLL_CALL, RollCallRecords)


def closed_phases(data_dir: Path) -> list[tuple[int, bool, dict[str, int], dict[str, int]]]:
    """Return the phases that are over: number, whether it is valid, who answered what, and how many
    did not, by cause."""
    with find_storage(data_dir).read_ledger() as ledger:
        return [
            (row.phase, row.outcome == "valid", row.summary["who"], row.summary["dropped"])
            for row in ledger.exchanges(ROLL_CALL)
        ]

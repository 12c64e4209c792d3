"""A kind of exchange for tests alone, of three phases: each device sends a number, is told who sent
one, and answers that; then those that answered are told the same once more. Whoever is missing in a
phase is not asked in the next."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import msgspec
from fleetlearn_coordinator.rounds.commands import Ask, ExchangeClosed, ExchangeOpened, Unanswered
from fleetlearn_coordinator.rounds.exchange import ExchangePolicy, ExchangeTerms, SavedExchange
from fleetlearn_coordinator.rounds.settings import Settings
from fleetlearn_coordinator.service.training_run.exchange_records import ExchangeCommand
from fleetlearn_coordinator.storage.ledger import Ledger, Metadata, Row
from fleetlearn_protocol.exchanges import ExchangeKind, content_of
from fleetlearn_protocol.messages import CheckIn, Reply

ROLL_CALL = "roll-call"
PHASES = 3


class RollCall(NamedTuple):
    """A series is opened by request alone."""

    devices: int = 4
    minimum: int = 2
    deadline: float = 15.0
    kind: str = ROLL_CALL
    letter: str = "r"

    def due(self, last: int, newest: int, *, final: bool) -> bool:
        return False

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


class RollCallRecords:
    """What a run records of its roll calls: all of the last phase, in one row of metadata."""

    def __init__(self, ledger: Ledger) -> None:
        kept = ledger.get(ROLL_CALL)
        self.state: dict[str, Any] = json.loads(kept) if kept else {"closed": [], "who": {}}

    def saved(self) -> SavedExchange | None:
        """Return what the engine is to know of what an earlier process left."""
        if "number" not in self.state:
            return None
        rows = self.state["tasks"]
        return SavedExchange(
            self.state["number"],
            self.state["version"],
            self.state["open"],
            [(task, device) for task, (device, state, _) in rows.items() if state == "asked"],
            [(task, device) for task, (device, state, _) in rows.items() if state == "answered"],
            [
                (task, device, state)
                for task, (device, state, _) in rows.items()
                if state not in ("asked", "answered")
            ],
            self.state["phase"],
            self.state["members"],
        )

    def join(self, check_in: CheckIn) -> None:
        pass

    def leave(self, device: str) -> None:
        pass

    def content(self, lease: Ask) -> dict[str, Any]:
        return {"who": self.state["who"]}

    def row_of(self, command: ExchangeCommand, at: float) -> Row | None:
        state = self.state
        match command:
            case ExchangeOpened(number, version, _, phase, members):
                state |= {"number": number, "version": version, "phase": phase, "open": True}
                state |= {"members": members, "tasks": {}}
            case Ask(device, task):
                if task not in state["tasks"]:
                    state["tasks"][task] = [device, "asked", None]
            case Unanswered(_, task, cause):
                state["tasks"][task][1] = cause
            case ExchangeClosed(phase=phase, valid=valid, dropped=dropped):
                rows = state["tasks"].values()
                answers = {device: number for device, how, number in rows if how == "answered"}
                state["open"], state["who"] = False, answers if phase < PHASES else {}
                state["closed"].append([phase, valid, answers, dropped])
        return self._row()

    def answer_row(self, message: Reply) -> Row:
        self.state["tasks"][message.task][1:] = "answered", content_of(message).number
        return self._row()

    def keep(self, message: Reply) -> None:
        pass

    def _row(self) -> Row:
        return Metadata(ROLL_CALL, json.dumps(self.state))

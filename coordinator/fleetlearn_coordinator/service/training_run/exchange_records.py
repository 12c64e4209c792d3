"""What a run records of the exchanges of one kind, and what it asks the devices: one object for
each kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from fleetlearn_protocol.exchanges import EXCHANGE_KINDS, content_of
from fleetlearn_protocol.messages import CheckIn, Reply

from fleetlearn_coordinator.rounds.commands import Ask, ExchangeClosed, ExchangeOpened, Unanswered
from fleetlearn_coordinator.rounds.exchange import SavedExchange
from fleetlearn_coordinator.storage.ledger import (
    AnswerAccepted,
    AnswerDropped,
    DeviceAsked,
    ExchangeBegun,
    ExchangeEnded,
    LastSeries,
    Ledger,
    Row,
)
from fleetlearn_coordinator.storage.stored_json import decode

ExchangeCommand = ExchangeOpened | Ask | Unanswered | ExchangeClosed


class ExchangeRecords:
    """One kind of exchange of a run, beside the engine.

    What all kinds have in common is here: the rows of the ledger, and the answers of the series
    that was opened last. A kind replaces those of the first methods that it needs.
    """

    def __init__(self, kind: str, ledger: Ledger) -> None:
        """``ledger``: the run's, with what an earlier process left. Raises StoreError (damaged)."""
        self.kind = kind
        last = ledger.last_series(kind)
        self.saved = None if last is None else _saved(last)
        """What the engine is to know of the series that an earlier process opened last."""
        self.notes: dict[str, str] = {}
        """Device that was asked in the exchange that was opened last -> what was noted of it."""
        self.answers: list[dict[str, Any]] = []
        """For each exchange of the series, in order: device -> the content of its reply."""
        self.request: str | None = None
        """The name of the request for the next series, if somebody asks for one."""
        self.rows: list[Row] = []
        """What is to be written at this start."""
        self.answered: str | None = None if last is None else last.request
        """The name of the request that was carried out last."""
        for phase in () if last is None else last.phases:
            self._begin_phase(phase.phase)
            for row in phase.answers:
                self.notes[row.device] = row.note
                if row.content is not None:
                    what = f"{ledger.where}: the answer of {row.task}"
                    answer = decode(row.content, EXCHANGE_KINDS[kind].reply, what)
                    self.answers[-1][row.device] = answer

    # What a kind may say

    def join(self, check_in: CheckIn) -> None:
        """A device that can answer checks in."""

    def leave(self, device: str) -> None:
        """A device is not connected any more. Harmless where it could not answer."""

    def look_for_request(self) -> bool:
        """Return whether somebody asked for a series that was not opened yet, and note the name of
        that ``request``."""
        return False

    def note(self, device: str) -> str:
        """Return what is to be remembered of a device that is asked now (``notes``)."""
        return ""

    def content(self, lease: Ask) -> dict[str, Any]:
        """Return the content of the question to this device."""
        return {}

    def summary(self, *, valid: bool) -> dict[str, Any]:
        """Return the summary of the exchange that is closed now. ``valid``: whether enough devices
        answered. How many did, and the causes why others did not, are added."""
        return {}

    def stop_metrics(self) -> Mapping[str, float] | None:
        """Return the metrics of the last valid exchange, which may stop the run, or None where the
        plan's stop rule does not go by this kind."""
        return None

    # What the run does

    def row_of(self, command: ExchangeCommand, at: float) -> Row | None:
        """Return the row that a command of this kind writes, or None. ``at``: Unix time."""
        match command:
            case ExchangeOpened(number, version, kind, phase, members):
                if phase == 1:
                    self.answered, self.request = self.request or self.answered, None
                self._begin_phase(phase)
                return ExchangeBegun(kind, number, phase, version, members, self.answered, at)
            case Ask(device, task, number, again=again, kind=kind, phase=phase):
                if again:
                    return None
                self.notes[device] = self.note(device)
                return DeviceAsked(task, kind, number, phase, device, self.notes[device])
            case Unanswered(_, task, cause):
                return AnswerDropped(task, cause)
            case ExchangeClosed(number, _, dropped, valid, kind, phase):
                outcome, answers = "valid" if valid else "invalid", len(self.answers[-1])
                summary = {"devices": answers, **self.summary(valid=valid), "dropped": dropped}
                return ExchangeEnded(kind, number, phase, outcome, summary, at)

    def answer_row(self, device: str, message: Reply) -> Row:
        """Return the row that makes an answer durable. ``keep`` follows. Raises ProtocolError
        (bad-message) where the answer is none of this kind."""
        return AnswerAccepted(message.task, msgspec.json.encode(content_of(message)))

    def keep(self, device: str, message: Reply) -> None:
        """The answer is durable."""
        self.answers[-1][device] = content_of(message)

    def _begin_phase(self, phase: int) -> None:
        if phase == 1:
            self.answers.clear()
        self.answers.append({})
        self.notes.clear()


def _saved(last: LastSeries) -> SavedExchange:
    """Return what the engine is to know of the series that an earlier process opened last."""
    newest = last.phases[-1]
    leases, accepted, dropped = [], [], []
    for row in newest.answers:
        if row.state == "assigned":
            leases.append((row.task, row.device))
        elif row.state == "accepted":
            accepted.append((row.task, row.device))
        else:
            dropped.append((row.task, row.device, row.state))
    return SavedExchange(
        last.number, last.version, newest.is_open, leases, accepted, dropped,
        newest.phase, newest.members, newest.is_valid,
    )  # fmt: skip

"""What a run records of one kind of exchange, and what it asks the devices: one object for each
kind."""

from __future__ import annotations

from typing import Any, Protocol

from fleetlearn_protocol.messages import CheckIn, Reply

from fleetlearn_coordinator.rounds.commands import Ask, ExchangeClosed, ExchangeOpened, Unanswered
from fleetlearn_coordinator.storage.ledger import Row

ExchangeCommand = ExchangeOpened | Ask | Unanswered | ExchangeClosed


class ExchangeRecords(Protocol):
    """One kind of exchange of a run, beside the engine."""

    def join(self, check_in: CheckIn) -> None:
        """A device that can answer checks in."""

    def leave(self, device: str) -> None:
        """A device is not connected any more. Harmless where it could not answer."""

    def content(self, lease: Ask) -> dict[str, Any]:
        """Return the content of the question to this device."""

    def row_of(self, command: ExchangeCommand, at: float) -> Row | None:
        """Return the row that a command of this kind writes, or None. ``at``: Unix time."""

    def answer_row(self, message: Reply) -> Row:
        """Return the row that makes an answer durable. ``keep`` follows. Raises ProtocolError
        (bad-message) where the answer is none of this kind."""

    def keep(self, message: Reply) -> None:
        """The answer is durable."""

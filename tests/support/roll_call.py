"""A kind of exchange for tests alone, of three phases: each device sends a number, is told who sent
one, and answers that; then those that answered are told the same once more. Whoever is missing in a
phase is not asked in the next."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from fleetlearn_coordinator.rounds.exchange import ExchangePolicy, ExchangeTerms
from fleetlearn_coordinator.rounds.settings import Settings

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

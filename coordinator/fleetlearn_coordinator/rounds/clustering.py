"""The exchange of a clustered run that goes with each round: before its training, devices measure
all of the run's models, and each then trains the one that fits its data best."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from fleetlearn_protocol.exchanges import FIT

from fleetlearn_coordinator.rounds.exchange import ExchangeTerms
from fleetlearn_coordinator.rounds.settings import FitSettings


class FitPolicy(NamedTuple):
    """One exchange for each round, before its tasks (``exchange.ExchangePolicy``)."""

    settings: FitSettings
    kind: str = FIT
    letter: str = "f"
    training_after: int | None = 1

    def due(self, last: int, newest: int, *, final: bool) -> bool:
        return False  # a round opens it

    def terms(self, phase: int) -> ExchangeTerms:
        return ExchangeTerms(*self.settings)

    def next_members(self, phase: int, answered: Collection[str]) -> Collection[str] | None:
        return None

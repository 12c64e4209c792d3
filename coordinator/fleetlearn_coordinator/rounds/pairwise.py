"""The exchanges of pairwise masks, which go with each round: keys and sealed shares before its
training, and unmasking after it (protocol, secure/pairwise.py)."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from fleetlearn_protocol.secure.pairwise_messages import PAIRWISE, SHARES, UNMASKING

from fleetlearn_coordinator.rounds.exchange import ExchangeTerms
from fleetlearn_coordinator.rounds.settings import PairwiseSettings


class PairwisePolicy(NamedTuple):
    """A series for each round, of those phases (``exchange.ExchangePolicy``)."""

    settings: PairwiseSettings
    kind: str = PAIRWISE
    letter: str = "p"
    training_after: int | None = SHARES

    def due(self, last: int, newest: int, *, final: bool) -> bool:
        return False  # a round opens it

    def terms(self, phase: int) -> ExchangeTerms:
        rule = self.settings
        minimum = rule.unmasking if phase == UNMASKING else rule.minimum
        return ExchangeTerms(rule.devices, minimum, rule.deadline)

    def next_members(self, phase: int, answered: Collection[str]) -> Collection[str] | None:
        return None if phase == UNMASKING else answered

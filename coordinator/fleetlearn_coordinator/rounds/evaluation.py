"""Evaluations: exchanges in which a sample of the connected devices measures one version of the
model."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from fleetlearn_coordinator.rounds.exchange import ExchangeTerms
from fleetlearn_coordinator.rounds.settings import EvaluationSettings

EVALUATION = "evaluation"
"""The kind of these exchanges."""


class EvaluationPolicy(NamedTuple):
    """One exchange every few versions of the model, and one of the last version
    (``exchange.ExchangePolicy``)."""

    settings: EvaluationSettings
    kind: str = EVALUATION
    letter: str = "e"
    training_after: int | None = None

    def due(self, last: int, newest: int, *, final: bool) -> bool:
        every = self.settings.every
        return every > 0 and (newest // every > last // every or (final and newest > last))

    def terms(self, phase: int) -> ExchangeTerms:
        return ExchangeTerms(self.settings.devices, self.settings.minimum, self.settings.deadline)

    def next_members(self, phase: int, answered: Collection[str]) -> Collection[str] | None:
        return None

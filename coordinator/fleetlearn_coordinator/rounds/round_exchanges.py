"""Exchanges that go with each round: those before its tasks, and those between its reports and its
model. Training is then one part of a series, as each exchange is.

A policy of exchanges asks for this (``ExchangePolicy.training_after``), as secure aggregation does:
keys and shares come before training, the sum is unmasked after it. The series has the round's
number. Its exchanges before training ask devices as any series does; those that answered in the
last of them alone are given tasks. When the round has its reports, the devices of those are asked
next. The round is abandoned where too few answer in one of the exchanges.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from fleetlearn_coordinator.rounds.commands import Command, Commit
from fleetlearn_coordinator.rounds.exchange import ExchangeSeries
from fleetlearn_coordinator.rounds.selection import Selection

Part = Literal["due", "open", "done", "failed"]
"""How far the exchanges before a round's tasks, or those before its model, are."""


@dataclass(slots=True)
class RoundExchanges:
    """The exchanges that go with the rounds of a run."""

    series: ExchangeSeries
    selection: Selection
    commit: Commit | None = None
    """The commit of the round that has its reports, while exchanges come before it."""

    @property
    def _before(self) -> int:
        return self.series.policy.training_after or 0

    @property
    def seconds(self) -> float:
        """The most seconds that a round's tasks wait for exchanges."""
        terms = map(self.series.policy.terms, range(1, self._before + 1))
        return sum(each.deadline for each in terms)

    # --- before the tasks ---

    def before_tasks(self, round: int) -> Part:
        """Return how far the exchanges before the round's tasks are."""
        if not self._before:
            return "done"
        return "due" if self.series.number != round else self._part

    @property
    def _part(self) -> Part:
        if self.series.is_open:
            return "open"
        return "done" if self.series.is_valid else "failed"

    def open(self, round: int, version: int, now: float) -> list[Command]:
        """Open the first exchange before the round's tasks, which are ``due``."""
        return self.series.open(version, now, round)

    def let_members_train(self) -> bool:
        """Let nobody but the devices that answered be given tasks in this round. Returns False
        where that was done before, or where no exchange comes before the tasks."""
        if not self._before or self.selection.members is not None:
            return False
        self.selection.restrict(self.series.book.accepted.values())
        return True

    # --- before the model ---

    def closes(self, round: int) -> bool:
        """Return whether the round has its reports, and exchanges before its model were begun."""
        return self.series.number == round and self.series.phase > self._before

    def before_commit(self, round: int) -> Part:
        """Return how far the exchanges before the round's model are."""
        return self._part if self.closes(round) else "due"

    def go_on_after_training(
        self, round: int, version: int, reported: Collection[str], now: float
    ) -> list[Command] | None:
        """Open the first exchange before the round's model, which are ``due``. ``reported``: the
        devices whose reports count. Returns None where no exchange follows."""
        members = self.series.policy.next_members(self._before, reported)
        if members is None:
            return None
        if self._before:
            return self.series.open_next(members, now)
        return self.series.open(version, now, round, members)

    def give_up(self, why: str) -> list[Command]:
        """The round is over: end the exchange that is open. ``why``: for people."""
        self.commit = None
        return self.series.give_up(why)

    @property
    def text(self) -> str:
        """Why the round is abandoned, for people."""
        series = self.series
        answered, needed = len(series.book.accepted), series.terms.minimum
        return (
            f"{answered} devices answered in phase {series.phase} of its {series.policy.kind}, "
            f"{needed} are the minimum"
        )

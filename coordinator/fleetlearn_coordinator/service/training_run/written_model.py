"""A model in its file, before it counts: what closing a round, or a roll back, makes in any
thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fleetlearn_protocol.secure.fixed_point import Words
from fleetlearn_protocol.vector import Vector

from fleetlearn_coordinator.aggregation.computations.registry import BadTotalError
from fleetlearn_coordinator.aggregation.family_round import replace_models
from fleetlearn_coordinator.aggregation.model_state import ModelState
from fleetlearn_coordinator.aggregation.modular_sum import UnmaskError
from fleetlearn_coordinator.aggregation.open_round import CommittedRound
from fleetlearn_coordinator.aggregation.regional_round import AnyRound
from fleetlearn_coordinator.aggregation.round_rules import RoundRules
from fleetlearn_coordinator.aggregation.sent_models import Forms
from fleetlearn_coordinator.privacy.budget import PrivacyAccount
from fleetlearn_coordinator.service.training_run.members import Members
from fleetlearn_coordinator.service.training_run.private_budget import account_row, summary_of
from fleetlearn_coordinator.service.training_run.run_models import RunModels
from fleetlearn_coordinator.service.training_run.saved_privacy import privacy_rows, tensors_of
from fleetlearn_coordinator.service.training_run.saved_tied_sum import row_of
from fleetlearn_coordinator.storage.ledger import (
    Metadata,
    ModelMade,
    RoundClosed,
    Row,
    TiedVectorsCounted,
    TiedVectorsForgotten,
)
from fleetlearn_coordinator.storage.store import Store


class WrittenModel(NamedTuple):
    """A model whose file is written. It does not count before its rows are written."""

    state: ModelState
    forms: Sequence[Forms]
    """In which each member's part of it travels beside float32."""
    rows: list[Row]
    """What makes it the newest model."""


class WrittenRound(NamedTuple):
    """The model of a round that is closed. Its rows close the round, too."""

    number: int
    """Of the round."""
    model: WrittenModel
    summary: dict[str, Any]
    forgets_tied: bool
    """Whether c or h, and what devices keep for it, begin again from zeros."""
    account: PrivacyAccount | None = None
    """What a private run has spent with this release."""


class NotUnmasked(NamedTuple):
    """The sum of a round's masks is none of its masked updates, or a computation cannot go on from
    its sums: there is no model."""

    dropped: dict[str, int]
    """As in ``rounds.commands.Abandon``."""
    text: str
    """Why, for people."""


@dataclass(frozen=True)
class RoundToCommit:
    """What is decided of a round when it closes. Nothing here changes while its model is made."""

    number: int
    summary: dict[str, Any]
    """As ``OpenRound.summary`` returned it, with what the run adds."""
    at: float
    """Unix time."""
    base: Vector | None
    """The model that the task of the only update began from, if the server mixes models."""
    bases: Mapping[int, str]
    """As ``RunModels.bases_of`` returned them."""
    dropped: Iterable[int]
    """The versions that are not kept any more."""
    tied: Mapping[str, str]
    """Device -> its last task whose report counts, where devices keep tied vectors."""
    account: PrivacyAccount | None = None
    """What a private run has spent before this release."""
    masks: Words | Callable[[], Words] | None = None
    """The sum of the masks of the round's updates, where they have some, uint32, (P + 1,), or what
    puts it together. That raises UnmaskError."""


class ModelWriter:
    """Makes models and writes their files, in any thread; nothing else of the run changes."""

    def __init__(
        self,
        members: Members,
        store: Store,
        models: RunModels,
        asked_for: Callable[[], Iterable[int]],
    ) -> None:
        """``asked_for``: returns the versions that somebody asks for at this moment. May be called
        in any thread."""
        self._members, self._store, self._models = members, store, models
        self._rules = members.all[0].rules
        self._asked_for = asked_for

    def commit(self, decided: RoundToCommit, round: AnyRound) -> WrittenRound | NotUnmasked:
        """Make the round's model and write its file. Raises FleetError (not-finite: training has
        diverged), StoreError (the disk is full), OSError."""
        averaged = self.average(decided, round)
        return averaged if isinstance(averaged, NotUnmasked) else self.write(decided, averaged)

    def average(self, decided: RoundToCommit, round: AnyRound) -> CommittedRound | NotUnmasked:
        """Make the round's model. Raises FleetError (not-finite: training has diverged)."""
        try:
            masks = decided.masks() if callable(decided.masks) else decided.masks
            return round.commit(decided.number, decided.summary, decided.base, masks)
        except (UnmaskError, BadTotalError) as error:
            return NotUnmasked(decided.summary["dropped"], str(error))

    def write_refined(
        self,
        decided: RoundToCommit,
        averaged: CommittedRound,
        before: ModelState,
        models: Mapping[str, Vector],
        about: Mapping[str, Any],
    ) -> WrittenRound:
        """Write the file of an averaged round with other models of these members. ``before``: what
        the round changed. ``about``: what its summary has beside. Raises as ``commit`` does, and as
        ``replace_models``."""
        refined = replace_models(self._members.rules, averaged, before, models)
        return self.write(decided, refined._replace(summary={**refined.summary, **about}))

    def write(self, decided: RoundToCommit, averaged: CommittedRound) -> WrittenRound:
        """Write the file of the round's model. Raises StoreError (the disk is full), OSError."""
        number, (state, summary) = decided.number, averaged
        account = None if decided.account is None else decided.account.after_release()
        if account is not None:
            released = summary.get("privacy", {}) | summary_of(account)
            summary = {**summary, "privacy": released}
        made = ModelMade(state.version, state.digest, number, decided.at)
        forms = self._models.make_forms(state.model, decided.bases)
        # Asked as each file is removed: somebody may ask for a version while this thread computes.
        dropped = (each for each in decided.dropped if each not in {*self._asked_for()})
        rows = [
            *write_model(self._rules, self._store, made, state, dropped),
            RoundClosed(number, "committed", summary, decided.at),
        ]
        forgets_tied = self._rules.devices is not None and state.tied_sum.since == number
        if forgets_tied:
            rows.append(TiedVectorsForgotten())
        else:
            rows += [TiedVectorsCounted(*pair) for pair in decided.tied.items()]
        if self._rules.devices is not None:
            rows.append(row_of(state.tied_sum))
        if account is not None:  # in the batch that makes the model count
            rows.append(account_row(account))
        return WrittenRound(
            number, WrittenModel(state, forms, rows), summary, forgets_tied, account
        )


def write_model(
    rules: RoundRules, store: Store, made: ModelMade, state: ModelState, dropped: Iterable[int] = ()
) -> list[Row]:
    """Write a model's file, with the optimizer's state, the vectors and the buffers of correlated
    noise beside the model. Returns the rows that make them count. Raises StoreError (the disk is
    full)."""
    name = rules.optimizer.name
    beside = {**state.optimizer_state, **state.vectors, **tensors_of(state.privacy)}
    named: list[Row] = [Metadata("optimizer", name), Metadata("devices", rules.devices)]
    made = made._replace(optimizer=name)
    named += privacy_rows(rules.privacy, state.privacy)
    return [*named, *store.write_model(made, state.model, beside, dropped)]

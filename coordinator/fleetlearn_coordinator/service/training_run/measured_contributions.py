"""What each update of a round is worth, measured on held-out data before the round is committed.

It is the run's refiner (``refining.py``) that changes no model: it needs each update, and nothing
else of the run may go on until their spool files are not needed any more. Nothing of a measurement
is stored: whoever dies, the next process averages again, and measures the same.
``service/contribution_asker.py`` measures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
from fleetlearn_protocol.errors import many
from fleetlearn_protocol.vector import Vector

from fleetlearn_coordinator.aggregation.device_models import device_model
from fleetlearn_coordinator.plan.quality_section import QualitySection
from fleetlearn_coordinator.quality.contributions import (
    Utility,
    leave_one_out,
    needed_sets,
    shapley,
)
from fleetlearn_coordinator.service.json_log import said
from fleetlearn_coordinator.service.run_log import RunLog
from fleetlearn_coordinator.service.training_run.distilling import Refined
from fleetlearn_coordinator.service.training_run.members import Members
from fleetlearn_coordinator.service.training_run.refining import AveragedRound

MOST_BYTES = 2**28
"""Bytes of the devices' models that are held together. A round with more is not measured."""


class ContributionQuestion(msgspec.Struct, frozen=True, eq=False):
    """What is to be measured: the mean model of each of these sets of devices. Each round has an
    object of its own."""

    round: int
    devices: Sequence[str]
    before: Vector
    """The model that the round began from, float32, (P,). The empty set of devices has it."""
    models: Vector
    """Each device's own model, (n, P)."""
    weights: Vector
    """What each counts in the mean, (n,)."""
    sets: Sequence[frozenset[int]]
    """By the devices' numbers in ``devices``."""

    def model_of(self, members: frozenset[int]) -> Vector:
        """Return the mean model of these devices, float32, (P,)."""
        if not members:
            return self.before
        rows = sorted(members)
        weights = self.weights[rows] / self.weights[rows].sum()
        mean: Vector = (weights @ self.models[rows].astype(np.float64)).astype(np.float32)
        return mean


class MeasuringContributions:
    """``refining.Refiner``: which round's updates are to be measured."""

    keeps_updates = True
    waits_on = "what its updates are worth is being measured on held-out data"

    def __init__(
        self, quality: QualitySection, seed: int, members: Members, log: RunLog, refined: Refined
    ) -> None:
        """``seed``: the plan's."""
        self._quality, self._seed, self._members = quality, seed, members.all
        self._log, self._refined = log, refined
        self.question: ContributionQuestion | None = None
        """What is to be measured now. None: nothing."""
        self.changed: Callable[[], None] = lambda: None
        """Called when ``question`` is another one."""

    def begin(self, averaged: AveragedRound) -> None:
        """Ask for the measurement of a round's updates, if it is due."""
        every, (member,) = self._quality.contributions, self._members
        if every is None or averaged.version % every or not averaged.updates:
            self._refined(averaged.number, {}, {})
            return
        size = len(averaged.updates) * member.size * 4
        if size > MOST_BYTES:
            self._do_without(
                averaged.number,
                f"the models of {many(len(averaged.updates), 'device')} take {size / 2**20:.0f} "
                f"MiB, and {MOST_BYTES / 2**20:.0f} MiB are held together at most",
            )
            return
        before, rows = averaged.before[member.name], list[Vector]()
        for report in averaged.updates:
            model = device_model(before, report.columns, 0, member.rules.buffers)
            if model is None:
                text = "devices reported before the plan had quality.contributions"
                self._do_without(averaged.number, text)
                return
            rows.append(model.read(0, member.size))
        self.question = ContributionQuestion(
            averaged.number,
            [report.device for report in averaged.updates],
            before,
            np.stack(rows),
            np.concatenate([each.columns.weights for each in averaged.updates]).astype(np.float64),
            needed_sets(len(rows), self._quality.utilities, self._seed + averaged.number),
        )
        self.changed()

    def measured(
        self, question: ContributionQuestion, losses: Mapping[frozenset[int], float]
    ) -> None:
        """The loss of each set is known: have the round committed. Changes nothing where another
        question is asked now."""
        if question is not self.question:
            return
        self.forget()
        utility: Utility = lambda members: -losses[members]  # noqa: E731
        number, limit = len(question.devices), self._quality.utilities
        drawn = shapley(number, utility, utilities=limit, seed=self._seed + question.round)
        without = leave_one_out(number, utility)
        rows = zip(question.devices, drawn.values, drawn.errors, without.values, strict=True)
        about = {
            device: {"shapley": value, "error": error, "left_out": left_out}
            for device, value, error, left_out in rows
        }
        self._log.info(
            "round %d: what %s are worth was measured with %s",
            question.round,
            many(number, "update"),
            many(len(losses), "model"),
            extra=said("contributions", round=question.round, devices=number),
        )
        self._refined(question.round, {}, {"contributions": about})

    def failed(self, question: ContributionQuestion, why: str) -> None:
        """The measurement could not be made: the round is committed without it."""
        if question is self.question:
            self.forget()
            self._do_without(question.round, why)

    def _do_without(self, round: int, why: str) -> None:
        self._log.error(
            "round %d: what its updates are worth is not measured: %s",
            round,
            why,
            extra=said("contributions-failed", round=round, why=why),
        )
        self._refined(round, {}, {})

    def forget(self) -> None:
        """The answer to a question that is under way changes nothing."""
        if self.question is not None:
            self.question = None
            self.changed()

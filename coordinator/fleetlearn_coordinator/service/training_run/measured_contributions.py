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
from numpy.typing import NDArray

from fleetlearn_coordinator.aggregation.device_models import DeviceModel, device_model
from fleetlearn_coordinator.plan.quality_section import QualitySection
from fleetlearn_coordinator.quality.round_worth import UpdatesOfRound, WorthRule, why_too_large
from fleetlearn_coordinator.service.json_log import said
from fleetlearn_coordinator.service.run_log import RunLog
from fleetlearn_coordinator.service.training_run.distilling import Refined
from fleetlearn_coordinator.service.training_run.members import Members
from fleetlearn_coordinator.service.training_run.refining import AveragedRound


class ContributionQuestion(msgspec.Struct, frozen=True, eq=False):
    """What is to be measured: the mean models of sets of a round's devices. Each round has an
    object of its own."""

    round: int
    devices: Sequence[str]
    before: Vector
    """The model that the round began from, float32, (P,)."""
    own: Sequence[DeviceModel]
    """Each device's own model, in a spool file."""
    weights: NDArray[np.float64]
    """What each counts in the mean, (n,)."""
    rule: WorthRule

    def read(self) -> UpdatesOfRound:
        """Read the devices' models: up to ``MOST_BYTES`` of spool files, so not in the event loop's
        thread. Raises StoreError."""
        rows = np.empty((len(self.own), self.before.size), np.float32)
        for row, model in zip(rows, self.own, strict=True):
            row[:] = model.read(0, len(row))
        return UpdatesOfRound(self.before, rows, self.weights)


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
        if why := why_too_large(len(averaged.updates), member.size):
            self._do_without(averaged.number, why)
            return
        before, own = averaged.before[member.name], list[DeviceModel]()
        for report in averaged.updates:
            model = device_model(before, report.columns, 0, member.rules.buffers)
            if model is None:
                text = "devices reported before the plan had quality.contributions"
                self._do_without(averaged.number, text)
                return
            own.append(model)
        self.question = ContributionQuestion(
            averaged.number,
            [report.device for report in averaged.updates],
            before,
            own,
            np.concatenate([each.columns.weights for each in averaged.updates]).astype(np.float64),
            WorthRule(self._quality.utilities, self._seed + averaged.number),
        )
        self.changed()

    def measured(
        self, question: ContributionQuestion, worth: Mapping[str, Mapping[str, float]], models: int
    ) -> None:
        """What each device's update is worth is known, from the losses of this many models: have
        the round committed. Changes nothing where another question is asked now."""
        if question is not self.question:
            return
        self.forget()
        number = len(question.devices)
        self._log.info(
            "round %d: what %s are worth was measured with %s",
            question.round,
            many(number, "update"),
            many(models, "model"),
            extra=said("contributions", round=question.round, devices=number),
        )
        self._refined(question.round, {}, {"contributions": worth})

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

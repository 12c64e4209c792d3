"""What each update of a simulated round is worth, by the coordinator's own arithmetic, in this
process. It takes no virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from fleetlearn_coordinator.aggregation.device_models import device_model
from fleetlearn_coordinator.aggregation.open_round import CommittedRound
from fleetlearn_coordinator.aggregation.reports import ReportColumns
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.quality.round_worth import UpdatesOfRound, WorthRule, why_too_large
from fleetlearn_device.training.train import DivergedError
from fleetlearn_protocol.vector import Vector

from fleetlearn_simulator.fleet.device_names import name_of
from fleetlearn_simulator.training.held_out_loss import HeldOutLoss

WORTH, FAILED = "contributions", "contributions_failed"
"""Keys of a round's summary: each device's worth, or why it is not measured."""


class SimulatedContributions:
    """Measures the updates of a plan's rounds, where the plan has quality.contributions."""

    def __init__(
        self, plan: Plan, seed: int, buffers: Sequence[slice], held_out: HeldOutLoss | None
    ) -> None:
        """``seed``: the plan's. ``buffers``: places of the model's elements that are no trained
        parameters. ``held_out``: measures models; None: the plan does not ask for that."""
        self._quality, self._seed, self._buffers = plan.quality, seed, buffers
        self.held_out = held_out
        self.is_due = False
        """Whether the open round is to be measured. Its updates are needed until it ends then."""
        self._kept: list[ReportColumns] = []
        self._devices: list[int] = []

    def begin_round(self, version: int) -> None:
        """A round opens that is to make this version. The updates of the one before are not needed
        any more."""
        every = None if self._quality is None else self._quality.contributions
        self.is_due = self.held_out is not None and every is not None and version % every == 0
        self._kept.clear()
        self._devices.clear()

    def add(self, reports: ReportColumns, devices: Sequence[int], size: int) -> None:
        """These devices' reports count, with their parts. Whoever gave them may use the arrays'
        memory again. ``size``: elements of the model."""
        if not self.is_due:
            return
        self._devices += devices
        if why_too_large(len(self._devices), size):
            self._kept.clear()  # the round is not measured
            return
        parts = {
            part: column.copy() if isinstance(column, np.ndarray) else column
            for part, column in reports.parts.items()
        }
        self._kept.append(replace(reports, parts=parts))

    def measured(self, number: int, made: CommittedRound, before: Vector) -> CommittedRound:
        """Return the round with what its updates are worth, if that is due. ``before``: the model
        that it began from."""
        if not self.is_due or self.held_out is None or self._quality is None:
            return made
        why = why_too_large(len(self._devices), before.size)
        if why:
            return made._replace(summary={**made.summary, FAILED: why})
        rule = WorthRule(self._quality.utilities, self._seed + number)
        updates = self._updates(before)
        try:
            losses = {
                members: self.held_out.loss(updates.model_of(members))
                for members in rule.sets(len(self._devices))
            }
        except DivergedError as error:
            return made._replace(summary={**made.summary, FAILED: str(error)})
        worth = rule.worth_of([*map(name_of, self._devices)], losses)
        return made._replace(summary={**made.summary, WORTH: worth})

    def _updates(self, before: Vector) -> UpdatesOfRound:
        models = np.empty((len(self._devices), before.size), np.float32)
        rows = iter(models)
        for reports in self._kept:
            for row in range(len(reports)):
                model = device_model(before, reports, row, self._buffers)
                assert model is not None
                next(rows)[:] = model.read(0, before.size)
        weights = np.concatenate([each.weights for each in self._kept]).astype(np.float64)
        return UpdatesOfRound(before, models, weights)

"""Ensemble distillation in a simulated round: the same job and the same steps as a coordinator's,
in this process. It takes no virtual time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from fleetlearn_coordinator.aggregation.device_models import device_model
from fleetlearn_coordinator.aggregation.family_round import FamilyRules, replace_models
from fleetlearn_coordinator.aggregation.model_state import ModelState
from fleetlearn_coordinator.aggregation.open_round import CommittedRound
from fleetlearn_coordinator.aggregation.reports import ReportColumns
from fleetlearn_coordinator.plan.distil_files import check_distillation
from fleetlearn_coordinator.plan.distil_job import failed_summary, is_due, job_of, summary_of
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_device.distil import Distiller
from fleetlearn_device.training.train import DivergedError
from fleetlearn_protocol.manifest import Manifest
from fleetlearn_protocol.vector import Vector


class SimulatedDistillation:
    """Distils the models of a plan's rounds, where it has [distil]."""

    def __init__(self, plan: Plan, manifests: Mapping[str, Manifest], rules: FamilyRules) -> None:
        """``manifests``: name of each member -> its bundle's manifest. Raises PlanError where the
        files do not fit."""
        self._plan, self._rules = plan, rules
        bundles = check_distillation(plan, manifests)
        self._distiller: Distiller | None = None
        if plan.distil is not None:
            self._distiller = Distiller(bundles, str(plan.distil.data))
        self._kept: list[ReportColumns] = []
        """The round's reports, where their devices' models are teachers."""

    @property
    def keeps_updates(self) -> bool:
        """Whether the updates of a round are needed until it ends."""
        return self._plan.keeps_device_models

    def begin_round(self) -> None:
        """The reports of the round before are not needed any more."""
        self._kept.clear()

    def add(self, reports: ReportColumns) -> None:
        """These reports count, with their parts. Whoever gave them may use the arrays' memory
        again."""
        if self.keeps_updates:
            parts = {
                part: column.copy() if isinstance(column, np.ndarray) else column
                for part, column in reports.parts.items()
            }
            self._kept.append(replace(reports, parts=parts))

    def distilled(self, made: CommittedRound, before: ModelState) -> CommittedRound:
        """Return the round with its models distilled, if that is due. ``before``: the state that
        the round changed."""
        distil, version = self._plan.distil, made.state.version
        if distil is None or self._distiller is None or not is_due(distil, version):
            return made
        began, averaged = (self._rules.models_of(each.model) for each in (before, made.state))
        names = [*averaged]
        students = [
            place
            for place, name in enumerate(names)
            if not np.array_equal(began[name], averaged[name])
        ]
        if not students:
            return made
        teachers = self._teachers(began, averaged)
        places = [place for place, _ in teachers]
        job = job_of(distil, self._plan.seed, version, students, places)
        given = iter(
            [*(averaged[names[place]] for place in students), *(row for _, row in teachers)]
        )

        def read(size: int) -> Vector:
            return next(given)

        try:
            found, models = self._distiller.distil(job, read)
        except DivergedError as error:  # the mean is a model too
            return made._replace(summary={**made.summary, **failed_summary(str(error))})
        taught = {names[place]: model for place, model in zip(students, models, strict=True)}
        after = replace_models(self._rules, made, before, taught)
        return after._replace(summary={**after.summary, **summary_of(job, found, names)})

    def _teachers(
        self, began: Mapping[str, Vector], averaged: Mapping[str, Vector]
    ) -> list[tuple[int, Vector]]:
        """Return the place of each teacher's member, and its model."""
        if not self.keeps_updates:
            return [*enumerate(averaged.values())]
        found = list[tuple[int, Vector]]()
        names = [*began]
        for reports in self._kept:
            base = began[names[reports.member]]
            places = self._rules.members[reports.member].rules.buffers
            for row in range(len(reports)):
                model = device_model(base, reports, row, places)
                assert model is not None
                found.append((reports.member, model.read(0, base.size)))
        return found

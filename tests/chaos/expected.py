"""The models of an undisturbed run, worked out without coordinator, network or processes: the
devices' and the coordinator's functions in a loop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from fleetlearn_coordinator import Plan
from fleetlearn_coordinator.aggregation.commit import next_model
from fleetlearn_coordinator.aggregation.round_sums import next_control
from fleetlearn_coordinator.aggregation.updates import NO_VALUES, ArrayUpdate
from fleetlearn_device.runtimes.open_runtime import open_runtime
from fleetlearn_device.training.algorithms import run_algorithm
from fleetlearn_device.training.sent_parts import encode_parts
from fleetlearn_device.training.work import Inputs, TaskSettings
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.encodings import find_encoding
from fleetlearn_protocol.messages import CONTROL, UPDATE
from fleetlearn_protocol.secure.fixed_point import weighted_sum
from fleetlearn_protocol.vector import Vector
from marked_update import BITS, CLIP, marked_update, marked_words

from tests.chaos.bundles import example


class SynchronousRun:
    """A run each of whose rounds has all devices."""

    def __init__(self, plan: Plan, devices: int) -> None:
        self._plan, self._bundle = plan, open_bundle(plan.bundle)
        self._runtime, self._aggregators = open_runtime(self._bundle), plan.aggregators()
        self._optimizer = plan.optimizer(self._bundle.manifest)
        self.models = [self._bundle.parameters()]
        """By their version."""
        self._state = self._optimizer.init(self.models[0])
        self._control = np.zeros_like(self.models[0])
        self._tied: list[Mapping[str, Vector]] = [{} for _ in range(devices)]
        self._data = [dict(zip("xy", example(number), strict=True)) for number in range(devices)]
        local = plan.local
        self._settings = TaskSettings(plan.hyper(self._bundle.manifest), local.epochs, 0, 0)

    def model(self, version: int) -> Vector:
        """Return the model of a version, float32."""
        while len(self.models) <= version:
            self.models.append(self._next())
        return self.models[version]

    def _next(self) -> Vector:
        plan, model, size = self._plan, self.models[-1], len(self.models[-1])
        sums = {part: each.init(size) for part, each in self._aggregators.items()}
        for number, data in enumerate(self._data):
            vectors = dict.fromkeys(plan.vectors, self._control)
            inputs = Inputs(model, None, vectors, self._tied[number], None)
            outcome = run_algorithm(
                plan.local.algorithm, self._runtime, self._bundle, data, inputs, self._settings
            )
            asked = plan.parts(self._bundle.manifest)
            sent = encode_parts(asked, outcome.parts, 0, self._tied[number])
            for name, content in sent.contents.items():
                vector = find_encoding(asked[name]).decode(content, size)
                largest = float(np.abs(vector).max())
                self._aggregators[name].add(
                    sums[name], ArrayUpdate(vector), 1, largest, 1.0, NO_VALUES
                )
            self._tied[number] = {**outcome.tied, **sent.tied}
        model, self._state, _ = next_model(
            self._aggregators[UPDATE], sums[UPDATE], self._optimizer, self._state, model
        )
        if CONTROL in sums:
            self._control = next_control(self._control, sums[CONTROL], len(self._data))
        return model


@cache
def synchronous_run(plan: Path, text: str, devices: int) -> SynchronousRun:
    """Return a run of a plan. ``text``: the plan's, without its names of files: runs with one text
    are one run, whose models are worked out once."""
    return SynchronousRun(Plan.load(plan), devices)


def masked_model(plan: Plan, names: Sequence[str], version: int) -> Vector:
    """Return the model after so many rounds of these devices' updates, each counting alike."""
    model = open_bundle(plan.bundle).parameters()
    total = np.zeros(len(model) + 1, np.uint32)
    for name in names:
        total[:-1] += marked_words(name, len(model))
    total[-1] = len(names) * (2**BITS - 1)
    found = weighted_sum(total, len(names), CLIP, BITS, equal=True)
    for _ in range(version):
        model = (model + found.total / found.weight).astype(np.float32)
    return model


def model_of_rows(plan: Plan, rows: Iterable[tuple[str, int, int]], version: int) -> Vector:
    """Return the model of updates that a ledger says were accepted: (device, round, staleness)."""
    bundle = open_bundle(plan.bundle)
    aggregator, optimizer = plan.aggregator(), plan.optimizer(bundle.manifest)
    model = bundle.parameters()[: bundle.manifest.size].copy()
    state, found = optimizer.init(model), sorted(rows)
    for number in range(1, version + 1):
        total = aggregator.init(len(model))
        for device, _, staleness in (row for row in found if row[1] == number):
            update = marked_update(device, len(model))
            largest = float(np.abs(update).max())
            factor = plan.staleness_factor(staleness)
            aggregator.add(total, ArrayUpdate(update), 1, largest, factor, NO_VALUES)
        model, state, _ = next_model(aggregator, total, optimizer, state, model)
    return model

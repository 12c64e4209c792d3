"""What the coordinator gets of devices whose plan has [secure]: updates in fixed point, or sums as
words, and nothing that a single device measures.

By default no masks are added: their sum is taken off again before anybody looks at the sum of the
updates, so that the models are the same with them, bit for bit. ``coordinator.masks`` of a scenario
adds them, and asks a helper (``simulated_helper.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from fleetlearn_coordinator.aggregation.modular_sum import MaskedNumbers, SumWords
from fleetlearn_coordinator.aggregation.reports import ReportColumns
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_protocol.manifest import Manifest
from fleetlearn_protocol.messages import SUMS, UPDATE
from fleetlearn_protocol.secure.fixed_point import Words
from fleetlearn_protocol.secure.whole_words import sums_to_words
from numpy.typing import NDArray

from fleetlearn_simulator.fleet.fixed_point_updates import weighted_rows
from fleetlearn_simulator.fleet.running_tasks import RunningTasks
from fleetlearn_simulator.training.trained_devices import TrainedDevices

if TYPE_CHECKING:
    from fleetlearn_simulator.fleet.simulated_helper import SimulatedHelper


class MaskedReports:
    """The reports of a plan's devices, and the masks of each round."""

    def __init__(
        self,
        numbers: MaskedNumbers,
        largest_weight: int,
        seed: int,
        helper: SimulatedHelper | None = None,
    ) -> None:
        """``largest_weight``: of an update. ``seed``: of the simulation. ``helper``: who adds masks
        up, if there are some."""
        self._numbers, self._largest_weight, self._seed = numbers, largest_weight, seed
        self._helper = helper

    def begin_round(self) -> None:
        """A round opens: nothing is in its sum."""
        if self._helper is not None:
            self._helper.begin_round()

    def unfit(self, found: TrainedDevices) -> NDArray[np.bool_]:
        """Return which devices give their tasks back, as their sums are too large to be masked,
        (n,)."""
        if not isinstance(self._numbers, SumWords):
            return np.zeros(len(found), np.bool_)
        sums, most = found.vectors[SUMS], self._numbers.largest
        beyond: NDArray[np.bool_] = np.any((sums > most) | (sums < -most), axis=1)
        return beyond

    def of(
        self, reports: ReportColumns, tasks: RunningTasks, rows: slice, factors: Sequence[float]
    ) -> ReportColumns:
        """Return the reports as the coordinator gets them. ``tasks``, ``rows``: whose they are.
        ``factors``: what staleness leaves of each update; empty: none is stale."""
        part = SUMS if isinstance(self._numbers, SumWords) else UPDATE
        elements = reports.parts[part]
        assert isinstance(elements, np.ndarray), "devices train into arrays"
        size = len(reports)
        if isinstance(self._numbers, SumWords):
            words = sums_to_words(elements)
        else:
            words = weighted_rows(
                elements,
                reports.weights / self._largest_weight,
                np.array(factors) if factors else np.ones(size),
                self._numbers,
                self._seed,
                np.array(tasks.device[rows][:size], np.int64),
                np.array(tasks.seed[rows][:size], np.int64),
            )
        if self._helper is not None:
            self._helper.mask(words, tasks, rows)
        return withheld_columns(reports, words, part)

    def accept(self, tasks: RunningTasks, rows: slice, model_of: Callable[[int], str]) -> None:
        """The masked updates of these tasks count. ``model_of``: round -> SHA-256 of the model that
        its tasks began from."""
        if self._helper is not None:
            self._helper.accept(tasks, rows, model_of)

    def masks(self, size: int) -> Words:
        """Return the sum of the masks of the round's updates: uint32, as many words as a device
        masks. ``size``: of the model. Raises SimulatorError where the helper refuses."""
        if self._helper is None:
            return np.zeros(self._numbers.words(size), np.uint32)
        return self._helper.sum_of_masks()


def withheld_columns(reports: ReportColumns, words: Words, part: str = UPDATE) -> ReportColumns:
    """Return the reports with these words, and without anything that depends on the devices' data:
    as ``withheld`` of the device SDK has it. ``words``: of the part, uint32, (n, P + 1) or
    (n, 3 S)."""
    ones = np.ones(len(reports), np.int64)
    return replace(
        reports,
        weights=ones,
        examples=ones,
        steps=ones,
        complete=ones > 0,
        loss=np.zeros(len(reports)),
        metrics={},
        largest={part: np.zeros(len(reports))},
        parts={part: words},
        evaluations=(),
        personal=(),
        lost_tied=(),
        clipped=(),
    )


def masked_reports(
    plan: Plan, manifest: Manifest, bundle: str, seed: int, prefix: str, masks: bool
) -> MaskedReports | None:
    """Return what hides the updates of a plan's devices. None: nothing does.

    bundle: SHA-256 of the bundle. seed: of the simulation. prefix: of all tasks' names. masks:
    whether there are real masks, and a helper.
    """
    numbers = plan.masked_numbers(manifest)
    if numbers is None or plan.secure is None:
        return None
    helper = None
    if masks:
        # Imports cryptography, which other runs do not need.
        from fleetlearn_simulator.fleet.simulated_helper import HelperTerms, SimulatedHelper

        one_model = not plan.engine_settings(0.0).outlive
        terms = HelperTerms(bundle, plan.masked_words(manifest), plan.secure.minimum, one_model)
        helper = SimulatedHelper(seed, terms, prefix)
    return MaskedReports(numbers, plan.largest_weight, seed, helper)

"""The accepted reports of the open round and their sums, and reports that are here before their round."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from fleetlearn_protocol.encodings import find_encoding
from fleetlearn_protocol.manifest import Manifest
from fleetlearn_protocol.messages import BUFFERS, UPDATE, Report
from fleetlearn_protocol.vector import Vector, gather
from numpy.typing import NDArray

from fleetlearn_coordinator.aggregation import round_sums
from fleetlearn_coordinator.aggregation.round_summary import (
    evaluation_of,
    summarise,
    summarise_staleness,
    training_of,
)
from fleetlearn_coordinator.aggregation.updates import NO_VALUES, Values
from fleetlearn_coordinator.aggregation.weighing.norms import NOT_MEASURED, Norms, measure
from fleetlearn_coordinator.aggregation.weighing.weighing import Reported, reported_of
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.service.run_log import RunLog
from fleetlearn_coordinator.service.training_run.spooled_update import SpooledUpdate, spooled_parts
from fleetlearn_coordinator.service.training_run.tied_sum import load_tied_sum
from fleetlearn_coordinator.storage.ledger import SavedReport
from fleetlearn_coordinator.storage.store import Store


class AcceptedReport(NamedTuple):
    """A report that is durable, its parts in its spool file."""

    device: str
    report: Report
    reported: Reported
    """What its update's weighing depends on."""
    staleness: int
    spool_file: int
    largest: Mapping[str, float]
    """Part -> the largest magnitude of its elements."""


class OpenRound:
    """What the coordinator has of a round so far. Between rounds it has the last one's."""

    def __init__(self, plan: Plan, manifest: Manifest, store: Store, log: RunLog) -> None:
        self._log = log
        self.weighing = plan.weighing(manifest)
        self.state = self.weighing.state_after(store.ledger.last_committed())
        """What the rounds before decide of the weighing."""
        self.aggregators = plan.aggregators(manifest.buffers)
        """Part -> the aggregator of this part of all reports."""
        self.reports: dict[str, Report] = {}
        """Task -> accepted report."""
        self.staleness: dict[str, int] = {}
        """Task -> staleness of that report's update."""
        self.reported: dict[str, Reported] = {}
        """Task -> what the weighing of that update depends on."""
        self.tied: dict[str, str] = {}
        """Device -> the last of its tasks with an accepted report."""
        self.tied_sum = None if plan.server.devices is None else load_tied_sum(store.ledger)
        """The state of c or h, the sum of what devices keep, as the committed rounds left it."""
        self.sums = round_sums.init(self.aggregators, manifest.size)
        """The aggregators' states, with all accepted reports except those that are still to be added. Empty after the
        round was abandoned."""
        self._plan, self._manifest, self._store = plan, manifest, store
        self._present: Vector = np.zeros(0, np.float32)
        """The values of the buffers in the model that the round changes, (B,)."""
        self._to_add: deque[AcceptedReport] = deque()
        self._early: deque[tuple[int, AcceptedReport]] = deque()
        """The rounds that they count for and the reports, in the order in which they count."""

    @property
    def keeps_updates(self) -> bool:
        """Whether each update itself is needed at the round's end."""
        return self.aggregators[UPDATE].keeps_updates

    def check(self, largest: Mapping[str, float], weight: int) -> None:
        """Raise ProtocolError (not-finite, out-of-range) if a report must be refused."""
        round_sums.check(self.aggregators, largest, weight)

    def weigh(self, report: Report, weight: int, spool_file: int) -> Reported:
        """Return what the weighing of an update depends on. Raises ProtocolError (norm-too-large) if it must be
        refused."""
        norms = NOT_MEASURED
        if self.weighing.needs_norms:
            update = spooled_parts(self._store.blobs, spool_file, report, self._manifest)[UPDATE]
            norms = measure(update, self._manifest.size, self._manifest.buffers)
        reported = reported_of(report, weight, norms)
        self.weighing.check(reported, self.state)
        return reported

    def scale(self) -> float:
        """Return what the mean of the round's updates is multiplied by."""
        return self.weighing.scale(self.reported.values(), self.state)

    def summary(self, names: Sequence[str], dropped: Mapping[str, int], *, outlives: bool) -> dict[str, Any]:
        """Return what is known of the round's reports and of its weighing. ``names``: of the metrics. ``outlives``:
        tasks may outlive their rounds."""
        plan, reports = self._plan, self.reports.values()
        training = training_of(reports, names, plan.round.max_weight)
        evaluated, personal = ([getattr(report, kind) for report in reports] for kind in ("evaluation", "personal"))
        evaluation = evaluation_of(evaluated, names, plan.round.max_weight, personal)
        summary: dict[str, Any] = {
            "reports": len(reports),
            "partial": sum(not report.complete for report in reports),
            **summarise(training, evaluation, plan.bounds),
        }
        for name, devices in summary["left_out"].items():
            low, high = plan.bounds[name]
            text = "%d devices measured a %s beyond its bounds, %g to %g, and are left out of it"
            self._log.warning(text, devices, name, low, high)
        if outlives:
            summary["staleness"] = summarise_staleness(self.staleness.values())
        return summary | self.weighing.summary(self.reported.values(), dropped, self.state)

    def begin(self, number: int, model: Vector) -> None:
        """The round of this number opens, with the reports that came before it. It changes this model."""
        self.sums = round_sums.init(self.aggregators, self._manifest.size)
        self._present = gather(model, self._manifest.buffers)
        self.reports, self.staleness, self.reported, self.tied = {}, {}, {}, {}
        while self._early and self._early[0][0] == number:
            self.accept(self._early.popleft()[1])

    def accept(self, accepted: AcceptedReport) -> None:
        """The report counts. ``next_work`` adds its parts."""
        self._to_add.append(accepted)
        self._count(accepted.device, accepted.report, accepted.staleness, accepted.reported)

    def last_task_of(self, device: str) -> str | None:
        """Return the last task of the device whose report counts, for this round or a later one, or None."""
        early = (accepted.report.task for _, accepted in reversed(self._early) if accepted.device == device)
        return next(filter(self._is_tied, early), None) or self.tied.get(device)

    def _is_tied(self, task: str) -> bool:
        """Return whether what a device kept of this task goes with c or h: it does not if they began from zeros since
        the task was given."""
        since = 0 if self.tied_sum is None else self.tied_sum.since
        return not since or given_in_order(task)[0] > since

    def accept_early(self, number: int, accepted: AcceptedReport) -> None:
        """The report counts for the round of this number, which is not open yet."""
        self._early.append((number, accepted))

    def _count(self, device: str, report: Report, staleness: int, reported: Reported) -> None:
        task = report.task
        self.reports[task], self.staleness[task], self.reported[task] = report, staleness, reported
        if self._is_tied(task):
            self.tied[device] = task

    def next_work(self) -> Callable[[], None] | None:
        """Return the work of adding the next report, which may be done in any thread; None if all are added."""
        return partial(self._add_if_wanted, self.sums, self._to_add.popleft()) if self._to_add else None

    def abandon(self) -> None:
        """The round is over without a model: what is not added yet is not needed, and devices go on from the tied
        vectors that they had before."""
        self._to_add.clear()
        self.sums, self.tied = {}, {}

    def forget_early(self) -> None:
        """No report counts any more that came before its round, and no device goes on from what it kept."""
        self._early.clear()
        self.tied = {}

    def _add_if_wanted(self, sums: round_sums.States, accepted: AcceptedReport) -> None:
        """Add the report. If the round is abandoned meanwhile, the file may be another upload's: then what was added is
        not used, and bytes that cannot be decoded are no error."""
        try:
            self._add(sums, accepted)
        except Exception:
            if sums is self.sums:
                raise

    def _add(self, sums: round_sums.States, accepted: AcceptedReport) -> None:
        parts = spooled_parts(self._store.blobs, accepted.spool_file, accepted.report, self._manifest)
        reported, stale = accepted.reported, self._plan.staleness_factor(accepted.staleness)
        factor = stale * self.weighing.factor(reported, self.state)
        values = self._values(parts, stale) if BUFFERS in parts else NO_VALUES
        # The task began before c began again from zeros: the device reports a change of a c_k that is in no sum now.
        aggregators = self.aggregators if self._is_tied(accepted.report.task) else {UPDATE: self.aggregators[UPDATE]}
        round_sums.add(aggregators, sums, parts, reported.weight, accepted.largest, factor, values)

    def _values(self, parts: Mapping[str, SpooledUpdate], stale: float) -> Values:
        """Return what a report says of the buffers. ``stale``: what its staleness leaves of it."""
        row = parts[BUFFERS].read(0, parts[BUFFERS].elements)
        factor = stale * self.weighing.factor_of_values(row, self._present, self.state)
        return Values(row[None], np.array([factor]), self._present)

    def tensors(self) -> dict[str, NDArray[Any]]:
        """Return the sums as they are saved."""
        return round_sums.to_tensors(self.aggregators, self.sums)

    # What an earlier process left

    def load_sums(self, reports: Iterable[SavedReport], model: Vector) -> None:
        """Take over the sums as they were last saved, with the reports that were accepted since. ``model``: what the
        open round changes. Raises StoreError, ValueError (damaged, or made by an earlier version)."""
        sums = round_sums.init(self.aggregators, self._manifest.size)
        self._present = gather(model, self._manifest.buffers)
        saved = self._store.load_aggregator()
        if saved is not None:
            sums = round_sums.from_tensors(self.aggregators, saved)
        for row in reports:
            if row.spool_file is not None:
                self._add(sums, self._take_back(row))
        self.sums = sums

    def load_early(self, row: SavedReport) -> None:
        """Take back a report that counts for a later round. Raises StoreError (damaged)."""
        self.accept_early(row.round, self._take_back(row, early=row.round))

    def count_again(self, reports: Iterable[SavedReport]) -> None:
        """These reports count for the open round; their parts are in the sums."""
        for row in sorted(reports, key=lambda row: given_in_order(row.task)):
            self._count(row.device, row.report, row.staleness, _reported_before(row))

    def _take_back(self, row: SavedReport, early: int | None = None) -> AcceptedReport:
        """Return a report that an earlier process accepted. ``early``: the later round that it counts for. Raises
        StoreError (damaged)."""
        assert row.spool_file is not None
        self._check_parts(row.report)
        content, begin, largest = memoryview(self._store.take_back_update(row, early=early)), 0, {}
        for part in row.report.parts:
            encoding = find_encoding(part.encoding)
            elements = self._manifest.elements_of(part.name)
            largest[part.name] = encoding.check(content[begin : begin + part.size], elements)
            begin += part.size
        return AcceptedReport(row.device, row.report, _reported_before(row), row.staleness, row.spool_file, largest)

    def _check_parts(self, report: Report) -> None:
        """Raise ValueError if an earlier version accepted the report, and it lacks a part that is needed now."""
        given, needed = [part.name for part in report.parts], self._plan.parts(self._manifest)
        if {*given} != {*needed}:
            raise ValueError(
                f"the report of task {report.task} has the parts {', '.join(given)}; this version needs "
                f"{', '.join(needed)}. It was accepted by an earlier version of fleetlearn, or under another plan"
            )


def _reported_before(row: SavedReport) -> Reported:
    """Return what an earlier process knew. Its plan may have had no use for norms."""
    return reported_of(row.report, row.weight, NOT_MEASURED if row.norms is None else Norms(*row.norms))


def given_in_order(task: str) -> tuple[int, int]:
    """Return a key that sorts a device's tasks as they were given: the round, and which of the device's tasks in that
    round it is. The engine names tasks RUN-ROUND-NUMBER and, from a device's second task in a round on, .TURN."""
    round, _, place = task.partition("-")[2].partition("-")
    return int(round), int(place.partition(".")[2] or 1)

"""The open round's reports, their parts in spool files; and reports that are here before their
round."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import inf

from fleetlearn_protocol.encodings import find_encoding, is_own
from fleetlearn_protocol.errors import ProtocolError
from fleetlearn_protocol.messages import BUFFERS, ROW_ELEMENTS, ROWS, UPDATE, Report
from fleetlearn_protocol.sparse_rows import elements_in

from fleetlearn_coordinator.aggregation.model_state import ModelState
from fleetlearn_coordinator.aggregation.open_round import OpenRound
from fleetlearn_coordinator.aggregation.regional_round import (
    AnyRound,
    RegionalRound,
    RegionalWeights,
    open_round,
)
from fleetlearn_coordinator.aggregation.reports import ReportColumns, columns_of
from fleetlearn_coordinator.aggregation.weighing.norms import NOT_MEASURED, Norms
from fleetlearn_coordinator.aggregation.weighing.weighing import reported_of
from fleetlearn_coordinator.service.training_run.members import Members, RunMember
from fleetlearn_coordinator.service.training_run.pre_sums import ArrivedSum, PreSums
from fleetlearn_coordinator.service.training_run.spooled_report import SpooledReport
from fleetlearn_coordinator.storage.ledger import SavedReport
from fleetlearn_coordinator.storage.spooled_update import spooled_parts
from fleetlearn_coordinator.storage.store import Store


class RoundReports:
    """What a run has of the open round so far. Between rounds it has none of the next one's."""

    def __init__(
        self,
        members: Members,
        store: Store,
        newest: ModelState,
        regions: RegionalWeights | None = None,
    ) -> None:
        """``regions``: what each weighs; None: rounds have no regions."""
        self.members, self._store, self._regions = members, store, regions
        self.rules = members.all[0].rules
        """Those of the first member. What is asked of them is the same for all of them."""
        self._elements = [_elements_of(member) for member in members.all]
        """For each member: part of a report -> its elements."""
        self._metrics = members.all[0].bundle.manifest.metrics
        self.round: AnyRound = open_round(members.rules, newest, regions)
        """The accepted reports and their sums, except for reports that are still to be added."""
        self.tied: dict[str, str] = {}
        """Device -> the last of its tasks with an accepted report."""
        self._in_region: dict[str, str] = {}
        """Task -> its region, of the tasks in ``tied``. Empty: rounds have no regions."""
        self.counted: dict[str, SpooledReport] = {}
        """Task -> its report that counts, where updates are masked, since each may have to be taken
        off the sum again, or where a refiner needs each."""
        self.refined = False
        """Whether the averaged models are refined by something that needs each update."""
        self.pre_sums: PreSums | None = None
        """The updates that other processes add. None: this one adds all."""
        self._to_add: deque[SpooledReport] = deque()
        self._to_subtract: deque[SpooledReport] = deque()
        self._early: deque[tuple[int, SpooledReport]] = deque()
        """The rounds that they count for and the reports, in the order in which they count."""

    @property
    def keeps_updates(self) -> bool:
        """Whether each update itself may be needed at the round's end."""
        keeps = any(aggregator.keeps_updates for aggregator in self.rules.aggregators.values())
        return keeps or self.rules.secure is not None or self.refined

    @property
    def _remembers(self) -> bool:
        """Whether the reports that count are remembered, beside their sum."""
        return self.rules.secure is not None or self.refined

    def receive(
        self,
        device: str,
        report: Report,
        spool_file: int,
        largest: Mapping[str, float],
        weight: int,
        staleness: int,
        version: int,
        region: str | None = None,
    ) -> SpooledReport:
        """Return the report, checked and weighed. ``version``: of the model that its task began
        from. ``region``: of its task; None: rounds have no regions. Raises ProtocolError
        (not-finite, out-of-range, norm-too-large) if it must be refused."""
        member = self.members.of_task(report.task)
        columns = self._columns(report, spool_file, largest, weight, staleness, member, region)
        accepted, refusal = self.round.receive(columns)
        if refusal is not None:
            raise refusal.error
        return SpooledReport(device, report, version, accepted, spool_file)

    def _columns(
        self,
        report: Report,
        spool_file: int,
        largest: Mapping[str, float],
        weight: int,
        staleness: int,
        member: RunMember,
        region: str | None,
    ) -> ReportColumns:
        elements = self._elements[member.number]
        parts = spooled_parts(self._store.blobs, spool_file, report, elements)
        return columns_of(
            report, self._metrics, weight, largest, parts, staleness, member.number, region
        )

    def accept(self, report: SpooledReport) -> None:
        """The report counts for the open round. ``next_to_add`` adds its parts, unless another
        process does."""
        if not self._give(report):
            self._to_add.append(report)
        self._count(report)

    def _give(self, report: SpooledReport) -> bool:
        """Have another process add the report's parts, if one can. Returns whether it does."""
        if self.pre_sums is None or self.keeps_updates:
            return False
        return self.pre_sums.give(self.round, report, self._parts_to_add(report))

    def waits_for_sums(self) -> bool:
        """Ask for what other processes have added up. Returns whether some of it is missing."""
        return self.pre_sums is not None and self.pre_sums.collect()

    def _count(self, report: SpooledReport) -> None:
        self.round.accept(report.columns)
        if self._remembers:
            self.counted[report.task] = report
        if self._is_tied(report.task):
            self.tied[report.device] = report.task
            if report.columns.region is not None:
                self._in_region[report.task] = report.columns.region

    def accept_early(self, number: int, report: SpooledReport) -> None:
        """The report counts for the round of this number, which is not open yet."""
        self._early.append((number, report))

    def last_task_of(self, device: str) -> str | None:
        """Return the last task of the device whose report counts, for this round or a later one, or
        None."""
        early = (report.task for _, report in reversed(self._early) if report.device == device)
        return next(filter(self._is_tied, early), None) or self.tied.get(device)

    def _is_tied(self, task: str) -> bool:
        """Return whether what a device kept of this task goes with c or h: it does not if they
        began from zeros since the task was given."""
        since = self.round.state.tied_sum.since
        return not since or given_in_order(task)[0] > since

    # Rounds

    def begin(self, number: int) -> None:
        """The round of this number opens, with the reports that came before it."""
        while self._early and self._early[0][0] == number:
            self.accept(self._early.popleft()[1])

    def end_regions(self, done: Collection[str]) -> None:
        """The round is closed: reports of these regions alone count."""
        assert isinstance(self.round, RegionalRound), "the plan has regions"
        self.round.end_regions(done)
        self.tied = {
            device: task for device, task in self.tied.items() if self._in_region[task] in done
        }

    def end(self, newest: ModelState) -> None:
        """The round is over. What is not added yet is not needed any more. ``newest``: what the
        next round changes."""
        self._to_add.clear()
        self._to_subtract.clear()
        if self.pre_sums is not None:
            self.pre_sums.forget()
        self.counted = {}
        self.tied = {}
        self._in_region = {}
        self.round = open_round(self.members.rules, newest, self._regions)

    def forget_early(self) -> None:
        """No report counts any more that came before its round."""
        self._early.clear()

    def trained_from(self, version: int) -> set[str]:
        """Return the devices of masked updates that count and began from this version's model."""
        return {each.device for each in self.counted.values() if each.version == version}

    def leave_out(self, tasks: Collection[str]) -> None:
        """The masked updates of these tasks, which count for the closed round, count no more.
        ``next_to_add`` takes them off the sum."""
        self._to_subtract.extend(self.counted.pop(task) for task in tasks)
        assert isinstance(self.round, OpenRound), "updates are left out of one model's round alone"
        self.round = self.round.without(report.columns for report in self.counted.values())

    def next_to_add(self) -> Callable[[], None] | None:
        """Return the work of adding the next report, or of taking one off again, for any thread;
        None if the sums are those of the reports that count."""
        if (pre_sums := self.pre_sums) is not None:
            if pre_sums.arrived:
                return partial(self._merge_if_wanted, self.round, pre_sums.arrived.popleft())
            self._to_add.extend(pre_sums.returned)
            pre_sums.returned.clear()
        if self._to_add:
            return partial(self._do_if_wanted, self._add, self.round, self._to_add.popleft())
        if self._to_subtract:
            left_out = self._to_subtract.popleft()
            return partial(self._do_if_wanted, self._subtract, self.round, left_out)
        return None

    def _do_if_wanted(
        self,
        step: Callable[[AnyRound, SpooledReport], None],
        round: AnyRound,
        report: SpooledReport,
    ) -> None:
        """Change the sums. If the round ends meanwhile, the file may be another upload's: then what
        was added is not used, and bytes that cannot be decoded are no error."""
        try:
            step(round, report)
        except Exception:
            if round.sums is self.round.sums:
                raise

    def _merge_if_wanted(self, round: AnyRound, arrived: ArrivedSum) -> None:
        """Add a partial sum, or its updates one by one where its file is damaged. ``round``: the
        whole one."""
        assert self.pre_sums is not None
        sums = self.pre_sums.read(arrived)
        if sums is not None:
            arrived.round.sums.merge(sums)
            return
        for report in arrived.reports:
            self._do_if_wanted(self._add, round, report)

    def _subtract(self, round: AnyRound, report: SpooledReport) -> None:
        assert isinstance(round, OpenRound), "updates are left out of one model's round alone"
        round.subtract(report.columns)

    def _add(self, round: AnyRound, report: SpooledReport) -> None:
        round.add(self._parts_to_add(report))

    def _parts_to_add(self, report: SpooledReport) -> ReportColumns:
        """Return the report with the parts that count."""
        columns = report.columns
        if not self._is_tied(report.task):
            # The task began before c began again from zeros: the device reports a change of a c_k
            # that is in no sum now.
            whole = {
                part: columns.parts[part] for part in (UPDATE, BUFFERS) if part in columns.parts
            }
            columns = replace(columns, parts=whole)
        return columns

    # What an earlier process left

    def load_sums(self, reports: Iterable[SavedReport]) -> None:
        """Take over the sums as they were last saved, with the reports that were accepted since.
        Raises StoreError, ValueError (damaged, or made by an earlier version)."""
        saved = self._store.load_aggregator(self.round.sums.first_version_tensors())
        if saved is not None:
            self.round.sums.load_tensors(saved)
        for row in reports:
            if row.spool_file is not None:
                report = self._take_back(row)
                self._add(self.round, report)
                if self._remembers:
                    self.counted[row.task] = report

    def load_early(self, row: SavedReport) -> None:
        """Take back a report that counts for a later round. Raises StoreError (damaged)."""
        self.accept_early(row.round, self._take_back(row, early=row.round))

    def count_again(self, reports: Iterable[SavedReport]) -> None:
        """These reports count for the open round; their parts are in the sums."""
        for row in sorted(reports, key=lambda row: given_in_order(row.task)):
            number = self.members.of_task(row.task).number
            columns = columns_of(
                row.report, self._metrics, row.weight, {}, {}, row.staleness, number, row.region
            )
            self._count(self.counted.get(row.task) or self._weighed_before(row, columns))

    def _take_back(self, row: SavedReport, early: int | None = None) -> SpooledReport:
        """Return a report that an earlier process accepted. ``early``: the later round that it
        counts for. Raises StoreError (damaged)."""
        assert row.spool_file is not None
        member = self.members.of_task(row.task)
        own = self._elements[member.number]
        self._check_parts(row.report, own)
        content = memoryview(self._store.take_back_update(row, early=early))
        begin, largest = 0, {}
        elements_of = elements_in(row.report, own.__getitem__)
        for part in row.report.parts:
            with own_as_accepted(row.task, part.encoding):
                encoding = find_encoding(part.encoding)
                # What has no blocks says by its bytes how many there are: sums may be fewer.
                elements = encoding.elements(elements_of(part.name)) if encoding.block > 1 else None
                largest[part.name] = encoding.check(content[begin : begin + part.size], elements)
            begin += part.size
        columns = self._columns(
            row.report, row.spool_file, largest, row.weight, row.staleness, member, row.region
        )
        return self._weighed_before(row, columns)._replace(spool_file=row.spool_file)

    def _weighed_before(self, row: SavedReport, columns: ReportColumns) -> SpooledReport:
        """Return the report with what an earlier process knew of it. Its plan may have had no use
        for norms."""
        norms = NOT_MEASURED if row.norms is None else Norms(*row.norms)
        bound = self.rules.weighing.bound
        if row.norms is None and bound is not None and bound.enforced is not None:
            # Nobody knows how long it is. Such rounds are given up (participations.py); should
            # one come here, it adds nothing.
            norms = Norms(inf, inf)
        weighed = (
            [] if self.rules.weighing.is_plain else [reported_of(row.report, row.weight, norms)]
        )
        columns = replace(columns, weighed=weighed)
        return SpooledReport(row.device, row.report, row.version, columns)

    def _check_parts(self, report: Report, needed: Mapping[str, int]) -> None:
        """Raise ValueError if an earlier version accepted the report, and it lacks a part that is
        needed now."""
        given = [part.name for part in report.parts]
        # Devices that cannot train sub-models send whole updates.
        of_rows = {ROWS, ROW_ELEMENTS} if ROWS in needed else set[str]()
        if {*given} - of_rows != needed.keys() - of_rows:
            raise ValueError(
                f"the report of task {report.task} has the parts {', '.join(given)}; this version "
                f"needs {', '.join(needed)}. It was accepted by an earlier version of "
                "fleetlearn, or under another plan"
            )


@contextmanager
def own_as_accepted(task: str, encoding: str) -> Iterator[None]:
    """Within the block an accepted update of an own encoding is read again. Raises ValueError where
    the plan does not name that encoding any more, or its function refuses now what it took."""
    try:
        yield
    except ProtocolError as error:
        if not is_own(encoding):
            raise
        raise ValueError(
            f"the update of task {task} cannot be read: {error.text}. It was accepted under "
            "another plan, or with another version of the function: start with those until its "
            "round is over"
        ) from None


def _elements_of(member: RunMember) -> dict[str, int]:
    """Return the elements of each part of the reports of a member's tasks."""
    rules, manifest = member.rules, member.bundle.manifest
    parts = [*rules.aggregators, *((BUFFERS,) if rules.buffers else ())]
    parts += [ROWS, ROW_ELEMENTS] if rules.has_rows else []
    return {part: manifest.elements_of(part) for part in parts}


def given_in_order(task: str) -> tuple[int, int]:
    """Return a key that sorts a device's tasks as they were given: the round, and which of the
    device's tasks in that round it is. The engine names tasks RUN-ROUND-NUMBER and, from a device's
    second task in a round on, .TURN."""
    round, _, place = task.partition("-")[2].partition("-")
    return int(round), int(place.partition(".")[2] or 1)

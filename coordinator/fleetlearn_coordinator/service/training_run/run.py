"""A training run: what the engine decides, made to last in the data directory. No sockets, no
clock.

``Run`` records what the engine decides (leases, rounds) and what the devices sent (updates) in the
store. What follows from it is background work (``RoundWork``): each update is added to the round's
sum, the sum is saved now and then, and the new model is made when the round is closed. If the
process dies before that, the next one does the work again from the accepted updates, with the same
bits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import msgspec
from fleetlearn_protocol import Bundle
from fleetlearn_protocol.exchanges import FIT
from fleetlearn_protocol.messages import Reply, Report, SecureTask
from fleetlearn_protocol.quality_messages import QUALITY
from fleetlearn_protocol.secure.fixed_point import Words
from fleetlearn_protocol.secure.pairwise_messages import PAIRWISE, UNMASKING

from fleetlearn_coordinator.conversation.begun import BegunUploads
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.rounds.commands import (
    Abandon,
    Ask,
    Assign,
    CancelTask,
    Command,
    Commit,
    Ended,
    ExchangeClosed,
    ExchangeOpened,
    Finish,
    Opened,
    RegionEnded,
    Revived,
    SendAway,
    Unanswered,
)
from fleetlearn_coordinator.rounds.engine import Engine
from fleetlearn_coordinator.rounds.evaluation import EVALUATION
from fleetlearn_coordinator.rounds.settings import Phase
from fleetlearn_coordinator.rounds.strategies.ruled_selection import RuledSelection
from fleetlearn_coordinator.service.event_log import EventLog
from fleetlearn_coordinator.service.observers import (
    AnswerSaved,
    ExchangeSummarised,
    Observers,
    RoundEnded,
    RunEvent,
    UpdateSaved,
    without_measurements,
)
from fleetlearn_coordinator.service.run_clock import Clocks
from fleetlearn_coordinator.service.run_log import RunLog
from fleetlearn_coordinator.service.training_run.distilling import Distilling
from fleetlearn_coordinator.service.training_run.evaluation_records import EvaluationRecords
from fleetlearn_coordinator.service.training_run.exchange_records import ExchangeRecords
from fleetlearn_coordinator.service.training_run.finish import finish_rows, met_before
from fleetlearn_coordinator.service.training_run.fit_records import BestFit, FitRecords
from fleetlearn_coordinator.service.training_run.load_state import load_or_begin
from fleetlearn_coordinator.service.training_run.mask_sum import MaskSums, helper_address
from fleetlearn_coordinator.service.training_run.measured_contributions import (
    MeasuringContributions,
)
from fleetlearn_coordinator.service.training_run.members import Members, open_bundles
from fleetlearn_coordinator.service.training_run.own_origins import look_at_origins, own_origins
from fleetlearn_coordinator.service.training_run.participations import take_up_participations
from fleetlearn_coordinator.service.training_run.plan_changes import look_at_plan
from fleetlearn_coordinator.service.training_run.private_budget import PrivateBudget, summary_of
from fleetlearn_coordinator.service.training_run.quality_records import QualityRecords
from fleetlearn_coordinator.service.training_run.remembered_improvement import (
    restore_improvement,
)
from fleetlearn_coordinator.service.training_run.remembered_pace import pace_rows, restore_pace
from fleetlearn_coordinator.service.training_run.remembered_selection import RememberedSelection
from fleetlearn_coordinator.service.training_run.remembered_stop_rule import restore_stop_rule
from fleetlearn_coordinator.service.training_run.resume import GivenUp, take_up_rounds
from fleetlearn_coordinator.service.training_run.roll_back import RollBacks
from fleetlearn_coordinator.service.training_run.round_reports import RoundReports
from fleetlearn_coordinator.service.training_run.round_work import RoundWork
from fleetlearn_coordinator.service.training_run.run_models import RunModels
from fleetlearn_coordinator.service.training_run.run_regions import RunRegions, region_of_task
from fleetlearn_coordinator.service.training_run.run_tasks import RunTasks
from fleetlearn_coordinator.service.training_run.take_up_uploads import take_up_uploads
from fleetlearn_coordinator.storage.ledger import (
    ExchangeEnded,
    ReportAccepted,
    RoundClosed,
    RoundOpened,
    Row,
    TaskEnded,
    TaskGiven,
    TaskRevived,
)
from fleetlearn_coordinator.storage.store import Store

if TYPE_CHECKING:
    from fleetlearn_coordinator.service.training_run.pairwise_records import PairwiseRecords


def _pairwise_records(plan: Plan, members: Members, store: Store) -> ExchangeRecords:
    # With it comes the package cryptography, which is not there where tasks are only simulated.
    from fleetlearn_coordinator.service.training_run.pairwise_records import PairwiseRecords

    return PairwiseRecords(plan, members, store)


EXCHANGE_RECORDS: dict[str, Callable[[Plan, Members, Store], ExchangeRecords]] = {
    EVALUATION: EvaluationRecords,
    QUALITY: QualityRecords,
    PAIRWISE: _pairwise_records,
    FIT: FitRecords,
}
"""Kind of exchange -> what makes a run's records of it."""


class Run:
    """One training run, new or continued from its data directory."""

    def __init__(
        self,
        plan: Plan,
        bundle: Bundle,
        store: Store,
        now: Clocks,
        heartbeat: float,
        log: RunLog | None = None,
        bundles: Mapping[str, Bundle] | None = None,
    ) -> None:
        """``heartbeat``: seconds between a device's signs of life. ``log``: what names the run, one
        of several. ``bundles``: as ``open_bundles`` returned them; None: they are opened here."""
        self.plan, self.bundle, self.store, self.log = plan, bundle, store, log or RunLog()
        self.observers = Observers(store.when_safe)
        """Who is told what happens."""
        self.observers.add(EventLog(self.log, plan))
        self.members = members = Members(plan, bundles or open_bundles(plan, bundle))
        for remark in members.remarks(plan):
            self.log.warning("%s", remark)
        changes, row = look_at_plan(plan, store.ledger)
        if changes:
            text = "the plan has changed since the run was served last: %s"
            self.log.info(text, "; ".join(changes))
        own = own_origins(plan, [each.bundle.manifest for each in members.all])
        if own:
            self.log.info("own algorithms: %s", "; ".join(f"{k} = {v}" for k, v in own.items()))
        others, own_rows = look_at_origins(own, store.ledger)
        if others:
            text = (
                "own algorithms are others than when the run was served last, and the run goes on "
                "with these: %s"
            )
            self.log.warning(text, "; ".join(others))
        rules = members.all[0].rules  # a family has neither [privacy] nor [secure]
        self.budget = PrivateBudget(plan, rules.privacy, store, now.wall, self.log)
        newest = load_or_begin(plan, members, store, now.wall, self.log)
        self.models = RunModels(plan, members, store, newest)
        self.regions = RunRegions(plan)
        self.reports = RoundReports(members, store, newest, self.regions.weights)
        self.roll_backs = RollBacks(plan, members, store, self.models, self.log)
        self._weights = plan.update_weights()
        for number, device in store.ledger.accepted_updates() if self._weights.rates else ():
            self._weights.count(number, [device])
        self.bytes_up = self.bytes_down = 0
        """Payload of updates received and of content sent, since the last round closed."""
        self.begun = BegunUploads(store.uploads, store.blobs.free_spool_file)
        """The uploads that are not complete, of devices that are away."""
        self._opened = now.engine
        self.engine = Engine(
            plan.engine_settings(heartbeat)._replace(budget=self.budget.limit),
            prefix=f"{store.run}-",
            version=newest.version,
            round=store.ledger.last_round(),
            releases=self.budget.rounds,
        )
        self.tasks = RunTasks(plan, members, self.engine.prefix, self.models, self.budget)
        """What all tasks say alike."""
        participations = take_up_participations(
            rules,
            self.tasks.shared(newest.version, members.all[0]),
            self.budget.account,
            self.engine,
            store.ledger,
        )
        restore_pace(self.engine.pace, store.ledger, *now)
        ruled = self.engine.selection
        self.selection: RememberedSelection | None = None
        """Where the plan has rules for it."""
        if isinstance(ruled, RuledSelection):
            self.selection = RememberedSelection(ruled, store.ledger)
        self.work = RoundWork(
            plan,
            self.engine,
            store,
            self.models,
            self.reports,
            self.roll_backs,
            self.budget,
            self.selection,
            self.observers,
            self.record,
        )
        self.distilling: Distilling | None = None
        """What distils the models, where the plan has it done."""
        if plan.distil is not None:
            self.distilling = self.work.refiner = Distilling(
                plan.distil, plan.seed, members, self.engine, self.log, self.work.refined
            )
        self.contributions: MeasuringContributions | None = None
        """What measures what updates are worth, where the plan has it done."""
        if plan.quality is not None and plan.quality.contributions is not None:
            self.contributions = self.work.refiner = MeasuringContributions(
                plan.quality, plan.seed, members, self.log, self.work.refined
            )
        self.mask_sums: MaskSums | None = None
        """What the helper is asked, where updates are masked."""
        if plan.secure is not None and plan.secure.mode == "helper":
            self.mask_sums = MaskSums(
                helper_address(plan.secure),
                self.tasks.mask_terms(),
                store,
                self.engine,
                self.reports,
                self.budget,
                self.models.sent_digest,
                self.log,
                self._make_model,
                self.record,
            )
        self.exchanges: dict[str, ExchangeRecords] = {}
        """Kind of exchange -> what is recorded of it."""
        for kind in self.engine.exchanges:
            records = self.exchanges[kind] = EXCHANGE_RECORDS[kind](plan, members, store)
            if isinstance(records, FitRecords):
                members.policy = BestFit(records)
            if records.saved is not None:
                self.engine.restore_exchange(kind, records.saved, now.engine)
                if kind == PAIRWISE:
                    saved = records.saved
                    self._begin_pairwise(saved.number, saved.phase, saved.members)
            self.engine.exchanges[kind].requested = records.look_for_request()
        self.finished: str | None = None
        """Why training is over, or None."""
        self.met_by: int | None = None
        """The version of the model whose metric met the target, or is the best with patience, where
        that ended training."""
        restore_improvement(plan, self.engine, store, self.roll_backs.newest)
        rolled_back = self.roll_backs.newest
        self.work.own_stop = restore_stop_rule(plan, store, newest.version, rolled_back)
        self.best_ends = False
        """Whether that version is the best that was measured: patience ended training."""
        finish = None
        if not self.roll_backs.look(now.wall) or self.roll_backs.next_work() is None:
            finish = met_before(plan, self.engine, store, rolled_back, rules.computation, newest)
            if finish is None and self.work.own_stop is not None:
                finish = self.work.own_stop.finish()
        if finish is not None:
            self.engine.phase, self.engine.finishing = Phase.FINISHED, finish
        finished = self._finish(None if self.engine.ends_with_exchanges else finish)
        begun = [each for records in self.exchanges.values() for each in records.rows]
        self.store.write([row, *own_rows, *self.budget.rows, *participations, *begun, *finished])

    @property
    def pairwise(self) -> PairwiseRecords | None:
        """The sessions in which devices agree on masks; None: they do not."""
        found = self.exchanges.get(PAIRWISE)
        return cast("PairwiseRecords | None", found)

    def secure_of(self, device: str) -> SecureTask | None:
        """Return how this device of the open round masks its update; None: it does not."""
        secure, pairwise = self.tasks.secure, self.pairwise
        if secure is None or pairwise is None:
            return secure
        session, shares = pairwise.session, pairwise.sealed_for(device)
        return msgspec.structs.replace(secure, session=session, shares=shares)

    @property
    def where(self) -> str:
        """Where the run is, for the log of a start."""
        if self.finished is not None:
            return f"finished before, at model version {self.engine.version}: {self.finished}"
        if not self.engine.round and not self.engine.version:
            return "begins at model version 0"
        return f"goes on at model version {self.engine.version}"

    def pace_rows(self, now: Clocks) -> list[Row]:
        """Return what is to be written, now and then, of when devices come back."""
        return pace_rows(self.engine.pace, *now)

    def resume(self, now: Clocks) -> list[Command]:
        """Take up what an earlier process left: its open round, tasks that run, reports that came
        early, exchanges, and uploads that are not complete. Call once."""
        heard = self._resume(now)
        here = take_up_uploads(self.store, self.begun, self.engine.leases)
        if here:
            self.log.info("uploads that were not complete go on: %d bytes of them are here", here)
        return heard

    def _resume(self, now: Clocks) -> list[Command]:
        if self.finished is not None:
            return []
        heard = [] if self.engine.phase is Phase.FINISHED else self._resume_rounds(now)
        # An earlier process may have left more spool files than are held now.
        heard += self.work.do_work(now)
        return heard + self.record(self.engine.begin(now.engine), now)

    def _resume_rounds(self, now: Clocks) -> list[Command]:
        settings = self.engine.settings
        oldest = self.engine.version - settings.max_staleness if settings.outlive else None
        sums = self.mask_sums
        is_closed = (lambda round: False) if sums is None else sums.is_closed
        restored, given_up = take_up_rounds(
            self.store, self.reports, oldest, self.log, is_closed, self.regions
        )
        heard: list[Command] = []
        if given_up is not None:
            self._give_up(given_up, now)
            if (beside := self.engine.round_exchanges) is not None:
                heard += self.record(beside.give_up("its round is given up"), now)
        if restored is None:
            return heard
        for command in self.record(self.engine.restore(restored, now.engine), now):
            heard += self.commit(command, now) if isinstance(command, Commit) else [command]
        return heard

    def _give_up(self, given_up: GivenUp, now: Clocks) -> None:
        why = "its reports cannot be added up any more"
        self.budget.give_up(given_up.number, self.engine)
        closed, ended = self._abandon(given_up.number, given_up.dropped, why, now)
        self.store.write([*given_up.rows, *closed])
        self.engine.releases = self.budget.rounds
        self.observers.tell([ended])

    def tied_to(self, device: str) -> str | None:
        """Return the task whose tied vectors the device's next task goes on from; None: from
        zeros."""
        if not self.plan.tied:
            return None
        return self.reports.last_task_of(device) or self.store.tied_to(device)

    def _finish(self, finish: Finish | None) -> list[Row]:
        self.finished = None if finish is None else finish.reason
        self.met_by = None if finish is None else finish.version
        self.best_ends = finish is not None and finish.rule == "patience"
        return finish_rows(finish)

    # What devices send

    def save_update(
        self,
        device: str,
        report: Report,
        spool_file: int,
        largest: Mapping[str, float],
        now: float | None = None,
    ) -> None:
        """Make a spooled and checked update durable. Background work adds it to the round's other
        updates.

        ``largest``: name of each part -> the largest magnitude of its elements. ``now``: the
        engine's time if it is known. The caller then tells the device and calls
        ``engine.count_report``. Raises ProtocolError if the update must be refused; nothing is
        saved then."""
        engine = self.engine
        engine.check_staleness(device)
        engine.check_participation(device)
        number, staleness, early = engine.report_terms(device)
        weight = self._weights.of_one(number, device, report.examples)
        spooled = self.reports.receive(
            device,
            report,
            spool_file,
            largest,
            weight,
            staleness,
            engine.book.terms[device].version,
            region_of_task(engine, device),
        )
        norms = None
        if self.reports.rules.weighing.needs_norms:
            (weighed,) = spooled.columns.weighed
            norms = weighed.norms
        moved = None if number == engine.round_of(report.task) else number
        row = ReportAccepted(report, weight, spool_file, staleness, moved, norms)
        also = []
        if self.selection is not None:
            also = self.selection.reported(device, report, number, now)
        self.store.record_report(row, number if early else None, also)
        self._weights.count(number, [device])
        if early:
            self.reports.accept_early(number, spooled)
        else:
            self.reports.accept(spooled)
        private = self.plan.hides_devices
        shown = without_measurements(report) if private else report
        self.observers.tell([UpdateSaved(device, shown, number, staleness, private)])

    def save_answer(self, device: str, message: Reply) -> None:
        """Make what a device answered in an exchange durable. The caller then tells the device and
        calls ``engine.count_answer``. Raises ProtocolError (bad-message)."""
        records = self.exchanges[message.kind]
        self.store.write([records.answer_row(device, message)])
        records.keep(device, message)
        self.observers.tell([AnswerSaved(device, message)])

    # What the engine decides

    def record(
        self, commands: Iterable[Command], now: Clocks, also: Iterable[Row] = ()
    ) -> list[Command]:
        """Write what the commands change, in one batch. Returns those that the driver has to act
        on, in order: ``Assign``, ``CancelTask``, ``SendAway``, ``Ask`` and ``Finish`` are for the
        devices to hear, ``Abandon`` ends a round; after ``ExchangeClosed`` comes
        ``end_exchange``; ``Commit`` is to be begun (``begin_commit``). ``also``: rows that are
        written with them."""
        heard: list[Command] = []
        rows: list[Row] = []
        events: list[RunEvent] = []
        for command in commands:
            events.append(command)
            match command:
                case ExchangeOpened() | Ask() | Unanswered() | ExchangeClosed():
                    if isinstance(command, ExchangeOpened) and command.kind == PAIRWISE:
                        self._begin_pairwise(command.number, command.phase, command.members)
                    row = self.exchanges[command.kind].row_of(command, now.wall)
                    if row is not None:
                        rows.append(row)
                    if isinstance(command, ExchangeClosed) and isinstance(row, ExchangeEnded):
                        number, version, _, valid, kind, phase = command
                        ended = ExchangeSummarised(kind, number, phase, version, valid, row.summary)
                        events.append(ended)
                        if valid:
                            self.work.kept.note(kind, version, row.summary)
                    heard.append(command)
                case Assign(device, task, number, again=again, version=version):
                    if not again:
                        member = self.members.give(device, task).name or None
                        region = region_of_task(self.engine, device)
                        rows.append(TaskGiven(task, number, device, version, member, region))
                        if self.selection is not None:
                            rows += self.selection.given(device, task, now.engine)
                    heard.append(command)
                case Ended(_, task, number, cause):
                    if self.selection is not None:
                        self.selection.ended(task)
                    rows.append(
                        TaskEnded(
                            task, cause, None if number == self.engine.round_of(task) else number
                        )
                    )
                case Revived(_, task):
                    rows.append(TaskRevived(task))
                case RegionEnded():
                    rows.append(self.regions.row_of(command))
                case CancelTask() | SendAway() | Commit():
                    heard.append(command)
                case Opened():
                    rows.append(self._open(command, now))
                case Abandon(number, dropped, text):
                    closed, round_ended = self._abandon(number, dropped, text, now)
                    rows += closed
                    events.append(round_ended)
                    heard.append(command)
                case Finish():
                    rows += self._finish(command)
                    heard.append(command)
        rows += also
        if rows:  # most events of most devices write nothing
            self.store.write(rows)
        self.observers.tell(events)
        return heard

    def begin_commit(self, command: Commit, now: Clocks) -> list[Command]:
        """The round is closed. ``RoundWork`` makes its model; where updates are masked, the sum of
        their masks comes first. Returns the engine's next commands, as ``record`` does."""
        if self.mask_sums is not None:
            return self.mask_sums.begin(command, now)
        masks = None
        if (pairwise := self.pairwise) is not None:
            version = self.engine.version
            model = self.models.sent_digest(version)
            (only,) = self.members.all
            task = pairwise.task_of(self.tasks.shared(version, only), model)
            words = self.plan.masked_words(self.bundle.manifest)
            masks = partial(pairwise.masks, task, words, self.log)
        self._make_model(command, masks, now)
        return []

    def _make_model(
        self, command: Commit, masks: Words | Callable[[], Words] | None, now: Clocks
    ) -> None:
        if command.regions is not None:
            self.reports.end_regions(command.regions)
        self.work.begin_commit(command.round, self._summary(command.dropped, now), now, masks)

    def _begin_pairwise(self, number: int, phase: int, members: Collection[str] | None) -> None:
        """An exchange of this round's pairwise masks begins, or was the last one before a restart.
        Devices that are asked to unmask a sum let no other one of this model be unmasked."""
        self.budget.begin_unmasking(number, phase, self.engine)
        if phase == UNMASKING:
            self.engine.spend(members or ())

    def commit(self, command: Commit, now: Clocks) -> list[Command]:
        """Commit at once, in this thread, unless the sum of masks has to come first."""
        return [*self.begin_commit(command, now), *self.work.do_work(now)]

    def _open(self, opened: Opened, now: Clocks) -> Row:
        self._opened = now.engine
        if self.members.is_family:
            book = self.engine.book
            self.members.keep({*book.tasks.values(), *book.lost, *book.early})
        self.reports.begin(opened.round)
        return RoundOpened(opened.round, now.wall, opened.goal)

    def _abandon(
        self, number: int, dropped: Mapping[str, int], text: str, now: Clocks
    ) -> tuple[list[Row], RoundEnded]:
        """End the open round without a model. Returns the rows that say so, and the event for when
        they are written. ``text``: why."""
        if self.mask_sums is not None:
            self.mask_sums.forget()
        summary, newest = self._summary(dropped, now), self.models.newest
        self.reports.end(newest)
        spent = self.budget.abandoned(number)
        if self.budget.account is not None and spent:
            summary["privacy"] = summary_of(self.budget.account)
        closed = RoundClosed(number, "abandoned", summary, now.wall)
        return [closed, *spent], RoundEnded(number, "abandoned", newest.version, summary, text)

    def _summary(self, dropped: Mapping[str, int], now: Clocks) -> dict[str, Any]:
        """Return the summary of the round that closes."""
        summary = self.reports.round.summary(dropped) | {
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "seconds": round(now.engine - self._opened, 6),
        }
        if self.engine.settings.own_goal is not None:
            summary["goal"] = self.engine.settings.own_goal
        self.bytes_up = self.bytes_down = 0
        return summary

    def end_exchange(self, command: ExchangeClosed, now: Clocks) -> list[Command]:
        """The end of an exchange was recorded: its metrics may stop the run. Returns the engine's
        next commands, as ``record`` does."""
        if not command.valid or command.version < self.roll_backs.newest:
            return []
        metrics = self.exchanges[command.kind].stop_metrics()
        if metrics is None:
            return []
        return self.record(self.engine.measured(metrics, command.version, now.engine), now)

    def free(self) -> None:
        """Let the model, and all that is as large, be freed now. Nothing may be asked of the run
        any more.

        The run and its parts refer to each other. Without this they would wait for the garbage
        collector, which a coordinator runs rarely (``process_settings.collect_garbage_rarely``)."""
        self.work.forget()
        self.models.free()
        self.reports.end(self.models.newest)

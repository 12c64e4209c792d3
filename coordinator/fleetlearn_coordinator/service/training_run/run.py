"""A training run: what the engine decides, made to last in the data directory, and the model. No sockets, no clock.

``Run`` records what the engine decides (leases, rounds) and what the devices sent (updates) in the store. The rest is
done in steps (``next_step``): each update is added to the round's sum, the sum is saved now and then, and the new model
is made when the round is closed. A step's work is arithmetic and the writing of files, which may run in another thread;
its end writes the rows with which the work counts. If the process dies before that, the next one does the work again
from the accepted updates, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import inf
from typing import Any, NamedTuple

import msgspec
import numpy as np
from fleetlearn_protocol import Bundle
from fleetlearn_protocol.messages import CONTROL, Evaluated, Report
from fleetlearn_protocol.vector import Vector, digest

from fleetlearn_coordinator.aggregation import adaptive_mu
from fleetlearn_coordinator.aggregation.commit import Began, weight_of
from fleetlearn_coordinator.aggregation.optimizers import State
from fleetlearn_coordinator.aggregation.round_summary import deciding, describe, possible
from fleetlearn_coordinator.aggregation.sent_models import Forms, make_forms
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.rounds.commands import (
    Abandon,
    Assign,
    CancelTask,
    Command,
    Commit,
    Ended,
    EvaluationClosed,
    EvaluationOpened,
    Finish,
    Measure,
    MeasurementEnded,
    Opened,
    Revived,
    SendAway,
)
from fleetlearn_coordinator.rounds.engine import Engine
from fleetlearn_coordinator.rounds.settings import Phase
from fleetlearn_coordinator.rounds.strategies.ruled_selection import RuledSelection
from fleetlearn_coordinator.service.held_out import HeldOut, means_of_newest
from fleetlearn_coordinator.service.run_log import RunLog
from fleetlearn_coordinator.service.training_run.algorithm_change import begin_algorithm, devices_factor
from fleetlearn_coordinator.service.training_run.evaluation_records import EvaluationRecords, saved
from fleetlearn_coordinator.service.training_run.kept_models import dropped_after
from fleetlearn_coordinator.service.training_run.model_digests import ModelDigests
from fleetlearn_coordinator.service.training_run.open_round import AcceptedReport, OpenRound
from fleetlearn_coordinator.service.training_run.plan_changes import look_at_plan
from fleetlearn_coordinator.service.training_run.remembered_selection import RememberedSelection
from fleetlearn_coordinator.service.training_run.resume import resume_rounds
from fleetlearn_coordinator.service.training_run.roll_back import RestoredModel, RollBacks
from fleetlearn_coordinator.service.training_run.tied_sum import TiedSum
from fleetlearn_coordinator.service.training_run.written_model import WrittenModel, make_model
from fleetlearn_coordinator.storage.ledger import (
    AggregatorSaved,
    Metadata,
    ModelMade,
    ReportAccepted,
    RoundClosed,
    RoundOpened,
    Row,
    TaskEnded,
    TaskGiven,
    TaskRevived,
)
from fleetlearn_coordinator.storage.store import Store
from fleetlearn_coordinator.storage.stored_json import decode


class Clocks(NamedTuple):
    """One moment on both clocks, in seconds."""

    engine: float
    """Never goes back; the engine's."""
    wall: float
    """Unix time, for the records."""


class Step(NamedTuple):
    """The next step with a run's accepted updates. Only one step is under way at a time."""

    work: Callable[[], Any]
    """To be called once, in any thread. Raises FleetError (not-finite: training has diverged), StoreError (the disk is
    full), OSError."""
    end: Callable[[Any, Clocks], list[Command]]
    """Takes what ``work`` returned, in the thread of all other calls. Returns the engine's next commands, as
    ``Run.record`` does."""


class Run:
    """One training run, new or continued from its data directory."""

    def __init__(
        self, plan: Plan, bundle: Bundle, store: Store, now: Clocks, heartbeat: float, log: RunLog | None = None
    ) -> None:
        """``heartbeat``: seconds between a device's signs of life. ``log``: what names the run, one of several."""
        self.plan, self.bundle, self.store, self.log = plan, bundle, store, log or RunLog()
        plan.check_against(bundle.manifest)
        self.hyper = plan.hyper(bundle.manifest)
        for remark in plan.remarks(bundle.manifest):
            self.log.warning("%s", remark)
        changes, row = look_at_plan(plan, store.ledger)
        if changes:
            self.log.info("the plan has changed since the run was served last: %s", "; ".join(changes))
        self.optimizer = plan.optimizer(bundle.manifest)
        self.open_round = OpenRound(plan, bundle.manifest, store, self.log)
        self._rates = plan.participation_rates()
        self._to_commit: Callable[[], WrittenModel] | None = None
        """The work of the commit that was decided and has not begun."""
        self.bytes_up = self.bytes_down = 0
        """Payload of updates received and of content sent, since the last round closed."""
        self._opened = now.engine
        self.digests = ModelDigests(self)
        version = self._load_model(now)
        self.roll_backs = RollBacks(self)
        self._mu = adaptive_mu.state_after(store.ledger.last_committed(), self.hyper.get("mu", 0.0))
        """Where the plan lets mu follow the loss."""
        self.engine = Engine(
            plan.engine_settings(heartbeat), prefix=f"{store.run}-", version=version, round=store.ledger.last_round()
        )
        ruled = self.engine.selection
        self.selection = RememberedSelection(ruled, store.ledger) if isinstance(ruled, RuledSelection) else None
        """Where the plan has rules for it."""
        self._restore_pace(now)
        if self._rates is not None:
            for number, device in store.ledger.accepted_updates():
                self._rates.add(number, device)
        last = store.ledger.last_evaluation()
        names = (*bundle.manifest.metrics, "loss")
        self.evaluations = EvaluationRecords(plan, names, store.storage.requests, last, self.log)
        if last is not None:
            self.engine.restore_evaluation(saved(last), now.engine)
        self.engine.evaluations.requested = self.evaluations.look_for_request()
        self.held_out: HeldOut | None = None
        """What measures the models on held-out data, if the plan names some."""
        self.finished: str | None = None
        """Why training is over, or None."""
        self.met_by: int | None = None
        """The version of the model whose metric met the target, where that ended training."""
        finish = None if self.roll_backs.look(now) and self.roll_backs.is_wanted() else self._still_finished()
        if finish is not None:
            self.engine.phase, self.engine.finishing = Phase.FINISHED, finish
        self.store.write([row, *self._finish(None if self.engine.measures_last else finish)])

    @property
    def where(self) -> str:
        """Where the run is, for the log of a start."""
        if self.finished is not None:
            return f"finished before, at model version {self.engine.version}: {self.finished}"
        if not self.engine.round and not self.engine.version:
            return "begins at model version 0"
        return f"goes on at model version {self.engine.version}"

    def pace_rows(self, now: Clocks) -> list[Row]:
        """Return what is to be written, now and then, so that the next process knows when devices come that were sent
        away. It is no loss if the last of them are missing: their times are then given to others, too."""
        pace = self.engine.pace
        if pace is None:
            return []
        state = {"time": now.wall, **pace.bookings.state(now.engine)}
        return [Metadata("pace", msgspec.json.encode(state).decode())]

    def _restore_pace(self, now: Clocks) -> None:
        saved = self.store.ledger.get("pace")
        if saved is not None and self.engine.pace is not None:
            state = decode(saved, dict[str, Any], f"{self.plan.data_dir}: what the database says of pace")
            self.engine.pace.bookings.restore(state, now.engine - max(0.0, now.wall - state["time"]))

    def resume(self, now: Clocks) -> list[Command]:
        """Take up what an earlier process left: its open round, tasks that run, reports that came early, and an
        evaluation. Call once."""
        if self.finished is not None:
            return []
        heard = [] if self.engine.phase is Phase.FINISHED else resume_rounds(self, now)
        heard += self.do_steps(now)  # an earlier process may have left more spool files than are held now
        return heard + self.record(self.engine.begin(now.engine), now)

    def _load_model(self, now: Clocks) -> int:
        found = self.store.load_model()
        if found is None:
            vector = self.bundle.parameters()[: self.bundle.manifest.size].copy()  # not what is personal
            found = 0, vector, self.optimizer.init(vector)
            beside = {name: np.zeros_like(vector) for name in self.plan.vectors}  # for tasks that outlive the version
            self.store.write(self.write_model(ModelMade(0, digest(vector), 0, now.wall), vector, found[2] | beside))
        version, self.model, self.state = found
        self.vectors = {name: self.state.pop(name) for name in (CONTROL,) if name in self.state}
        self.vectors, rows = begin_algorithm(self.plan, self.store.ledger, version, self.model, self.vectors)
        self.store.write(rows)
        # The name of its optimizer is missing in a data directory of an earlier version; slots say less.
        before = self.store.ledger.get("optimizer") or self.optimizer.name
        if before != self.optimizer.name or set(self.state) != set(self.optimizer.init(self.model)):
            self.log.warning("the server optimizer is now %s: its state starts from the beginning", self.optimizer.name)
            self.state = self.optimizer.init(self.model)
        factor = devices_factor(self.plan, self.store.ledger)
        if factor != 1.0:
            text = "server.devices is %d now: what the coordinator keeps of all devices is multiplied by %.6g"
            self.log.warning(text, self.plan.server.devices, factor)
            for kept in (self.vectors, self.state) if self.optimizer.name == "feddyn" else (self.vectors,):
                kept |= {name: vector * np.float32(factor) for name, vector in kept.items()}
        self.model_digest = digest(self.model)
        self.vector_digests = {name: digest(vector) for name, vector in self.vectors.items()}
        self.forms = make_forms(self.plan.encoding.down, self.model, self.digests.load(self.digests.bases_of(version)))
        return version

    @property
    def tied_sum(self) -> TiedSum | None:
        """What is known of c or h at the newest model. None: the plan has neither."""
        return self.open_round.tied_sum

    def tied_to(self, device: str) -> str | None:
        """Return the task whose tied vectors the device's next task goes on from; None: from zeros."""
        if not self.plan.tied:
            return None
        return self.open_round.last_task_of(device) or self.store.ledger.tied_to(device)

    def _still_finished(self) -> Finish | None:
        """The stop rule that the last committed round meets. The plan's rules may be others than at the last start."""
        ledger, plan = self.store.ledger, self.plan
        since, summary = self.roll_backs.newest, ledger.last_committed()
        if summary is None or since == self.engine.version > 0:  # no round has made the newest model
            summary = {"change": inf, "metrics": {}}
        if plan.stop.measured_by == "evaluation":
            measured, found = ledger.last_valid_evaluation(since) or (0, {"metrics": {}})
            metrics = deciding(found, plan.evaluation.minimum)
        elif plan.stop.measured_by == "held-out":
            results = self.store.storage.held_out.read_all()
            results = {version: row for version, row in results.items() if version >= since}
            measured, metrics = max(results, default=0), means_of_newest(results)
        else:
            measured, metrics = self.engine.version - 1, deciding(summary, plan.round.minimum)
        # An earlier version let one device's word pass.
        metrics = {name: mean for name, mean in metrics.items() if possible(plan.bounds, name, mean)}
        return self.engine.finish(summary["change"], metrics, measured)

    def _finish(self, finish: Finish | None) -> list[Row]:
        self.finished, self.met_by = (None, None) if finish is None else (finish.reason, finish.version)
        rule = None if finish is None else msgspec.json.encode(finish._asdict()).decode()
        return [Metadata("finished", self.finished), Metadata("finished_by", rule)]

    def hyper_of(self, version: int) -> dict[str, float]:
        """Return the hyper-parameters of the tasks that begin from this version of the model."""
        if not self.plan.local.adaptive_mu:
            return self.hyper
        if version == self.engine.version:
            return self.hyper | {"mu": self._mu.mu}
        rounds = self.store.ledger.committed_rounds(self.engine.version - version + 1)
        made = next((summary for made, summary in reversed(rounds) if made <= version), None)
        return self.hyper | {"mu": adaptive_mu.state_after(made, self.hyper["mu"]).mu}

    def save_update(
        self,
        device: str,
        report: Report,
        spool_file: int,
        largest: Mapping[str, float],
        now: float | None = None,
    ) -> None:
        """Make a spooled and checked update durable. A later step adds it to the round's other updates.

        ``largest``: name of each part -> the largest magnitude of its elements. ``now``: the engine's time if it is
        known. The caller then tells the device and calls ``engine.count_report``. Raises ProtocolError if the update
        must be refused; nothing is saved then.
        """
        engine, task = self.engine, report.task
        engine.check_staleness(device)
        number, staleness, early = engine.counts(device)
        weight = (
            weight_of(report.examples, self.plan.largest_weight)
            if self._rates is None
            else self._rates.weight(number, device)
        )
        self.open_round.check(largest, weight)
        reported = self.open_round.weigh(report, weight, spool_file)
        moved = None if number == engine.round_of(task) else number
        also = [] if self.selection is None else self.selection.reported(device, report, number, now)
        self.store.record_report(
            ReportAccepted(
                report,
                weight,
                spool_file,
                staleness,
                moved,
                reported.norms if self.open_round.weighing.needs_norms else None,
            ),
            number if early else None,
            also,
        )
        if self._rates is not None:
            self._rates.add(number, device)
        accepted = AcceptedReport(device, report, reported, staleness, spool_file, largest)
        if early:
            self.open_round.accept_early(number, accepted)
        else:
            self.open_round.accept(accepted)

    def next_step(self) -> Step | None:
        """Return what is to be done next, or None: roll back, if somebody asked for it; add an accepted update; where
        all are added, make the model if the round is to be committed, or save the aggregator's state if many updates
        are in spool files."""
        if self.roll_backs.is_wanted():
            return Step(*self.roll_backs.next_work())
        add = self.open_round.next_work()
        if add is not None:
            return Step(add, lambda added, now: [])
        if self._to_commit is not None:
            work, self._to_commit = self._to_commit, None
            return Step(work, self._end_commit)
        if self.store.must_save_aggregator and not self.open_round.keeps_updates:
            return Step(self.store.begin_save(self.open_round.tensors()), self._end_save)
        return None

    def do_steps(self, now: Clocks) -> list[Command]:
        """Do all steps at once, in this thread. Returns the engine's next commands, as ``record`` does."""
        heard: list[Command] = []
        while (step := self.next_step()) is not None:
            heard += step.end(step.work(), now)
        return heard

    def _end_save(self, saved: AggregatorSaved, now: Clocks) -> list[Command]:
        self.store.end_save(saved)
        return []

    def record(self, commands: Iterable[Command], now: Clocks, also: Iterable[Row] = ()) -> list[Command]:
        """Write what the commands change, in one batch. Returns those that the driver has to act on, in order:
        ``Assign``, ``CancelTask``, ``SendAway``, ``Measure`` and ``Finish`` are for the devices to hear, ``Abandon``
        ends a round; after ``EvaluationClosed`` comes ``end_evaluation``; ``Commit`` is to be begun
        (``begin_commit``). ``also``: rows that are written with them."""
        heard: list[Command] = []
        rows: list[Row] = []
        ended: list[Ended] = []
        for command in commands:
            match command:
                case EvaluationOpened() | Measure() | MeasurementEnded() | EvaluationClosed():
                    if (row := self.evaluations.row_of(command, now.wall)) is not None:
                        rows.append(row)
                    heard.append(command)
                case Assign(device, task, number, again=again, version=version):
                    if not again:
                        rows.append(TaskGiven(task, number, device, version))
                        if self.selection is not None:
                            rows += self.selection.given(device, task, now.engine)
                    heard.append(command)
                case Ended(_, task, number, cause) as end:
                    ended.append(end)
                    if self.selection is not None:
                        self.selection.ended(task)
                    rows.append(TaskEnded(task, cause, None if number == self.engine.round_of(task) else number))
                case Revived(_, task):
                    rows.append(TaskRevived(task))
                case CancelTask() | SendAway() | Commit():
                    heard.append(command)
                case Opened(number):
                    rows.append(self._open(number, now))
                case Abandon(number, dropped, text):
                    rows.append(self.abandon(number, dropped, text, now))
                    heard.append(command)
                case Finish(reason):
                    rows += self._finish(command)
                    self.log.info("finished: %s", reason)
                    heard.append(command)
        rows += also
        if rows:  # most events of most devices write nothing
            self.store.write(rows)
        if ended:
            self.log.say_ended(ended)
        return heard

    def _open(self, number: int, now: Clocks) -> Row:
        self._opened = now.engine
        self.open_round.begin(number, self.model)
        return RoundOpened(number, now.wall)

    def begin_commit(self, command: Commit, now: Clocks) -> None:
        """The round is closed: the step after its last update's makes the model.

        Its work changes nothing of the run, and while the engine is committing nothing changes that it reads."""
        summary, needed = self._summary(command.dropped, now), [self.engine.version]
        if (oldest := self.engine.oldest_version()) is not None:
            needed.append(oldest)
        if self.selection is not None:
            summary |= self.selection.summary(self.engine.accepted.values())
        if self.held_out is not None:
            needed += self.held_out.waiting()[:1]
        began = None
        if self.plan.server.mix:
            (staleness,) = self.open_round.staleness.values()
            began = self._began(self.engine.version - staleness, staleness)
            # A report that came early, or may still come of a lost device, needs the model that its task began from.
            needed.append(self.engine.version - self.engine.settings.max_staleness)
        bases = self.digests.bases_of(self.engine.version + 1)  # here, since a thread cannot read the ledger
        there, needed = self.store.blobs.model_versions(), [*needed, *bases, *self.roll_backs.needed()]
        dropped = dropped_after(self.plan, there, self.engine.version, min(needed), summary)
        self._to_commit = partial(make_model, self, command.round, summary, now.wall, dropped, began, bases)

    def _began(self, version: int, staleness: int) -> Began:
        """Return where a task of this version began. Raises StoreError (missing, damaged)."""
        model = self.model if not staleness else self.store.load_parameters(version, self.digests.of_model(version))
        return Began(model, self.plan.staleness_factor(staleness), self.plan.mixing_rate)

    def _end_commit(self, new: WrittenModel, now: Clocks) -> list[Command]:
        """Write the rows with which the new model and its optimizer's state become valid and the round is closed, and
        tell the engine."""
        self.store.write(new.rows)
        self.model, self.state, self.vectors, self.model_digest = new.model, new.state, new.vectors, new.sha256
        self.vector_digests, self.forms = new.vector_digests, new.forms
        if self.vectors:
            self.digests.begin_version(self.engine.version + 1, self.engine.oldest_version())
        self.open_round.state = self.open_round.weighing.state_after(new.summary)
        self.open_round.tied_sum = new.tied_sum
        if new.tied_sum is not None and new.tied_sum.since == new.round:
            self.log.warning(
                "a device lost what it kept for %s: the vectors that go with it begin again from zeros, here and on "
                "all devices; the model stays",
                self.plan.local.algorithm,
            )
        self._mu = adaptive_mu.state_after(new.summary, self._mu.mu)
        self.log.info("round %d committed: %s", new.round, describe(new.summary))
        if self.selection is not None:
            self.selection.selection.committed(self.engine.version + 1, new.summary.get("selection", {}))
        metrics = deciding(new.summary, self.plan.round.minimum) if self.plan.stop.measured_by == "round" else {}
        return self.record(self.engine.committed(now.engine, change=new.summary["change"], metrics=metrics), now)

    def save_measurement(self, message: Evaluated) -> None:
        """Make what a device measured durable. The caller then tells the device and calls
        ``engine.count_measurement``."""
        self.store.write([self.evaluations.result_row(message)])
        self.evaluations.keep(message)

    def end_evaluation(self, command: EvaluationClosed, now: Clocks) -> list[Command]:
        """An evaluation was recorded: its metrics may stop the run. Returns the engine's next commands, as ``record``
        does."""
        if not command.valid or self.plan.stop.measured_by != "evaluation" or command.version < self.roll_backs.newest:
            return []
        return self.record(self.engine.measured(self.evaluations.metrics, command.version, now.engine), now)

    def commit(self, command: Commit, now: Clocks) -> list[Command]:
        """Commit at once, in this thread."""
        self.begin_commit(command, now)
        return self.do_steps(now)

    def give_up_for(self, new: RestoredModel, rows: Iterable[Row], now: Clocks) -> list[Command]:
        """Give up what is open and make this model the newest, with these rows, in one batch. Returns what ``record``
        does."""
        self._to_commit = None
        heard = self.record(self.engine.roll_back(), now, rows)
        self.store.give_up_early()
        self.open_round.forget_early()
        self.model, self.state, self.vectors, self.forms = new.model, new.state, new.vectors, new.forms
        self.model_digest = new.made.sha256
        self.vector_digests = {name: digest(vector) for name, vector in new.vectors.items()}
        self.digests.begin_version(new.made.version, None)
        return heard

    def free(self) -> None:
        """Let the model, and all that is as large, be freed now. Nothing may be asked of the run any more.

        The run and its parts refer to each other. Without this they would wait for the garbage collector, which a
        coordinator runs rarely (``process_settings.collect_garbage_rarely``)."""
        self._to_commit = None
        self.model = np.empty(0, np.float32)
        self.state, self.vectors, self.forms = {}, {}, Forms()
        self.open_round.abandon()

    def write_model(self, made: ModelMade, model: Vector, state: State, dropped: Iterable[int] = ()) -> list[Row]:
        """Write the model's file, with the optimizer's state and the vectors beside the model. Returns the rows that
        make them count."""
        made = made._replace(optimizer=self.optimizer.name)
        named = [Metadata("optimizer", self.optimizer.name), Metadata("devices", self.plan.server.devices)]
        return [*named, *self.store.write_model(made, model, state, dropped)]

    def abandon(self, number: int, dropped: dict[str, int], text: str, now: Clocks) -> Row:
        """End the open round without a model. Returns the row that says so. ``text``: why."""
        summary = self._summary(dropped, now)
        self.open_round.abandon()
        self.log.warning("round %d abandoned: %s; %s", number, text, describe(summary))
        return RoundClosed(number, "abandoned", summary, now.wall)

    def _summary(self, dropped: dict[str, int], now: Clocks) -> dict[str, Any]:
        """Return the summary of a round whose model stays as it is; a commit then states its change."""
        names = (*self.bundle.manifest.metrics, "loss")
        summary = self.open_round.summary(names, dropped, outlives=self.engine.settings.outlive)
        if self.plan.local.adaptive_mu:
            loss, most = summary["metrics"].get("loss"), adaptive_mu.largest(self.hyper)
            summary |= adaptive_mu.summary_of(self._mu, loss, most)
        summary |= {
            "dropped": dropped,
            "change": 0.0,
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "seconds": round(now.engine - self._opened, 6),
        }
        self.bytes_up = self.bytes_down = 0
        return summary

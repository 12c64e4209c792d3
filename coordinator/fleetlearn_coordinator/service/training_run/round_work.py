"""What a run does beside answering devices: it adds updates, saves sums, makes models, rolls back.

All of it is arithmetic and the writing of files, and may be done in another thread, one thing at a
time. Its end, in the thread of all other calls, writes the rows with which it counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

from fleetlearn_protocol.secure.fixed_point import Words
from fleetlearn_protocol.vector import Vector

from fleetlearn_coordinator.aggregation.open_round import CommittedRound
from fleetlearn_coordinator.aggregation.round_summary import deciding
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.rounds.commands import Command
from fleetlearn_coordinator.rounds.engine import Engine
from fleetlearn_coordinator.rounds.own_stop_rule import OwnStopRule
from fleetlearn_coordinator.service.held_out import HeldOut
from fleetlearn_coordinator.service.observers import (
    ModelRestored,
    Observers,
    RoundEnded,
    TiedVectorsReset,
)
from fleetlearn_coordinator.service.run_clock import Clocks
from fleetlearn_coordinator.service.training_run.computation_end import computation_done
from fleetlearn_coordinator.service.training_run.kept_models import KeptModels
from fleetlearn_coordinator.service.training_run.participations import participation_rows
from fleetlearn_coordinator.service.training_run.private_budget import PrivateBudget
from fleetlearn_coordinator.service.training_run.refining import AveragedRound, Refiner
from fleetlearn_coordinator.service.training_run.remembered_selection import RememberedSelection
from fleetlearn_coordinator.service.training_run.remembered_stop_rule import note_round
from fleetlearn_coordinator.service.training_run.roll_back import RestoredModel, RollBacks
from fleetlearn_coordinator.service.training_run.round_reports import (
    RoundReports,
    given_in_order,
)
from fleetlearn_coordinator.service.training_run.run_models import RunModels
from fleetlearn_coordinator.service.training_run.written_model import (
    ModelWriter,
    NotUnmasked,
    RoundToCommit,
    WrittenRound,
)
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.ledger import AggregatorSaved, Row
from fleetlearn_coordinator.storage.requests import RollBack
from fleetlearn_coordinator.storage.store import Store


class BackgroundWork(NamedTuple):
    """What is to be done next with a run's updates and models. Only one is under way at a time."""

    work: Callable[[], Any]
    """To be called once, in any thread. Raises FleetError (not-finite: training has diverged),
    StoreError (the disk is full), OSError."""
    end: Callable[[Any, Clocks], list[Command]]
    """Takes what ``work`` returned, in the thread of all other calls. Returns the engine's next
    commands, as ``Run.record`` does."""


class Record(Protocol):
    """Writes what commands change; ``Run.record``."""

    def __call__(
        self, commands: Iterable[Command], now: Clocks, also: Iterable[Row] = ()
    ) -> list[Command]: ...


class RoundWork:
    """The background work of a run."""

    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        store: Store,
        models: RunModels,
        reports: RoundReports,
        roll_backs: RollBacks,
        budget: PrivateBudget,
        selection: RememberedSelection | None,
        observers: Observers,
        record: Record,
    ) -> None:
        """``record``: the run's."""
        self.plan, self.engine, self.store, self.observers = plan, engine, store, observers
        self.models, self.reports, self.roll_backs = models, reports, roll_backs
        self.budget, self.selection, self.record = budget, selection, record
        self.held_out: HeldOut | None = None
        """What measures the models on held-out data, if the plan names some."""
        asked_for = roll_backs.versions_asked_for
        self._writer = ModelWriter(reports.members, store, models, asked_for)
        self.own_stop: OwnStopRule | None = None
        """The plan's own stop rule, with the rounds so far."""
        self.kept = KeptModels(plan, store.blobs.model_versions())
        self._to_commit: Callable[[], WrittenRound | NotUnmasked] | None = None
        """The work of the commit that was decided and has not begun."""
        self._refiner: Refiner | None = None
        self._to_average: RoundToCommit | None = None
        """The round that was closed and is to be averaged, where a refiner has its models next."""
        self._averaged: tuple[RoundToCommit, CommittedRound] | None = None
        """The round whose models the refiner has."""

    @property
    def refiner(self) -> Refiner | None:
        """What changes the averaged models before they are written. To be set before the run
        resumes. None: nothing does."""
        return self._refiner

    @refiner.setter
    def refiner(self, refiner: Refiner | None) -> None:
        self._refiner = refiner
        self.reports.refined = refiner is not None and refiner.keeps_updates

    def next_work(self) -> BackgroundWork | None:
        """Return what is to be done next, or None: roll back, if somebody asked for it; add an
        accepted update; where all are added, make the model if the round is to be committed, or
        save the aggregator's state if many updates are in spool files."""
        if (roll_back := self.roll_backs.next_work()) is not None:
            restore = partial(self.roll_backs.restore, roll_back)
            return BackgroundWork(restore, partial(self._end_roll_back, roll_back.request))
        if (add := self.reports.next_to_add()) is not None:
            return BackgroundWork(add, lambda added, now: [])
        if self._needs_all_sums and self.reports.waits_for_sums():
            return None  # once they are here, the caller looks again
        if self._to_average is not None:
            decided, self._to_average = self._to_average, None
            average = partial(self._writer.average, decided, self.reports.round)
            return BackgroundWork(average, partial(self._end_average, decided))
        # The model before must count first: making this one drops older ones.
        if self._to_commit is not None and self.store.may_replace_bytes:
            make, self._to_commit = self._to_commit, None
            return BackgroundWork(make, self._end_commit)
        if self.store.must_save_aggregator and not self.reports.keeps_updates:
            save = self.store.begin_save(self.reports.round.sums.to_tensors())
            return BackgroundWork(save, self._end_save)
        return None

    @property
    def _needs_all_sums(self) -> bool:
        """Whether what is to be done next needs every update that counts in the sums."""
        closed = self._to_average is not None or self._to_commit is not None
        return closed or (self.store.must_save_aggregator and not self.reports.keeps_updates)

    def do_work(self, now: Clocks) -> list[Command]:
        """Do all that is to be done at once, in this thread. Returns the engine's next commands, as
        ``record`` does."""
        heard: list[Command] = []
        while (next_work := self.next_work()) is not None:
            heard += next_work.end(next_work.work(), now)
        return heard

    def begin_commit(
        self,
        number: int,
        summary: dict[str, Any],
        now: Clocks,
        masks: Words | Callable[[], Words] | None = None,
    ) -> None:
        """The round of this number is closed: the work after its last update's makes the model.
        ``summary``: the round's, as ``OpenRound.summary`` returned it, with what the run adds.
        ``masks``: the sum of the updates' masks, where they have some, uint32, (P + 1,), or what
        puts it together, as ``RoundToCommit`` has it.

        The work changes nothing of the run, and while the engine is committing nothing changes that
        it reads."""
        engine, models, version = self.engine, self.models, self.engine.version
        if self.selection is not None:
            summary |= self.selection.summary(engine.accepted.values())
        bases = models.bases_of(version + 1)
        needed = [version, *bases, *self.roll_backs.versions_asked_for()]
        if (oldest := engine.oldest_version()) is not None:
            needed.append(oldest)
        if self.held_out is not None:
            needed += self.held_out.waiting()[:1]
        base = None
        if self.reports.rules.mixing_rate is not None:
            (staleness,) = self.reports.round.staleness()
            base = models.load_model(version - staleness)
            # A report that came early, or may still come of a lost device, needs the model that its
            # task began from.
            needed.append(version - engine.settings.max_staleness)
        there = self.store.blobs.model_versions()
        best = engine.improvement.best
        dropped = self.kept.dropped_after(there, version, min(needed), summary, best)
        tied = self.reports.tied if self.plan.tied else {}
        account = self.budget.account
        if masks is not None:
            self.budget.seen = number
        decided = RoundToCommit(
            number, summary, now.wall, base, bases, dropped, tied, account, masks
        )
        if self._refiner is None:
            self._to_commit = partial(self._writer.commit, decided, self.reports.round)
        else:
            self._to_average = decided

    def _end_average(
        self, decided: RoundToCommit, averaged: CommittedRound | NotUnmasked, now: Clocks
    ) -> list[Command]:
        """Let the refiner have the averaged models. Returns the engine's next commands, as
        ``record`` does."""
        if isinstance(averaged, NotUnmasked):
            return self._end_commit(averaged, now)
        assert self._refiner is not None
        rules = self.reports.members.rules
        counted = self.reports.counted
        updates = [counted[task] for task in sorted(counted, key=given_in_order)]
        self._averaged = decided, averaged
        self.engine.waits_on = self._refiner.waits_on
        self._refiner.begin(
            AveragedRound(
                decided.number,
                averaged.state.version,
                rules.models_of(self.reports.round.state.model),
                rules.models_of(averaged.state.model),
                updates,
            )
        )
        return []

    def refined(self, number: int, models: Mapping[str, Vector], about: Mapping[str, Any]) -> None:
        """The round of this number is to have these models, by their members' names, in the place
        of the averaged ones. Members that are not named keep theirs. ``about``: what the round's
        summary has beside. The caller has the next work done. Changes nothing where no such round
        waits."""
        if self._averaged is None or self._averaged[0].number != number:
            return
        (decided, averaged), self._averaged = self._averaged, None
        self.engine.waits_on = ""
        before = self.reports.round.state
        write = self._writer.write_refined
        self._to_commit = partial(write, decided, averaged, before, models, about)

    def _end_commit(self, new: WrittenRound | NotUnmasked, now: Clocks) -> list[Command]:
        """Write the rows with which the new model and its optimizer's state become valid and the
        round is closed, and tell the engine. A round without a model is abandoned."""
        if isinstance(new, NotUnmasked):
            self.budget.give_up(self.engine.round, self.engine)
            if self.plan.secure is not None and self.plan.secure.mode == "helper":
                # The helper adds their updates of this model to no other sum.
                self.engine.spend(self.reports.trained_from(self.engine.version))
            given_up = self.engine.give_up_commit(new.text, new.dropped, now.engine)
            return self.record(given_up, now)
        model, summary, version = new.model, new.summary, new.model.state.version
        self.store.write([*model.rows, *participation_rows(self.engine)])
        self.models.begin_version(model.state, model.forms, self.engine.oldest_version())
        self.reports.end(model.state)
        self.budget.account, self.budget.seen = new.account, None
        if new.forgets_tied:
            self.observers.tell([TiedVectorsReset(self.plan.local.algorithm)])
        self.observers.tell([RoundEnded(new.number, "committed", version, summary, "")])
        if self.selection is not None:
            self.selection.selection.committed(version, summary.get("selection", {}))
        self.kept.note("round", version - 1, summary)
        metrics = {}
        if self.plan.stop.measured_by == "round":
            metrics = deciding(summary, self.plan.round.minimum)
        done = computation_done(self.reports.rules.computation, model.state)
        if self.own_stop is not None:
            note_round(self.own_stop, self.plan, version, summary)
            done = done or self.own_stop.finish()
        commands = self.engine.committed(
            now.engine, change=summary["change"], metrics=metrics, done=done
        )
        return self.record(commands, now)

    def _end_save(self, written: AggregatorSaved, now: Clocks) -> list[Command]:
        self.store.end_save(written)
        return []

    def _end_roll_back(
        self, request: RollBack, new: RestoredModel | StoreError, now: Clocks
    ) -> list[Command]:
        """Give up what is open, and make this model the newest, in one batch; then let the run go
        on."""
        if isinstance(new, StoreError):
            self.roll_backs.refuse(request, new.text)
            return []
        self.forget()
        if self.own_stop is not None:
            self.own_stop.rounds.clear()
        rows = self.roll_backs.rows_of(request, new)
        self.budget.give_up(self.engine.round, self.engine)
        heard = self.record(self.engine.roll_back(), now, rows)
        self.store.give_up_early()
        self.models.begin_version(new.model.state, new.model.forms, None)
        self.reports.forget_early()
        self.reports.end(new.model.state)
        made = new.made
        restored = ModelRestored(made.version, request.version, request.who, new.keeps_state)
        self.observers.tell([restored])
        self.roll_backs.end(request, new, now.wall)
        return heard + self.record(self.engine.go_on_from_model(now.engine), now)

    def forget(self) -> None:
        """Do not make the model of the round that is closed."""
        self._to_commit = self._to_average = self._averaged = None
        if self._refiner is not None:
            self._refiner.forget()

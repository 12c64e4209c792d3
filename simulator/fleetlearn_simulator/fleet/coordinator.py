"""The simulated coordinator: the real engine over the real round, and what devices train from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
from fleetlearn_coordinator.aggregation.clusters import starting_models
from fleetlearn_coordinator.aggregation.family_round import FamilyRules
from fleetlearn_coordinator.aggregation.modular_sum import FixedPoint
from fleetlearn_coordinator.aggregation.optimizers import State
from fleetlearn_coordinator.aggregation.privacy import release
from fleetlearn_coordinator.aggregation.regional_round import (
    AnyRound,
    RegionalRound,
    open_round,
)
from fleetlearn_coordinator.aggregation.reports import ReportColumns
from fleetlearn_coordinator.aggregation.round_summary import deciding
from fleetlearn_coordinator.aggregation.sent_models import half_of
from fleetlearn_coordinator.plan.initial_model import initial_model
from fleetlearn_coordinator.rounds.commands import FAILED, REJECTED, Command, Finish
from fleetlearn_coordinator.rounds.engine import Engine, Snapshot
from fleetlearn_coordinator.rounds.exchange import ExchangeSeries, SavedExchange
from fleetlearn_coordinator.rounds.regional_book import RegionalBook
from fleetlearn_coordinator.rounds.settings import Phase
from fleetlearn_coordinator.rounds.training_tasks import Restored
from fleetlearn_coordinator.service.training_run.computation_end import computation_done
from fleetlearn_device.training.algorithms import ALGORITHMS
from fleetlearn_protocol import Bundle
from fleetlearn_protocol.encodings import FLOAT16
from fleetlearn_protocol.messages import BUFFERS, UPDATE, Evaluation
from fleetlearn_protocol.vector import Vector, digest
from numpy.typing import NDArray

from fleetlearn_simulator.fleet import selection
from fleetlearn_simulator.fleet.device_names import name_of
from fleetlearn_simulator.fleet.kept_by_devices import KeptByDevices, rows_of
from fleetlearn_simulator.fleet.masked_reports import masked_reports
from fleetlearn_simulator.fleet.named_rows import NamedRows
from fleetlearn_simulator.fleet.round_costs import RoundCosts
from fleetlearn_simulator.fleet.round_training import RoundTraining
from fleetlearn_simulator.fleet.running_tasks import RunningTasks
from fleetlearn_simulator.fleet.sent_updates import TiedToUpdate
from fleetlearn_simulator.fleet.simulated_account import SimulatedAccount, device_noise
from fleetlearn_simulator.fleet.simulated_contributions import SimulatedContributions
from fleetlearn_simulator.fleet.simulated_distillation import SimulatedDistillation
from fleetlearn_simulator.fleet.trained_reports import Measured, parts_to_add, reports_of
from fleetlearn_simulator.fleet.update_file import UpdateFile
from fleetlearn_simulator.keyed_random import secret_bytes
from fleetlearn_simulator.scenario.scenario import Scenario
from fleetlearn_simulator.training.backend import Backend, Job, RoundInputs
from fleetlearn_simulator.training.cluster_models import ClusterModels
from fleetlearn_simulator.training.held_out_loss import HeldOutLoss
from fleetlearn_simulator.training.kept_rows import NO_ROW
from fleetlearn_simulator.training.run_bundles import numbers_of
from fleetlearn_simulator.training.trained_devices import LARGE_UPDATE, TrainedDevices


class SimulatedCoordinator:
    """What the coordinator has in memory and on its disk."""

    def __init__(
        self,
        scenario: Scenario,
        bundles: Sequence[Bundle],
        backend: Backend,
        kept: KeptByDevices | None,
        held_out: HeldOutLoss | None = None,
    ) -> None:
        """``bundles``: one, or those of the plan's family in its order. ``held_out``: measures
        models, where the plan asks what updates are worth."""
        self.scenario, self.plan, self.backend = scenario, scenario.plan, backend
        bundle = bundles[0]
        self.metrics = bundle.manifest.metrics
        # A device makes progress until it vanishes: there is no stall to watch for.
        rules = self.plan.round_rules(bundle.manifest)
        self.account = None if rules.privacy is None else SimulatedAccount(self.plan, rules.privacy)
        """What the releases have spent. None: the plan has no [privacy]."""
        self.engine = Engine(
            self.plan.engine_settings(scenario.service.heartbeat)._replace(
                stall=inf, budget=None if self.account is None else self.account.limit
            ),
            prefix="s-",
        )
        manifests = dict.fromkeys(self.plan.members, bundle.manifest)
        if self.plan.family:
            found = (each.manifest for each in bundles)
            manifests = dict(zip(self.plan.members, found, strict=True))
        family = self.plan.family_rules(manifests)
        self.distillation = SimulatedDistillation(self.plan, manifests, family)
        self.contributions = SimulatedContributions(
            self.plan, scenario.seed, rules.buffers, held_out
        )
        self.own_stop = self.plan.own_stop_rule()
        self._judged = 0
        """How many rows of the history the own stop rule has."""
        self.down = False
        """Whether its process is dead."""
        measured = ("loss", *self.metrics)  # the order of rounds.jsonl
        self.rules = replace(rules, metrics=measured)
        self.family = FamilyRules(
            each._replace(rules=replace(each.rules, metrics=measured)) for each in family.members
        )
        """The run's models: one, one for each cluster, or the members of the plan's family."""
        self.bundles_of = numbers_of(scenario)
        """Devices -> the number of the member that each trains, in a plan with [family]; None:
        there is one bundle."""
        self.chosen: dict[int, int] = {}
        """With clusters: device -> the model that fits its data best, in this round."""
        self.weights = self.plan.update_weights()
        self.masked = masked_reports(
            self.plan,
            bundle.manifest,
            bundle.sha256,
            scenario.seed,
            self.engine.prefix,
            scenario.coordinator.masks,
        )
        """What hides each update. None: the coordinator sees them."""
        parts = [initial_model(self.plan, each) for each in bundles]
        model = np.concatenate(parts)
        if self.plan.clusters is not None:
            count, spread = self.plan.clusters.count, self.plan.clusters.spread
            begun = starting_models(model, bundle.manifest, count, scenario.seed, spread)
            model = np.concatenate(begun)
        privacy = None
        if rules.privacy is not None:
            secret = secret_bytes(scenario.seed, "privacy")
            privacy = release.begin(rules.privacy, secret, model.size)
        self.state = self.family.make_state(
            None,
            version=0,
            model=model,
            optimizer_state=self.rules.optimizer.init(model),
            vectors={name: np.zeros_like(model) for name in self.plan.vectors},
            privacy=privacy,
        )
        """At the newest model."""
        self.earlier: Vector = model
        """The model before this round's."""
        self.history: list[dict[str, Any]] = []
        """The summaries of the rounds."""
        self.abandoned_in_a_row = 0
        """Rounds that were abandoned since the last one that was committed."""
        self.last_end = 0.0
        """When the last round ended, or when the simulation began."""
        self.kept = kept
        self._hypers = [self.plan.hyper(each.manifest) for each in bundles]
        """For each bundle, its step's hyper-parameters, without what changes by rounds."""
        buffers = [each.rules.buffers for each in self.family.members[: len(bundles)]]
        self._beside = [
            [part for part in self.rules.aggregators if part != UPDATE]
            + ([BUFFERS] if places else [])
            for places in buffers
        ]
        """For each bundle, the names of the parts of a report beside the update."""
        algorithm = ALGORITHMS.get(self.plan.local.algorithm)  # a computation has none
        factors = tuple(
            algorithm.per_update[name](self._hypers[0])
            for name in (() if algorithm is None else algorithm.tied)
            if algorithm is not None and algorithm.per_update
        )
        self.named: NamedRows | None = None
        """Which rows of sparse tables devices send; None: they send whole updates."""
        self.training = RoundTraining(
            backend,
            scenario.seed,
            self.plan.up,
            kept,
            buffers,
            TiedToUpdate(factors, buffers[0]),
            device_noise(rules.privacy, scenario.seed),
            self.bundles_of,
        )
        self._begin_round()

    def _begin_round(self) -> None:
        """Begin a round over the newest model."""
        regions = None if self.plan.regions is None else self.plan.regions.weights
        self.round: AnyRound = open_round(self.family, self.state, regions)
        self.costs = RoundCosts()
        self.in_region: dict[str, str] = {}
        """Accepted task -> its region, where rounds have regions."""
        self.devices: list[int] = []
        """Devices whose reports were accepted, in order."""
        self.circle: list[int] = []
        """With pairwise masks: the devices that sent keys."""
        self.sharers: list[int] = []
        """With pairwise masks: those that sent shares."""
        self.given_in: list[int] = []
        """Where updates may be stale: the rounds in which the tasks of these reports were given."""
        if self.masked is not None:
            self.masked.begin_round()
        self.distillation.begin_round()
        self.contributions.begin_round(self.state.version + 1)
        keeps = any(aggregator.keeps_updates for aggregator in self.rules.aggregators.values())
        keeps = keeps or self.distillation.keeps_updates or self.contributions.is_due
        self._files = [
            UpdateFile(each.size) if keeps and each.size >= LARGE_UPDATE else None
            for each in self.family.members
        ]
        """Where each model's updates are until the round ends."""

    @property
    def model(self) -> Vector:
        return self.state.model

    @property
    def done(self) -> Finish | None:
        """Why a run is over by an own stop rule, or as its computation is; None: it is not."""
        done = computation_done(self.rules.computation, self.state)
        if self.own_stop is None:
            return done
        for row in self.history[self._judged :]:
            if row["how"] == "committed":
                metrics = deciding(row, self.plan.round.minimum)
                self.own_stop.add(len(self.own_stop.rounds) + 1, row, metrics)
        self._judged = len(self.history)
        return done or self.own_stop.finish()

    # Reports

    def receive(
        self, tasks: RunningTasks, rows: slice, found: TrainedDevices
    ) -> tuple[ReportColumns, str | None]:
        """Return the reports of these tasks that are accepted, from the first on, and why the one
        after them is not; None: all are. All are of one model."""
        member = self.member_of(tasks.device[rows.start])
        beside = self._beside[member if self.plan.family else 0]
        measured, names = self._measure_before(tasks, rows, found), tasks.name[rows]
        weights = self.weights.of(self.engine.report_terms(names[0]).round, names, found.examples)
        staleness = (
            [self.engine.report_terms(name).staleness for name in names] if self.outlive else []
        )
        failed = found.diverged
        if self.masked is not None:
            failed = failed | self.masked.unfit(found)
        trained = int(failed.argmax()) if failed.any() else len(found)
        reports = reports_of(found, beside, weights, staleness, measured).first(trained)
        reports = replace(reports, member=member, region=self.region_of(tasks.device[rows.start]))
        if self.masked is not None:
            factors = self._factors_told(tasks, rows, reports)
            reports = self.masked.of(reports, tasks, rows, factors)
        accepted, refusal = self.round.receive(reports)
        if refusal is not None:
            return accepted, f"{REJECTED}{refusal.error.code.value}"
        return accepted, None if trained == len(found) else f"{FAILED}diverged"

    def accept(
        self, tasks: RunningTasks, rows: slice, reports: ReportColumns, times: Sequence[float]
    ) -> None:
        """Reports of these tasks, which ``receive`` accepted, arrived at these times. The engine is
        not told."""
        self.round.accept(reports)
        if reports.region is not None:
            self.in_region.update(dict.fromkeys(tasks.task[rows], reports.region))
        parts = parts_to_add(reports, self._files[reports.member])
        updates = reports.parts.get(UPDATE)
        if self.named is not None and isinstance(updates, np.ndarray):
            parts[UPDATE] = self.named.updates(updates, tasks.device[rows])
        reports = replace(reports, parts=parts)
        self.round.add(reports)
        self.distillation.add(reports)
        self.contributions.add(reports, tasks.device[rows], self.model.size)
        if self.masked is not None:
            self.masked.accept(tasks, rows, self._model_given)
        self.weights.count(self.engine.report_terms(tasks.name[rows][0]).round, tasks.name[rows])
        self.costs.accept(tasks, rows, times)
        self.devices += tasks.device[rows]
        if self.outlive:
            self.given_in += tasks.round[rows]

    def region_of(self, device: int) -> str | None:
        """Return the region in which the device was given its task; None: rounds have no
        regions."""
        return self.engine.book.terms[name_of(device)].region

    def member_of(self, device: int) -> int:
        """Return the number of the model that the device trains in this round."""
        (member,) = self.members_of([device])
        return member

    def members_of(self, devices: Sequence[int]) -> Sequence[int]:
        """Return the number of the model that each device trains in this round."""
        if self.bundles_of is not None:
            return self.bundles_of(devices)
        return [self.chosen.get(device, 0) for device in devices]

    def _model_given(self, round: int) -> str:
        """Return the SHA-256 of the model that this round's tasks began from."""
        return digest(self.training.given[round].inputs[0].model)

    def _factors_told(
        self, tasks: RunningTasks, rows: slice, reports: ReportColumns
    ) -> list[float]:
        """Return the factors by which these devices multiply their masked updates: of the staleness
        that each had when it had trained, and asked for its factor. Empty: no update is stale."""
        told = zip(reports.staleness, tasks.trained[rows], strict=False)
        return [
            min(1.0, self.rules.staleness_factor(staleness - self._committed_since(trained)))
            for staleness, trained in told
        ]

    def _committed_since(self, time: float) -> int:
        """Return how many models were made after this time."""
        found = 0
        for row in reversed(self.history):
            if row["time"] <= time:
                break
            found += row["how"] == "committed"
        return found

    def _measure_before(
        self, tasks: RunningTasks, rows: slice, found: TrainedDevices
    ) -> list[Measured]:
        """Return what these devices measured before they trained: nothing unless the plan asks for
        it. A device whose loss is not finite then gives its task back: it has diverged."""
        if not self.plan.local.evaluate:
            return []
        good = [at for at, diverged in enumerate(found.diverged.tolist()) if not diverged]
        rounds, devices = (
            [column[rows][at] for at in good] for column in (tasks.round, tasks.device)
        )
        kept = None if self.kept is None else rows_of(self.kept.states, devices)
        models = self._evaluated(rounds, devices, kept, self.backend.evaluate)
        own: list[Evaluation | None] = [None] * len(good)
        if self.plan.algorithm.personal_model:
            own = self._evaluated(rounds, devices, kept, self.backend.evaluate_personal)
        measured = [Measured(None, None)] * len(found)
        for at, model, personal in zip(good, models, own, strict=True):
            measured[at] = Measured(model, personal)
            if model is None or (personal is None and self.plan.algorithm.personal_model):
                found.diverged[at] = True
        return measured

    def saved_rates(self) -> list[tuple[int, dict[str, int]]] | None:
        """Return the counts on which weights depend, for a checkpoint, if they do."""
        rates = self.weights.rates
        return (
            None if rates is None else [(number, dict(row)) for number, row in rates.rounds.items()]
        )

    def restore_rates(self, rows: Iterable[tuple[int, dict[str, int]]] | None) -> None:
        """Go on from what ``saved_rates`` returned."""
        if self.weights.rates is not None and rows is not None:
            self.weights.rates.rounds = {number: Counter(row) for number, row in rows}

    # Rounds

    def begin_round(self, number: int, now: float, running: Callable[[], set[int]]) -> None:
        """A round opens. ``running``: returns the rounds of the tasks that devices have."""
        self.costs.opened = now
        self.chosen = {}
        inputs = self._inputs_of_round()
        earlier = self._sent_parts(self.earlier)[: len(inputs)]
        clip = None if self.state.privacy is None else self.state.privacy.clip
        if isinstance(self.rules.secure, FixedPoint):
            clip = self.rules.secure.bound
        if self.outlive:
            self.training.add_round(
                number, inputs, earlier, lambda: running().union(self.given_in), clip
            )
        else:
            self.training.begin_round(number, inputs, earlier, clip)

    def _inputs_of_round(self) -> list[RoundInputs]:
        """Return what the next round's tasks begin from, for each of the run's bundles."""
        first, *others = models = self.sent_models()
        hypers, schedule = self._hypers_of_round(), self.plan.steps_of(self.state.version)
        if self.plan.family:
            states = zip(models, self.state.members, hypers, strict=True)
            return [
                RoundInputs(model, state.vectors, hyper, schedule=schedule)
                for model, state, hyper in states
            ]
        clusters = ClusterModels(models, self.chosen) if others else None
        return [RoundInputs(first, self.state.vectors, hypers[0], clusters, schedule)]

    def _hypers_of_round(self) -> list[dict[str, float] | None]:
        """Return the next round's hyper-parameters for each bundle; None: the plan's."""
        if self.rules.adaptive_mu:
            changed = {"mu": self.state.mu.mu}
        elif self.plan.local.schedule is None:
            return [None] * len(self._hypers)
        else:
            changed = {}
        version = self.state.version
        return [self.plan.hyper_of(version, each) | changed for each in self._hypers]

    def by_bundle(
        self, inputs: RoundInputs, devices: Sequence[int]
    ) -> list[tuple[RoundInputs, list[int]]]:
        """Return what the devices of each bundle begin from, and the places of these devices in the
        sequence. ``inputs``: with all of the run's models in one vector."""
        if self.bundles_of is None:
            return [(inputs, [*range(len(devices))])]
        numbers, models = self.bundles_of(devices), [*self.family.models_of(inputs.model).values()]
        return [
            (RoundInputs(models[number]), [at for at, own in enumerate(numbers) if own == number])
            for number in sorted({*numbers})
        ]

    def sent(self, model: Vector) -> Vector:
        """Return what devices have of a model that they were sent."""
        half = half_of(model) if self.plan.encoding.down == FLOAT16.name else None
        return model if half is None else FLOAT16.decode(half)

    def sent_models(self) -> list[Vector]:
        """Return what devices have of each of the run's newest models."""
        return self._sent_parts(self.model)

    def _sent_parts(self, model: Vector) -> list[Vector]:
        return [self.sent(part) for part in self.family.models_of(model).values()]

    @property
    def outlive(self) -> bool:
        """Whether tasks go on when their round ends, so that updates may be stale."""
        return self.engine.settings.outlive

    def room_ahead(self) -> int:
        """Return how many more reports may come, as far as is known now."""
        return self.engine.settings.cohort if self.outlive else self.engine.wanted_reports()

    def commit(
        self,
        number: int,
        dropped: dict[str, int],
        now: float,
        connected: int,
        regions: Collection[str] | None = None,
    ) -> dict[str, Any]:
        """Make the next model from the accepted updates, where rounds have regions those of these
        regions. Returns the round's summary. The engine is not told."""
        if isinstance(self.round, RegionalRound):
            self.round.end_regions(regions or ())
        base = None
        if self.rules.mixing_rate is not None:
            (given_in,) = self.given_in
            base, *others = (each.model for each in self.training.given[given_in].inputs)
            base = np.concatenate([base, *others]) if others else base
        masks = None if self.masked is None else self.masked.masks(self.model.size)
        made = self.round.commit(number, self.round.summary(dropped), base, masks)
        made = self.distillation.distilled(made, self.state)
        made = self.contributions.measured(number, made, self.state.model)
        self.earlier, self.state, self.abandoned_in_a_row = self.model, made.state, 0
        summary = made.summary | selection.committed(self.engine, self.devices)
        if self.account is not None and made.state.privacy is not None:
            abandoned = sum(row["how"] == "abandoned" for row in self.history)
            spent = self.account.summary(made.state.privacy.releases, abandoned)
            summary["privacy"] = summary.get("privacy", {}) | spent
        return self._close("committed", number, summary, now, connected)

    def abandon(
        self, number: int, dropped: dict[str, int], now: float, connected: int
    ) -> dict[str, Any]:
        """Return the summary of a round that has no model."""
        self.abandoned_in_a_row += 1
        return self._close("abandoned", number, self.round.summary(dropped), now, connected)

    def _close(
        self, how: str, number: int, summary: dict[str, Any], now: float, connected: int
    ) -> dict[str, Any]:
        row = {
            **summary,
            "round": number,
            "how": how,
            "time": now,
            "seconds": now - self.costs.opened,
            "connected": connected,
            **self.costs.summary(),
        }
        if self.engine.settings.own_goal is not None:
            row["goal"] = self.engine.settings.own_goal
        del row["left_out"]
        if not self.plan.local.evaluate:
            del row["behind"]
        self.history.append(row)
        self.last_end = now
        self._begin_round()
        if self.kept is not None:
            self.training.keep_finished()
            self.kept.end_round(how == "committed")
        return row

    def _evaluated(
        self,
        given_in: Sequence[int],
        devices: Sequence[int],
        kept_before: Sequence[int] | None,
        measure: Callable[[RoundInputs, Sequence[Job]], list[Evaluation | None]],
    ) -> list[Evaluation | None]:
        """Evaluate the models of these rounds on the data of these devices, which are of one model,
        with what they had kept then, if they keep something. Returns a row for each. ``measure``:
        the back end's function."""
        bundle = self.member_of(devices[0]) if devices and self.plan.family else 0
        found: dict[tuple[int, int, int], Evaluation | None] = {}
        keys = list(zip(given_in, devices, kept_before or [NO_ROW] * len(devices), strict=True))
        for number in sorted({*given_in}):
            own = sorted({key for key in keys if key[0] == number})
            jobs = [Job(device, kept=kept) for _, device, kept in own]
            inputs = self.training.given[number].inputs[bundle]
            found |= zip(own, measure(inputs, jobs), strict=True)
        return [found[key] for key in keys]

    def restore_model(
        self,
        version: int,
        model: Vector,
        earlier: Vector,
        optimizer_state: State,
        vectors: dict[str, Vector],
        privacy: Mapping[str, Any] | None,
        buffers: Mapping[str, NDArray[Any]],
    ) -> None:
        """Go on from a checkpoint's model. ``privacy``: as ``saved_privacy`` returned it.
        ``buffers``: of correlated noise. What else the rounds before decide is in their summaries
        (``history``)."""
        before = self.state.privacy
        if before is not None and privacy is not None:
            before = replace(before, **privacy, buffers=buffers)
        last = next((row for row in reversed(self.history) if row["how"] == "committed"), None)
        self.earlier = earlier
        self.state = self.family.make_state(
            last,
            version=version,
            model=model,
            optimizer_state=optimizer_state,
            vectors=vectors,
            privacy=before,
        )

    def saved_privacy(self) -> dict[str, Any] | None:
        """Return what a checkpoint has of the releases so far, beside the buffers of correlated
        noise. The secret follows from the seed. None: the plan has no [privacy]."""
        state = self.state.privacy
        if state is None:
            return None
        return {"releases": state.releases, "clip": state.clip, "began": state.began}

    def resume(
        self, taken: Snapshot, connected: Collection[str], remembered: dict[str, Any] | None
    ) -> None:
        """Go on with the engine of a checkpoint, to which these devices are connected. It waits for
        ``committed``. ``remembered``: by its selection (``selection.to_json``)."""
        self._begin_round()
        self.engine = Engine.from_snapshot(
            self.engine.settings, self.engine.prefix, taken, connected
        )
        for series in self.engine.exchanges.values():
            series.able.update(connected)
        selection.from_json(self.engine, remembered)

    def restart(self, now: float) -> list[Command]:
        """Start the process again, with a new engine that has what was on the disk: the accepted
        updates and the tasks that devices have."""
        self.down = False
        old, book = self.engine, self.engine.book
        self.engine = Engine(old.settings, old.prefix, old.version, old.round, old.releases)
        selection.hand_over(old, self.engine)
        if old.limits is not None and self.engine.limits is not None:
            self.engine.limits.restore(*old.limits.made())
        if old.pace is not None and self.engine.pace is not None:
            self.engine.pace.bookings.restore(old.pace.bookings.state(now), now)
        for kind, series in old.exchanges.items():
            self.engine.restore_exchange(kind, _saved(series), now)
        if old.phase is Phase.FINISHED:  # its last model is being measured
            self.engine.phase, self.engine.finishing = old.phase, old.finishing
        beside = old.round_exchanges
        # A simulated model is made at once. So a round that is closed here and open on the disk is
        # one that waits for exchanges.
        is_open = old.phase is Phase.OPEN or (beside is not None and beside.commit is not None)
        if old.phase is Phase.FINISHED or not (is_open or old.settings.outlive):
            return self.engine.begin(now)
        leases = [(task, device, book.terms[device].version) for device, task in book.tasks.items()]
        dropped = [(task, device, cause) for task, (device, cause) in book.dropped.items()]
        lost = [(task, device, terms.version) for task, (device, terms) in book.lost.items()]
        number = old.round if is_open else None
        restored = Restored(
            number, leases, book.accepted.items(), dropped, lost, book.early.items(),
            goal=old.settings.own_goal,
        )  # fmt: skip
        if isinstance(book, RegionalBook):
            running = {task: book.terms[device].region or "" for device, task in book.tasks.items()}
            restored = restored._replace(regions=running | self.in_region, over={**book.over})
        return self.engine.restore(restored, now) + self.engine.begin(now)


def _saved(found: ExchangeSeries) -> SavedExchange:
    """Return what the coordinator's disk has of its exchanges of one kind."""
    book, members = found.book, found.members
    leases = [(task, device) for device, task in book.tasks.items()]
    dropped = [(task, device, cause) for task, (device, cause) in book.dropped.items()]
    return SavedExchange(
        found.number,
        found.version,
        found.is_open,
        leases,
        [*book.accepted.items()],
        dropped,
        found.phase,
        None if members is None else tuple(members),
        found.is_valid,
    )

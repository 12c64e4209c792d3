"""The simulated coordinator: the real engine, the model, and the arithmetic of a round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from math import inf
from typing import Any

import numpy as np
from fleetlearn_coordinator.aggregation import adaptive_mu
from fleetlearn_coordinator.aggregation.commit import Began, next_model, weights_of
from fleetlearn_coordinator.aggregation.round_summary import NOTHING, Measurements, evaluation_of, summarise
from fleetlearn_coordinator.aggregation.sent_models import half_of
from fleetlearn_coordinator.aggregation.weighing.weighing import Reported
from fleetlearn_coordinator.rounds.commands import Command
from fleetlearn_coordinator.rounds.engine import Engine, Snapshot
from fleetlearn_coordinator.rounds.evaluation import Evaluations, SavedEvaluation
from fleetlearn_coordinator.rounds.settings import Phase
from fleetlearn_coordinator.rounds.training_tasks import Restored
from fleetlearn_device.training.algorithms import ALGORITHMS
from fleetlearn_protocol import Bundle
from fleetlearn_protocol.encodings import FLOAT16, find_encoding
from fleetlearn_protocol.messages import CONTROL, Evaluation
from fleetlearn_protocol.vector import Vector, gather
from numpy.typing import NDArray

from fleetlearn_simulator.fleet import selection
from fleetlearn_simulator.fleet.kept_by_devices import KeptByDevices, rows_of
from fleetlearn_simulator.fleet.round_totals import Measured, RoundTotals
from fleetlearn_simulator.fleet.round_training import RoundTraining
from fleetlearn_simulator.fleet.running_tasks import RunningTasks
from fleetlearn_simulator.fleet.sent_updates import TiedToUpdate
from fleetlearn_simulator.fleet.server_control import ServerControl
from fleetlearn_simulator.scenario.scenario import Scenario
from fleetlearn_simulator.training.backend import Backend, Job, RoundInputs
from fleetlearn_simulator.training.kept_rows import NO_ROW
from fleetlearn_simulator.training.trained_devices import TrainedDevices


class SimulatedCoordinator:
    """What the coordinator has in memory and on its disk."""

    def __init__(self, scenario: Scenario, bundle: Bundle, backend: Backend, kept: KeptByDevices | None) -> None:
        self.scenario, self.plan, self.backend = scenario, scenario.plan, backend
        self.metrics = bundle.manifest.metrics
        # A device makes progress until it vanishes: there is no stall to watch for.
        self.engine = Engine(self.plan.engine_settings(scenario.service.heartbeat)._replace(stall=inf), prefix="s-")
        self.down = False
        """Whether its process is dead."""
        self.optimizer, self.weighing = self.plan.optimizer(bundle.manifest), self.plan.weighing(bundle.manifest)
        self.aggregator = self.plan.aggregator(self.optimizer.buffers)
        self._hyper, self._adapts_mu = self.plan.hyper(bundle.manifest), self.plan.local.adaptive_mu
        self._rates = self.plan.participation_rates()
        self.model: Vector = bundle.parameters()[: bundle.manifest.size].copy()
        self.optimizer_state = self.optimizer.init(self.model)
        self.earlier: Vector = self.model
        """The model before this round's."""
        self.history: list[dict[str, Any]] = []
        """The summaries of the rounds."""
        self.abandoned_in_a_row = 0
        """Rounds that were abandoned since the last one that was committed."""
        self.last_end = 0.0
        """When the last round ended, or when the simulation began."""
        self.control = (
            ServerControl(len(self.model), self.plan.server.devices)
            if CONTROL in self.plan.vectors and self.plan.server.devices
            else None
        )
        """What SCAFFOLD's tasks fetch beside the model."""
        self.kept = kept
        algorithm, buffers = ALGORITHMS[self.plan.local.algorithm], self.optimizer.buffers
        factors = tuple(algorithm.per_update[name](self._hyper) for name in algorithm.tied if algorithm.per_update)
        self.training = RoundTraining(
            backend,
            scenario.seed,
            find_encoding(self.plan.encoding.up),
            kept,
            buffers,
            TiedToUpdate(factors, buffers),
        )
        self.totals = self._no_totals()

    def _no_totals(self) -> RoundTotals:
        state, buffers = self.weighing.state_after(self._last_committed()), self.optimizer.buffers
        present = gather(self.model, buffers)
        size, max_weight = len(self.model), self.plan.round.max_weight
        return RoundTotals(self.aggregator, size, max_weight, self.weighing, state, buffers, present)

    def _last_committed(self) -> dict[str, Any] | None:
        """Return the summary of the last committed round."""
        return next((row for row in reversed(self.history) if row["how"] == "committed"), None)

    def _mu(self) -> adaptive_mu.MuState:
        """Return the open round's mu, where the plan lets mu follow the loss."""
        return adaptive_mu.state_after(self._last_committed(), self._hyper["mu"])

    def _mu_summary(self, loss: float | None) -> dict[str, Any]:
        return adaptive_mu.summary_of(self._mu(), loss, adaptive_mu.largest(self._hyper))

    def measure_before(self, tasks: RunningTasks, rows: slice, found: TrainedDevices) -> list[Measured]:
        """Return what these devices measured before they trained: nothing unless the plan asks for it. A device whose
        loss is not finite then gives its task back: it has diverged."""
        if not self.plan.local.evaluate:
            return []
        good = [at for at, diverged in enumerate(found.diverged.tolist()) if not diverged]
        rounds, devices = ([column[rows][at] for at in good] for column in (tasks.round, tasks.device))
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

    def with_losses(self, reported: list[Reported], measured: Sequence[Measured]) -> list[Reported]:
        """Return what the weighing of accepted updates depends on, with the losses that the devices measured."""
        if not self.weighing.needs_losses:
            return reported
        return [each.measured(row.model) for each, row in zip(reported, measured, strict=True)]

    def weights(self, names: Sequence[str], examples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the weights of the updates of devices with tasks, which have these numbers of examples."""
        if self._rates is None:
            return weights_of(examples, self.plan.largest_weight)
        number = self.engine.counts(names[0]).round
        return np.array([self._rates.weight(number, name) for name in names], np.int64)

    def count_updates(self, names: Sequence[str]) -> None:
        """Updates of these devices, which have tasks, are accepted."""
        if self._rates is not None:
            number = self.engine.counts(names[0]).round
            for name in names:
                self._rates.add(number, name)

    def saved_rates(self) -> list[tuple[int, dict[str, int]]] | None:
        """Return the counts on which weights depend, for a checkpoint, if they do."""
        return None if self._rates is None else [(number, dict(row)) for number, row in self._rates.rounds.items()]

    def restore_rates(self, rows: Iterable[tuple[int, dict[str, int]]] | None) -> None:
        """Go on from what ``saved_rates`` returned."""
        if self._rates is not None and rows is not None:
            self._rates.rounds = {number: Counter(row) for number, row in rows}

    def begin_round(self, number: int, now: float, running: Callable[[], set[int]]) -> None:
        """A round opens. ``running``: returns the rounds of the tasks that devices have."""
        self.totals.opened = now
        inputs = RoundInputs(
            self.sent(self.model),
            {} if self.control is None else {CONTROL: self.control.vector},
            self._hyper | {"mu": self._mu().mu} if self._adapts_mu else None,
        )
        earlier = self.sent(self.earlier)
        if self.outlive:
            self.training.add_round(number, inputs, earlier, lambda: running().union(self.totals.given_in))
        else:
            self.training.begin_round(number, inputs, earlier)

    def sent(self, model: Vector) -> Vector:
        """Return what devices have of a model that they were sent."""
        half = half_of(model) if self.plan.encoding.down == FLOAT16.name else None
        return model if half is None else FLOAT16.decode(half)

    @property
    def outlive(self) -> bool:
        """Whether tasks go on when their round ends, so that updates may be stale."""
        return self.engine.settings.outlive

    def room_ahead(self) -> int:
        """Return how many more reports may come, as far as is known now."""
        return self.engine.settings.cohort if self.outlive else self.engine.wanted_reports()

    def commit(self, number: int, dropped: dict[str, int], now: float, connected: int) -> dict[str, Any]:
        """Make the next model from the accepted updates. Returns the round's summary. The engine is not told."""
        self.totals.add_up()
        self.earlier, self.abandoned_in_a_row = self.model, 0
        self.model, self.optimizer_state, change = next_model(
            self.aggregator,
            self.totals.aggregate,
            self.optimizer,
            self.optimizer_state,
            self.model,
            self._began(),
            self.plan.share(len(self.totals.devices)),
            self.weighing.scale(self.totals.reported, self.totals.state),
        )
        return self._close("committed", number, dropped, change, now, connected)

    def _began(self) -> Began | None:
        """Return where the task of the round's only update began, if the server mixes models."""
        if not self.plan.server.mix:
            return None
        ((number, staleness),) = zip(self.totals.given_in, self.totals.staleness, strict=True)
        model = self.training.given[number].inputs.model
        return Began(model, self.plan.staleness_factor(staleness), self.plan.mixing_rate)

    def refuse(
        self, found: TrainedDevices, weights: NDArray[np.int64], reported: list[Reported]
    ) -> tuple[int, str] | None:
        """Return the first row that is not accepted, and why. None: all are. The arguments are those of
        ``RoundTotals.refuse``."""
        refused = [self.totals.refuse(found, weights, reported)]
        if self.control is not None:
            refused.append(self.control.refuse(found))
        return min((row for row in refused if row is not None), key=lambda row: row[0], default=None)

    def abandon(self, number: int, dropped: dict[str, int], now: float, connected: int) -> dict[str, Any]:
        """Return the summary of a round that has no model."""
        self.abandoned_in_a_row += 1
        return self._close("abandoned", number, dropped, 0.0, now, connected)

    def _close(
        self, how: str, number: int, dropped: dict[str, int], change: float, now: float, connected: int
    ) -> dict[str, Any]:
        evaluation = self._evaluation() if how == "committed" and self.plan.local.evaluate else NOTHING
        summary = summarise(self.totals.training(), evaluation, self.plan.bounds)
        del summary["left_out"]
        if evaluation is NOTHING:
            del summary["behind"]
        summary |= {
            "round": number,
            "how": how,
            "reports": len(self.totals.devices),
            "partial": len(self.totals.devices) - self.totals.complete(),
            "time": now,
            "seconds": now - self.totals.opened,
            "connected": connected,
            "dropped": dropped,
            **self.totals.summary(),
            "change": change,
            **(self._mu_summary(summary["metrics"].get("loss")) if self._adapts_mu else {}),
            **(selection.committed(self.engine, self.totals.devices) if how == "committed" else {}),
        }
        self.history.append(summary)
        self.last_end = now
        self.totals = self._no_totals()
        if self.control is not None:
            self.control.end_round(how == "committed")
        if self.kept is not None:
            self.training.settle()
            self.kept.end_round(how == "committed")
        return summary

    def _evaluation(self) -> Measurements:
        """Return what the devices whose reports were accepted measured before they trained, in the reports' order."""
        measured, names = self.totals.measured, ("loss", *self.metrics)
        personal = [row.personal for row in measured] if self.plan.algorithm.personal_model else []
        return evaluation_of([row.model for row in measured], names, self.plan.round.max_weight, personal)

    def _evaluated(
        self,
        given_in: Sequence[int],
        devices: Sequence[int],
        kept_before: Sequence[int] | None,
        measure: Callable[[RoundInputs, Sequence[Job]], list[Evaluation | None]],
    ) -> list[Evaluation | None]:
        """Evaluate the models of these rounds on the data of these devices, with what they had kept then, if they keep
        something. Returns a row for each. ``measure``: the back end's function."""
        found: dict[tuple[int, int, int], Evaluation | None] = {}
        keys = list(zip(given_in, devices, kept_before or [NO_ROW] * len(devices), strict=True))
        for number in sorted({*given_in}):
            own = sorted({key for key in keys if key[0] == number})
            jobs = [Job(device, kept=kept) for _, device, kept in own]
            inputs = self.training.given[number].inputs
            found |= zip(own, measure(inputs, jobs), strict=True)
        return [found[key] for key in keys]

    def resume(
        self, taken: Snapshot, evaluated: tuple[int, int], connected: Collection[str], remembered: dict[str, Any] | None
    ) -> None:
        """Go on with the engine of a checkpoint, to which these devices are connected. It waits for ``committed``.
        ``evaluated``: the number of the last evaluation, and the version that it measured. ``remembered``: by its
        selection (``selection.to_json``)."""
        self.totals = self._no_totals()
        self.engine = Engine.from_snapshot(self.engine.settings, self.engine.prefix, taken, connected)
        self.engine.restore_evaluation(SavedEvaluation(*evaluated, False, [], [], []), 0.0)
        self.engine.evaluations.able.update(connected)
        selection.from_json(self.engine, remembered)

    def restart(self, now: float) -> list[Command]:
        """Start the process again, with a new engine that has what was on the disk: the accepted updates and the tasks
        that devices have."""
        self.down = False
        old, book = self.engine, self.engine.book
        self.engine = Engine(old.settings, prefix=old.prefix, version=old.version, round=old.round)
        selection.hand_over(old, self.engine)
        if old.pace is not None and self.engine.pace is not None:
            self.engine.pace.bookings.restore(old.pace.bookings.state(now), now)
        self.engine.restore_evaluation(_saved(old.evaluations), now)
        if old.phase is Phase.FINISHED:  # its last model is being measured
            self.engine.phase, self.engine.finishing = old.phase, old.finishing
        if old.phase is Phase.FINISHED or (old.phase is not Phase.OPEN and not old.settings.outlive):
            return self.engine.begin(now)
        leases = [(task, device, book.terms[device].version) for device, task in book.tasks.items()]
        dropped = [(task, device, cause) for task, (device, cause) in book.dropped.items()]
        lost = [(task, device, terms.version) for task, (device, terms) in book.lost.items()]
        number = old.round if old.phase is Phase.OPEN else None
        restored = Restored(number, leases, book.accepted.items(), dropped, lost, book.early.items())
        return self.engine.restore(restored, now) + self.engine.begin(now)


def _saved(found: Evaluations) -> SavedEvaluation:
    """Return what the coordinator's disk has of its evaluations."""
    book = found.book
    leases = [(task, device) for device, task in book.tasks.items()]
    dropped = [(task, device, cause) for task, (device, cause) in book.dropped.items()]
    return SavedEvaluation(found.number, found.version, found.is_open, leases, [*book.accepted.items()], dropped)

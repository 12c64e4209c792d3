"""The simulated coordinator: the real engine, the model, and the arithmetic of a round."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Any

from fleetlearn_coordinator.aggregation import exact_mean
from fleetlearn_coordinator.aggregation.optimizers import change_norm
from fleetlearn_coordinator.aggregation.round_summary import Row, devices_of, outside, pooled, row_of, without
from fleetlearn_coordinator.rounds.commands import Command
from fleetlearn_coordinator.rounds.engine import Engine, Snapshot
from fleetlearn_coordinator.rounds.settings import Phase
from fleetlearn_protocol import Bundle
from fleetlearn_protocol.vector import Vector

from fleetlearn_simulator.fleet.round_totals import RoundTotals
from fleetlearn_simulator.fleet.round_training import RoundTraining
from fleetlearn_simulator.scenario.scenario import Scenario
from fleetlearn_simulator.training.backend import Backend


class SimulatedCoordinator:
    """What the coordinator has in memory and on its disk."""

    def __init__(self, scenario: Scenario, bundle: Bundle, backend: Backend) -> None:
        self.scenario, self.plan, self.backend = scenario, scenario.plan, backend
        self.metrics = bundle.manifest.metrics
        # A device makes progress until it vanishes: there is no stall to watch for.
        self.engine = Engine(self.plan.engine_settings()._replace(stall=inf), prefix="s-")
        self.down = False
        """Whether its process is dead."""
        self.optimizer = self.plan.optimizer(bundle.manifest)
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
        self.begin_round(0.0)

    def begin_round(self, now: float) -> None:
        self.totals = RoundTotals(len(self.model), self.plan.round.max_weight, now)
        self.training = RoundTraining(self.backend, self.model, self.earlier, self.scenario.seed)

    def room(self) -> int:
        """Return how many more reports the round takes."""
        return self.engine.wanted_reports()

    def commit(self, number: int, dropped: dict[str, int], now: float, connected: int) -> dict[str, Any]:
        """Make the next model from the accepted updates. Returns the round's summary. The engine is not told."""
        self.totals.add_up()
        before = self.model
        mean = exact_mean.mean(self.totals.sum)
        self.optimizer_state, self.model = self.optimizer.apply(self.optimizer_state, mean, before)
        self.earlier, self.abandoned_in_a_row = before, 0
        return self._close("committed", number, dropped, change_norm(before, self.model), now, connected)

    def abandon(self, number: int, dropped: dict[str, int], now: float, connected: int) -> dict[str, Any]:
        """Return the summary of a round that has no model."""
        self.abandoned_in_a_row += 1
        return self._close("abandoned", number, dropped, 0.0, now, connected)

    def _close(
        self, how: str, number: int, dropped: dict[str, int], change: float, now: float, connected: int
    ) -> dict[str, Any]:
        metrics = self.totals.means(self.plan.bounds)
        summary: dict[str, Any] = {"train": metrics, "evaluation": {}, "metrics": metrics}
        if self.plan.local.evaluate and self.totals.devices and how == "committed":
            rows = self._evaluated()
            own = pooled(rows)
            evaluation = {name: own[name] for name in ("loss", *self.metrics) if name in own}
            summary |= {"evaluation": evaluation, "metrics": metrics | evaluation, "behind": devices_of(rows)}
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
        }
        self.history.append(summary)
        self.last_end = now
        return summary

    def _evaluated(self) -> list[Row]:
        """Evaluate the round's model before training, on the data of the devices whose reports were accepted."""
        found = self.backend.evaluate(self.earlier, sorted(self.totals.devices))
        most, bounds = self.plan.round.max_weight, self.plan.bounds
        rows = [row_of(own, self.metrics, most) for own in found]
        return [without(row, outside(row, bounds)) for row in rows] if bounds else rows

    def resume(self, taken: Snapshot, connected: Iterable[str]) -> None:
        """Go on with the engine of a checkpoint, to which these devices are connected. It waits for ``committed``."""
        self.engine = Engine.from_snapshot(self.engine.settings, self.engine.prefix, taken, connected)

    def restart(self, now: float) -> list[Command]:
        """Start the process again, with a new engine that has what was on the disk: the accepted updates and the tasks
        that devices have."""
        self.down = False
        old = self.engine
        self.engine = Engine(old.settings, prefix=old.prefix, version=old.version, round=old.round)
        if old.phase is not Phase.OPEN:
            return []
        leases = [(task, device) for device, task in old.leases.items()]
        dropped = [(task, device, cause) for task, (device, cause) in old.book.dropped.items()]
        return self.engine.restore(old.round, leases, old.accepted.items(), dropped, now)

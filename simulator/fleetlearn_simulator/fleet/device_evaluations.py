"""The measurements of devices in evaluations, in virtual time, and the evaluations' summaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from fleetlearn_coordinator.aggregation.evaluation_summary import summarise_evaluation
from fleetlearn_coordinator.rounds.commands import Ask, ExchangeClosed, ExchangeOpened
from fleetlearn_protocol.messages import Evaluation

from fleetlearn_simulator.fleet.coordinator import SimulatedCoordinator
from fleetlearn_simulator.fleet.device_names import device_of
from fleetlearn_simulator.fleet.device_tasks import DeviceTasks
from fleetlearn_simulator.fleet.events import EventQueue
from fleetlearn_simulator.fleet.kept_by_devices import rows_of
from fleetlearn_simulator.population.failures import CAUSES, sample_evaluation_fates
from fleetlearn_simulator.population.traits import traits
from fleetlearn_simulator.training.backend import Job, RoundInputs, steps_of


class Running(NamedTuple):
    """A measurement that a device is working on."""

    task: str
    ends: float
    cause: str
    """Why the device vanishes before it is done; empty if it does not."""


class DeviceEvaluations:
    """Which device measures, until when, and what it finds."""

    def __init__(
        self, tasks: DeviceTasks, coordinator: SimulatedCoordinator, events: EventQueue
    ) -> None:
        self.scenario, self.tasks, self.coordinator, self.events = (
            tasks.scenario,
            tasks,
            coordinator,
            events,
        )
        self.inputs = RoundInputs(coordinator.sent(coordinator.model))
        """With the model that the open evaluation measures."""
        self.opened = 0.0
        self.running: dict[int, Running] = {}
        """Device -> its measurement."""
        self.results: dict[str, Evaluation | None] = {}
        """Task of the open evaluation -> what its device finds. None: its loss is not finite."""
        self.accepted: dict[str, int] = {}
        """Task of the open evaluation -> its device, where the result was accepted."""

    def open(self, command: ExchangeOpened) -> None:
        self.inputs, self.opened = (
            RoundInputs(self.coordinator.sent(self.coordinator.model)),
            self.events.now,
        )
        self.results, self.accepted = {}, {}
        about = {"number": command.number, "version": command.version}
        self.tasks.write([{"time": self.opened, "event": "evaluation", **about}])

    def measure(self, given: Sequence[Ask]) -> None:
        """Let devices measure, and expect how that ends. A device that measures this already goes
        on."""
        working = {row.task for row in self.running.values()}
        given = [row for row in given if row.task not in working]
        if not given:
            return
        numbers, now, tasks = [device_of(row.device) for row in given], self.events.now, self.tasks
        devices, local = np.array(numbers, np.int64), tasks.local
        down = np.full(len(given), tasks.model_bytes)
        down += tasks.bundle_bytes * np.array(
            [device not in tasks.has_bundle for device in numbers]
        )
        tasks.has_bundle.update(numbers)
        steps = steps_of(local, tasks.source.examples(devices)) // local.passes
        failures = self.coordinator.engine.evaluations.failures
        # A device that measures once more, after it failed, has other luck.
        turns = np.array([row.number + (failures(row.device) << 32) for row in given], np.int64)
        seconds, causes = sample_evaluation_fates(
            self.scenario, devices, turns, steps=steps, down=down
        )
        kept = self.coordinator.kept
        self.coordinator.training.keep_finished()
        rows = rows_of(None if kept is None else kept.states, numbers)
        jobs = [Job(device, kept=row) for device, row in zip(numbers, rows, strict=True)]
        found = self.coordinator.backend.evaluate(self.inputs, jobs)
        self.coordinator.costs.down += int(down.sum())
        fates = zip(given, numbers, seconds.tolist(), causes.tolist(), found, strict=True)
        for row, device, taken, cause, result in fates:
            self.running[device] = Running(row.task, now + taken, CAUSES[cause])
            self.results[row.task] = result
            self.events.expect(now + taken, "measured", device)
        lines = [
            {"time": now, "event": "measure", "device": device_of(row.device), "task": row.task}
            for row in given
        ]
        tasks.write(lines)

    def due(self, device: int, time: float) -> Running | None:
        """Return the device's measurement if it ends at this time."""
        running = self.running.get(device)
        return running if running is not None and running.ends == time else None

    def delay(self, device: int, until: float) -> None:
        """The device is done, and cannot tell the coordinator before."""
        self.running[device] = self.running[device]._replace(ends=until)
        self.events.expect(until, "measured", device)

    def lose(self, device: int, task: str | None = None) -> None:
        """End a device's measurement, if it has one (or this one). The engine is not told."""
        running = self.running.get(device)
        if running is not None and task in (None, running.task):
            del self.running[device]

    def accept(self, device: int) -> Evaluation | None:
        """The device is done. Returns what it found, which counts; None: it gives its task back."""
        task = self.running.pop(device).task
        found = self.results[task]
        if found is not None:
            self.accepted[task] = device
        return found

    def close(self, command: ExchangeClosed) -> dict[str, Any]:
        """Return the evaluation's summary."""
        coordinator, plan = self.coordinator, self.coordinator.plan
        found = [self.results[task] for task in self.accepted]
        results = [result for result in found if result is not None]
        devices = np.array([*self.accepted.values()], np.int64)
        names = [*self.scenario.tiers]
        tiers = [names[tier] for tier in traits(self.scenario, devices).tier.tolist()]
        measured = ("loss", *coordinator.metrics)
        return {
            "evaluation": command.number,
            "version": command.version,
            "outcome": "valid" if command.valid else "invalid",
            "time": self.events.now,
            "seconds": self.events.now - self.opened,
            **summarise_evaluation(results, tiers, measured, plan.round.max_weight, plan.bounds),
            "dropped": command.dropped,
        }

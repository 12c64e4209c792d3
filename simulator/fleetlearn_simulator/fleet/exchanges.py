"""Exchanges in virtual time: which device is asked what, when its answer arrives, and which devices
vanish before. What devices answer is a row of a table, ``EXCHANGES``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from fleetlearn_coordinator.aggregation.clusters import best_of
from fleetlearn_coordinator.plan.pairwise_rules import graph_for
from fleetlearn_coordinator.rounds.commands import Ask, Command, ExchangeClosed, ExchangeOpened
from fleetlearn_coordinator.rounds.evaluation import EVALUATION
from fleetlearn_protocol.exchanges import EXCHANGE_KINDS, FIT, FitAnswer
from fleetlearn_protocol.quality_messages import QUALITY
from fleetlearn_protocol.secure.pairwise_messages import PAIRWISE

from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.fleet.device_names import device_of
from fleetlearn_simulator.fleet.device_tasks import DeviceTasks
from fleetlearn_simulator.fleet.evaluations import EVALUATIONS
from fleetlearn_simulator.fleet.events import EventQueue
from fleetlearn_simulator.fleet.fits import FITS
from fleetlearn_simulator.fleet.looks import LOOKS
from fleetlearn_simulator.fleet.pairwise import PAIRWISE_MASKS
from fleetlearn_simulator.fleet.pairwise_circle import circle_order, lacking_shares
from fleetlearn_simulator.fleet.simulated_exchange import Answers, OpenExchange, SimulatedExchange
from fleetlearn_simulator.population.failures import CAUSES, sample_answer_fates
from fleetlearn_simulator.population.traits import Ints
from fleetlearn_simulator.training.backend import RoundInputs

EXCHANGES: dict[str, SimulatedExchange] = {
    EVALUATION: EVALUATIONS,
    QUALITY: LOOKS,
    PAIRWISE: PAIRWISE_MASKS,
    FIT: FITS,
}
"""Kind of exchange -> what simulated devices do in it. Each kind of the engine has a row."""


class RunningAnswer(NamedTuple):
    """What a device is asked that has not answered yet."""

    task: str
    kind: str
    ends: float
    """When the answer reaches the coordinator, or when the device vanishes."""
    cause: str
    """Why the device vanishes before; empty if it does not."""
    up: int
    """Bytes of the answer."""


class DeviceExchanges:
    """The questions that devices have, of all kinds, and the exchanges that were opened last."""

    def __init__(self, tasks: DeviceTasks, events: EventQueue) -> None:
        self.tasks, self.events = tasks, events
        self.opened: dict[str, OpenExchange] = {}
        """Kind -> the exchange that was opened last."""
        self.running: dict[int, RunningAnswer] = {}
        """Device -> what it is asked: one thing at a time, of any kind."""
        self.summaries: dict[str, list[dict[str, Any]]] = {kind: [] for kind in EXCHANGES}
        """Kind -> the summaries of its exchanges that are over."""
        if unknown := sorted(tasks.coordinator.engine.exchanges.keys() - EXCHANGES.keys()):
            raise SimulatorError(
                f"the coordinator has exchanges of the kind {unknown[0]}, and simulated devices "
                "have no answer to them: add a row to EXCHANGES in fleet/exchanges.py"
            )

    def join(self, name: str) -> None:
        """The device checks in next. It can answer whatever the simulator knows."""
        for series in self.tasks.coordinator.engine.exchanges.values():
            series.join(name)

    def open(self, command: ExchangeOpened) -> None:
        kind, phase, coordinator = command.kind, command.phase, self.tasks.coordinator
        before = self.opened.get(kind) if phase > 1 else None
        inputs = None if before is None else before.inputs
        if before is None and EXCHANGE_KINDS[kind].sends_vectors:
            inputs = RoundInputs(np.concatenate(coordinator.sent_models()))
        now = self.events.now
        answers = {} if before is None else before.answers()
        self.opened[kind] = OpenExchange(
            command.number, command.version, phase, now, inputs, answers
        )
        about = {"number": command.number, "version": command.version}
        self.tasks.write([{"time": now, "event": kind, **about, **_later(phase)}])

    def ask(self, asked: Sequence[Ask]) -> None:
        """Let devices work out what they are asked, and expect how that ends. A device that does so
        already goes on."""
        for kind in dict.fromkeys(row.kind for row in asked):
            new = [row for row in asked if row.kind == kind and not self._is_at(row)]
            if new:
                self._begin(kind, new)

    def _is_at(self, row: Ask) -> bool:
        running = self.running.get(device_of(row.device))
        return running is not None and running.task == row.task

    def _begin(self, kind: str, asked: Sequence[Ask]) -> None:
        tasks, now, row, exchange = self.tasks, self.events.now, EXCHANGES[kind], self.opened[kind]
        devices = [device_of(ask.device) for ask in asked]
        answers = row.answer(tasks, exchange, devices)
        down, up = self._fetched(kind, devices, answers), np.full(len(asked), answers.up)
        tasks.coordinator.costs.down += int(down.sum())
        seconds, codes = sample_answer_fates(
            tasks.scenario,
            kind,
            np.array(devices, np.int64),
            self._turns(kind, asked),
            now=now,
            work=answers.work,
            down=down,
            up=up,
        )
        ends, causes = (now + seconds).tolist(), [CAUSES[code] for code in codes.tolist()]
        fates = zip(devices, asked, ends, causes, up.tolist(), answers.contents, strict=True)
        for device, ask, end, cause, size, content in fates:
            self.running[device] = RunningAnswer(ask.task, kind, end, cause, size)
            exchange.contents[ask.task] = content
            self.events.expect(end, "answered", device)
        given = zip(devices, asked, strict=True)
        tasks.write(
            [
                {"time": now, "event": row.events[0], "device": device, "task": ask.task}
                for device, ask in given
            ]
        )

    def _fetched(self, kind: str, devices: Sequence[int], answers: Answers) -> Ints:
        """Return the bytes that each device fetches: the question with its vectors, and the bundle
        if it needs one that it has not."""
        tasks = self.tasks
        down = np.full(len(devices), answers.down)
        if EXCHANGE_KINDS[kind].sends_vectors:
            lacks = np.array([device not in tasks.has_bundle for device in devices])
            each = tasks.bytes_of(devices)
            # Of clusters each device measures all models, and of a family its own.
            clusters = tasks.scenario.plan.clusters
            down += (1 if clusters is None else clusters.count) * each.model + each.bundle * lacks
            tasks.has_bundle.update(devices)
        return down

    def _turns(self, kind: str, asked: Sequence[Ask]) -> Ints:
        """Return a number for each device's turn. A device that is asked once more, after it
        failed, has other luck."""
        failures = self.tasks.coordinator.engine.exchanges[kind].failures
        turns = [(ask.number, ask.phase - 1, failures(ask.device)) for ask in asked]
        return np.array(
            [row + (phase << 24) + (more << 32) for row, phase, more in turns], np.int64
        )

    def due(self, device: int, time: float) -> RunningAnswer | None:
        """Return what the device is asked, if that ends at this time."""
        running = self.running.get(device)
        return running if running is not None and running.ends == time else None

    def delay(self, device: int, until: float) -> None:
        """The device is done, and cannot tell the coordinator before."""
        self.running[device] = self.running[device]._replace(ends=until)
        self.events.expect(until, "answered", device)

    def lose(self, device: int, task: str | None = None) -> None:
        """End what a device is asked, if it is asked something (or this). The engine is not
        told."""
        running = self.running.get(device)
        if running is not None and task in (None, running.task):
            del self.running[device]

    def accept(self, device: int) -> bool:
        """The device is done. Returns whether it has an answer, which counts; else it gives its
        task back."""
        running = self.running.pop(device)
        exchange, row = self.opened[running.kind], EXCHANGES[running.kind]
        about = {"device": device, "task": running.task}
        self.tasks.write([{"time": self.events.now, "event": row.events[1], **about}])
        self.tasks.coordinator.costs.up += running.up
        content = exchange.contents[running.task]
        if content is None:
            return False
        if isinstance(content, FitAnswer):
            self.tasks.coordinator.chosen[device] = best_of(content.losses)
        exchange.accepted[running.task] = device
        return True

    def close(self, command: ExchangeClosed) -> dict[str, Any]:
        """Return the summary of the exchange that is over."""
        kind, now = command.kind, self.events.now
        exchange, row = self.opened[kind], EXCHANGES[kind]
        outcome = "valid" if command.valid else "invalid"
        summary = {
            kind: command.number,
            "version": command.version,
            **_later(command.phase),
            "outcome": outcome,
            "time": now,
            "seconds": now - exchange.opened,
            "devices": len(exchange.accepted),
            **row.summarise(self.tasks, exchange),
            "dropped": command.dropped,
        }
        self.summaries[kind].append(summary)
        about = {kind: command.number, **_later(command.phase), "outcome": outcome}
        self.tasks.write([{"time": now, "event": row.events[2], **about}])
        return summary

    def why_not_unmasked(self, round: int) -> str | None:
        """Return why the masks of this round's updates cannot be taken off, for people. None: they
        can, or no devices agree on masks."""
        unmasking, secure = self.opened.get(PAIRWISE), self.tasks.scenario.plan.secure
        if unmasking is None or secure is None:
            return None
        coordinator, seed = self.tasks.coordinator, self.tasks.scenario.seed
        return lacking_shares(
            graph_for(secure, len(coordinator.circle)),
            circle_order(seed, round, coordinator.circle),
            coordinator.sharers,
            coordinator.devices,
            unmasking.accepted.values(),
        )

    def stop_by(self, command: ExchangeClosed) -> list[Command]:
        """Tell the engine what the exchange that was closed last has measured: it may stop the
        run."""
        metrics_of, summary = EXCHANGES[command.kind].metrics, self.summaries[command.kind][-1]
        metrics = metrics_of(self.tasks, summary) if command.valid else None
        if metrics is None:
            return []
        engine = self.tasks.coordinator.engine
        return engine.measured(metrics, command.version, self.events.now)


def _later(phase: int) -> dict[str, int]:
    """Return what a line says of an exchange's phase: nothing in the first."""
    return {} if phase == 1 else {"phase": phase}

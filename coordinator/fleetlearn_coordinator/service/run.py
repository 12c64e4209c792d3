"""A training run: the engine's commands carried out on the data directory and the model. No sockets, no clock.

``Run`` keeps what the engine decides (leases, rounds) and what the devices sent (updates) in the store, adds updates
to the round's sum as they arrive, and makes the new model when a round closes.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterable
from math import inf
from typing import Any, NamedTuple

import msgspec
from fleetlearn_protocol import Bundle
from fleetlearn_protocol.encodings import ENCODINGS
from fleetlearn_protocol.messages import UPDATE, Report
from fleetlearn_protocol.vector import Vector, digest

from fleetlearn_coordinator.aggregation import exact_mean
from fleetlearn_coordinator.aggregation.optimizers import State, change_norm
from fleetlearn_coordinator.aggregation.round_summary import deciding, describe, outside, summarise
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.rounds.engine import (
    LOST,
    Abandon,
    Assign,
    Cancel,
    Command,
    Commit,
    Ended,
    Engine,
    Finish,
    Opened,
    Phase,
)
from fleetlearn_coordinator.storage.store import Open, Store

logger = logging.getLogger("fleetlearn.coordinator")


class Clocks(NamedTuple):
    """One moment on both clocks, in seconds."""

    engine: float
    """Never goes back; the engine's."""
    wall: float
    """Unix time, for the records."""


class Run:
    """One training run, new or continued from its data directory."""

    def __init__(self, plan: Plan, bundle: Bundle, store: Store, now: Clocks) -> None:
        self.plan, self.bundle, self.store = plan, bundle, store
        plan.check_against(bundle.manifest)
        self.hyper = plan.hyper(bundle.manifest)
        for remark in plan.remarks(bundle.manifest):
            logger.warning("%s", remark)
        self.optimizer = plan.optimizer(bundle.manifest)
        self.reports: dict[str, Report] = {}
        """Task -> accepted report of the open round."""
        self.total = exact_mean.init(bundle.manifest.size)
        self.bytes_up = self.bytes_down = 0
        """Payload of updates received and of content sent, since the last round closed."""
        self._opened = now.engine
        version = self._load_model(now)
        self.engine = Engine(plan.engine_settings(), prefix=f"{store.run}-", version=version, round=store.last_round())
        self.finished: str | None = None
        """Why training is over, or None."""
        self._finish(self._still_finished())
        if self.finished is not None:
            self.engine.phase = Phase.FINISHED

    def resume(self, now: Clocks) -> list[Command]:
        """Take up the open round of an earlier process, if there is one. Call once."""
        opened = self.store.recover(self.bundle.manifest.size) if self.finished is None else None
        if opened is None:
            return []
        self.total = opened.total
        self.reports = {task: report for task, _, report in opened.reports}
        if opened.given_up:
            self._give_up(opened, now)
            return []
        logger.info(
            "round %d goes on: %d reports are safe, %d tasks were out",
            opened.number, len(opened.reports), len(opened.leases),
        )  # fmt: skip
        accepted = [(task, device) for task, device, _ in opened.reports]
        commands = self.engine.restore(opened.number, opened.leases, accepted, opened.dropped, now.engine)
        return self.carry_out(commands, now)

    def _give_up(self, opened: Open, now: Clocks) -> None:
        dropped = Counter(cause for _, _, cause in opened.dropped)
        with self.store.transaction():
            for task, _ in opened.leases:
                self.store.end(task, LOST)
                dropped[LOST] += 1
            self._abandon(opened.number, dict(dropped), "the sum of its reports was removed", now)

    def _load_model(self, now: Clocks) -> int:
        found = self.store.model()
        if found is None:
            vector = self.bundle.parameters()[: self.bundle.manifest.size].copy()  # not what is personal
            found = 0, vector, self.optimizer.init(vector)
            with self.store.transaction():
                self._save_model(*found, round=0, now=now)
        version, self.model, self.state = found
        # The name of its optimizer is missing in a data directory of an earlier version; slots say less.
        before = self.store.get("optimizer") or self.optimizer.name
        if before != self.optimizer.name or set(self.state) != set(self.optimizer.init(self.model)):
            logger.warning("the server optimizer is now %s: its state starts from the beginning", self.optimizer.name)
            self.state = self.optimizer.init(self.model)
        self.model_digest = digest(self.model)
        return version

    def _still_finished(self) -> Finish | None:
        """The stop rule that the last committed round meets. The plan's rules may be others than at the last start."""
        summary = self.store.last_committed() or {"change": inf, "metrics": {}}
        metrics = deciding(summary, self.plan.round.minimum)
        for name in outside((1, metrics), self.plan.bounds):  # an earlier version let one device's word pass
            del metrics[name]
        return self.engine.finish(summary["change"], metrics)

    def _finish(self, finish: Finish | None) -> None:
        self.finished = None if finish is None else finish.reason
        self.store.put("finished", self.finished)
        self.store.put("finished_by", None if finish is None else msgspec.json.encode(finish._asdict()).decode())

    def accept(self, report: Report, slot: int, largest: float) -> None:
        """Make a spooled and checked update count: durable first, then in the sum.

        ``largest`` is its greatest magnitude. The caller then tells the device and calls ``engine.accept``.
        """
        weight = self.weight(report)
        exact_mean.check(largest, weight)
        self.store.accept(report, weight, slot)
        part = report.part(UPDATE)
        blocks = map(ENCODINGS[part.encoding].decode, self.store.read_slot(slot, part))
        exact_mean.add_parts(self.total, blocks, weight, largest)
        self.store.fold(self.total)
        self.reports[report.task] = report

    def weight(self, report: Report) -> int:
        """The update's weight in the mean: its device's examples, up to the plan's cap."""
        return min(report.examples, self.plan.round.max_weight)

    def carry_out(self, commands: Iterable[Command], now: Clocks) -> list[Command]:
        """Record the commands and do the arithmetic; returns those that the network has to hear of, in order."""
        heard: list[Command] = []
        waiting = deque(commands)
        if not waiting:  # most events of most devices: nothing to write
            return heard
        with self.store.transaction():
            while waiting:
                command = waiting.popleft()
                match command:
                    case Opened(number):
                        self._open(number, now)
                    case Assign(device, task, number, again=again):
                        if not again:
                            self.store.assign(task, number, device)
                        heard.append(command)
                    case Ended(_, task, _, cause):
                        self.store.end(task, cause)
                    case Cancel():
                        heard.append(command)
                    case Commit(number, dropped):
                        waiting.extend(self._commit(number, dropped, now))
                    case Abandon(number, dropped, text):
                        self._abandon(number, dropped, text, now)
                    case Finish(reason):
                        self._finish(command)
                        logger.info("finished: %s", reason)
                        heard.append(command)
        return heard

    def _open(self, number: int, now: Clocks) -> None:
        self.store.open_round(number, now.wall)
        self.total = exact_mean.init(self.total.hi.size)
        self.reports, self._opened = {}, now.engine

    def _commit(self, number: int, dropped: dict[str, int], now: Clocks) -> list[Command]:
        self.state, model = self.optimizer.apply(self.state, exact_mean.mean(self.total), self.model)
        change = change_norm(self.model, model)
        summary = self._summary(dropped, change, now)
        version = self.engine.version + 1
        self.model, self.model_digest = model, self._save_model(version, model, self.state, round=number, now=now)
        self.store.close_round(number, "committed", summary, now.wall)
        self.store.drop_old_models(version)
        logger.info("round %d committed: %s", number, describe(summary))
        return self.engine.committed(now.engine, change=change, metrics=deciding(summary, self.plan.round.minimum))

    def _save_model(self, version: int, model: Vector, state: State, *, round: int, now: Clocks) -> str:
        """Call within a transaction: model, state and the name of its optimizer count together."""
        self.store.put("optimizer", self.optimizer.name)
        return self.store.save_model(version, round, model, state, now.wall)

    def _abandon(self, number: int, dropped: dict[str, int], text: str, now: Clocks) -> None:
        summary = self._summary(dropped, 0.0, now)
        self.store.close_round(number, "abandoned", summary, now.wall)
        logger.warning("round %d abandoned: %s; %s", number, text, describe(summary))

    def _summary(self, dropped: dict[str, int], change: float, now: Clocks) -> dict[str, Any]:
        plan, known = self.plan, self.bundle.manifest.metrics
        summary = summarise(self.reports.values(), known, plan.round.max_weight, plan.bounds)
        for name, devices in summary["left_out"].items():
            low, high = plan.bounds[name]
            text = "%d devices measured a %s beyond its bounds, %g to %g, and are left out of it"
            logger.warning(text, devices, name, low, high)
        summary |= {
            "dropped": dropped,
            "change": change,
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "seconds": round(now.engine - self._opened, 6),
        }
        self.bytes_up = self.bytes_down = 0
        return summary

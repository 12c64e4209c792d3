"""The log lines about what happens in one run: an observer (observers.py)."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fleetlearn_coordinator.aggregation.round_summary import (
    describe,
    describe_dropped,
    describe_metrics,
)
from fleetlearn_coordinator.conversation.limits import LINE_BURST, LINE_RATE
from fleetlearn_coordinator.network.peer_log import FewLines
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.rounds.commands import (
    LATE,
    LOST,
    STALE,
    STALLED,
    SURPLUS,
    Ended,
    ExchangeOpened,
    Finish,
)
from fleetlearn_coordinator.rounds.evaluation import EVALUATION
from fleetlearn_coordinator.rounds.waiting_words import named
from fleetlearn_coordinator.service.observers import (
    ExchangeSummarised,
    ModelRestored,
    RoundEnded,
    RunEvent,
    TiedVectorsReset,
)
from fleetlearn_coordinator.service.run_log import RunLog

WHY = {
    LOST: "lost: the connection ended, and the device was not back in time",
    LATE: "late: the time was over before the report was here",
    SURPLUS: "surplus: the round had its reports without it",
    STALLED: "stalled: no step and no byte for too long (round.stall)",
    STALE: "stale: the model that the task began from is too old",
}
"""The engine's own causes. What devices fail and what is rejected is logged where their messages
are read."""

_tasks = logging.getLogger("fleetlearn.coordinator.tasks")
_tasks.addFilter(FewLines(LINE_RATE, LINE_BURST, "tasks"))


class EventLog:
    """An observer that logs what a person wants to read of one run."""

    def __init__(self, log: RunLog, plan: Plan) -> None:
        self._log, self._plan = log, plan

    def __call__(self, events: Sequence[RunEvent]) -> None:
        """Log what happened."""
        ended: list[Ended] = []
        for event in events:
            match event:
                case Ended():
                    ended.append(event)
                case RoundEnded():
                    self._say_round_ended(event)
                case ExchangeOpened(number, version, kind, phase):
                    name = exchange_name(kind, number, phase)
                    self._log.info("%s of model version %d begins", name, version)
                case ExchangeSummarised(kind, number, phase, version, valid, summary):
                    name = exchange_name(kind, number, phase)
                    outcome, describe_it = "valid" if valid else "invalid", DESCRIBE.get(kind)
                    found = (describe_it or describe_answers)(summary)
                    text = "%s of model version %d is %s: %s"
                    self._log.info(text, name, version, outcome, found)
                case TiedVectorsReset(algorithm):
                    self._log.warning(
                        "a device lost what it kept for %s: the vectors that go with it begin "
                        "again from zeros, here and on all devices; the model stays",
                        algorithm,
                    )
                case ModelRestored(version, restores, who, keeps_state):
                    self._log.warning(
                        "rolled back (%s): version %d is version %d's model; the server optimizer "
                        "%s",
                        who,
                        version,
                        restores,
                        "goes on from that version's state"
                        if keeps_state
                        else "begins from the beginning",
                    )
                case Finish(reason):
                    self._log.info("finished: %s", reason)
        if ended:
            self._say_tasks_ended(ended)

    def _say_round_ended(self, event: RoundEnded) -> None:
        for name, devices in event.summary["left_out"].items():
            low, high = self._plan.bounds[name]
            text = "%d devices measured a %s beyond its bounds, %g to %g, and are left out of it"
            self._log.warning(text, devices, name, low, high)
        found = describe(event.summary)
        if event.outcome == "committed":
            self._log.info("round %d committed: %s", event.number, found)
        else:
            self._log.warning("round %d abandoned: %s; %s", event.number, event.why, found)

    def _say_tasks_ended(self, ended: Iterable[Ended]) -> None:
        """Say which devices' tasks ended without a report that counts, and why: a line for each
        cause and round."""
        devices = defaultdict[tuple[int, str], list[str]](list)
        for device, _, number, cause in ended:
            if cause in WHY:
                devices[number, cause].append(device)
        for (number, cause), names in devices.items():
            who = f"device {names[0]} is" if len(names) == 1 else f"{named(names)} are"
            _tasks.info("%sround %d: %s %s", self._log.begin, number, who, WHY[cause])


def exchange_name(kind: str, number: int, phase: int) -> str:
    """Return what people call an exchange."""
    return f"{kind} {number}" if phase == 1 else f"{kind} {number}, phase {phase},"


def describe_answers(summary: Mapping[str, Any]) -> str:
    """Return an exchange's summary in one line."""
    return f"{summary['devices']} devices answered, dropped: {describe_dropped(summary)}"


def describe_evaluation(summary: Mapping[str, Any]) -> str:
    """Return an evaluation's summary in one line."""
    dropped, metrics = describe_dropped(summary), describe_metrics(summary)
    metrics = f"{metrics} on the devices' training examples" if metrics else "no metrics"
    return (
        f"{summary['devices']} devices, {summary['examples']} examples, dropped: {dropped}; "
        f"{metrics}"
    )


DESCRIBE: dict[str, Callable[[Mapping[str, Any]], str]] = {EVALUATION: describe_evaluation}
"""Kind of exchange -> what makes one line of its summary, where ``describe_answers`` says less."""

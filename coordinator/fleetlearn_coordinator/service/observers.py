"""What happens in a run, as plain events for whoever watches: the log, metrics, a page.

Each event comes once, after what it says is durable, in the order in which things happened and in
the thread of the run's calls. The engine's commands are events as they are (rounds/commands.py);
this file adds what no command says. An observer must return soon and must not change the run.

An event that was recorded just before the process died may be lost: an observer that needs each of
them reads the ledger at its start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
from fleetlearn_protocol.errors import Code
from fleetlearn_protocol.messages import CheckIn, Reply, Report

from fleetlearn_coordinator.rounds.commands import Command

logger = logging.getLogger("fleetlearn.coordinator")


class DeviceJoined(NamedTuple):
    """A device is connected, and may serve the run from now on. A device that connects once more
    joins once more."""

    check_in: CheckIn
    """What the device said of itself."""


class DeviceLeft(NamedTuple):
    """A device's connection is gone, or the device serves another run of the host now."""

    device: str


class TaskFailed(NamedTuple):
    """A device gave its task back. The command ``Ended`` or ``Unanswered`` comes too, unless the
    task was not the device's any more."""

    device: str
    task: str
    cause: str
    """``failed: `` and the code that the device gave."""
    text: str
    """What the device said, for people. It may hold anything."""


class UpdateSaved(NamedTuple):
    """A device's update is durable: its report counts."""

    device: str
    report: Report
    round: int
    """The round that the report counts for."""
    staleness: int
    """How many versions that round's model is newer than the one that the task began from."""
    private: bool = False
    """Whether what single devices measure is shown to nobody, as the plan has [privacy] or
    [secure]. ``report`` is then as ``without_measurements`` returns it."""


class AnswerSaved(NamedTuple):
    """What a device answered is durable: it counts in the open exchange of its kind."""

    device: str
    message: Reply


class MessageRefused(NamedTuple):
    """A message of a device that serves the run was refused. Nothing is recorded of it; if the
    device's task ended with it, the command ``Ended`` comes too."""

    device: str
    code: Code
    text: str
    """For people."""


class RoundEnded(NamedTuple):
    """A round was committed or abandoned."""

    number: int
    outcome: Literal["committed", "abandoned"]
    version: int
    """Of the newest model from now on."""
    summary: Mapping[str, Any]
    """As ``rounds`` of the status has it."""
    why: str
    """Why the round was abandoned, for people. Empty: it was not."""


class ExchangeSummarised(NamedTuple):
    """An exchange was closed."""

    kind: str
    number: int
    """Of the series."""
    phase: int
    """Which exchange of the series, from 1."""
    version: int
    """Of the model that the series is about."""
    valid: bool
    """Whether enough devices answered."""
    summary: Mapping[str, Any]
    """``devices`` (how many answered), ``dropped``, and what the kind adds: of an evaluation as
    ``evaluations`` of the status has it."""


class HeldOutMeasured(NamedTuple):
    """A model was measured on held-out data."""

    version: int
    metrics: Mapping[str, float]
    """Means over the data's examples: ``loss`` and the model's own metrics."""


class TiedVectorsReset(NamedTuple):
    """A device lost what it kept, so SCAFFOLD's c or FedDyn's h begin again from zeros."""

    algorithm: str


class ModelRestored(NamedTuple):
    """The run was rolled back: an earlier model is the newest version."""

    version: int
    restores: int
    """The version that it was made from."""
    who: str
    """Who asked for it."""
    keeps_state: bool
    """Whether the server optimizer goes on from that version's state; else it begins again."""


RunEvent: TypeAlias = (
    Command
    | DeviceJoined
    | DeviceLeft
    | TaskFailed
    | UpdateSaved
    | AnswerSaved
    | MessageRefused
    | RoundEnded
    | ExchangeSummarised
    | HeldOutMeasured
    | TiedVectorsReset
    | ModelRestored
)


def without_measurements(report: Report) -> Report:
    """Return the report of such a run as whoever watches the run may see it: without anything
    that follows from what the device's data are. What it must have is 0, and 1 example."""
    return msgspec.structs.replace(
        report,
        examples=1,
        steps=0,
        epochs=0.0,
        loss=0.0,
        metrics={},
        evaluation=None,
        personal=None,
        clipped=None,
    )


Observer: TypeAlias = Callable[[Sequence[RunEvent]], None]
"""Takes what was recorded together, at least one event."""


class Observers:
    """Who is told what happens in one run."""

    def __init__(
        self, when_safe: Callable[[Callable[[], None]], None] = lambda tell: tell()
    ) -> None:
        """``when_safe``: calls something once all that was recorded so far is durable
        (``Store.when_safe``)."""
        self._observers: list[Observer] = []
        self._when_safe = when_safe

    def add(self, observer: Observer) -> None:
        """Tell this observer what happens from now on. It is called after those added before."""
        self._observers.append(observer)

    def tell(self, events: Sequence[RunEvent]) -> None:
        """Tell all observers. One that raises is removed, with an error in the log: the run does
        not depend on who watches it."""
        if events:
            self._when_safe(lambda: self._tell(events))

    def _tell(self, events: Sequence[RunEvent]) -> None:
        for observer in list(self._observers):
            try:
                observer(events)
            except Exception:
                self._observers.remove(observer)
                text = "an observer failed and is told nothing more; the run goes on: %r"
                logger.exception(text, observer)

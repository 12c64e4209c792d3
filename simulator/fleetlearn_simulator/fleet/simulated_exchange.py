"""What an exchange is in a simulation: what its devices answer, how long that takes, and what comes
of the answers. Who is asked, who vanishes and when answers arrive is the same for each kind
(exchanges.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from fleetlearn_simulator.fleet.device_tasks import DeviceTasks
from fleetlearn_simulator.population.traits import Floats, Ints
from fleetlearn_simulator.training.backend import RoundInputs


class Answers(NamedTuple):
    """What n devices that are asked together answer, in their order."""

    contents: Sequence[msgspec.Struct | None]
    """The content of each device's reply, as the protocol's ``EXCHANGE_KINDS`` has it. None: the
    device cannot answer, and gives its task back as ``failed: diverged``."""
    work: Floats | None = None
    """Training steps that take as long as to work the answer out, shape (n,). None: no time."""
    down: Ints | int = 0
    """Bytes of the question, beside the vectors that the kind sends and the bundle: one for all, or
    shape (n,)."""
    up: Ints | int = 0
    """Bytes of the answer: one for all, or shape (n,)."""


@dataclass
class OpenExchange:
    """The exchange of one kind that was opened last."""

    number: int
    """The series' number."""
    version: int
    """The model version that the series is about."""
    phase: int
    """Which exchange of the series, from 1."""
    opened: float
    """When it was opened."""
    inputs: RoundInputs | None
    """That version of the model, where questions of this kind send vectors."""
    before: Mapping[int, msgspec.Struct]
    """Device -> its answer that counted in the phase before. Empty in the first phase."""
    contents: dict[str, msgspec.Struct | None] = field(default_factory=dict)
    """Task -> what its device will answer."""
    accepted: dict[str, int] = field(default_factory=dict)
    """Task -> its device, for answers that count, in the order in which they came."""

    def answers(self) -> dict[int, msgspec.Struct]:
        """Return the answers that count: device -> content."""
        found = ((device, self.contents[task]) for task, device in self.accepted.items())
        return {device: content for device, content in found if content is not None}


class SimulatedExchange(NamedTuple):
    """One kind of exchange in a simulation: functions that know no time and no event."""

    answer: Callable[[DeviceTasks, OpenExchange, Sequence[int]], Answers]
    """Work out what these devices answer, which are asked now."""
    summarise: Callable[[DeviceTasks, OpenExchange], dict[str, Any]]
    """Return what the kind adds to the summary of an exchange that is over."""
    metrics: Callable[[DeviceTasks, dict[str, Any]], Mapping[str, float] | None] = (
        lambda tasks, summary: None
    )
    """Return the model's metrics by which a valid exchange may stop the run, given its summary.
    None: it stops no run."""
    events: tuple[str, str, str] = ("asked", "answered", "closed")
    """How the event log says that a device is asked, that it has answered, and that the exchange is
    over."""

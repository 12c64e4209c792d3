"""The engine's commands to its driver, and the causes by which a lease ends."""

from __future__ import annotations

from typing import Literal, NamedTuple

from fleetlearn_protocol.errors import Code

LOST, LATE, SURPLUS, STALLED, STALE = "lost", "late", "surplus", "stalled", "stale"
"""The engine's own causes: the device vanished; the deadline passed; the goal was reached without
it; the device made no step and moved no byte for ``Settings.stall`` seconds; its update would be
too stale."""
FAILED, REJECTED = "failed: ", "rejected: "
"""What the other causes begin with: the device could not do its task; its update was refused. The
code that says why comes next."""
PRIVACY_LIMIT = f"{REJECTED}privacy-limit"
"""The cause where a device takes part as often as it may without this report
(participation_limits.py)."""
STOPPED = f"{FAILED}stopping"
PAUSED = f"{FAILED}paused"
"""The causes where a device gives its task back because it stops, or because a condition of its
owner's does not hold any more."""
GIVEN_BACK = (STOPPED, PAUSED)
"""The device did nothing wrong. It may have another turn if it returns in this round."""


BY_HELPER = f"{REJECTED}helper-"
"""What the cause begins with where a report counted, and counts no more since the helper of secure
aggregation does not add its mask up. The name of the helper's refusal comes next."""


class Opened(NamedTuple):
    """A round began."""

    round: int
    goal: int | None = None
    """The reports that it wants, where that is a share of the devices (``Settings.share``)."""
    devices: int | None = None
    """The devices that it is a share of: those that can take part now."""


class Assign(NamedTuple):
    """Give the device its task: a new one, or again the one it holds, after it came back without
    its work."""

    device: str
    task: str
    round: int
    """In which the task was given."""
    seed: int
    deadline: float
    """When the lease ends at the latest, on the engine's clock."""
    again: bool
    version: int
    """Version of the model that the task begins from."""


class Ended(NamedTuple):
    """A lease ended without a report that counts."""

    device: str
    task: str
    round: int
    """Whose end it counts for: the open round, or the next one to open."""
    cause: str


class Revived(NamedTuple):
    """A lease that had ended because its device was lost runs again: the device returned with its
    work done."""

    device: str
    task: str
    round: int


class CancelTask(NamedTuple):
    """Tell a connected device that its task is no longer wanted."""

    device: str
    task: str
    code: Code
    text: str


class SendAway(NamedTuple):
    """Tell a connected device without a task to disconnect and to come back later (pace.py)."""

    device: str
    after: float
    """Seconds until it is to come back."""


class RegionEnded(NamedTuple):
    """A region's part of the round is over (regional_rounds.py)."""

    round: int
    region: str
    is_done: bool
    """Whether its reports count. False: the region has failed, and contributes nothing."""
    reports: int
    text: str
    """Why, for people."""


class Commit(NamedTuple):
    """Make the new model of the reports that count, then call ``committed``."""

    round: int
    dropped: dict[str, int]
    """How many of the round's leases ended without a report that counts, by cause."""
    regions: tuple[str, ...] | None = None
    """The regions that are done, whose reports alone count. None: rounds have no regions."""


class Abandon(NamedTuple):
    """The round ended below its minimum; the model stays."""

    round: int
    dropped: dict[str, int]
    text: str


class ExchangeOpened(NamedTuple):
    """An exchange of this kind began (exchange.py)."""

    number: int
    """The series' number."""
    version: int
    """Version of the model that the series is about."""
    kind: str
    phase: int = 1
    """Which exchange of the series, from 1."""
    members: tuple[str, ...] | None = None
    """Who alone may answer, sorted. None: every device that can."""


class Ask(NamedTuple):
    """Ask the device what the exchange asks: a new task, or again the one that it has, after it
    came back."""

    device: str
    task: str
    number: int
    """The series' number."""
    version: int
    deadline: float
    """When the exchange ends, on the engine's clock."""
    again: bool
    kind: str
    phase: int = 1


class Unanswered(NamedTuple):
    """A device's task in an exchange ended without an answer that counts."""

    device: str
    task: str
    cause: str
    kind: str


class ExchangeClosed(NamedTuple):
    """An exchange is over. Where another one of its series follows, ``ExchangeOpened`` comes
    next."""

    number: int
    """The series' number."""
    version: int
    dropped: dict[str, int]
    """How many of its tasks ended without an answer that counts, by cause."""
    valid: bool
    """Whether enough devices answered."""
    kind: str
    phase: int = 1


class Finish(NamedTuple):
    """Training is over, by one of the stop rules."""

    reason: str
    """For people."""
    rule: Literal["rounds", "epsilon", "metric", "patience", "privacy budget", "computation", "own"]
    value: float
    """The rounds done, also of a computation that is done and with an own rule, the L2 norm of the
    model's change, the metric's value, with patience its best one, or the epsilon that was
    spent."""
    limit: float
    """What the rule compares it with; with patience the measured models without an
    improvement."""
    metric: str | None = None
    """The metric's name, where the rule is one of a metric."""
    version: int | None = None
    """For a rule about a metric: the version of the model that was measured, with patience that of
    the best one. It may be older than the newest: devices measure the model with which a round
    begins, and the round makes one more."""


Command = (
    Opened
    | Assign
    | Ended
    | Revived
    | CancelTask
    | SendAway
    | RegionEnded
    | Commit
    | Abandon
    | ExchangeOpened
    | Ask
    | Unanswered
    | ExchangeClosed
    | Finish
)

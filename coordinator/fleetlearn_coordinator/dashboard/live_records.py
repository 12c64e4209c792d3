"""What viewers of the live page are told, as types: ``GET /v1/live`` (live_feed.py).
service/live_schema.py makes docs/operate/live-page.schema.json of them, and tests hold what is
sent to that schema.

Times are Unix times in seconds, in a simulation's replay seconds of its virtual time. A field that
may be ``UNSET`` is left out where it is not known.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

from msgspec import UNSET, Struct, UnsetType

Metrics: TypeAlias = dict[str, float | None]
"""Name of a metric -> its value. None: it is not finite, which JSON does not have."""


class PrivacySpent(Struct, frozen=True, kw_only=True):
    """What a private run has spent of its budget: its ledger's account, for people."""

    epsilon: float
    """What all releases have spent at ``delta``."""
    budget: float | None
    """The plan's epsilon. None: it states a noise, and no budget."""
    delta: float
    releases: int
    """How many models were released."""
    left: int | None
    """How many more releases are within the budget. None: any number."""


class Glance(Struct, kw_only=True):
    """A run in a few words."""

    served: bool
    """Whether a coordinator serves it."""
    recorded: bool | UnsetType = UNSET
    """True: records alone are shown."""
    phase: str | UnsetType | None = UNSET
    """``gathering``, ``open``, ``committing`` or ``finished``."""
    round: int | UnsetType | None = UNSET
    """The open round, or the last one."""
    version: int | UnsetType = UNSET
    """Of the newest model."""
    of: int | UnsetType | None = UNSET
    """Versions after which training is over. None: it has no such end."""
    goal: int | UnsetType | None = UNSET
    """Reports with which a round closes."""
    accepted: int | UnsetType | None = UNSET
    """Reports of the open round that count."""
    connected: int | UnsetType | None = UNSET
    """Devices that are connected and may serve the run."""
    finished: str | UnsetType | None = UNSET
    """Why training is over. None: it is not."""
    paused: bool | UnsetType | None = UNSET
    draining: bool | UnsetType | None = UNSET
    waits_for: str | UnsetType | None = UNSET
    """What the run waits for, in a sentence. Empty: nothing."""
    metrics: Metrics | UnsetType = UNSET
    """Of the last committed round."""
    spark: list[float | None] | UnsetType = UNSET
    """Losses of the last committed rounds, the oldest first."""
    privacy: PrivacySpent | UnsetType = UNSET
    """Of a private run."""
    wanted: str | UnsetType = UNSET
    """What one of a host's runs is to do: ``running``, ``paused``, ``draining`` or ``stopped``."""
    failed: str | UnsetType = UNSET
    """Why the run was stopped by an error. Empty: it was not."""


class GatewayGlance(Struct, kw_only=True):
    """A gateway of the coordinator."""

    number: int
    """From 0 on."""
    process: int
    """Its process number."""
    connections: int
    """With those that have not checked in."""
    devices: int
    """Devices that have checked in there."""
    bytes_up: int
    """Payload received there."""
    bytes_down: int
    """Payload sent from there."""
    lag: float
    """How late its event loop was in the last second, in seconds, at most."""
    name: str
    """Of a gateway on another machine. Empty: it is on the coordinator's."""


class HostValues(Struct, kw_only=True):
    """A coordinator's process. Beside these it has a ``Glance`` of each run, under ``run/NAME``."""

    time: float
    """Now, on the coordinator's clock; 0 where records are shown."""
    began: float | UnsetType = UNSET
    """When the process began."""
    software: str | UnsetType = UNSET
    address: str | UnsetType = UNSET
    """Where devices connect, as a URL."""
    connected: int | UnsetType = UNSET
    """Devices that are connected."""
    gateways: list[GatewayGlance] | UnsetType = UNSET
    """The processes that hold the connections, where there are some."""


class ProcessSecond(NamedTuple):
    """What the process used in a second."""

    time: int
    lag: float
    """The most that the event loop was late, in milliseconds."""
    memory: int
    """Resident memory, in bytes."""
    cpu: float
    """CPU seconds in the second."""


class HostLists(Struct, kw_only=True):
    """Lists of the coordinator's process. Records have none."""

    process: list[ProcessSecond] | UnsetType = UNSET


class About(Struct, kw_only=True):
    """A run's plan, in a few words."""

    recipe: str | UnsetType = UNSET
    goal: int | None
    """Reports with which a round closes; with a ``goal_share`` the most."""
    goal_share: float | UnsetType = UNSET
    """The share of the devices that a round wants; absent: each wants ``goal``."""
    minimum: int | UnsetType = UNSET
    """Reports that a round needs."""
    deadline: float | UnsetType = UNSET
    """Seconds that a round is open at most."""
    rounds: int | None
    """Versions after which training is over. None: it has no such end."""
    metric: str | None
    """The metric whose ``target`` ends training. None: none does."""
    target: float | None
    private: Literal["none", "noised"] | UnsetType = UNSET
    """Of a run with differential privacy or secure aggregation: whether what devices measure is
    kept from everybody, or shown with noise."""
    computes: str | UnsetType = UNSET
    """The kind of computation of a run without a model."""


class ExchangeGlance(Struct):
    """An exchange with devices that is under way, such as an evaluation."""

    number: int
    phase: int
    version: int
    """Of the model that it is about."""
    devices: int
    """Devices that have answered."""
    of: int
    """Devices that are to answer."""


class RegionNowValues(Struct, kw_only=True):
    """How a region is doing in the open round."""

    name: str
    reports: int
    goal: int
    minimum: int
    tasks: int
    """That run."""
    waiting: int
    """Connected devices that may be given a task."""
    done: bool | None
    """Whether its part of the round is done, or has failed. None: it is not over."""


class RegionRow(Struct, kw_only=True):
    """What a region came to in a round that is over."""

    reports: int
    done: bool
    """Whether they count. False: the region failed."""


class RunValues(Struct, kw_only=True):
    """A run as it is now."""

    name: str
    served: bool
    """Whether a coordinator serves it."""
    recorded: bool | UnsetType = UNSET
    """True: records alone are shown."""
    about: About
    version: int
    """Of the newest model."""
    round: int
    """The open round, or the last one; 0: none is known."""
    finished: str | None
    """Why training is over. None: it is not."""
    privacy: PrivacySpent | UnsetType = UNSET
    """Of a private run."""
    phase: str | UnsetType = UNSET
    """``gathering``, ``open``, ``committing`` or ``finished``; empty: nobody serves the run."""
    paused: bool | UnsetType = UNSET
    draining: bool | UnsetType = UNSET
    waits_for: str | UnsetType = UNSET
    """What the run waits for, in a sentence. Empty: nothing."""
    ends: float | UnsetType | None = UNSET
    """When the open round ends at the latest."""
    goal: int | UnsetType = UNSET
    """Reports with which the open round closes, or one that would open now."""
    accepted: int | UnsetType = UNSET
    """Reports of the open round that count."""
    dropped: dict[str, int] | UnsetType = UNSET
    """Cause -> tasks of the open round that ended without a report that counts."""
    leases: int | UnsetType = UNSET
    """Tasks that devices have now."""
    members: dict[str, int] | UnsetType = UNSET
    """The same for each member of a family, in the plan's order."""
    regions: list[RegionNowValues] | UnsetType = UNSET
    """Where rounds have regions, in the plan's order."""
    connected: int | UnsetType = UNSET
    """Devices that are connected and may serve the run."""
    idle: int | UnsetType = UNSET
    unable: int | UnsetType = UNSET
    """Connected devices that cannot do the run's tasks."""
    training: int | UnsetType = UNSET
    uploading: int | UnsetType = UNSET
    queued: int | UnsetType = UNSET
    """Uploads that wait for a place."""
    silent: int | UnsetType = UNSET
    """Devices with a task that are not connected."""
    ineligible: int | UnsetType = UNSET
    """Connected devices that may not take part."""
    ineligible_by: dict[str, int] | UnsetType = UNSET
    """The same, by the rule of [selection]."""
    barred: int | UnsetType = UNSET
    """Connected devices that took part lately."""
    sent_away: int | UnsetType = UNSET
    """Devices that were told to come back later, since the process began."""
    away: int | UnsetType = UNSET
    """Those of them that are away now."""
    all_back_in: float | UnsetType = UNSET
    """Seconds in which the last of them was told to come."""
    exchanges: dict[str, ExchangeGlance] | UnsetType = UNSET
    """By kind."""
    evaluation: ExchangeGlance | UnsetType | None = UNSET
    """The evaluation that is under way."""
    causes: dict[str, int] | UnsetType = UNSET
    """Cause -> tasks that ended without a report that counts, of the rounds that are shown."""
    refusals: dict[str, int] | UnsetType = UNSET
    """Code -> messages that were refused, since the process began."""
    staleness: dict[str, int] | UnsetType = UNSET
    """How many versions behind -> updates that counted, since the process began."""
    tiers: dict[str, int] | UnsetType = UNSET
    """The tier that devices name (empty: none) -> updates that counted, since the process began."""
    bytes: tuple[int, int] | UnsetType = UNSET
    """Payload received and sent, since the process began."""


class Second(NamedTuple):
    """What devices do at the end of a second, and what happened in it. In a simulation's replay it
    is a longer stretch of time."""

    time: float
    connected: int
    training: int
    uploading: int
    silent: int
    """With a task, and not connected: the task waits for them."""
    reports: int
    """Reports that counted."""
    received: int
    """Payload of updates, in bytes."""
    sent: int
    """Payload of models and bundles, in bytes."""
    ended: dict[str, int]
    """Cause -> tasks that ended by it without a report that counts."""


class Minute(NamedTuple):
    """A minute that is over. What devices do is that of its last second."""

    end: int
    """Unix time."""
    connected: int
    training: int
    uploading: int
    silent: int
    """With a task, and not connected: the task waits for them."""
    reports: int
    """Reports that counted."""
    received: int
    """Payload of updates, in bytes."""
    sent: int
    """Payload of models and bundles, in bytes."""
    ended: dict[str, int]
    """Cause -> tasks that ended by it without a report that counts."""
    present: int
    """The most devices that were connected, or away because they were told to be."""

    @property
    def hour(self) -> int:
        """The hour of its begin, of the hours since 1970."""
        return (self.end - 60) // 3600


class MemberRow(Struct, kw_only=True):
    """What a round says of one member of a family."""

    reports: int
    """Reports that counted."""
    metrics: Metrics
    """What its devices measured on their training examples."""
    change: float
    """L2 norm of its model's change."""


class RoundRow(Struct, kw_only=True):
    """A round that is over."""

    number: int
    outcome: Literal["committed", "abandoned"]
    version: int | None
    """Of the model that it made. None: it made none, or that is not known."""
    opened: float
    closed: float
    seconds: float
    """How long it was open. Time in which the run was paused does not count."""
    reports: int
    """Reports that counted."""
    partial: int
    """Those of them whose device did not finish its task."""
    dropped: dict[str, int]
    """Cause -> tasks that ended without a report that counts."""
    metrics: Metrics
    """What its devices measured on their training examples."""
    evaluated: bool
    """Whether they measured the model with which the round began; else the training."""
    change: float
    """L2 norm of the model's change."""
    up: int
    """Payload of updates, in bytes."""
    down: int
    """Payload of models and bundles, in bytes."""
    staleness: dict[str, float] | None
    """Of its updates: mean, max, and how many were stale. None: not known."""
    why: str
    """Why it was abandoned. Empty: it was not, or that is not known."""
    goal: int | UnsetType = UNSET
    """The reports that it wanted, where each round has its own goal."""
    members: dict[str, MemberRow] | UnsetType = UNSET
    """By name, where the run has several models."""
    regions: dict[str, RegionRow] | UnsetType = UNSET
    """By name, where rounds have regions."""
    computation: str | UnsetType = UNSET
    """Where a run without a model stood after it, in words."""


class EvaluationRow(Struct, kw_only=True):
    """An evaluation on devices that is over."""

    number: int
    version: int
    """Of the model that was measured."""
    valid: bool
    """Whether enough devices measured."""
    closed: float
    devices: int
    examples: int
    metrics: Metrics
    dropped: dict[str, int]
    """Cause -> tasks that ended without an answer."""


class HeldOutRow(NamedTuple):
    """What a model measures on the coordinator's held-out data."""

    version: int
    metrics: Metrics
    """Means over the data's examples."""


class NoteRow(NamedTuple):
    """A failed task, or a message that was refused."""

    time: float
    device: str
    cause: str
    text: str
    """What the device said, or was told. It may hold anything."""


class RunLists(Struct, kw_only=True):
    """What happened in a run, the oldest first; held-out results in the order in which they were
    measured."""

    samples: list[Second]
    """Of the last 15 minutes, since the process began."""
    minutes: list[Minute]
    """Of the last day."""
    rounds: list[RoundRow]
    evaluations: list[EvaluationRow]
    held_out: list[HeldOutRow]
    notes: list[NoteRow]


TOPICS: dict[str, tuple[Any, Any]] = {"host": (HostValues, HostLists), "run": (RunValues, RunLists)}
"""What a topic's name begins with -> its values, and its lists."""

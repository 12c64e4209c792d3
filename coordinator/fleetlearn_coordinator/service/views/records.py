"""The records that commands, the administrators' port and the live page show: structs of msgspec.
commands/schemas.py makes docs/operate/command-line.schema.json of them.

All times are Unix times in seconds. None: not known, or there is none. A later version may add
fields; who reads the JSON ignores those that he does not know.
"""

from __future__ import annotations

from typing import Any

import msgspec

from fleetlearn_coordinator.dashboard.live_records import PrivacySpent


class Trend(msgspec.Struct, frozen=True):
    """How one metric moved over the last committed rounds."""

    values: list[float]
    """One for each of the rounds that measured it, the oldest first."""
    change: float
    """The last value less the first."""


class RunGlance(msgspec.Struct, frozen=True, kw_only=True):
    """A run in a few words."""

    name: str
    state: str
    """``running``, ``paused``, ``draining``, ``stopped`` (what people want of one of several runs,
    and of a run alone whether its coordinator runs), ``finished``, ``failed``, ``died`` (its
    coordinator was killed, or its machine went down) or ``new`` (it has not begun)."""
    running: bool = False
    """Whether a coordinator serves the run now and answers devices."""
    plan: str = ""
    """The plan's file. Empty: the run was named by its data directory."""
    wanted: str | None = None
    """What one of several runs is to do. None: its host serves it alone."""
    failed: str = ""
    """Why the run was stopped by an error; empty: it was not."""
    error: str = ""
    """Why nothing more can be told of the run; empty: all is told."""
    population: str = "all"
    """Which devices serve it, in a few words."""
    address: str | None = None
    """Where its devices connect, or connected last."""
    version: int = 0
    """Of the newest model."""
    last_model: float | None = None
    """When the newest model was made."""
    finished: str | None = None
    """Why training is over. None: it is not."""
    phase: str | None = None
    """``gathering``, ``open``, ``committing`` or ``finished``; None where no coordinator runs."""
    round: int = 0
    """The last round that was opened; 0: none was."""
    opened: float | None = None
    """When the open round began. None: no round is open."""
    deadline: float | None = None
    """When the open round ends at the latest. None: no round is open, or no coordinator runs."""
    goal: int | None = None
    """Reports that the open round wants. None is open: those that a round wants; at most so many
    with round.goal_share."""
    accepted: int = 0
    """Reports that count, of the open round."""
    leases: int = 0
    """Tasks that run now."""
    dropped: dict[str, int] = {}
    """Cause -> tasks of the open round that ended without a report that counts."""
    connected: int = 0
    """Devices that are connected and may serve the run."""
    waits_for: str = ""
    """What the run waits for, in a sentence. Empty: nothing, or no coordinator runs."""
    metrics: dict[str, float] = {}
    """Of the last committed round that measured any: the model with which it began, or the
    training."""
    privacy: PrivacySpent | None = None
    """What a private run has spent. None: the plan has no [privacy]."""


class RoundView(msgspec.Struct, frozen=True, kw_only=True):
    """A round that is over."""

    number: int
    outcome: str
    """``committed`` or ``abandoned``."""
    opened: float
    closed: float
    seconds: float
    """How long it was open on the engine's clock, which stands still while the run is paused."""
    reports: int
    """Reports that count."""
    partial: int
    """Those of them whose device did not finish its task."""
    goal: int | None = None
    """Reports that it wanted, where each round has its own goal (round.goal_share). None: the plan
    says it."""
    lost: dict[str, int]
    """Cause -> tasks that ended without a report: ``lost``, ``late``, ``stalled``, ``stale``,
    ``failed: CODE``."""
    refused: dict[str, int]
    """Code -> updates that were rejected."""
    surplus: int
    """Tasks that were cancelled because the round had its reports."""
    loss: float | None
    metrics: dict[str, float]
    """With the loss."""
    norm: float
    """L2 norm of the model's change; 0: it was abandoned."""
    bytes_up: int
    """Payload that devices sent, in bytes."""
    bytes_down: int
    summary: dict[str, Any]
    """All that the ledger has of the round."""


class EvaluationView(msgspec.Struct, frozen=True):
    """An evaluation that is over."""

    number: int
    version: int
    """Of the model that was measured."""
    outcome: str
    """``valid``, or ``invalid`` where too few devices measured."""
    closed: float
    summary: dict[str, Any]


class RunView(RunGlance, frozen=True, kw_only=True):
    """A run, with where it is going."""

    data: str = ""
    """Where its data are."""
    seen: float | None = None
    """When its coordinator last wrote how it is."""
    began: float | None = None
    """When its coordinator began to serve it."""
    committed: int = 0
    """Rounds that were committed."""
    abandoned: int = 0
    trend: dict[str, Trend] = {}
    """By metric."""
    rounds_per_hour: float | None = None
    """Of the last committed rounds."""
    stop: dict[str, Any] = {}
    """The plan's [stop], as it was when the run was served last."""
    eta: float | None = None
    """When the run will have made stop.rounds models at this rate. Another stop rule may come
    earlier."""
    finished_by: dict[str, Any] | None = None
    """The stop rule that is met: rule, value, limit, metric, reason, version."""
    live: dict[str, Any] = {}
    """The coordinator's last look at itself."""
    rounds: list[RoundView] = []
    evaluations: list[EvaluationView] = []
    held_out: dict[int, dict[str, Any]] = {}
    """Version -> what its model measures on held-out data: examples, metrics."""


class HostView(msgspec.Struct, frozen=True, kw_only=True):
    """A coordinator with its runs."""

    time: float
    """Now, on the coordinator's clock."""
    running: bool = False
    """Whether a coordinator runs."""
    enrolled: int | None = None
    """Devices that are enrolled. None: whoever connects is a device."""
    connected: int = 0
    """Connected devices. One that may serve several runs counts for each."""
    runs: list[RunGlance] = []


class TurnView(msgspec.Struct, frozen=True):
    """A device's task in a round."""

    task: str
    device: str
    state: str
    """``assigned`` while it runs, ``accepted``, or the cause of its end."""
    member: str | None = None
    """Which of a family's models it is for. None: the run has one."""


class TurnsView(msgspec.Struct, frozen=True):
    """Who took part in a round, and what became of it."""

    round: int
    """0: no round is open."""
    opened: float | None
    tasks: list[TurnView]
    """Empty for a round that was closed long ago."""


class DeviceView(msgspec.Struct, frozen=True, kw_only=True):
    """A device that is enrolled, or that was seen."""

    device: str
    connected: bool = False
    since: float | None = None
    """Since when it has been connected."""
    seen: float | None = None
    """When it last connected, left or ended a task."""
    runs: list[str] = []
    """The runs that have seen it."""
    done: int = 0
    """Its reports that counted."""
    failed: int = 0
    """Its tasks that it failed, that stalled, or whose update was rejected."""
    lost: int = 0
    """Its tasks that ended because it was gone or too late."""
    error: str | None = None
    """Why its last task failed, as the device said it: ``CODE: text``."""
    error_at: float | None = None
    tags: list[str] = []
    """Its operator's, then its own."""
    runtime: str | None = None
    software: str | None = None
    tier: str | None = None
    enrolled: float | None = None
    """Since when it has had its credential or certificate. None: it is not enrolled."""
    revoked: float | None = None
    """When it was revoked. None: it was not, or it is enrolled again."""


class DeviceTask(msgspec.Struct, frozen=True):
    """A task of a device."""

    run: str
    task: str
    round: int
    """In which it was given while it runs, and then the one that its end counts for."""
    state: str
    """``assigned`` while it runs, ``accepted``, or the cause of its end."""
    member: str | None = None
    """Which of a family's models it is for. None: the run has one."""


class DeviceDetail(DeviceView, frozen=True, kw_only=True):
    """A device, with its last tasks."""

    tasks: list[DeviceTask] = []
    """Those of each run's last rounds, the newest first."""


class DevicePage(msgspec.Struct, frozen=True):
    """Some of the devices, of those that fit a search."""

    total: int
    """Devices there are."""
    connected: int
    """How many of all are connected."""
    matching: int
    """How many of all fit."""
    devices: list[DeviceView]


class Version(msgspec.Struct, frozen=True):
    """One version of a run's model."""

    version: int
    sha256: str
    """SHA-256 of the parameter vector's bytes."""
    made: float
    """Unix time."""
    round: int | None
    """The round that made it; None: the initial model, or a roll back."""
    restores: int | None
    """The earlier version that it is the model of, where a roll back made it."""
    change: float | None
    """L2 norm of its difference from the version before, where a round made it."""
    kept: str | None
    """Why it is kept: ``target`` (it met the target that ended the run, or is the best where
    patience ended the run), ``initial``, ``newest``, ``last``, ``every``, ``best``; ``needed``
    while something uses it. None: its file is gone."""
    size: int | None
    """Bytes of its file, with the server optimizer's state. None: it is gone."""
    metrics: dict[str, dict[str, float]]
    """Where from (``round``, ``evaluation``, ``held-out``) -> what was measured of it."""


class AuditView(msgspec.Struct, frozen=True):
    """A row of the audit log."""

    number: int
    at: float
    what: str
    about: dict[str, Any]
    hash: str
    """SHA-256, in hexadecimal, of the hash before and of this row's other fields."""


class EventView(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened."""

    at: float
    what: str
    """``round-opened``, ``round-closed``, ``task-given``, ``task-ended``, ``update-accepted``,
    ``device-connected``, ``device-left``, ``device-failed``, ``model-made``, ``evaluation``,
    ``finished`` or ``coordinator``."""
    text: str
    """For people."""
    run: str
    round: int | None = None
    device: str | None = None


class OperationView(msgspec.Struct, frozen=True):
    """Something that a person asked for."""

    what: str
    """``paused``, ``resumed``, ``drained``, ``stopped``, ``rolled back``, ``evaluation``,
    ``revoked`` or ``certificate revoked``."""
    name: str
    """Of the run or the device."""
    when: str
    """For people: when it is done."""
    version: int | None = None
    """The version whose model is to be the newest."""
    remark: str = ""
    """What is to be known of it, for people. Empty: nothing."""


class ArmView(msgspec.Struct, frozen=True):
    """What the devices of a canary, or those of the old run, did in one step."""

    given: int
    """Tasks that devices were given."""
    done: int
    """Tasks whose report counted."""
    causes: dict[str, int]
    """Cause of an end that was somebody's fault -> tasks: ``lost``, ``late``, ``stalled``,
    ``failed: CODE``, ``rejected: CODE``."""
    interrupted: int
    """Tasks during which the device's connection broke."""
    devices: int
    """Devices that were given tasks."""
    seconds: float | None
    """Median time that training took, to 9 %."""


class BoundView(msgspec.Struct, frozen=True):
    """What a canary must not exceed, and where it is."""

    name: str
    """``failures`` (all kinds), ``failed``, ``lost``, ``refused``, ``interrupted``: shares of the
    tasks; ``time``: median seconds of training."""
    canary: float | None
    """None: nothing is known yet."""
    control: float | None
    """The old run's."""
    limit: float | None
    beyond: bool
    """Whether it is certain enough that the canary's is beyond the limit."""
    text: str
    """For people."""


class CanaryView(msgspec.Struct, frozen=True, kw_only=True):
    """A canary: a run with a new plan, bundle or model, which a part of another run's devices
    serve."""

    name: str
    """Of the canary's run; from its end on of the run that took the old one's place."""
    of: str
    """The old run's name."""
    phase: str
    """``running``, ``back`` or ``finished``."""
    step: int
    """From 1 on."""
    steps: list[float]
    """Shares of the old run's devices, one for each step."""
    share: float
    """Of this step."""
    tags: list[str]
    """Tags of the devices that have it before the last step."""
    model: str
    """What it began with, for people."""
    take_over: str
    """The model of the last step: ``newest`` (the old run's) or ``own``."""
    began: float
    who: str
    """Who began it."""
    seconds: float
    """For which the step has been served."""
    next: str
    """What it waits for; at its end why it went back, or who finished it. For people."""
    canary: ArmView
    control: ArmView
    """The old run's devices in the same time; in the last step those of an earlier one."""
    bounds: list[BoundView]


class TokenView(msgspec.Struct, frozen=True):
    """A token that enrols devices."""

    token: str
    until: float
    link: str | None = None
    """The link by which browsers join. None: it was not asked for."""


class CheckView(msgspec.Struct, frozen=True):
    """What ``doctor`` found of one thing."""

    what: str
    state: str
    """``good``, ``warning`` (it works, and will not for long), ``bad``, or ``unknown``."""
    found: str
    """What is so, for people."""
    do: str = ""
    """What to do. Empty: nothing."""


class FilesView(msgspec.Struct, frozen=True):
    """What ``init`` wrote."""

    written: list[str]


class AdministratorView(msgspec.Struct, frozen=True):
    """Somebody who may operate the coordinator, or look at it."""

    name: str
    role: str
    """``view`` or ``operate``."""
    added: float
    until: float | None
    """When the token expires. None: it does not."""

"""The states of a session: ``link``, the connection, and ``work``, the task; each with the values
that it needs."""

from __future__ import annotations

from dataclasses import dataclass

from fleetlearn_protocol.messages import Content, Question, Reply, Report, Task

from fleetlearn_device.session.commands import Wanted


@dataclass(frozen=True, slots=True)
class Offline:
    """There is no connection."""


@dataclass(frozen=True, slots=True)
class CheckingIn:
    """The device is connected and has checked in. The welcome has not come."""


@dataclass(frozen=True, slots=True)
class Online:
    """The coordinator has welcomed the device."""

    heartbeat_interval: float
    """Seconds."""
    next_heartbeat: float
    """By the owner's clock."""
    chunk_bytes: int
    """Most bytes of a chunk's payload."""


@dataclass(frozen=True, slots=True)
class Closing:
    """Close was commanded; whatever still arrives is ignored."""


Link = Offline | CheckingIn | Online | Closing


@dataclass(frozen=True, slots=True)
class Idle:
    """The device has no task."""

    @property
    def task_id(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class Assignment:
    """A task that is not trained, or a question that is not answered, yet."""

    task: Task | Question
    deadline: float
    """When the result must have arrived, by the owner's clock."""
    arrived: tuple[str, ...] = ()
    """The place of each content that arrived to its last byte; twice where its SHA-256 was wrong
    the first time."""


@dataclass(frozen=True, slots=True)
class UnfinishedTask:
    """The task is not trained, or the question is not answered, yet."""

    assignment: Assignment

    @property
    def task_id(self) -> str:
        return self.assignment.task.task


@dataclass(frozen=True, slots=True)
class Locating(UnfinishedTask):
    """The device waits to know which contents are lacking; or to be online, or for an earlier
    training to end."""


@dataclass(frozen=True, slots=True)
class Fetching(UnfinishedTask):
    """The first of the wanted contents was asked for."""

    wanted: tuple[Wanted, ...]
    http: bool = False
    """The coordinator was told that it may name a URL."""
    content: Content | None = None
    """The coordinator's answer, once it has come."""
    end: int = 0
    """Where the next chunk begins."""


@dataclass(frozen=True, slots=True)
class Storing(UnfinishedTask):
    """The first of the wanted contents is complete, and its hash is being checked."""

    wanted: tuple[Wanted, ...]


@dataclass(frozen=True, slots=True)
class Training(UnfinishedTask):
    """The training runs, or the work on an answer."""


@dataclass(frozen=True, slots=True)
class AnswerReady:
    """The question is answered. The reply is sent on each connection until the coordinator says
    that
    it has it. The reply is not durable: a device that was restarted is asked again."""

    message: Reply

    @property
    def task_id(self) -> str:
        return self.message.task


@dataclass(frozen=True, slots=True)
class Saving:
    """The task is trained; its update is being made durable."""

    report: Report
    least_factor: float | None = None
    """Of an update that is masked later (``Unmasked``). None: the update is as it is sent."""

    @property
    def task_id(self) -> str:
        return self.report.task


@dataclass(frozen=True, slots=True)
class Unmasked:
    """The update is durable, on this disk alone. It is masked when the coordinator has said what it
    counts: the device asks on each connection."""

    task_id: str
    round: int
    least_factor: float
    """The smallest part of itself that the update may count for."""


@dataclass(frozen=True, slots=True)
class Masking(Unmasked):
    """The update is being masked and made durable so. What it counts does not change any more."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The update is durable."""

    report: Report
    reported_again: bool
    """It was reported a second time, since other bytes arrived the first time."""

    @property
    def task_id(self) -> str:
        return self.report.task


@dataclass(frozen=True, slots=True)
class Holding(Finished):
    """The update is reported as soon as the device is online. Its upload is not granted."""


@dataclass(frozen=True, slots=True)
class Uploading(Finished):
    """The update's chunks are being sent under this transfer number."""

    transfer: int


@dataclass(frozen=True, slots=True)
class Sent(Finished):
    """All chunks were sent. The acknowledgement has not come."""

    transfer: int


Work = (
    Idle
    | Locating
    | Fetching
    | Storing
    | Training
    | AnswerReady
    | Saving
    | Unmasked
    | Masking
    | Holding
    | Uploading
    | Sent
)

"""The ledger: the rows that a run must remember. sqlite_ledger.py keeps them in SQLite.

What happens in a run is a list of the rows below, prepared first and then written by one call of
``Ledger.write``: all of them count, or none. Nothing else changes the ledger. Other processes read
it by a ``LedgerReader``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from fleetlearn_protocol.messages import Report
from fleetlearn_protocol.secure.pairwise_messages import PAIRWISE

ROUNDS_KEPT = 100
"""Closed rounds whose tasks and reports are kept. Of older rounds only the summary is kept."""
DEVICES_KEPT = 200_000
"""Devices whose activity is kept, those that were seen last. More are kept for some rounds."""
PRIVACY, PRIVACY_COPIED = "privacy", "privacy_copied"
"""Keys of the metadata of a private run: what it has spent of its budget, as JSON; and when this
copy of it was made (Unix time), until somebody has said what was released since."""
EXCHANGES_KEPT = 100
"""Series of exchanges of a kind whose answers are kept. Of older ones only the summaries are
kept."""
KEPT_OF_KIND = {PAIRWISE: 1}
"""The same of kinds of which another number is kept: shares of secrets are of no use once their
round is over."""


class Metadata(NamedTuple):
    """A small value of the run under a name."""

    key: str
    value: str | float | None


class RoundOpened(NamedTuple):
    """A round began."""

    number: int
    at: float
    """Unix time."""
    goal: int | None = None
    """The reports that it wants. None: the plan says how many, for all rounds."""


class TaskGiven(NamedTuple):
    """A device was given a task."""

    task: str
    round: int
    device: str
    version: int
    """Of the model that the task begins from."""
    member: str | None = None
    """Which of a family's models the task is for. None: the run has one model."""
    region: str | None = None
    """In which it was given. None: rounds have no regions."""


class TaskEnded(NamedTuple):
    """A task ended without an accepted report."""

    task: str
    cause: str
    round: int | None = None
    """The round that it counts for, if that is another than the one in which it was given."""


class TaskRevived(NamedTuple):
    """A task that had ended runs again: its device returned with its work done."""

    task: str


class ReportAccepted(NamedTuple):
    """A report and its update are durable. They count for their round once the engine has counted
    them."""

    report: Report
    weight: int
    spool_file: int
    """The file that holds its update's bytes."""
    staleness: int = 0
    """How many versions the model of its round is newer than the one that its task began from."""
    round: int | None = None
    """The round that it counts for, if that is another than the one in which its task was given."""
    norms: tuple[float, float] | None = None
    """The L2 norms of its update and of the update's trained parameters. None: the plan has no use
    for them."""


class AggregatorSaved(NamedTuple):
    """The aggregator's state was written to its file. It holds the updates of ``tasks``: their
    spool files are free."""

    turn: int
    """Which of the two files has it."""
    crc32: int
    """CRC-32 of that file's bytes."""
    tasks: Sequence[str]
    layout: str
    """What the file holds, for ``Store.load_aggregator``: which tensors there are depends on the
    updates."""


class ModelMade(NamedTuple):
    """The model of a version was made; its file is written already."""

    version: int
    sha256: str
    """SHA-256 of the parameter vector's bytes."""
    round: int
    """The round that made it; 0: none did."""
    at: float
    """Unix time."""
    restores: int | None = None
    """The earlier version that it is the model of, where a roll back made it."""
    optimizer: str | None = None
    """The server optimizer whose state is beside it. None: an earlier version of this package wrote
    it."""
    state_crc32: int | None = None
    """CRC-32 of that state. None: the same."""


class DeviceRemembered(NamedTuple):
    """What selection remembers of a device from now on, in place of what it remembered before."""

    device: str
    given: int
    """The round in which it was given its last task."""
    tasks: int
    """How many tasks it was given."""
    labels: Sequence[str]
    """Its labels that have a quota."""
    reported: int | None
    """The round for which its last report counted, and of that report ..."""
    loss: float | None
    """... the mean training loss,"""
    examples: int | None
    """the examples,"""
    seconds: float | None
    """and the time that its task took."""


class DeviceActivity(NamedTuple):
    """What was seen of a device since the last such row of it. What a reader gets of a device is
    all such rows of it together. None: nothing new, and to a reader: never known."""

    device: str
    seen: float | None = None
    """When the device last connected, left, or ended a task (Unix time)."""
    connected: float | None = None
    """Since when it has been connected (Unix time). None, also in a later row: it is not. A
    coordinator that was killed could not write that."""
    runtime: str | None = None
    """What trains there, as the device says."""
    software: str | None = None
    """The SDK and its version, as the device says."""
    tier: str | None = None
    tags: Sequence[str] | None = None
    done: int = 0
    """Its reports that counted."""
    failed: int = 0
    """Its tasks that it failed, that stalled, or whose update was rejected."""
    lost: int = 0
    """Its tasks that ended because it was gone or too late."""
    error: str | None = None
    """Why its last task failed, in the device's words where it has said so."""
    error_at: float | None = None
    """When that was (Unix time)."""


class TiedVectorsCounted(NamedTuple):
    """From now on a device's next task goes on from the tied vectors that it made with ``task``."""

    device: str
    task: str


class TiedVectorsForgotten(NamedTuple):
    """Every device's next task goes on from no tied vectors."""


class ParticipationCounted(NamedTuple):
    """A device took part in a release of a private run: a report of it is in the model that this
    batch makes."""

    device: str
    release: int
    """The number of the release, from 1 in the order of commits."""
    since: int
    """The first release of the segment: participations are counted from there on."""


class RoundClosed(NamedTuple):
    """A round ended. No spool file belongs to it any more."""

    number: int
    outcome: str
    """``committed`` or ``abandoned``."""
    summary: Mapping[str, Any]
    at: float
    """Unix time."""


class ExchangeBegun(NamedTuple):
    """An exchange with devices began: the first one of its series, or a later one."""

    kind: str
    number: int
    """Of the series. Each kind counts from 1."""
    phase: int
    """Which exchange of the series, from 1."""
    version: int
    """Of the model that the series is about."""
    members: Sequence[str] | None
    """The devices that alone may answer. None: every device that can."""
    request: str | None
    """The name of the request that the series answers; None: it was due."""
    at: float
    """Unix time."""


class DeviceAsked(NamedTuple):
    """A device was asked in an exchange."""

    task: str
    kind: str
    number: int
    phase: int
    """The three as in ``ExchangeBegun``."""
    device: str
    note: str
    """What the exchange has to know of the device beside its answer, such as its tier."""


class AnswerDropped(NamedTuple):
    """A task in an exchange ended without an answer that counts."""

    task: str
    cause: str


class AnswerAccepted(NamedTuple):
    """What a device answered in an exchange is durable."""

    task: str
    content: bytes
    """The content of its reply, as JSON (the protocol's ``EXCHANGE_KINDS``)."""


class ExchangeEnded(NamedTuple):
    """An exchange ended."""

    kind: str
    number: int
    phase: int
    """The three as in ``ExchangeBegun``."""
    outcome: str
    """``valid``, or ``invalid`` where too few devices answered."""
    summary: Mapping[str, Any]
    at: float
    """Unix time."""


Row: TypeAlias = (
    Metadata
    | RoundOpened
    | TaskGiven
    | TaskEnded
    | TaskRevived
    | ReportAccepted
    | AggregatorSaved
    | ModelMade
    | DeviceRemembered
    | DeviceActivity
    | TiedVectorsCounted
    | TiedVectorsForgotten
    | ParticipationCounted
    | RoundClosed
    | ExchangeBegun
    | DeviceAsked
    | AnswerDropped
    | AnswerAccepted
    | ExchangeEnded
)


class SavedTask(NamedTuple):
    """A task that runs, or that ended because its device was lost."""

    task: str
    device: str
    version: int | None
    """Of the model that it began from. None: an earlier version of this package gave it; its
    round's model."""
    member: str | None = None
    region: str | None = None
    """The two as in ``TaskGiven``."""


class SavedReport(NamedTuple):
    """An accepted report of a round that is not closed."""

    task: str
    device: str
    report: Report
    weight: int
    spool_file: int | None
    """The file that holds its update's bytes; None where the aggregator's saved state has it."""
    staleness: int
    round: int
    """The round that it counts for."""
    norms: tuple[float, float] | None
    """As in ``ReportAccepted``."""
    version: int | None
    """Of the model that its task began from. None: an earlier version of this package gave it."""
    member: str | None = None
    region: str | None = None
    """The two as in ``TaskGiven``."""


class SavedParticipations(NamedTuple):
    """How a device took part in the releases of a private run."""

    device: str
    last: int
    """The last release that it took part in."""
    times: int
    """How often it took part in the segment of that release."""
    since: int
    """The first release of that segment."""


class Unfinished(NamedTuple):
    """What a process left behind that was going on."""

    round: int | None
    """The round that was opened and not closed, if there is one."""
    leases: list[SavedTask]
    """The tasks that run."""
    lost: list[SavedTask]
    """Tasks of earlier rounds that ended because their devices were lost."""
    dropped: list[tuple[str, str, str]]
    """(task, device, cause) of the tasks that ended without an accepted report, in the open round
    or since the last."""
    reports: list[SavedReport]
    """Of the open round, and of the rounds after it."""
    goal: int | None = None
    """Of the open round, as in ``RoundOpened``."""


class SavedAnswer(NamedTuple):
    """A device's turn in an exchange."""

    task: str
    device: str
    note: str
    """As in ``DeviceAsked``."""
    state: str
    """``assigned`` while it runs, ``accepted``, or the cause of its end."""
    content: bytes | None
    """As in ``AnswerAccepted``. None: the device has not answered."""


class SavedPhase(NamedTuple):
    """An exchange of a series."""

    phase: int
    members: list[str] | None
    """As in ``ExchangeBegun``."""
    is_open: bool
    is_valid: bool
    """Whether enough devices answered, where it is over."""
    answers: list[SavedAnswer]
    """By the names of their tasks."""


class LastSeries(NamedTuple):
    """The series of exchanges of a kind that was opened last."""

    number: int
    version: int
    request: str | None
    phases: list[SavedPhase]
    """In order. The last one alone may be open."""


class Ledger(Protocol):
    """The rows of one run, for the coordinator that holds the run's lock. No other process writes
    them.

    One thread at a time may call it. Each read returns what all batches so far left, those of
    earlier processes included. What is returned is the caller's: changing it changes nothing here.

    Every method may raise StoreUnavailableError. What was being written then counts as a whole or
    not at all, and the caller does not know which: the process has to end, and the next one reads
    what counts.
    """

    where: str
    """Its name in the run's storage, for messages to people."""
    is_slow: bool
    """Whether a call may take so long, such as over a network, that the event loop must not wait
    for it. While the run is served, only ``write`` is then called, in a thread of its own."""
    restore_advice: str
    """What to do where it is lost, for people: a sentence that says what to put back from a
    backup."""

    @property
    def is_new(self) -> bool:
        """Whether there is no ledger yet: ``create`` comes before everything else."""

    def create(self, values: Mapping[str, str]) -> None:
        """Make the ledger of a new run with these first ``Metadata``, in one batch. Call where
        ``is_new``, once."""

    def write(self, rows: Sequence[Row]) -> None:
        """Write one batch of rows, in their order: all of them count, or none if this raises.

        When it returns, the batch survives the death of this process (``durable = "process"``), or
        of its machine (``"power"``). A batch counts before each later one: where a later batch is
        found, so are all before it. Rows change what earlier rows of the same batch made. A row
        about the end of a task, round or exchange that is not known changes nothing. A model's row
        takes the place of an earlier one of its version. Raises DuplicateRowError where a task is
        given, a device asked, or a round or exchange begun, that is there already.
        """

    def get(self, key: str) -> Any:
        """Return the value of the last ``Metadata`` row with this key, or None if there is none.
        ``AggregatorSaved`` also sets ``sum`` (its turn), ``sum_crc32`` and ``sum_layout``;
        ``RoundOpened`` and ``RoundClosed`` set ``sum`` to None."""

    def newest_model(self) -> tuple[int, str] | None:
        """Return the newest model's version and SHA-256, or None before the first model."""

    def last_round(self) -> int:
        """Return the number of the last round that was opened, or 0 before the first."""

    def last_committed(self) -> dict[str, Any] | None:
        """Return the summary of the last round that was committed, or None before the first. Raises
        StoreError (damaged)."""

    def committed_rounds(self, most: int) -> list[tuple[int, dict[str, Any]]]:
        """Return the last rounds that were committed, at most this many, the oldest first: the
        model version that each made, and its summary. Raises StoreError (damaged)."""

    def remembered_devices(self) -> list[DeviceRemembered]:
        """Return what selection remembers of each device (the last row of each), the device that
        was given its last task longest ago first, and by name among those of one round."""

    def tied_tasks(self) -> dict[str, str]:
        """Return device -> the task whose tied vectors the device's next task goes on from
        (``TiedVectorsCounted``). Devices without one are left out."""

    def participations(self) -> list[SavedParticipations]:
        """Return how each device took part (``ParticipationCounted``), by name. None is ever
        forgotten, however many devices there are."""

    def known_models(self) -> list[ModelMade]:
        """Return what is known of each model, the oldest first. Models are known for ever, also
        where their bytes are gone."""

    def rolled_back(self) -> int:
        """Return the newest version that a roll back made, or 0."""

    def accepted_updates(self) -> Sequence[tuple[int, str]]:
        """Return (round, device) of each report that counts, in the order of rounds: for the open
        round, for later ones and at least for the last ROUNDS_KEPT that were closed
        (``participation_rates.WINDOW``)."""

    def unfinished(self, lost_since: int | None) -> Unfinished:
        """Return what an earlier process left, with tasks in the order of their versions and then
        of their names. Raises StoreError (damaged).

        ``lost_since``: tasks that run since earlier rounds are among the leases, and tasks of this
        model version or a newer one among the lost. None: tasks of the open round alone, and no
        lost ones.
        """

    def last_series(self, kind: str) -> LastSeries | None:
        """Return the series of exchanges of this kind that was opened last, or None before the
        first. Raises StoreError (damaged)."""

    def last_valid_exchange(self, kind: str, since: int = 0) -> tuple[int, dict[str, Any]] | None:
        """Return the version and the summary of the last exchange of this kind, about version
        ``since`` or a newer one, that was valid, or None. Raises StoreError (damaged)."""

    def close(self) -> None:
        """Free what it holds. Call once; nothing may be asked afterwards."""

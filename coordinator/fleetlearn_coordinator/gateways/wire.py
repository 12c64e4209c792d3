"""What a gateway and the engine process say to each other.

Everything here is names, numbers, bytes and the protocol's own messages: any bus can carry it. One
*batch* is a list of messages, encoded once for each turn of the event loop, as MessagePack. The
batches of one side arrive in order, or the bus is lost; then the gateway says hello again.

A *connection number* is given by the gateway to each connection that asks to check in, and never
again: what is said of a connection that the device has left meanwhile is recognised and dropped. A
*question* has a number too. A gateway asks again what was not answered when the bus was lost, so
each question may come twice: its answer is then the same, or that of a task which is over.

Gateways and engine processes of two releases speak with each other: wire_version.py has what may
be changed here.

Where the engine process serves several runs, ``run`` says which of them a message is about: what
stands before the first dash of its tasks' names. It is empty where there is one run.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec
from fleetlearn_protocol.errors import Code
from fleetlearn_protocol.messages import (
    CheckIn,
    ComeBack,
    FromCoordinator,
    OwnEncoding,
    Reply,
    Report,
    Welcome,
)

from fleetlearn_coordinator.aggregation.partial_sum import PartialSum, SumsToMake, UpdateToAdd
from fleetlearn_coordinator.conversation.begun import BegunUpload


class WireMessage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all messages: an array, whose first element is the tag."""


class LentFile(WireMessage, frozen=True, tag=False):
    """A spool file that a gateway may write."""

    number: int
    mark: int
    """Which of the files that had this number one after the other."""
    run: str = ""


# --- From a gateway


class PresentDevice(WireMessage, frozen=True, tag=False):
    """A device that is connected to a gateway which says hello."""

    connection: int
    check_in: CheckIn
    """With the task that the device has, if any, as ``held``."""
    address: str
    """From which it connected."""
    waits: bool
    """Whether it is the coordinator's turn to act."""


class AskEnd(WireMessage, frozen=True, tag=8):
    """The device failed its task, or its update was rejected. Answered, so that it is not lost with
    the bus."""

    question: int
    device: str
    task: str
    cause: str
    text: str | None


class GatewayHello(WireMessage, frozen=True, tag=1):
    """The first message of a gateway on each bus: all that the engine process must know of it. The
    answer is ``Setup``."""

    gateway: int
    """Its number, from 0 on."""
    process: int
    """Its process number, for people."""
    software: str
    """Its release, for people."""
    address: str
    """Where it listens, as a URL."""
    files: tuple[LentFile, ...]
    """The spool files that it was lent by this engine process or an earlier one."""
    asked: tuple[LentFile, ...]
    """Of these, those whose updates it has asked to save, without an answer."""
    ended: tuple[AskEnd, ...]
    """Tasks that devices failed meanwhile: those devices wait for others."""
    devices: tuple[PresentDevice, ...]
    wire: int = 1
    """Its ``WIRE`` (wire_version.py)."""
    oldest: int = 1
    """Its ``OLDEST``."""
    apart: bool = False
    """Whether it is on another machine: bytes go through the object store."""
    region: str | None = None
    """Of its devices, where a plan has regions. None: it has none."""


class AskAdmission(WireMessage, frozen=True, tag=2):
    """May this device stay? If so it has joined the run."""

    question: int
    connection: int
    address: str
    check_in: CheckIn


class AskAnnounce(WireMessage, frozen=True, tag=3):
    """Is the update of this report wanted? The answer is ``Announcement``."""

    question: int
    connection: int
    device: str
    report: Report


class AskFactor(WireMessage, frozen=True, tag=4):
    """What does staleness leave of the update of this task? The answer is a number, or None where
    its report has counted."""

    question: int
    connection: int
    device: str
    task: str


class AskSave(WireMessage, frozen=True, tag=5):
    """Make the update in this spool file durable, and count its report. Also asked for a device
    that has gone meanwhile."""

    question: int
    device: str
    report: Report
    file: int
    largest: dict[str, float]


class AskCounted(WireMessage, frozen=True, tag=6):
    """Does the device's report of this task count?"""

    question: int
    device: str
    task: str


class AskAnswered(WireMessage, frozen=True, tag=7):
    """Make what the device answered in an exchange durable, and count it."""

    question: int
    device: str
    reply: Reply


class AskKeep(WireMessage, frozen=True, tag=9):
    """A connection broke in the middle of this upload: the engine process keeps it, with its spool
    file. Answered, so that it is not lost with the bus."""

    question: int
    begun: BegunUpload


class DeviceGone(WireMessage, frozen=True, tag=10):
    """The connection is gone."""

    connection: int


class DeviceRefused(WireMessage, frozen=True, tag=11):
    """A message of the device was refused."""

    connection: int
    code: Code
    text: str


class StepsOf(WireMessage, frozen=True, tag=12):
    """The device has trained this many steps of its task."""

    connection: int
    task: str | None
    steps: int


class BytesIn(WireMessage, frozen=True, tag=13):
    """``size`` bytes came, which bring the upload of the task up to byte ``end``."""

    connection: int
    task: str
    end: int
    size: int


class BytesOut(WireMessage, frozen=True, tag=14):
    """``size`` bytes went, which bring the content with this hash up to about byte ``end``."""

    connection: int
    sha256: str
    end: int
    size: int


class TurnOfEngine(WireMessage, frozen=True, tag=15):
    """It is the coordinator's turn to act for the device, or the device's again."""

    connection: int
    waits: bool


class GatewayFigures(WireMessage, frozen=True, tag=16):
    """What the gateway is like, once a second."""

    open: int
    """Connections, with newcomers."""
    unsent: int
    longest: int
    refused: dict[str, int]
    arriving: int
    """Uploads that have a place."""
    waiting: int
    """Uploads that wait for one."""
    lag: float
    """How late its event loop was since the last figures, in seconds, at most."""
    certificate_ends: float | None
    of_runs: dict[str, tuple[int, int]] = {}
    """Of several runs, those with uploads: how many have a place, and how many wait for one."""


class GatewayFailed(WireMessage, frozen=True, tag=17):
    """An error of the gateway that no device caused, such as a full disk: the run must end."""

    text: str
    run: str = ""


class PartialSumMade(WireMessage, frozen=True, tag=18):
    """A partial sum is in its file."""

    number: int
    made: PartialSum | None
    """None: it could not be made."""
    text: str
    """Why not."""
    run: str = ""


class AskKnown(WireMessage, frozen=True, tag=19):
    """May this device connect to a gateway on another machine? The answer is ``DeviceKnown`` or
    ``DeviceUnknown``. Not asked again where the bus is lost."""

    question: int
    credential: str
    """SHA-256 of it, as of the other secrets; empty: none."""
    device: str
    token: str
    next: str
    certified: tuple[str, float] | None
    """The device that its certificate is of, and the Unix time from which it is valid."""


class AskEnrolled(WireMessage, frozen=True, tag=20):
    """Who of these devices is enrolled still? The answer is ``EnrolledNow``. Not asked again where
    the bus is lost."""

    devices: tuple[str, ...]


# --- To a gateway


class Setup(WireMessage, frozen=True, tag=1):
    """The answer to ``GatewayHello``, unless that is ``GatewayRefused``."""

    bundles: tuple[str, ...]
    """The folders or files of the run's bundles."""
    contents: str
    """The folder of what devices fetch, whose files are named by their SHA-256."""
    spool: str
    """The folder with the spool files."""
    lost: tuple[int, ...]
    """Spool files of the hello that are others' now."""
    page: int | None
    """The port of the coordinator's own page, which may connect."""
    shown: str | None
    """What people read in place of what a device says of its data. None: they read that."""
    sums: str
    """The folder of partial sums, whose files are named by their numbers."""
    wire: int = 1
    """The version that is spoken on this bus."""
    objects: str = ""
    """For a gateway that is apart: the URL below which the run's objects are. It needs none of the
    folders."""
    stored_bundles: tuple[str, ...] = ()
    """The bundles' SHA-256. Their files are served as objects."""
    first_put: int = 0
    """The first number of the updates that it puts (storage/arrived.py)."""
    run: str = ""
    name: str = ""
    """The run's name, of several."""
    knows_devices: bool = False
    """Whether devices have to be enrolled."""
    adds_up: bool = False
    """Whether the gateway, which is apart, may be asked to add up what it stores."""
    encoding: OwnEncoding | None = None
    """The run's own encoding. None: it has none."""
    residual: bool = False
    """Whether devices keep what that leaves out."""


class Admission(WireMessage, frozen=True, tag=2):
    """The device may stay, and has joined the run."""

    question: int
    welcome: Welcome
    download: int
    upload: int


class Dismissal(WireMessage, frozen=True, tag=3):
    """The device is sent away."""

    question: int
    come_back: ComeBack


class Announcement(WireMessage, frozen=True, tag=4):
    """Whether the update of a report is wanted."""

    question: int
    wanted: bool
    elements: dict[str, int]
    """Name of each of its parts -> its elements."""
    begun: BegunUpload | None
    """What is here of the same bytes. Its spool file is lent with this."""
    mark: int
    """The mark of that file."""


class Answered(WireMessage, frozen=True, tag=5):
    """The answer to any other question."""

    question: int
    value: bool | float | None


class QuestionRefused(WireMessage, frozen=True, tag=6):
    """The ProtocolError with which a question ended."""

    question: int
    code: Code
    text: str
    is_limit: bool
    """It is a PrivacyLimitError."""


class TellDevice(WireMessage, frozen=True, tag=7):
    """Send this to the device."""

    connection: int
    message: FromCoordinator
    elements: dict[str, int]
    """Of a task or a question: name of each part of its report -> its elements."""


class ReplaceDevice(WireMessage, frozen=True, tag=8):
    """The device has connected again, from this address, to another gateway."""

    connection: int
    address: str


class PublishContents(WireMessage, frozen=True, tag=9):
    """Devices may fetch these contents, by SHA-256, and no others."""

    newest: tuple[str, ...]
    older: tuple[str, ...]
    urls: dict[str, str] = {}
    """SHA-256 of a content -> where devices can fetch it by HTTP, if it is in the object store.
    Empty (COMING, transfers/elsewhere.py): it will be there soon."""
    run: str = ""


class PublishOlder(WireMessage, frozen=True, tag=10):
    """Devices may fetch this content too, until others are published."""

    sha256: str
    run: str = ""


class LendFiles(WireMessage, frozen=True, tag=11):
    """The gateway may write these spool files too."""

    files: tuple[LentFile, ...]
    run: str = ""


class TasksOver(WireMessage, frozen=True, tag=12):
    """A round is over: forget what is remembered of tasks that no connected device has."""

    run: str = ""


class PageMayConnect(WireMessage, frozen=True, tag=13):
    """The coordinator's own page, on this port, may connect."""

    port: int


class BeginSums(WireMessage, frozen=True, tag=14):
    """Begin a partial sum: it has no updates yet."""

    number: int
    sums: SumsToMake
    run: str = ""


class AddToSums(WireMessage, frozen=True, tag=15):
    """Add this update, whose report counts, to a partial sum."""

    number: int
    update: UpdateToAdd
    run: str = ""


class CollectSums(WireMessage, frozen=True, tag=16):
    """Write the partial sum into its file, and forget it. The answer is ``PartialSumMade``."""

    number: int
    run: str = ""


class ForgetSums(WireMessage, frozen=True, tag=17):
    """The partial sum is not needed any more."""

    number: int
    run: str = ""


class GatewayRefused(WireMessage, frozen=True, tag=18):
    """The answer to the hello of a gateway that speaks no version in common. The bus ends."""

    text: str
    """Why, and what to do."""


class SeveralRuns(WireMessage, frozen=True, tag=20):
    """The answer to ``GatewayHello`` where the engine process serves several runs. A ``Setup`` for
    each follows, now or when a run is begun."""


class RunOver(WireMessage, frozen=True, tag=21):
    """The run is not served any more. Its devices were told."""

    run: str


class ServesRun(WireMessage, frozen=True, tag=22):
    """From now on the device serves this run, of several."""

    connection: int
    run: str
    is_first: bool
    """It serves it for the first time on this connection."""
    download: int
    upload: int
    """Bytes that it may have to fetch, and to send, for its first task."""


class EngineAlive(WireMessage, frozen=True, tag=19):
    """The engine process does not stand still. Said once a second, whatever else it says."""


class DeviceKnown(WireMessage, frozen=True, tag=23):
    """The device may connect."""

    question: int
    device: str
    tags: tuple[str, ...]
    enrolled: float
    """Unix time."""


class DeviceUnknown(WireMessage, frozen=True, tag=24):
    """The device may not connect."""

    question: int
    status: int
    """Of HTTP."""
    text: str
    cause: str
    """One of ``network/gate.py::CAUSES``."""


class EnrolmentsChanged(WireMessage, frozen=True, tag=25):
    """Devices were enrolled or revoked: a gateway on another machine asks about its own."""


class EnrolledNow(WireMessage, frozen=True, tag=26):
    """Device -> Unix time of its enrolment, of those that were asked about and are enrolled."""

    asked: tuple[str, ...]
    enrolled: dict[str, float]


ToEngine: TypeAlias = (
    GatewayHello
    | AskAdmission
    | AskAnnounce
    | AskFactor
    | AskSave
    | AskCounted
    | AskAnswered
    | AskEnd
    | AskKeep
    | DeviceGone
    | DeviceRefused
    | StepsOf
    | BytesIn
    | BytesOut
    | TurnOfEngine
    | GatewayFigures
    | GatewayFailed
    | PartialSumMade
    | AskKnown
    | AskEnrolled
)
ToGateway: TypeAlias = (
    Setup
    | Admission
    | Dismissal
    | Announcement
    | Answered
    | QuestionRefused
    | TellDevice
    | ReplaceDevice
    | PublishContents
    | PublishOlder
    | LendFiles
    | TasksOver
    | PageMayConnect
    | BeginSums
    | AddToSums
    | CollectSums
    | ForgetSums
    | GatewayRefused
    | EngineAlive
    | SeveralRuns
    | RunOver
    | ServesRun
    | DeviceKnown
    | DeviceUnknown
    | EnrolmentsChanged
    | EnrolledNow
)

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[list[ToEngine]] = msgspec.msgpack.Decoder(list[ToEngine])
_to_gateway: msgspec.msgpack.Decoder[list[ToGateway]] = msgspec.msgpack.Decoder(list[ToGateway])


def encode_batch(messages: list[ToEngine] | list[ToGateway]) -> bytes:
    """Return the batch of these messages."""
    return _encoder.encode(messages)


def decode_for_engine(batch: bytes) -> list[ToEngine]:
    """Return a gateway's messages. Raises msgspec.DecodeError where another version wrote them."""
    return _to_engine.decode(batch)


def decode_for_gateway(batch: bytes) -> list[ToGateway]:
    """Return the engine's messages. Raises msgspec.DecodeError where another version wrote them."""
    return _to_gateway.decode(batch)

"""The control messages: small tagged JSON objects in text frames. PROTOCOL.md is the specification.

Every field is bounded here, so that a message that decodes is a message that can be handled: its
strings are short, its numbers finite and in range. What only the conversation can judge (is it that
device's turn, does that task exist) is judged by the engine and the session.

Fields that a receiver does not know are ignored, so that a later version may add some.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta

from fleetlearn_protocol.errors import MAX_TEXT, Code, ProtocolError
from fleetlearn_protocol.frames import CHUNK_BYTES

PROTOCOL_VERSION = 3
"""The newest version of the protocol that both sides speak (section 10)."""
OLDEST_PROTOCOL_VERSION = 1
"""The oldest version that they speak too."""
PROTOCOL_NAME = "fleetlearn.v1"
"""The WebSocket subprotocol (Sec-WebSocket-Protocol) that both sides name in the handshake."""
MAX_CONTROL_BYTES = 64 * 1024
"""Largest control message, in bytes of UTF-8."""
MAX_VECTOR_BYTES = 2**33
"""Most bytes of a vector, and of all parts of a report together."""
MAX_PIECES = 512
"""Most pieces of a selection."""
MOST_ROWS = 8192
"""Most rows of a selection: more would not fit into a control message. A device that needs more
fetches the whole model."""
MAX_SELECTED_BYTES = 2**26
"""Most bytes of what is selected. Whoever needs more fetches the whole content."""
MAX_VECTORS = 8
"""Most vectors of a task, and most parts of a report."""
MODEL = "model"
"""Name of the vector that holds the round's model."""
UPDATE = "update"
"""Name of the part that holds the update."""
SUMS = "sums"
"""Name of the part that holds what a device adds up of its rows, in a task of a computation."""
CONTROL = "control"
"""SCAFFOLD's control variates. Name of the vector that holds the server's, and of the part that
holds how the device's changed."""
BUFFERS = "buffers"
"""Name of the part that holds the values of the model's buffers after training, where the model has
any."""
ROWS = "rows"
"""Name of the part that says which rows of the bundle's sparse tables the update has."""
ROW_ELEMENTS = "row elements"
"""Not a part's name: how many elements of the model belong to one of those rows."""
PLAIN = "plain"
"""Name of the algorithm that every device knows: training, without anything beside the model and
the update."""
MAX_EXAMPLES = 2**31
MAX_EXACT = 2**53 - 1
"""Largest integer in any message: a browser's numbers are doubles, and hold no larger one
exactly."""
MAX_SIGNED = 32 * 1024
"""Most characters of a message that is signed: half of a control message, which has it as a
string."""
MAX_KEYS = 8
"""Most public keys that a device trusts."""
MOST_REPORTS = 2**16 + 1
"""Most masked updates in one sum: with 16 bits an element, more cannot be added modulo 2^32."""
MOST_NEIGHBOURS = 96
"""Most devices that one agrees on masks with: with the longest names, what is said of more does not
fit into a signed message."""
MAX_REFUSALS = 32
"""Refused messages, by the device's fault and not forgotten yet, after which the coordinator closes
a connection."""
SILENT_HEARTBEATS = 3
"""Heartbeats of silence after which the coordinator ends a connection."""

Identifier = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
"""A device, task, vector, part or encoding: 1 to 64 characters that are safe in a file name."""
FunctionName = Annotated[
    str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,99}(:[A-Za-z_][A-Za-z0-9_]{0,99})?\Z")
]
"""A function that its owner allows: a short name, or `module:function`."""
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
"""SHA-256 in lower-case hexadecimal."""
Bytes32 = Annotated[str, Meta(pattern=r"^([0-9a-f]{2}){32}\Z")]
"""32 bytes in lower-case hexadecimal: a public key, or random."""
Bytes64 = Annotated[str, Meta(pattern=r"^([0-9a-f]{2}){64}\Z")]
"""64 bytes in lower-case hexadecimal: a signature."""
Bytes80 = Annotated[str, Meta(pattern=r"^([0-9a-f]{2}){80}\Z")]
"""80 bytes in lower-case hexadecimal: a sealed seed."""
Bytes82 = Annotated[str, Meta(pattern=r"^([0-9a-f]{2}){82}\Z")]
"""82 bytes in lower-case hexadecimal: two shares, sealed by one device for another."""
Url = Annotated[str, Meta(pattern=r"^https?://[!-~]{1,4088}\Z")]
"""Where something is for HTTP: printable ASCII, without a space."""
Checksum = Annotated[int, Meta(ge=0, le=2**32 - 1)]
"""CRC-32 as in zlib, PNG and Ethernet."""
Name = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,127}\Z")]
"""A metric or hyper-parameter."""
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
"""For people: shown and logged, never parsed."""
Label = Annotated[str, Meta(max_length=100)]
"""A short text for people."""
Number = Annotated[float, Meta(ge=-1e30, le=1e30)]
"""A finite number (JSON has neither NaN nor infinity, and 1e999 is out of bounds)."""
Positive = Annotated[float, Meta(ge=1e-30, le=1e30)]
"""A finite number above 0."""
Share = Annotated[float, Meta(ge=1e-30, le=1)]
"""A number above 0, at most 1."""
Seconds = Annotated[float, Meta(ge=0, le=366 * 86400.0)]
"""A duration, at most a leap year."""
Offset = Annotated[int, Meta(ge=0, le=MAX_VECTOR_BYTES)]
"""A place in a content or an upload, in bytes."""
VectorSize = Annotated[int, Meta(ge=1, le=MAX_VECTOR_BYTES)]
Count = Annotated[int, Meta(ge=0, le=MAX_EXACT)]
"""A non-negative integer that a browser holds exactly."""
RoundNumber = Annotated[int, Meta(ge=0, le=2**31)]
Transfer = Annotated[int, Meta(ge=1, le=2**32 - 1)]
Numbers = Annotated[dict[Name, Number], Meta(max_length=64)]
"""Numbers by name."""
Fields = Annotated[dict[Name, Any], Meta(max_length=64)]
"""An object whose fields are those of a kind of exchange (section 4, "Exchanges")."""
Tags = Annotated[tuple[Identifier, ...], Meta(max_length=16)]
Version = Annotated[int, Meta(ge=0, le=10**6)]
FailureCode = Literal[
    "diverged",
    "out-of-time",
    "out-of-memory",
    "killed",
    "disk-full",
    "bad-bundle",
    "bad-data",
    "unsupported",
    "untrusted",
    "runtime-error",
    "paused",
    "stopping",
]
"""Why a device gives its task back."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=False, tag_field="type"):
    """Base of all messages; ``type`` is the tag."""


class Held(msgspec.Struct, frozen=True):
    """A finished update that the device still holds, unacknowledged."""

    task: Identifier
    """The update's task."""
    round: RoundNumber
    """The task's round."""


class Delta(msgspec.Struct, frozen=True):
    """A vector as its difference from one that the device may still have (section 4)."""

    base: Digest
    """SHA-256 of the bytes of the vector that it differs from."""
    sha256: Digest
    """SHA-256 of the difference's bytes."""
    size: VectorSize
    """Bytes of the difference."""


class VectorReference(msgspec.Struct, frozen=True):
    """A vector that a task works with. The device fetches its bytes by their hash."""

    name: Identifier
    """What the vector is. `model`: the round's parameter vector."""
    sha256: Digest
    """SHA-256 of the encoded vector's bytes."""
    size: VectorSize
    """Bytes of the encoded vector."""
    encoding: Identifier
    """How numbers became these bytes, such as `float32` (section 4)."""
    delta: Delta | None = None
    """What the device may fetch in place of these bytes. null: nothing."""


class SharedModel(msgspec.Struct, frozen=True):
    """The newest model, for a device that takes no part."""

    bundle: Digest
    """SHA-256 of the bundle's manifest.json."""
    model: VectorReference
    """The model's vector."""


class PrivacyNote(msgspec.Struct, frozen=True):
    """What the coordinator says of the run's differential privacy. For people: the device shows it
    to its owner, and cannot check it."""

    spent: Annotated[float, Meta(ge=0, le=1e30)]
    """Epsilon of all that the run has released so far, at most."""
    delta: Annotated[float, Meta(ge=0, le=1)]
    """The delta for which both epsilons hold."""
    epsilon: Annotated[float, Meta(ge=0, le=1e30)] | None = None
    """The run's budget: it ends before it has spent more. null: it has none."""


class SecureTask(msgspec.Struct, frozen=True):
    """How the device masks its update, so that the coordinator learns the sum of many alone
    (section 4, "Secure aggregation")."""

    mode: Literal["helper", "pairwise"]
    """`helper`: the mask's seed is sealed for another operator's process. `pairwise`: devices
    agree on masks that cancel each other out."""
    minimum: Annotated[int, Meta(ge=2, le=MOST_REPORTS)]
    """The fewest different devices whose updates may be added up. The device signs it."""
    bits: Annotated[int, Meta(ge=8, le=24)]
    """Of an element before the mask is added."""
    most_weight: Annotated[int, Meta(ge=1, le=MAX_EXACT)] | None = None
    """The weight of an update is the device's number of examples, at most this many, as a share of
    this. null: all updates weigh the same, and the share is 1."""
    least_factor: Share | None = None
    """The smallest factor that the device lets its update be multiplied by because it is stale: it
    says `finished`, and masks when it has heard the factor (`weighing`). null: the factor is 1, and
    the device masks at once."""
    helper: Bytes32 | None = None
    """The helper's public key (X25519), which the seed is sealed for. null: there is no helper."""
    noise: Positive | None = None
    """Standard deviation of the noise that the device adds to each element before the mask, where a
    word is 1. null: none."""
    session: Bytes32 | None = None
    """The session in which the device agreed on masks with others (section 4, "Pairwise masks").
    null: in none."""
    shares: Annotated[dict[Identifier, Bytes82], Meta(max_length=MOST_NEIGHBOURS)] = {}
    """The neighbours that the device masks with in this session -> the shares that each sealed for
    it."""
    reports: Annotated[int, Meta(ge=2, le=MOST_REPORTS)] | None = None
    """Of a computation: the most reports that a round has. No sum of the device may be further from
    0 than 2^62 divided by this. null: the task trains."""


class StepSchedule(msgspec.Struct, frozen=True):
    """By what each step of a task multiplies the learning rate (section 4, "Learning rate by
    step")."""

    kind: Literal["constant", "step", "exponential", "linear", "cosine", "one-cycle"]
    """What the factor does after the warm-up."""
    warm_up: Count = 0
    """Steps in which the factor rises from `start` to 1."""
    start: Share = 1.0
    """The factor of the warm-up's first step."""
    every: Annotated[int, Meta(ge=1, le=MAX_EXACT)] = 1
    """step: how many steps have the same factor."""
    factor: Share = 1.0
    """step, exponential: what is multiplied with again."""
    steps: Annotated[int, Meta(ge=1, le=MAX_EXACT)] | None = None
    """linear, cosine, one-cycle: steps from the end of the warm-up until the factor is `least`.
    null: as many as the task has after its warm-up."""
    least: Share = 1e-4
    """No factor after the warm-up is smaller."""
    first: Count = 0
    """The number of the task's first step."""


class OwnEncoding(msgspec.Struct, frozen=True):
    """The function that makes an own encoding (section 4, "Own encodings")."""

    function: FunctionName
    """The name by which the device's owner allows it, one of `check-in.functions`."""
    parameters: Numbers = {}
    """Its parameters."""


class Part(msgspec.Struct, frozen=True):
    """One vector of an upload."""

    name: Identifier
    """What the vector is. `update`: what training changed in the model. `buffers`: the values of
    its buffers."""
    encoding: Identifier
    """How numbers became these bytes, such as `float32` (section 4)."""
    size: VectorSize
    """Bytes of the encoded vector."""
    crc32: Checksum
    """CRC-32 of zlib, PNG and Ethernet (not CRC-32C, Castagnoli's) of the encoded vector's
    bytes."""


class Evaluation(msgspec.Struct, frozen=True):
    """A model measured on the device's own data: sums, so that they can be added."""

    examples: Annotated[int, Meta(ge=1, le=MAX_EXAMPLES)]
    """How many examples were measured."""
    loss_sum: Number
    """Sum of their losses."""
    metric_sums: Numbers = {}
    """Sum of each metric over these examples."""


# --- device to coordinator ---


class CheckIn(Message, frozen=True, tag="check-in"):
    """The first message on every connection."""

    protocol: Version
    """The oldest version of the protocol that the device speaks. Coordinators of version 1 read
    this field alone, and expect 1."""
    device: Identifier
    """The device's name; the same on every connection."""
    examples: Annotated[int, Meta(ge=1, le=MAX_EXAMPLES)]
    """How many training examples the device has."""
    runtime: Label = ""
    """What trains there: `onnx 1.31.1`. A plan may choose devices by its first word."""
    software: Label = ""
    """The SDK and its version, for people: `fleetlearn-device 0.1.0`."""
    held: Held | None = None
    """The finished update that it will report next, if it has one."""
    memory: Count | None = None
    """Bytes of RAM. null, here and below: not known."""
    tags: Tags = ()
    """What its owner calls it by, such as a region or a kind of camera. A plan may choose devices
    by them."""
    tier: Identifier | None = None
    """The kind of device, such as a phone. A plan may choose devices by tier."""
    charging: bool | None = None
    """Whether it is charging, or has mains power, now."""
    network: Literal["metered", "unmetered"] | None = None
    """Whether its connection is paid for by the byte."""
    exchanges: Annotated[tuple[Identifier, ...], Meta(max_length=16)] = ()
    """The kinds of exchanges that the device can answer (section 4). It is sent a `question` of no
    other."""
    algorithms: Annotated[tuple[Identifier, ...], Meta(max_length=16)] = ()
    """The algorithms that it knows beside `plain` (section 4). A device is given no task of
    another."""
    encodings: Annotated[tuple[Identifier, ...], Meta(max_length=16)] = ("float32",)
    """The families of encodings that the device knows (section 4). It is asked for no others."""
    models: Annotated[tuple[Digest, ...], Meta(max_length=MAX_VECTORS)] = ()
    """SHA-256 of models that it still has. It may be sent a newer one as the difference from one of
    them."""
    trusts: Annotated[tuple[Bytes32, ...], Meta(max_length=MAX_KEYS)] = ()
    """The public keys that it trusts (section 4, "Signed tasks"). It is given tasks that one of
    them signed, and no others. Empty: any task."""
    challenge: Bytes32 | None = None
    """Random, another one on each connection: what is signed for the device has it."""
    newest_protocol: Version | None = None
    """The newest version of the protocol that the device speaks. null: `protocol` and no other."""
    error: Text = ""
    """For people: what keeps the device from doing any task, such as a runtime that cannot be
    loaded. It is given none. Empty: nothing does."""
    wants: Literal["tasks", "model"] = "tasks"
    """`model`: the device takes no part. It is given no task, and fetches the newest model, if the
    welcome names one."""
    privacy: Annotated[tuple[Identifier, ...], Meta(max_length=16)] = ()
    """What the device can do for privacy: `clip`, `local-noise` (section 4, "Differential
    privacy"), `secure`, `secure-noise` (section 4, "Secure aggregation"). It is given no task with
    `local_noise`, with `secure` or with noise under the mask where it does not name that.
    `required`: its owner lets it do no task of a run without differential privacy;
    `secure-required`: none without secure aggregation."""
    functions: Annotated[tuple[FunctionName, ...], Meta(max_length=64)] = ()
    """The functions that its owner lets it compute by (section 4, "Functions"). It is given no task
    of another."""


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """A sign of life. ``task`` and ``steps`` say how far training is. Without progress a task is
    cancelled (section 9)."""

    task: Identifier | None = None
    """The task being done, if any."""
    steps: Count = 0
    """Batches of the task that were evaluated or whose features were computed, plus optimizer
    steps, so far."""
    fetched: Offset = 0
    """Bytes that the device has of the content that it fetches by HTTP now. 0: it fetches none
    so."""


class Piece(msgspec.Struct, frozen=True):
    """A piece of a content: a stretch of its bytes, or the chosen rows of a table."""

    begin: Offset
    """Where the stretch begins, or the table's row 0."""
    size: Annotated[int, Meta(ge=1, le=MAX_VECTOR_BYTES)]
    """Bytes of the stretch, or of each row."""
    chosen: bool = False
    """Whether it is a table, of which the chosen rows are wanted."""


class ContentSelection(msgspec.Struct, frozen=True):
    """The pieces of a content that are wanted, one after the other (section 4, "Rows of
    tables")."""

    pieces: Annotated[tuple[Piece, ...], Meta(min_length=1, max_length=MAX_PIECES)]
    """In the content's order, without overlaps."""
    rows: Annotated[tuple[Annotated[int, Meta(ge=0, le=2**31)], ...], Meta(max_length=MOST_ROWS)]
    """The chosen rows: the first one's number, then for each the rows that are left out between it
    and the one before."""


class Fetch(Message, frozen=True, tag="fetch"):
    """The device asks for the content with this hash, from ``offset`` on."""

    sha256: Digest
    """The content that is wanted."""
    offset: Offset = 0
    """Bytes that the device already has."""
    end: Offset | None = None
    """Send no byte from this place on: the device asks again, when it has dealt with those before.
    null: send all."""
    http: bool = False
    """The device can fetch the content by HTTP (section 4, "Contents"): the answer may have a
    `url`."""
    selection: ContentSelection | None = None
    """The pieces that are wanted; `offset` and `end` count their bytes. null: the whole content."""


class Report(Message, frozen=True, tag="report"):
    """A task is done; this describes its result. The bytes follow once the upload is granted."""

    task: Identifier
    """The task that was given."""
    round: RoundNumber
    """The task's round."""
    parts: Annotated[tuple[Part, ...], Meta(min_length=1, max_length=MAX_VECTORS)]
    """The vectors that will be uploaded, one after the other in this order."""
    examples: Annotated[int, Meta(ge=1, le=MAX_EXAMPLES)]
    """n_k, the weight: training examples on the device, whether or not all of them were visited."""
    steps: Annotated[int, Meta(ge=1, le=2**31)]
    """Optimizer steps that were done."""
    epochs: Annotated[float, Meta(ge=0, le=1e6)]
    """Passes over the data that were done; a fraction where a pass was cut short."""
    complete: bool
    """False: the work is partial, because the time budget ended before the last epoch did, or the
    device had to pause."""
    loss: Number
    """Mean training loss over the examples of all steps."""
    metrics: Numbers = {}
    """Mean training metrics over the same examples."""
    seconds: Seconds = 0.0
    """Wall-clock seconds spent training."""
    evaluation: Evaluation | None = None
    """The measurement, where the task asked for one (`evaluate`)."""
    personal: Evaluation | None = None
    """The same for the device's personal model, where the algorithm has one beside the round's:
    before its training."""
    lost_tied: bool = False
    """The device does not have the tied vectors that the task goes on from (`kept`) any more, and
    began from zeros."""
    clipped: bool | None = None
    """Whether the update (or the sums) was longer than the task's `clip` and scaled down. null: the
    device did not look, or does not say."""
    sealed: Bytes80 | None = None
    """The seed of the update's mask, sealed for the helper, where the task has one."""
    signature: Bytes64 | None = None
    """Ed25519, by the device's own key, of what the seed is sealed about and of the sealed seed
    (section 4, "Secure aggregation")."""

    @property
    def size(self) -> int:
        """Bytes of the whole upload."""
        return sum(part.size for part in self.parts)

    def part(self, name: str) -> Part:
        """Return the part of this name. Raises KeyError."""
        return {part.name: part for part in self.parts}[name]


class TaskFinished(Message, frozen=True, tag="finished"):
    """A task whose update will be masked is trained: the device asks for the factor that its
    staleness leaves of it (`weighing`). Said again on each connection until the device masks."""

    task: Identifier
    """The task that was given. It has a `secure.least_factor`."""


class Uploaded(Message, frozen=True, tag="uploaded"):
    """All bytes of the granted upload were sent."""

    task: Identifier
    """The task whose update it is."""


class Reply(Message, frozen=True, tag="reply"):
    """The answer to a `question`. Nothing is uploaded."""

    task: Identifier
    """The task that was given."""
    kind: Identifier
    """The question's kind."""
    content: Fields = {}
    """What the device answers, as the kind says."""
    seconds: Seconds = 0.0
    """Wall-clock seconds spent on the answer."""


class Failed(Message, frozen=True, tag="failed"):
    """The device gives its task back."""

    task: Identifier
    """The task that was given."""
    code: FailureCode
    """Why, for programs."""
    text: Text = ""
    """Why, for people."""


# --- coordinator to device ---


class Welcome(Message, frozen=True, tag="welcome"):
    """Checked in. Send a heartbeat at least every ``heartbeat`` seconds; wait for a task."""

    coordinator: Label
    """The coordinator's software and version, for people."""
    heartbeat: Annotated[float, Meta(ge=0.01, le=86400.0)]
    """Longest pause between two messages of the device, in seconds."""
    chunk_bytes: Annotated[int, Meta(ge=4, le=CHUNK_BYTES, multiple_of=4)]
    """Largest payload of a chunk that the device may send, in bytes."""
    ineligible: Text = ""
    """For people: why the device gets no task while it is as its check-in says. Empty: it may get
    one."""
    protocol: Version = 1
    """The version of the protocol that both sides speak on this connection: the newest that both
    know."""
    waits: Text = ""
    """For people: why there is no task for anybody at this moment, such as `round 12 has its
    devices`. It names no device. Empty: a task may follow at once."""
    newest: SharedModel | None = None
    """The newest model, where the device wants it and the coordinator gives it. The device may
    fetch its bytes and the bundle's files."""
    warning: Text = ""
    """For people: what went wrong with the device's last update after it was accepted, such as
    that the helper of secure aggregation refused it. The device goes on. Empty: nothing did."""


class Task(Message, frozen=True, tag="task"):
    """A lease on one slot of the round: train the model and report before ``deadline`` seconds are
    over."""

    task: Identifier
    """Names this lease in every later message about it. No other lease has it, in this run or
    another."""
    round: RoundNumber
    """The round that the task belongs to."""
    bundle: Digest
    """SHA-256 of the bundle's manifest.json."""
    vectors: Annotated[tuple[VectorReference, ...], Meta(min_length=1, max_length=MAX_VECTORS)]
    """The vectors that training needs, each under another name; the round's model is always one of
    them."""
    parts: Annotated[dict[Identifier, Identifier], Meta(min_length=1, max_length=MAX_VECTORS)]
    """The parts that the report must have: the name of each and its encoding. `buffers` is one of
    them exactly where rows of the bundle that travel are buffers."""
    hyper: Numbers
    """Values of the hyper-parameters of the bundle's step, such as lr and mu, and of those of the
    algorithm itself (section 4)."""
    epochs: Annotated[int, Meta(ge=1, le=10**6)]
    """Passes over the device's examples."""
    batch_size: Annotated[int, Meta(ge=0, le=MAX_EXAMPLES)]
    """Examples per step; 0 means all of the device's examples in one step."""
    seed: Count
    """Decides the order of the examples and, where the bundle is random, what each step draws."""
    deadline: Seconds
    """Seconds from now until the round ends."""
    time_budget: Seconds | None = None
    """Seconds that training may take; then the device reports what was done. null: what the
    deadline allows."""
    evaluate: bool = False
    """Measure the round's model on the device's data before training."""
    algorithm: Identifier = PLAIN
    """What the device does with these vectors and parts (section 4)."""
    kept: Identifier | None = None
    """The device's own task whose tied vectors this task goes on from (section 4). null: from
    zeros."""
    personal_epochs: Annotated[int, Meta(ge=1, le=10**6)] | None = None
    """Passes over the device's examples in which its personal model or parameters are trained by
    themselves, where the algorithm has such passes. null: as many as `epochs`."""
    clip: Positive | None = None
    """The greatest L2 norm that the part `update` may have, as its bytes mean it, or the clip norm
    of the part `sums` (section 4, "Computations"). The device scales a longer one down. null:
    any."""
    local_noise: Positive | None = None
    """Standard deviation of the noise that the device adds to each element of the clipped update.
    null: none."""
    privacy: PrivacyNote | None = None
    """What the coordinator says of the run's privacy. null: the run promises none."""
    secure: SecureTask | None = None
    """How the update is masked. null: it is not."""
    schedule: StepSchedule | None = None
    """How the learning rate `lr` of `hyper` changes from step to step. null: it does not. It comes
    only to devices that speak version 3 of the protocol or a newer one."""
    function: FunctionName | None = None
    """Of the algorithm `own`: the function of the device's owner that trains, one of
    `check-in.functions`. null: none."""
    encoding: OwnEncoding | None = None
    """What makes the encoding of the part `update`, where that is one of the family `own`. null:
    it is none."""

    def vector(self, name: str) -> VectorReference:
        """Return the vector of this name. Raises KeyError."""
        return {vector.name: vector for vector in self.vectors}[name]


class Question(Message, frozen=True, tag="question"):
    """Answer with `reply` before ``deadline`` seconds are over (section 4, "Exchanges"). The device
    trains nothing."""

    task: Identifier
    """Names this lease in every later message about it. No other lease has it, in this run or
    another."""
    kind: Identifier
    """What is asked."""
    deadline: Seconds
    """Seconds from now until the exchange ends."""
    phase: Annotated[int, Meta(ge=1, le=1000)] = 1
    """Which exchange of a series it is."""
    content: Fields = {}
    """What the device must know to answer, as the kind says."""
    bundle: Digest | None = None
    """SHA-256 of the bundle's manifest.json. null: the answer needs none."""
    vectors: Annotated[tuple[VectorReference, ...], Meta(max_length=MAX_VECTORS)] = ()
    """The vectors that the answer needs, each under another name. With vectors comes a bundle."""

    def vector(self, name: str) -> VectorReference:
        """Return the vector of this name. Raises KeyError."""
        return {vector.name: vector for vector in self.vectors}[name]


class Trust(Message, frozen=True, tag="trust"):
    """The public keys that the device is to trust from now on, in place of those before. It comes
    signed alone."""

    keys: Annotated[tuple[Bytes32, ...], Meta(min_length=1, max_length=MAX_KEYS)]
    """The coordinator's keys."""


class Signed(Message, frozen=True, tag="signed"):
    """A `task`, a `question` or a `trust` for a device that trusts keys, signed (section 4, "Signed
    tasks")."""

    message: Annotated[str, Meta(max_length=MAX_SIGNED)]
    """The message's own JSON. What is signed is this text, byte for byte."""
    key: Bytes32
    """The public key, one of those that the device trusts."""
    signature: Bytes64
    """Ed25519 (RFC 8032)."""


class ComeBack(Message, frozen=True, tag="come-back"):
    """Nothing for you now: disconnect, and check in again after about ``after`` seconds (pace
    steering)."""

    after: Seconds
    """Seconds until the next check-in, to be spread at random by the device."""
    reason: Literal["no-task", "busy", "stopping", "finished"]
    """Why, for programs."""


class Content(Message, frozen=True, tag="content"):
    """The chunks of what was fetched follow, under this transfer number."""

    transfer: Transfer
    """The number that its chunks carry."""
    sha256: Digest
    """The content that was asked for."""
    size: Offset
    """Bytes of the whole content."""
    offset: Offset
    """Where the first chunk begins."""
    end: Offset | None = None
    """No chunk goes beyond this place: the `end` that was asked for. null: they go to the
    content's end."""
    url: Url | None = None
    """Where the content is for HTTP (section 4, "Contents"): no chunks follow. null: they do.
    Whoever has the URL can read the content."""
    selected: Digest | None = None
    """SHA-256 of the selected pieces, where a selection was asked for: `size`, `offset` and the
    chunks are of these. null: of the whole content."""


class Grant(Message, frozen=True, tag="grant"):
    """Upload now, from ``offset`` on, under this transfer number."""

    task: Identifier
    """The task whose update it is."""
    transfer: Transfer
    """The number that its chunks must carry."""
    offset: Offset
    """Bytes that the coordinator already has."""


class TaskWeighing(Message, frozen=True, tag="weighing"):
    """The answer to `finished`: multiply the update by this, mask it, and report. A device that
    hears several for a task masks with the first."""

    task: Identifier
    """The task that is finished."""
    factor: Annotated[float, Meta(ge=0, le=1)]
    """What staleness leaves of the update. A device gives its task back where this is less than the
    task's `secure.least_factor`."""


class Waiting(Message, frozen=True, tag="waiting"):
    """A transfer waits for its turn. ``sha256``: a fetch; its bytes come later, or go on later.
    ``task``: an upload that was granted; stop sending, and report again."""

    task: Identifier | None = None
    """The task whose upload lost its place."""
    sha256: Digest | None = None
    """The content whose bytes come later."""


class Accepted(Message, frozen=True, tag="accepted"):
    """The update, or the reply, is safe on the coordinator; forget it."""

    task: Identifier
    """The task whose result it is."""


class Cancel(Message, frozen=True, tag="cancel"):
    """The task is no longer wanted: stop working on it and forget it."""

    task: Identifier
    """The task that is no longer wanted."""
    code: Code
    """Why, for programs."""
    text: Text = ""
    """Why, for people."""


class Refused(Message, frozen=True, tag="refused"):
    """What you sent was not accepted, and changed nothing. ``task`` or ``sha256`` names what it was
    about."""

    code: Code
    """Why, for programs."""
    text: Text
    """Why, for people."""
    task: Identifier | None = None
    """The task of the refused message, where it had one."""
    sha256: Digest | None = None
    """The content of a refused `fetch`."""


FromDevice = CheckIn | Heartbeat | Fetch | TaskFinished | Report | Uploaded | Reply | Failed
FromCoordinator = (
    Welcome
    | Task
    | Question
    | Trust
    | Signed
    | ComeBack
    | Content
    | TaskWeighing
    | Grant
    | Waiting
    | Accepted
    | Cancel
    | Refused
)

Decoded = TypeVar("Decoded")


class _Tag(msgspec.Struct):
    """What every message has."""

    type: str


_encoder = msgspec.json.Encoder()
_tag: msgspec.json.Decoder[_Tag] = msgspec.json.Decoder(_Tag)
_from_device: msgspec.json.Decoder[FromDevice] = msgspec.json.Decoder(FromDevice)
_from_coordinator: msgspec.json.Decoder[FromCoordinator] = msgspec.json.Decoder(FromCoordinator)
_device_tags = frozenset(kind.__struct_config__.tag for kind in get_args(FromDevice))
_coordinator_tags = frozenset(kind.__struct_config__.tag for kind in get_args(FromCoordinator))


def encode(message: FromDevice | FromCoordinator) -> str:
    """Return the message as ``encode_checked`` does."""
    by_device = isinstance(message, FromDevice)
    return encode_checked(message, decode_from_device if by_device else decode_from_coordinator)


def encode_checked(message: msgspec.Struct, decode: Callable[[bytes], object]) -> str:
    """Return the message as the text of one frame. ``decode``: reads it on the other side.

    What the other side would refuse is not sent: raises ProtocolError (bad-message, too-large),
    naming the field. The types alone do not ensure that: nothing holds a message to its bounds when
    it is made, and NaN would travel as null. The check takes 1 microsecond for a heartbeat and 5
    for a task.
    """
    try:
        content = _encoder.encode(message)
    except (UnicodeError, TypeError) as error:
        raise ProtocolError(
            Code.BAD_MESSAGE, f"{type(message).__name__} cannot be sent: {error}"
        ) from None
    decode(content)
    return content.decode()


def decode_from_device(text: str | bytes) -> FromDevice:
    """Read what a device sent. Raises ProtocolError (too-large, unknown-type, bad-message)."""
    return decode_tagged(text, _from_device, _device_tags)


def decode_from_coordinator(text: str | bytes) -> FromCoordinator:
    """Read what a coordinator sent. Raises ProtocolError (too-large, unknown-type, bad-message)."""
    return decode_tagged(text, _from_coordinator, _coordinator_tags)


def decode_tagged(
    text: str | bytes, decoder: msgspec.json.Decoder[Decoded], tags: frozenset[object]
) -> Decoded:
    """Read a control message of one of these types. Raises ProtocolError (too-large, unknown-type,
    bad-message)."""
    try:
        content = text.encode() if isinstance(text, str) else text
        if len(content) > MAX_CONTROL_BYTES:
            raise ProtocolError(
                Code.TOO_LARGE,
                f"a control message of {len(content)} bytes was sent; the limit is "
                f"{MAX_CONTROL_BYTES}",
            )
        content.decode()  # msgspec does not look into the strings that it skips
        try:
            return decoder.decode(content)
        except msgspec.ValidationError as error:
            tag = _tag.decode(content).type
            if tag not in tags:
                raise ProtocolError(
                    Code.UNKNOWN_TYPE,
                    f"a message of type {tag[:64]!r} was sent; here go "
                    f"{', '.join(sorted(map(str, tags)))}",
                ) from None
            raise ProtocolError(
                Code.BAD_MESSAGE, f"{tag} does not fit the protocol: {error}"
            ) from None
    except msgspec.ValidationError as error:
        raise ProtocolError(
            Code.BAD_MESSAGE, f"the message is not an object with a type: {error}"
        ) from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ProtocolError(Code.BAD_MESSAGE, f"the message is not JSON: {error}") from None

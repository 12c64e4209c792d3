"""The commands that a session gives to its owner, who carries them out in order."""

from __future__ import annotations

from dataclasses import dataclass

from fleetlearn_protocol.messages import ContentSelection, FromDevice, Question, Report, Task


@dataclass(frozen=True, slots=True)
class Wanted:
    """A content that the device lacks."""

    sha256: str
    name: str
    """The name for people, such as ``graphs/train.onnx``."""
    place: str
    """The path below the state directory of the complete content."""
    size: int | None
    """Bytes. None: only the coordinator knows."""
    limit: int
    """Most bytes that the content may have."""
    have: int = 0
    """Bytes that arrived in an earlier attempt."""
    base: str | None = None
    """For a difference: SHA-256 of the vector that it differs from."""
    instead: Wanted | None = None
    """For a difference, or pieces: the whole vector, which is fetched if these cannot be had."""
    selection: ContentSelection | None = None
    """The pieces of the content that are wanted, which ``size`` and ``have`` are about. None: all
    of it."""
    selected: str = ""
    """SHA-256 of these pieces, once the coordinator has said it."""
    name_of_pieces: str = ""
    """What these pieces are called in the cache."""

    @property
    def key(self) -> str:
        """Its name in the cache."""
        return self.name_of_pieces or self.sha256

    @property
    def expected(self) -> str:
        """SHA-256 of the bytes that arrive; empty where it is not known."""
        return self.sha256 if self.selection is None else self.selected


@dataclass(frozen=True, slots=True)
class Send:
    """Send the message, if the connection is still open."""

    message: FromDevice


@dataclass(frozen=True, slots=True)
class Locate:
    """Look up what the task lacks; answer with ``located``."""

    task: Task | Question


@dataclass(frozen=True, slots=True)
class StoreChunk:
    """Append to the partial content. ``offset`` 0 begins it again."""

    wanted: Wanted
    offset: int
    payload: memoryview


@dataclass(frozen=True, slots=True)
class FetchByHttp:
    """GET the wanted content's bytes from ``begin`` on, instead of any that are being fetched so;
    answer with ``http_bytes`` for each part, and with ``http_ended`` where not all came."""

    wanted: Wanted
    url: str
    """Whoever has it can read the content: it is not for the log."""
    begin: int
    size: int
    """Bytes of the whole content."""


@dataclass(frozen=True, slots=True)
class StopHttp:
    """GET no more bytes."""


@dataclass(frozen=True, slots=True)
class FinishContent:
    """Move the complete content to its place, or delete it where its SHA-256 is wrong; answer with
    ``stored``."""

    wanted: Wanted


@dataclass(frozen=True, slots=True)
class StartTraining:
    """Train the task; answer with ``trained`` or ``ended``."""

    task: Task
    seconds: float
    """The time budget."""


@dataclass(frozen=True, slots=True)
class StartAnswer:
    """Work out what is asked; answer with ``answered`` or ``ended``."""

    task: Question
    seconds: float
    """The time budget."""


@dataclass(frozen=True, slots=True)
class StopTraining:
    """Stop the task's training, or the work on an answer, before its next batch; answer with
    ``ended``."""

    task_id: str
    keep: bool = False
    """Save how far it is: a later process is to go on with it."""


@dataclass(frozen=True, slots=True)
class FinishEarly:
    """End the task's training after its next step, as at the end of its time; answer with
    ``trained``, or with ``ended`` where there was no step yet."""

    task_id: str


@dataclass(frozen=True, slots=True)
class SaveTrusted:
    """Make the public keys that the device trusts from now on durable."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SavePending:
    """Make the update and its report durable, all or nothing; answer with ``saved``."""

    report: Report


@dataclass(frozen=True, slots=True)
class MaskPending:
    """Multiply the saved update of this task by what it counts, mask it, and make it durable so;
    answer with ``masked`` or ``ended``."""

    task_id: str
    factor: float
    """Above 0, at most 1."""


@dataclass(frozen=True, slots=True)
class DropPending:
    """Delete the saved update of this task; stop uploading it."""

    task_id: str


@dataclass(frozen=True, slots=True)
class SendUpdate:
    """Send the saved update's chunks from ``offset`` on, instead of any that are being sent; answer
    with ``update_sent``."""

    task_id: str
    transfer: int
    offset: int
    chunk_bytes: int


@dataclass(frozen=True, slots=True)
class StopUpdate:
    """Send no more chunks of the saved update."""


@dataclass(frozen=True, slots=True)
class Close:
    """Close the connection (what was sent before goes out first); answer with ``disconnected``."""

    reason: str
    after: float | None = None
    """Seconds after which to connect again, about. None: after a back-off."""
    code: int = 1000
    """The WebSocket's closing code: 1002 where the coordinator broke the protocol."""


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the log."""

    text: str
    warning: bool = False
    event: str = "note"
    """A stable name for programs (driver/log_events.py)."""


Command = (
    Send
    | Locate
    | StoreChunk
    | FetchByHttp
    | StopHttp
    | FinishContent
    | StartTraining
    | StartAnswer
    | StopTraining
    | FinishEarly
    | SaveTrusted
    | SavePending
    | MaskPending
    | DropPending
    | SendUpdate
    | StopUpdate
    | Close
    | Note
)
Commands = list[Command]

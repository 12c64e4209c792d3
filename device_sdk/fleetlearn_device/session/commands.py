"""What a session asks of its owner. Each command is carried out after those before it."""

from __future__ import annotations

from dataclasses import dataclass

from fleetlearn_protocol.messages import FromDevice, Report, Task


@dataclass(frozen=True, slots=True)
class Wanted:
    """A content that the device lacks."""

    sha256: str
    name: str
    """What it is, such as ``graphs/train.onnx``."""
    place: str
    """Its path below the state directory, once it is complete."""
    size: int | None
    """Bytes; None where only the coordinator knows."""
    limit: int
    """Most bytes it may have."""
    have: int = 0
    """Bytes that an earlier attempt left."""


@dataclass(frozen=True, slots=True)
class Send:
    message: FromDevice


@dataclass(frozen=True, slots=True)
class Locate:
    """Look up what the task lacks; answer with ``located``."""

    task: Task


@dataclass(frozen=True, slots=True)
class StoreChunk:
    """Append to the partial content. ``offset`` 0 begins it anew."""

    wanted: Wanted
    offset: int
    payload: memoryview


@dataclass(frozen=True, slots=True)
class FinishContent:
    """Check the complete content's hash and file it, or delete it; answer with ``stored``."""

    wanted: Wanted


@dataclass(frozen=True, slots=True)
class StartTraining:
    """Answer with ``trained`` or ``ended``."""

    task: Task
    seconds: float
    """Time budget."""


@dataclass(frozen=True, slots=True)
class StopTraining:
    """Stop soon; answer with ``ended``."""

    task_id: str


@dataclass(frozen=True, slots=True)
class SavePending:
    """Make the update and its report durable, all or nothing; answer with ``saved``."""

    report: Report


@dataclass(frozen=True, slots=True)
class DropPending:
    """Delete the saved update of this task; stop uploading it."""

    task_id: str


@dataclass(frozen=True, slots=True)
class SendUpdate:
    """Send the saved update's chunks from ``offset`` on; answer with ``update_sent``. Replaces one under way."""

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
    """Connect again after about so many seconds. None: after a back-off."""
    code: int = 1000
    """The WebSocket's closing code: 1002 where the coordinator broke the protocol."""


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the log."""

    text: str
    warning: bool = False


Command = (
    Send
    | Locate
    | StoreChunk
    | FinishContent
    | StartTraining
    | StopTraining
    | SavePending
    | DropPending
    | SendUpdate
    | StopUpdate
    | Close
    | Note
)
Commands = list[Command]

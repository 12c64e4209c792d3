"""What conversations ask of the run that admitted their device, and of the files that its updates
are written to.

Only names, numbers, bytes and messages cross these ports, so the other side may be another process.
Then its answers come later, each as a ``Pending``. Answers, and what the run tells devices, come in
the order in which the run decided. Times are seconds on the engine's clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from fleetlearn_protocol.errors import FleetError
from fleetlearn_protocol.frames import Buffer
from fleetlearn_protocol.messages import CheckIn, ComeBack, Reply, Report, Welcome

from fleetlearn_coordinator.conversation.begun import Announced, BegunUpload
from fleetlearn_coordinator.conversation.pending import Pending


class Admitted(NamedTuple):
    """The device may stay."""

    port: Port
    """The port of the run that the device serves from now on."""
    welcome: Welcome
    download: int
    """Bytes that the device may have to fetch for its first task: the bundle and the model."""
    upload: int
    """Bytes that the device may have to send for its first task: an update, twice."""


class Port(Protocol):
    """A run, as conversations see it. What it decides about a device comes back through
    ``Conversation.tell``: a task, a cancellation, the end of training. The same call may tell other
    devices something too.

    Where a method may return a ``Pending``, its errors may come as the ``Pending``'s too. The other
    methods answer at once, in any process.
    """

    @property
    def spool(self) -> Spool:
        """The files that the bytes of its updates are written to."""

    def elements_of(self, task: str, part: str) -> int:
        """Return how many elements this part of a task's report has: of the model that the task is
        for, or its buffers'."""

    # The device

    def admit(self, check_in: CheckIn) -> Admitted | ComeBack | Pending[Admitted | ComeBack]:
        """Decide whether the device may stay. Nothing is remembered yet."""

    def join(self, check_in: CheckIn, now: float) -> None:
        """The device was welcomed. ``check_in`` is what it said of itself."""

    def leave(self, device: str, now: float) -> None:
        """The device's connection is gone. Not called where the device has connected again
        before."""

    # Its task

    def announce(self, device: str, report: Report, now: float) -> Announced | Pending[Announced]:
        """Return whether the update of this report is wanted.

        Raises ProtocolError: stale-round, unknown-task, not-wanted, and nothing has changed; or
        wrong-parts, wrong-length, bad-message, or a PrivacyLimitError, after which the caller ends
        the task.
        """

    def keep_upload(self, device: str, begun: BegunUpload) -> None:
        """The connection that brought this is gone. Its spool file is the run's, which hands it out
        with the answer when the same update is announced again."""

    def weigh(self, device: str, task: str, now: float) -> float | Pending[float | None] | None:
        """Return what its staleness leaves now of the update of this task, which the device will
        mask and report: from 0 to 1. None: its report has counted already.

        Raises ProtocolError as ``announce`` does; bad-message where the task asks for no factor.
        """

    def save_update(
        self, device: str, report: Report, spool: int, largest: Mapping[str, float]
    ) -> Pending[None] | None:
        """Make the complete update in this spool file durable. From then on the file belongs to the
        coordinator. ``largest``: name of each part -> the greatest magnitude of its elements.
        Raises ProtocolError: stale-round, out-of-range, norm-too-large; PrivacyLimitError."""

    def count_report(self, device: str, task: str, now: float) -> None:
        """Count the report of the update that was just saved. The device has been told, or has left
        (``leave``) while the run was asked."""

    def has_counted(self, device: str, task: str) -> bool | Pending[bool]:
        """Return whether the device's report of this task counts for the open round."""

    def save_answer(self, device: str, message: Reply) -> bool | Pending[bool]:
        """Make what the device answered in an exchange durable. Returns False if it has counted
        already. Raises ProtocolError: unknown-task, and nothing has changed; or bad-message, after
        which the caller ends the task."""

    def count_answer(self, device: str, task: str, now: float) -> None:
        """Count the answer that was just saved. The device has been told, or has left."""

    def end_task(
        self, device: str, task: str, cause: str, now: float, text: str | None = None
    ) -> None:
        """The device failed its task, or its update was rejected. Harmless where the task is not
        the device's. ``text``: what a device that failed says, for people; None: its update was
        rejected."""

    def shown(self, task: str | None, text: str) -> str:
        """Return what people may read of a text that may follow from a device's data, such as what
        a device says of the task that it failed: nothing of it in a private run."""

    def refused(self, device: str, error: FleetError) -> None:
        """A message of the device was refused, and the device told. Nothing follows from it
        here."""

    # What it does meanwhile

    def steps_done(self, device: str, task: str | None, steps: int, now: float) -> None:
        """The device has trained ``steps`` steps of its task."""

    def received(self, device: str, task: str, end: int, size: int, now: float) -> None:
        """A message of ``size`` bytes brought the upload of the task up to byte ``end``."""

    def sent(self, device: str, sha256: str, end: int, size: int, now: float) -> None:
        """A frame of ``size`` bytes brought the content with this hash up to about byte ``end``,
        for the task that the device has. ``size`` 0: the device says that others brought it."""

    def wait(self, device: str, now: float) -> bool:
        """From now on it is the coordinator's turn to act: to grant an upload, or to send what the
        device fetches. Returns whether the device has a task."""

    def proceed(self, device: str, now: float) -> None:
        """It is the device's turn again. Harmless where it was."""

    # What it fetches

    def find(self, sha256: str, offset: int) -> int:
        """Return the size in bytes of the content with this hash. Raises ProtocolError:
        unknown-content, wrong-offset (``offset`` is beyond the end)."""


class RunPort(Port, Protocol):
    """A run on a host with several, as the host sees it: a device serves one of them at a time. For
    the others it is as if it were not connected; those that it waits for have been told ``join``.
    The run is in the host's process, and answers at once."""

    name: str
    task_prefix: str
    """What stands before the first dash of its tasks' names. No other run has it."""
    download: int
    """Bytes that a device may have to fetch for its first task."""
    upload: int
    """Bytes that a device may have to send for its first task."""
    patience: float
    """Seconds after which all its tasks that are out now have ended."""

    def announce(self, device: str, report: Report, now: float) -> Announced: ...

    def weigh(self, device: str, task: str, now: float) -> float | None: ...

    def save_update(
        self, device: str, report: Report, spool: int, largest: Mapping[str, float]
    ) -> None: ...

    def has_counted(self, device: str, task: str) -> bool: ...

    def save_answer(self, device: str, message: Reply) -> bool: ...

    @property
    def open_to_devices(self) -> bool:
        """Whether it gives tasks at all: it is neither paused nor over."""

    @property
    def gathers(self) -> int:
        """How many devices it waits for, all at a time, to open a round; 0: it does not."""

    def unfit(self, check_in: CheckIn) -> str:
        """Return why the device can have no task of this run, for people; empty: it can."""

    def warning_for(self, device: str) -> str:
        """Return what went wrong with its last update after it was accepted, for people; empty:
        nothing did."""

    def may_serve(self, device: str) -> bool:
        """Return whether the device, which waits here, may be given a task in the next round."""

    def task_of(self, device: str) -> str | None:
        """Return the task that the device has, connected or not."""

    def take_freed(self) -> list[str]:
        """Return the connected devices whose tasks ended since the last call."""

    def withdraw(self, device: str, now: float) -> None:
        """The connected device, which has no task of this run, waits here no longer. Nothing
        follows from it now."""


class Spool(Protocol):
    """Files, by number, that the bytes of arriving updates are written to."""

    def has_room(self) -> bool:
        """Return whether another file may be taken. If not, the next upload waits."""

    def take_spool_file(self) -> int:
        """Return a file that nobody uses. It may hold old bytes."""

    def free_spool_file(self, number: int) -> None:
        """The file's bytes are not needed any more, nor what is written beside it."""

    def write_spool_file(self, number: int, offset: int, content: Buffer) -> None:
        """Write these bytes into the file."""

    def write_checkpoint(self, number: int, content: bytes) -> None:
        """Write what is known of the file's bytes beside it, in place of what was written there. A
        later process finds it, whole or not at all."""

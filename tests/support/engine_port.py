"""For tests of conversations: a port (conversation/port.py) of a real engine, with files in
memory."""

from __future__ import annotations

from collections.abc import Iterable

from fleetlearn_coordinator.conversation.begun import BegunUpload, decode_begun
from fleetlearn_coordinator.rounds.commands import Command
from fleetlearn_coordinator.rounds.engine import Engine
from fleetlearn_coordinator.rounds.evaluation import EVALUATION
from fleetlearn_protocol.errors import Code, FleetError, ProtocolError
from fleetlearn_protocol.frames import Buffer
from fleetlearn_protocol.messages import CheckIn, Reply


class SpoolInMemory:
    """At most ``most`` files of at most ``size`` bytes, which are written from their beginning to
    their end. What is written beside them, of the bytes that are here then, is gone with them."""

    def __init__(self, size: int, most: int = 10**9) -> None:
        self.files: dict[int, bytearray] = {}
        self.checkpoints: dict[int, BegunUpload] = {}
        self.size, self.most = size, most
        self._last = 0

    def has_room(self) -> bool:
        return len(self.files) < self.most

    def take_spool_file(self) -> int:
        self._last += 1
        self.files[self._last] = bytearray()
        return self._last

    def free_spool_file(self, number: int) -> None:
        del self.files[number]
        self.checkpoints.pop(number, None)

    def write_checkpoint(self, number: int, content: bytes) -> None:
        begun = decode_begun(content)
        assert begun is not None
        assert begun.spool_file == number
        # More bytes may be there: they came before the process was killed, and come again.
        assert begun.offset <= len(self.files[number])
        self.checkpoints[number] = begun

    def write_spool_file(self, number: int, offset: int, content: Buffer) -> None:
        assert offset <= len(self.files[number])
        assert offset + len(content) <= self.size
        self.files[number][offset : offset + len(content)] = content


class EnginePort:
    """What of a port is the engine's alone. A subclass carries the engine's commands out
    (``carry_out``), and has ``admit``, ``announce`` and ``save_update``."""

    engine: Engine
    elements: int
    """Of each part of a report."""
    contents: dict[str, int]
    """SHA-256 of what can be fetched -> its bytes."""

    def carry_out(self, commands: Iterable[Command]) -> None:
        raise NotImplementedError

    def elements_of(self, task: str, part: str) -> int:
        return self.elements

    def join(self, check_in: CheckIn, now: float) -> None:
        device, held = check_in.device, check_in.held
        for kind in {*check_in.exchanges} & self.engine.exchanges.keys():
            self.engine.exchanges[kind].join(device)
        self.carry_out(self.engine.check_in(device, None if held is None else held.task, now))

    def leave(self, device: str, now: float) -> None:
        self.carry_out(self.engine.disconnect(device, now))

    def weigh(self, device: str, task: str, now: float) -> float | None:
        """Where reports may be stale, half of the update is left for each version."""
        if self.has_counted(device, task):
            return None
        self.carry_out(self.engine.announce(device, task, 0, now))
        if not self.engine.settings.outlive:
            raise ProtocolError(Code.BAD_MESSAGE, "no factor is asked for")
        return float(0.5 ** self.engine.report_terms(device).staleness)

    def count_report(self, device: str, task: str, now: float) -> None:
        self.carry_out(self.engine.count_report(device, task, now))

    def has_counted(self, device: str, task: str) -> bool:
        return self.engine.has_counted(device, task)

    def save_answer(self, device: str, message: Reply) -> bool:
        evaluations = self.engine.exchanges[EVALUATION]
        if evaluations.book.accepted.get(message.task) == device:
            return False
        if not evaluations.takes_answer(device, message.task):
            raise ProtocolError(Code.UNKNOWN_TASK, "not given")
        return True

    def count_answer(self, device: str, task: str, now: float) -> None:
        self.carry_out(self.engine.count_answer(device, task, now))

    def end_task(
        self, device: str, task: str, cause: str, now: float, text: str | None = None
    ) -> None:
        self.carry_out(self.engine.end(device, task, cause, now))

    def shown(self, task: str | None, text: str) -> str:
        return text

    def refused(self, device: str, error: FleetError) -> None:
        pass

    def steps_done(self, device: str, task: str | None, steps: int, now: float) -> None:
        self.engine.progress(device, task, "steps", steps, now)

    def received(self, device: str, task: str, end: int, size: int, now: float) -> None:
        self.engine.progress(device, task, "upload", end, now)

    def sent(self, device: str, sha256: str, end: int, size: int, now: float) -> None:
        self.engine.progress(device, None, sha256, end, now)

    def wait(self, device: str, now: float) -> bool:
        self.engine.wait(device, now)
        return self.engine.has_task(device)

    def proceed(self, device: str, now: float) -> None:
        self.engine.proceed(device, now)

    def find(self, sha256: str, offset: int) -> int:
        size = self.contents.get(sha256)
        if size is None:
            raise ProtocolError(Code.UNKNOWN_CONTENT, "not here")
        if offset > size:
            raise ProtocolError(Code.WRONG_OFFSET, "beyond the end")
        return size

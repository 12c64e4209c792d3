"""For tests of conversations: the run is in another process, and answers later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from conversing import WELCOME, Room
from engine_port import EnginePort
from fleetlearn_coordinator.conversation.pending import Pending
from fleetlearn_coordinator.conversation.port import Admitted
from fleetlearn_protocol.errors import ProtocolError
from fleetlearn_protocol.messages import CheckIn

ASKED = ("announce", "weigh", "save_update", "has_counted", "save_answer")
TOLD = (
    "join",
    "keep_upload",
    "end_task",
    "refused",
    "steps_done",
    "received",
    "sent",
    "proceed",
)


class LatePort:
    """A ``Port`` of a ``Room`` that is far away. What conversations ask and say waits, in order,
    until ``go_on``: then the room hears it, and what it answers and tells comes back at once, in
    the order of its decisions. A report is counted with the question that saves its update, and an
    answer likewise, so that nothing comes in between."""

    def __init__(self, room: LateRoom) -> None:
        self.room, self.spool = room, room.spool
        self.waiting: deque[Callable[[], None]] = deque()

    def __getattr__(self, name: str) -> Any:
        if name in ASKED:
            return partial(self._ask, name)
        if name in TOLD:
            return partial(self._say, name)
        return getattr(self.room, name)

    def admit(self, check_in: CheckIn) -> Pending[Any]:
        return self._ask("decide_admission", check_in)

    def leave(self, device: str, now: float) -> None:
        del self.room.devices[device]
        self.waiting.append(lambda: EnginePort.leave(self.room, device, now))

    def wait(self, device: str, now: float) -> bool:
        self._say("wait", device, now)
        return True

    def count_report(self, device: str, task: str, now: float) -> None:
        """Counted where it was saved."""

    def count_answer(self, device: str, task: str, now: float) -> None:
        """Counted where it was saved."""

    def _say(self, name: str, *args: Any) -> None:
        self.waiting.append(lambda: getattr(self.room, name)(*args))

    def _ask(self, name: str, *args: Any) -> Pending[Any]:
        pending: Pending[Any] = Pending()
        self.waiting.append(partial(self._answer, pending, name, args))
        return pending

    def _answer(self, pending: Pending[Any], name: str, args: tuple[Any, ...]) -> None:
        room = self.room
        try:
            answer = getattr(room, name)(*args)
        except ProtocolError as error:
            pending.fail(error, room.now)
            return
        if isinstance(answer, Admitted):
            answer = Admitted(self, WELCOME, answer.download, answer.upload)
        pending.answer(answer, room.now)
        if name == "save_update":
            room.count_report(args[0], args[1].task, room.now)
        elif name == "save_answer" and answer:
            room.count_answer(args[0], args[1].task, room.now)

    def go_on(self, most: int = 10**9) -> None:
        """Let the room hear the oldest ``most`` of what waits."""
        while self.waiting and most:
            self.waiting.popleft()()
            most -= 1


class LateRoom(Room):
    """A room whose devices speak to it through a ``LatePort``."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.far = LatePort(self)

    def admit(self, check_in: CheckIn) -> Any:
        return self.far.admit(check_in)

    def decide_admission(self, check_in: CheckIn) -> Any:
        """As a room admits at once."""
        return super().admit(check_in)

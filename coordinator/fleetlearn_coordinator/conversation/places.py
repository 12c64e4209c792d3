"""Who may transfer now: a few places at a time, and whose turn is next. No socket, no clock, no bytes.

1,000 transfers at once take gigabytes and are no faster than a few, so downloads have a number of places and uploads
another. A place is worth something to whoever wants to stop the training: a peer that takes one and hardly moves costs
nothing to run. So a place is held by the bytes that move, and names alone count for little:

- A transfer that moves fewer bytes a second than ``least_rate``, over WINDOW seconds, is *slow*. The next that waits
  takes its place. Where nobody waits it keeps the place: a poor link is no fault. Of several slow ones the least
  advanced loses its place, so that in a fleet where all are slow most of those that began also finish.
- Anybody can make up names, and each new name would hold a place for a WINDOW. A device whose update was accepted at a
  good rate is *proven*, and that cannot be made up. Where proven and *new* devices both wait, each kind has half of the
  places: so made-up names cannot keep the proven devices waiting, and proven ones do not keep new ones out of the
  rounds. A device that is slow is new again.
- A device without a task (*idle*) comes last, and gives its place to any device that has one.

Who loses its place loses no bytes: a download goes on where it was, an upload too, with what was on its way. A rate
alone would be simpler. But it cannot be measured in less than some seconds, and then a few made-up names in each round
cost that much of each round.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

WINDOW = 2.0
"""Seconds over which a transfer's rate is measured."""
PROOF = 16
"""How many times the least rate proves a device. An update that took less than a WINDOW proves it at any rate."""
PROVEN, NEW, IDLE = range(3)
"""Ranks."""


@dataclass(slots=True, eq=False)  # two are never the same, and looking one up among many is quick
class Turn:
    """One transfer that waits for a place or holds one."""

    device: str
    rank: int = field(default=NEW, init=False)
    slow: bool = field(default=False, init=False)
    """Whether it moved less than the least rate when it was last looked at."""
    _looked: tuple[float, int] = field(default=(0.0, 0), init=False)
    """When its rate was last measured, and how many bytes it had moved by then."""
    _changed: tuple[float, int] = field(default=(0.0, 0), init=False)

    def progress(self) -> int:
        """Bytes moved so far."""
        raise NotImplementedError

    def begin(self, now: float) -> None:
        """It has a place from now on."""
        self.slow, self._looked = False, (now, self.progress())
        self._changed = self._looked

    def measure(self, now: float, least_rate: float) -> None:
        """Say whether it is slow, once in a WINDOW."""
        (at, had), moved = self._looked, self.progress()
        if now - at >= WINDOW:
            self.slow, self._looked = moved - had < least_rate * (now - at), (now, moved)

    def stalled(self, now: float) -> float:
        """Seconds for which no byte has moved, as far as earlier calls could see."""
        moved = self.progress()
        if moved != self._changed[1]:
            self._changed = now, moved
        return now - self._changed[0]


class Proven:
    """The devices that proved themselves, at most ``most`` of them; the one whose last proof is oldest is forgotten."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._devices: dict[str, None] = {}

    def __contains__(self, device: str) -> bool:
        return device in self._devices

    def add(self, device: str) -> None:
        self._devices.pop(device, None)
        self._devices[device] = None
        if len(self._devices) > self._most:
            del self._devices[next(iter(self._devices))]

    def discard(self, device: str) -> None:
        self._devices.pop(device, None)


T = TypeVar("T", bound=Turn)


class Places(Generic[T]):
    """``limit`` places, and the turns that hold them or wait for them. ``least_rate`` is bytes per second."""

    def __init__(self, limit: int, least_rate: float, proven: Proven) -> None:
        self.limit, self.least_rate, self.proven = limit, least_rate, proven
        self.held: dict[T, None] = {}
        self._queues: tuple[dict[T, None], ...] = ({}, {}, {})

    def __contains__(self, turn: T) -> bool:
        """Whether it holds a place or waits for one."""
        return turn in self.held or self.waits(turn)

    @property
    def waiting(self) -> Iterator[T]:
        """Who waits, rank by rank, each in order of arrival."""
        return (turn for queue in self._queues for turn in queue)

    def waits(self, turn: T) -> bool:
        """Whether it waits for a place."""
        return any(turn in queue for queue in self._queues)

    def ask(self, turn: T, *, idle: bool = False) -> None:
        """Let it wait for a place. ``idle``: its device has no task."""
        turn.rank = IDLE if idle else PROVEN if turn.device in self.proven else NEW
        self._queues[turn.rank][turn] = None

    def leave(self, turn: T) -> None:
        """It neither holds a place nor waits for one any longer."""
        self.held.pop(turn, None)
        for queue in self._queues:
            queue.pop(turn, None)

    def next(self, now: float) -> tuple[T, T | None] | None:
        """Give one place away, if that may be done: who has it now, and from whom it was taken, if from anybody."""
        proven, new, idle = self._queues
        queue = proven or new or idle
        if proven and new and self._proven_held() >= self._share:
            queue = new
        if not queue:
            return None
        turn, loser = next(iter(queue)), None
        if len(self.held) >= self.limit:
            loser = self._loser_to(turn)
            if loser is None:
                return None
            del self.held[loser]
        del queue[turn]
        self.held[turn] = None
        turn.begin(now)
        return turn, loser

    def measure(self, now: float) -> None:
        """Look at the rates of those that hold a place."""
        for turn in self.held:
            turn.measure(now, self.least_rate)
            if turn.slow and turn.rank == PROVEN:
                turn.rank = NEW
                self.proven.discard(turn.device)

    @property
    def _share(self) -> int:
        return (self.limit + 1) // 2

    def _proven_held(self) -> int:
        return sum(turn.rank == PROVEN for turn in self.held)

    def _loser_to(self, turn: T) -> T | None:
        """Who gives its place to this turn: the one of the lowest rank, there a slow one, there the least advanced."""
        takes_from_new = turn.rank == PROVEN and self._proven_held() < self._share
        found = [
            held
            for held in self.held
            if (held.slow and held.rank >= turn.rank)
            or held.rank == IDLE > turn.rank
            or (held.rank == NEW and takes_from_new)
        ]
        return min(found, key=lambda held: (-held.rank, not held.slow, held.progress()), default=None)

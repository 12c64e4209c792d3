"""Who may transfer now: a few places at a time, and whose turn is next. No socket, no clock, no
bytes.

1,000 transfers at once take gigabytes and are no faster than a few, so downloads have a number of
places and uploads another. A place is worth something to whoever wants to stop the training: a peer
that takes one and hardly moves costs nothing to run. So a place is held by the bytes that move, and
names alone count for little:

- A transfer that moves fewer bytes a second than ``least_rate``, over WINDOW seconds, is *slow*.
  The next that waits takes its place. Where nobody waits it keeps the place: a poor link is no
  fault. Of several slow ones the least advanced loses its place, so that in a fleet where all are
  slow most of those that began also finish.
- Anybody can make up names, and each new name would hold a place for a WINDOW. A device whose
  update was accepted at a good rate is *proven*, and that cannot be made up. Where proven and *new*
  devices both wait, each kind has half of the places: so made-up names cannot keep the proven
  devices waiting, and proven ones do not keep new ones out of the rounds. A device that is slow is
  new again.
- A device without a task (*idle*) comes last, and gives its place to any device that has one.

A transfer that loses its place loses no bytes: it goes on later where it was, and an upload's
chunks that were on their way still count. To look at rates alone would be simpler. But measuring a
rate takes some seconds, which a few made-up names could take from each round.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

WINDOW = 2.0
"""Seconds over which a transfer's rate is measured."""
PROOF_FACTOR = 16
"""An update that arrives at this many times the least rate proves its device. One that takes less
than a WINDOW does so at any rate."""
PROVEN, NEW, IDLE = range(3)
"""The rank of a transfer: its device is proven, is not, or has no task."""


@dataclass(slots=True, eq=False)  # compared by identity, so that looking one up among many is quick
class Turn:
    """One transfer that waits for a place or holds one."""

    device: str
    rank: int = field(default=NEW, init=False)
    slow: bool = field(default=False, init=False)
    """Whether it moved less than the least rate when it was last measured."""
    _looked: tuple[float, int] = field(default=(0.0, 0), init=False)
    """When its rate was last measured, and how many bytes it had moved by then."""
    _changed: tuple[float, int] = field(default=(0.0, 0), init=False)

    def progress(self) -> int:
        """Return how many bytes have moved so far."""
        raise NotImplementedError

    def has_room(self) -> bool:
        """Return whether there is room for what the transfer brings."""
        return True

    def begin(self, now: float) -> None:
        """The transfer has a place from now on."""
        self.slow, self._looked = False, (now, self.progress())
        self._changed = self._looked

    def measure(self, now: float, least_rate: float) -> None:
        """Set ``slow``, once in a WINDOW."""
        (at, had), moved = self._looked, self.progress()
        if now - at >= WINDOW:
            self.slow, self._looked = moved - had < least_rate * (now - at), (now, moved)

    def stalled(self, now: float) -> float:
        """Return for how many seconds no byte has moved, as far as earlier calls could see."""
        moved = self.progress()
        if moved != self._changed[1]:
            self._changed = now, moved
        return now - self._changed[0]


class Proven:
    """At most ``most`` devices that proved themselves. The one whose last proof is oldest is
    forgotten first."""

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
    """``limit`` places, and the transfers that hold or await one. ``least_rate`` is bytes per
    second."""

    def __init__(self, limit: int, least_rate: float, proven: Proven) -> None:
        self.limit, self.least_rate, self.proven = limit, least_rate, proven
        self.held: dict[T, None] = {}
        self._queues: tuple[dict[T, None], ...] = ({}, {}, {})

    def __contains__(self, turn: T) -> bool:
        """Return whether the transfer holds a place or waits for one."""
        return turn in self.held or self.waits(turn)

    @property
    def waiting(self) -> Iterator[T]:
        """The transfers that wait, rank by rank, each rank in order of arrival."""
        return (turn for queue in self._queues for turn in queue)

    def waits(self, turn: T) -> bool:
        """Return whether the transfer waits for a place."""
        return any(turn in queue for queue in self._queues)

    def ask(self, turn: T, *, idle: bool = False) -> None:
        """Let the transfer wait for a place. ``idle``: its device has no task."""
        turn.rank = IDLE if idle else PROVEN if turn.device in self.proven else NEW
        self._queues[turn.rank][turn] = None

    def leave(self, turn: T) -> None:
        """The transfer neither holds a place nor waits for one any longer."""
        self.held.pop(turn, None)
        for queue in self._queues:
            queue.pop(turn, None)

    def next(self, now: float) -> tuple[T, T | None] | None:
        """Give one place to a transfer that waits. Returns that transfer and the one that lost the
        place to it, if one did; None if no place can be given, or there is no room for what the
        next transfer brings."""
        proven, new, idle = self._queues
        queue = proven or new or idle
        if proven and new and self._proven_held() >= self._share:
            queue = new
        if not queue:
            return None
        turn, loser = next(iter(queue)), None
        if not turn.has_room():
            return None
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
        """Measure the rates of the transfers that hold a place."""
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
        """Return the transfer that gives its place to this one, or None: of the lowest rank, then a
        slow one, then the one that has moved the fewest bytes."""
        takes_from_new = turn.rank == PROVEN and self._proven_held() < self._share
        found = [
            held
            for held in self.held
            if (held.slow and held.rank >= turn.rank)
            or held.rank == IDLE > turn.rank
            or (held.rank == NEW and takes_from_new)
        ]
        return min(
            found, key=lambda held: (-held.rank, not held.slow, held.progress()), default=None
        )

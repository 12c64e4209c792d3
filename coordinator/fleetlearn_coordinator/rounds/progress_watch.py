"""How one lease gets on: when it last made progress, and how much of its grace is left."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_RETURNS = 4
"""Each absence uses up at least the grace divided by this. So a lease ends after this many returns
without progress."""


@dataclass(slots=True)
class Watch:
    """The progress of one lease. Time in which the device cannot act does not count: ``moved`` is
    put off by it."""

    task: str
    moved: float
    """When the lease last made progress, or began."""
    grace: float
    """Seconds of grace that are left."""
    progressed: bool = False
    """Whether the lease ever made progress."""
    waits: float | None = None
    """Since when it has been the coordinator's turn to act: to grant an upload, or to send a
    content."""
    gone: float | None = None
    """Since when the device has not been connected."""
    furthest: dict[str, int] = field(default_factory=dict)
    """What the device moves, such as ``steps`` -> how far it came. Only more than before is
    progress."""

    def progress(self, what: str, amount: int, grace: float, now: float) -> None:
        """The device came this far. Progress restores the whole ``grace``."""
        if amount > self.furthest.get(what, 0):
            self.furthest[what] = amount
            self.moved, self.grace, self.progressed = now, grace, True

    def begin_wait(self, now: float) -> None:
        """It is the coordinator's turn to act."""
        if self.waits is None:
            self.waits = now

    def end_wait(self, now: float) -> None:
        """It is the device's turn to act again. Harmless where it was."""
        if self.waits is not None:
            self.moved += now - max(self.waits, self.moved)
            self.waits = None

    def leave(self, now: float) -> None:
        """The device's connection is gone."""
        self.end_wait(now)
        self.gone = now

    def come_back(self, grace: float, now: float) -> None:
        """The device is connected again. Its absence shortens the grace that is left; ``grace`` is
        the whole."""
        self.end_wait(now)
        if self.gone is not None:
            away = now - self.gone
            self.moved += away
            self.grace -= max(away, grace / MAX_RETURNS)
            self.gone = None

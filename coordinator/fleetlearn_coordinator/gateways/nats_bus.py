"""A bus over NATS: numbered frames (numbered_frames.py) on two subjects.

NATS itself promises little: a message comes once or not at all. So a bus is lost as soon as a frame
is missing, the connection to the server breaks, or the other side is silent; then the gateway
connects again, and says hello.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fleetlearn_coordinator.gateways.bus import BusUser
from fleetlearn_coordinator.gateways.numbered_frames import (
    FrameKind,
    MissingFrameError,
    NumberedFrames,
)

BEAT = 1.0
"""Seconds between two signs of life."""
SILENCE = 10
"""Beats without a word of the other side, after which the bus is lost. They are counted, rather
than the time: while this process stands still, nobody else is silent."""
MOST_UNSENT = 2**28
"""Bytes that wait for a peer that takes nothing in. Above, the bus is lost."""


class NatsBus:
    """One end. Whoever makes it calls ``took`` with each frame, and ``beat`` each BEAT seconds."""

    def __init__(
        self, publish: Callable[[bytes], None], longest: int, ended: Callable[[], None]
    ) -> None:
        """``publish``: sends a frame to the other end, of ``longest`` bytes at most. ``ended``:
        called once the bus is over."""
        self.user: BusUser
        """Who speaks on this end. To be set before anything else."""
        self._publish, self._ended = publish, ended
        self._frames = NumberedFrames(longest)
        self._loop = asyncio.get_running_loop()
        self._over = self._closing = self._said = False
        self._quiet = 0

    # What the user asks

    @property
    def full(self) -> bool:
        return self._frames.waiting > 0

    def send(self, batch: bytes) -> None:
        if self._over or self._closing:
            return
        self._frames.add(batch)
        self._go_on()
        if self._frames.waiting > MOST_UNSENT:
            self.lose("the other process takes nothing in")

    def close(self) -> None:
        self._closing = True
        self._go_on()

    # What comes

    def took(self, frame: bytes) -> None:
        """A frame of the other end came."""
        if self._over:
            return
        self._quiet = 0
        was_full = self.full
        try:
            kind, batch = self._frames.take(frame)
        except MissingFrameError as error:
            self.lose(str(error))
            return
        if kind is FrameKind.END:
            self.lose("the other process ended, or closed the connection")
            return
        self._go_on()
        if batch is not None and not self._closing:
            self.user.received(batch)
        if was_full and not self.full and not self._over:
            self.user.writable()
        if self._frames.must_tell and not self._over:
            self._say(self._frames.signal(FrameKind.BEAT))

    def beat(self) -> None:
        """BEAT seconds have passed."""
        self._quiet += 1
        if self._quiet > SILENCE:
            self.lose("the other process is silent")
        elif not self._said:
            self._publish(self._frames.signal(FrameKind.BEAT))
        self._said = False

    def lose(self, why: str) -> None:
        """The bus is over."""
        if self._over:
            return
        self._over = True
        self._publish(self._frames.signal(FrameKind.END))
        self._ended()
        # later: whoever is called now may be in the middle of something
        self._loop.call_soon(self.user.lost, why)

    def _go_on(self) -> None:
        """Send what may be sent."""
        if self._over:
            return
        for frame in self._frames.frames():
            self._say(frame)
        if self._closing and not self.full:
            self.lose("this process closed the connection")

    def _say(self, frame: bytes) -> None:
        self._said = True
        self._publish(frame)

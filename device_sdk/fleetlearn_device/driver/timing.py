"""How long a device waits for the network, and before it connects again."""

from __future__ import annotations

import random
from typing import NamedTuple


class Timing(NamedTuple):
    """Time limits, in seconds. The defaults suit devices on real networks; tests take smaller
    ones."""

    open: float = 10.0
    """Looking the name up, connecting, and the handshake: each at most so long."""
    send: float = 30.0
    """Sending one message or chunk; then the connection is aborted."""
    ping: float = 20.0
    """The longest wait for a sign of life, which the device asks for with each heartbeat."""
    close: float = 5.0
    """The closing handshake; then the connection is aborted."""
    base: float = 0.5
    """Longest wait before the first connection after one that was welcomed; it doubles with each
    failure."""
    cap: float = 60.0
    """Longest wait before any connection."""
    slow_cap: float = 900.0
    """Longest wait between attempts where trying again alone will not help, as with a certificate
    that is not accepted."""
    paused: float = 60.0
    """Between two looks at the conditions while one of them does not hold, about."""
    give_up: float = 900.0
    """How long a device that runs until the training is finished tries to connect, without one
    connection."""


LONGEST_RETRY_AFTER = 3600.0
"""Longest wait, in seconds, that a refused handshake can ask for."""


def retry_after(value: str) -> float:
    """Return the seconds that the header Retry-After (RFC 9110, section 10.2.3) asks to wait at
    least; 0 where it is missing, or a date."""
    if not value.isascii() or not value.isdecimal():
        return 0.0
    return min(float(value[:9]), LONGEST_RETRY_AFTER)


def seconds_to_wait(
    timing: Timing, failures: int, come_back_after: float | None, dice: random.Random
) -> float:
    """Return how long to wait before the next connection.

    If the coordinator said ``come_back_after``, the wait is 0.5 to 1.5 times that. Otherwise it is
    uniform between 0 and min(cap, base * 2**failures) ("full jitter": Brooker, "Exponential Backoff
    And Jitter", AWS Architecture Blog 2015).
    """
    if come_back_after is not None:
        return dice.uniform(0.5, 1.5) * come_back_after
    return dice.uniform(0.0, min(timing.cap, timing.base * 2.0 ** min(failures, 30)))

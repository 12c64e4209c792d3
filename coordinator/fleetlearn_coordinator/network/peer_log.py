"""The log of what peers do: at most a few lines a second, and how many lines were left out.

What keeps peers away is said once in a while for each cause (``say_seldom``): a device tries again
for ever.
"""

from __future__ import annotations

import logging
import time

from fleetlearn_coordinator.conversation.limits import (
    LINE_BURST,
    LINE_RATE,
    LINE_RATE_OF_A_CONNECTION,
    LINES_OF_A_CONNECTION,
    LONGEST_LINE,
    Bucket,
)

logger = logging.getLogger("fleetlearn.coordinator.peers")
websockets_logger = logging.getLogger("fleetlearn.coordinator.peers.websockets")
websockets_logger.setLevel(logging.WARNING)  # its less important lines come for every connection


class FewLines(logging.Filter):
    """Lets a burst of lines through, then some a second; the next line says how many were left
    out."""

    def __init__(self, rate: float, burst: int, about: str = "connections") -> None:
        """``rate``: lines a second. ``about``: what the lines are about, for people."""
        super().__init__()
        self.about = about
        self.bucket = Bucket(rate, burst, time.monotonic())
        self.left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if self.bucket.wait(time.monotonic()):
            self.left_out += 1
            return False
        self.bucket.tokens -= 1
        text = record.getMessage()
        if len(text) > LONGEST_LINE:
            text = text[:LONGEST_LINE] + "..."
        if self.left_out:
            text += f" (and {self.left_out} more lines about {self.about}, left out)"
            self.left_out = 0
        record.msg, record.args = text, ()
        return True


few_lines = FewLines(LINE_RATE, LINE_BURST)
logger.addFilter(few_lines)
websockets_logger.addFilter(few_lines)


def flush() -> None:
    """Say how many lines were left out, if no line has said so since."""
    left_out = few_lines.left_out
    if left_out and not few_lines.bucket.wait(time.monotonic()):
        few_lines.left_out = 0
        logger.info("%d more lines about connections were left out", left_out)


INTERVAL = 600.0
"""Seconds between two lines about the same."""
MOST_CAUSES = 1000
"""Causes that are remembered. The one that was said first is forgotten first."""
_said: dict[str, tuple[float, int]] = {}
"""Cause -> when it was said last, and how often it was left out since."""


def say_seldom(who: str, text: str, level: int = logging.WARNING) -> None:
    """Log ``who: text``, unless just this was logged in the last INTERVAL seconds; then count it
    for the next line."""
    now, line = time.monotonic(), f"{who}: {text}"
    at, left_out = _said.get(line, (-INTERVAL, 0))
    if now - at < INTERVAL:
        _said[line] = at, left_out + 1
        return
    _said.pop(line, None)
    _said[line] = now, 0
    if len(_said) > MOST_CAUSES:
        del _said[next(iter(_said))]
    logger.log(
        level,
        "%s%s",
        line,
        f" ({left_out} times more since this was logged last)" if left_out else "",
    )


class ConnectionLog:
    """The lines about one connection."""

    __slots__ = ("_bucket", "_left_out")

    def __init__(self, now: float) -> None:
        self._bucket = Bucket(LINE_RATE_OF_A_CONNECTION, LINES_OF_A_CONNECTION, now)
        self._left_out = 0

    def say(self, now: float, level: int, text: str, *arguments: object) -> None:
        """Log a line, or count it."""
        if self._bucket.wait(now):
            self._left_out += 1
            return
        self._bucket.tokens -= 1
        if self._left_out:
            text, arguments = (
                text + " (and %d more lines about this connection, left out)",
                (*arguments, self._left_out),
            )
            self._left_out = 0
        logger.log(level, text, *arguments)

    def end(self, device: str | None) -> None:
        """Say how many lines were left out, where the connection ends."""
        if self._left_out:
            logger.info(
                "device %s: %d more lines about its connection were left out",
                device or "(unknown)",
                self._left_out,
            )

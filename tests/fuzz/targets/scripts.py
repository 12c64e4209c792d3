"""How an input becomes what two sides say to each other: a script, one step a line. Any bytes are a script.

::

    1{"type":"heartbeat"}   actor 1 says this control message; $task and the like stand for what the actor was told
    1"any bytes             a text frame as it is
    1#0100ff                a binary frame, in hexadecimal
    1^0 0 16 255            a chunk: of the granted transfer + 0, at the expected offset + 0, of 16 bytes 255
    1+    1-                the actor connects; its connection breaks
    1>5                     the actor does the next right thing, 5 times
    ~2.5                    time passes, in seconds

Without a digit it is actor 0. Other signs are the target's own. A line that fits nothing is a text frame.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

MOST_STEPS = 200
"""Steps of a script that are done."""
LONGEST_WAIT = 5000.0


class Step(NamedTuple):
    """A line of a script."""

    actor: int
    sign: str
    """What kind of step it is."""
    text: bytes
    """The rest of the line; of a control message, all of it."""


def steps(data: bytes) -> Iterator[Step]:
    """Yield the steps of a script."""
    for line in data.split(b"\n")[:MOST_STEPS]:
        actor = 0
        if line[:1].isdigit():
            actor, line = int(line[:1]) % 4, line[1:]
        sign = line[:1].decode("latin-1")
        yield Step(actor, sign, line if sign == "{" else line[1:])


def number(text: bytes, limit: float, default: float = 1.0) -> float:
    """Return the number that is written there, from 0 to ``limit``."""
    try:
        found = abs(float(text))
    except ValueError:
        return default
    return min(found, limit) if found == found else default


def count(text: bytes, limit: int) -> int:
    """Return the number as an integer."""
    return int(number(text, limit))


def integers(text: bytes, size: int) -> list[int]:
    """Return as many integers as wanted; 0 for what is none."""
    words = text.split()[:size]
    found = [int(word) if word.lstrip(b"-").isdigit() and len(word) < 20 else 0 for word in words]
    return found + [0] * (size - len(found))


def filled(text: bytes, told: Mapping[bytes, bytes]) -> bytes:
    """Return the text with the values of its placeholders."""
    if b"$" in text:
        for name, value in told.items():
            text = text.replace(name, value)
    return text


def binary(text: bytes) -> bytes:
    """Return the bytes that are written in hexadecimal, as far as they are."""
    text = text[: len(text) // 2 * 2]
    try:
        return bytes.fromhex(text.decode("latin-1"))
    except ValueError:
        return text


def escaped(text: bytes) -> bytes:
    r"""Return the bytes of a text with escapes as Python's: \r, \n, \xff."""
    try:
        return text.decode("unicode_escape").encode("latin-1", "replace")
    except UnicodeDecodeError:
        return text

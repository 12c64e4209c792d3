"""How an input becomes what two sides say to each other: a script, one step a line. Any bytes are a
script.

::

    1{"type":"heartbeat"}   actor 1 says this control message; $task and the like stand for what the
                            actor was told
    1"any bytes             a text frame as it is
    1#0100ff                a binary frame, in hexadecimal
    1^0 0 16 255            a chunk: of the granted transfer + 0, at the expected offset + 0, of 16
                            bytes 255
    1+    1-                the actor connects; its connection breaks
    1>5                     the actor does the next right thing, 5 times
    1!{"loss":1e30}         the same once, with these fields in place of its own; "scale" is of its
                            update's elements
    ~2.5                    time passes, in seconds

Without a digit it is actor 0. Other signs are the target's own. A line that fits nothing is a text
frame.
"""

from __future__ import annotations

import re
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
        found = default
    return min(found, limit) if found == found else min(default, limit)


def count(text: bytes, limit: int) -> int:
    """Return the number as an integer."""
    return int(number(text, limit))


def integers(text: bytes, size: int) -> list[int]:
    """Return as many integers as wanted; 0 for what is none."""
    found = [int(word) if _INTEGER.fullmatch(word) else 0 for word in text.split()[:size]]
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
    r"""Return the bytes of a text in which \r, \n and \xff are escapes."""
    return _ESCAPE.sub(lambda found: _SHORT.get(found[1]) or bytes([int(found[1][1:], 16)]), text)


_INTEGER = re.compile(rb"-?[0-9]{1,19}")
_SHORT = {b"r": b"\r", b"n": b"\n"}
_ESCAPE = re.compile(rb"\\(r|n|x[0-9a-fA-F]{2})")

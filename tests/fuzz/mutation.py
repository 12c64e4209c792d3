"""Changes inputs as a fuzzer does: knows lines, JSON, TOML's values and bytes, so that much of what
it makes gets far.

An input is lines. What a line says is up to the target (scripts.py). A change keeps most of the
input: it moves, repeats, drops or borrows a line, changes a value or a key of a line's JSON, or
changes bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

MOST_BYTES = 16_384
"""Bytes of an input that was changed."""
NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    4,
    7,
    8,
    15,
    16,
    31,
    32,
    33,
    63,
    64,
    127,
    128,
    255,
    256,
    4095,
    4096,
    4097,
    65535,
    65536,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**33,
    2**33 + 1,
    2**53 - 1,
    2**53,
    2**63,
    2**64,
    -(2**31),
    -(2**63),
    0.5,
    -0.0,
    1e-320,
    1e30,
    1.0000001e30,
    1e308,
    -1e308,
)
TEXTS = (
    "",
    "a",
    "0",
    "-",
    ".",
    "..",
    "../..",
    "/",
    "\\",
    "\0",
    "\n",
    "\r\n",
    "é",
    "\u2028",
    "\U0001f600",
    "NaN",
    "null",
    "%s",
    "$task",
    "$round",
    "$transfer",
    "$offset",
    "$device",
    "$model",
    "$crc",
    "$size",
    "a" * 63,
    "a" * 64,
    "a" * 65,
    "0" * 64,
    "f" * 64,
    "F" * 64,
    "x" * 1001,
    "model",
    "update",
    "control",
    "float32",
    "float16",
    "bfloat16",
    "int8",
    "int4",
    "topk-0.1",
    "topk-0.999999",
    "topk-0.000001-int8",
    "topk-0.5-float16",
    "plain",
    "scaffold",
    "feddyn",
)
RAW = (
    b"1e999",
    b"-1e999",
    b"NaN",
    b"Infinity",
    b"-0",
    b"1.0",
    b"01",
    b"1e0",
    b'"\\ud800"',
    b'"\\u0000"',
    b"[" * 2000,
    b'{"a":' * 500,
    b"\xff",
    b"\xc0\x80",
    b"\xed\xa0\x80",
    b"\xef\xbb\xbf",
    b"9" * 400,
    b"0." + b"0" * 400 + b"1",
)
_JSON_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")


def mutate(
    data: bytes, random: Random, others: Sequence[bytes], changes: int | None = None
) -> bytes:
    """Return ``data`` with a few changes. ``others``: inputs whose lines may be borrowed."""
    if changes is None:
        changes = 1 + min(random.getrandbits(3), random.getrandbits(3))
    for _ in range(changes):
        lines = data.split(b"\n")
        data = b"\n".join(random.choice(CHANGES)(lines, random, others))[:MOST_BYTES]
    return data


def _place(lines: list[bytes], random: Random) -> int:
    return random.randrange(len(lines))


def _drop(lines: list[bytes], random: Random, others: Sequence[bytes]) -> list[bytes]:
    place = _place(lines, random)
    return lines[:place] + lines[place + 1 + random.randrange(2) :]


def _repeat(lines: list[bytes], random: Random, others: Sequence[bytes]) -> list[bytes]:
    place = _place(lines, random)
    times = random.choice((1, 1, 1, 2, 8, 40))
    return lines[:place] + [lines[place]] * times + lines[place:]


def _move(lines: list[bytes], random: Random, others: Sequence[bytes]) -> list[bytes]:
    line = lines.pop(_place(lines, random))
    lines.insert(random.randrange(len(lines) + 1), line)
    return lines


def _cut(lines: list[bytes], random: Random, others: Sequence[bytes]) -> list[bytes]:
    return lines[: 1 + _place(lines, random)]


def _borrow(lines: list[bytes], random: Random, others: Sequence[bytes]) -> list[bytes]:
    """Take some lines of another input."""
    if not others:
        return lines
    theirs = random.choice(others).split(b"\n")
    begin, place = _place(theirs, random), random.randrange(len(lines) + 1)
    return lines[:place] + theirs[begin : begin + random.choice((1, 1, 2, 5, 20))] + lines[place:]


def _change_digit(lines: list[bytes], random: Random, others: Sequence[bytes]) -> list[bytes]:
    """Give a line that begins with a digit to another actor."""
    place = _place(lines, random)
    if lines[place][:1].isdigit():
        lines[place] = b"%d" % random.randrange(4) + lines[place][1:]
    return lines


def _change_json(lines: list[bytes], random: Random, others: Sequence[bytes]) -> list[bytes]:
    """Change a value or a key of the JSON in a line, or of the input where it is one JSON
    document."""
    places = [place for place, line in enumerate(lines) if b"{" in line]
    if not places:
        return _change_number(lines, random, others)
    place = random.choice(places)
    begin = lines[place].index(b"{")
    last = place + 1 if lines[place].endswith(b"}") else len(lines)
    try:
        value = json.loads(b"\n".join([lines[place][begin:], *lines[place + 1 : last]]))
    except (ValueError, RecursionError):
        return _change_bytes(lines, random, others)
    value = _changed(value, random)
    lines[place:last] = [
        lines[place][:begin]
        + json.dumps(value, ensure_ascii=random.random() < 0.5).encode("utf-8", "replace")
    ]
    return lines


def _changed(value: Any, random: Random) -> Any:
    """Return a JSON value with one change, somewhere in it."""
    if isinstance(value, dict) and value:
        key = random.choice(list(value))
        match random.randrange(8):
            case 0:
                del value[key]
            case 1:
                value[random.choice(TEXTS)] = value[key]
            case 2:
                value[key] = _other(random)
            case _:
                value[key] = _changed(value[key], random)
        return value
    if isinstance(value, list) and value:
        place = random.randrange(len(value))
        match random.randrange(6):
            case 0:
                del value[place]
            case 1:
                return value * random.choice((0, 2, 9, 20))
            case 2:
                random.shuffle(value)
            case _:
                value[place] = _changed(value[place], random)
        return value
    if isinstance(value, bool):
        return not value if random.random() < 0.7 else _other(random)
    if isinstance(value, int | float) and abs(value) < 2**64 and random.random() < 0.8:
        return random.choice(
            (value + 1, value - 1, -value, value * 2, value / 2, float(value), *NUMBERS)
        )
    if isinstance(value, str) and random.random() < 0.8:
        place = random.randrange(len(value) + 1)
        return random.choice(
            (
                value[:place],
                value[:place] + random.choice(TEXTS) + value[place:],
                random.choice(TEXTS),
            )
        )
    return _other(random)


def _other(random: Random) -> Any:
    """Return a value of any type."""
    return random.choice(
        (
            None,
            True,
            False,
            [],
            {},
            [[]],
            {"a": 1},
            [None] * 9,
            random.choice(NUMBERS),
            random.choice(TEXTS),
        )
    )


def _change_number(lines: list[bytes], random: Random, others: Sequence[bytes]) -> list[bytes]:
    """Change a number that stands anywhere in the text."""
    place = _place(lines, random)
    found = list(_JSON_NUMBER.finditer(lines[place][:4096], lines[place][:1].isdigit()))
    if found:
        at = random.choice(found)
        number = (
            str(random.choice(NUMBERS)).encode()
            if random.random() < 0.6
            else b"%d" % random.randrange(300)
        )
        lines[place] = lines[place][: at.start()] + number + lines[place][at.end() :]
    return lines


def _insert_raw(lines: list[bytes], random: Random, others: Sequence[bytes]) -> list[bytes]:
    """Put what JSON, UTF-8 or TOML do not have, or hardly, in the place of some bytes."""
    place = _place(lines, random)
    line = lines[place]
    begin = random.randrange(len(line) + 1)
    lines[place] = line[:begin] + random.choice(RAW) + line[begin + random.choice((0, 0, 1, 4)) :]
    return lines


def _change_bytes(lines: list[bytes], random: Random, others: Sequence[bytes]) -> list[bytes]:
    """Change, cut or repeat some bytes, wherever lines end."""
    data = bytearray(b"\n".join(lines))
    for _ in range(random.choice((1, 1, 2, 8))):
        begin = random.randrange(len(data) + 1)
        size = random.choice((1, 1, 2, 4, 8, 64))
        match random.randrange(5):
            case 0:
                data[begin : begin + size] = random.randbytes(size)
            case 1:
                del data[begin : begin + size]
            case 2:
                data[begin:begin] = data[begin : begin + size] * random.choice((1, 2, 30))
            case 3:
                data[begin : begin + size] = (
                    random.choice((b"\0", b"\xff", b"\x80", b"\x7f")) * size
                )
            case _ if begin < len(data):
                data[begin] ^= 1 << random.randrange(8)
    return bytes(data).split(b"\n")


CHANGES: tuple[Callable[[list[bytes], Random, Sequence[bytes]], list[bytes]], ...] = (
    _drop,
    _repeat,
    _move,
    _cut,
    _borrow,
    _borrow,
    _change_digit,
    _change_json,
    _change_json,
    _change_json,
    _change_json,
    _change_number,
    _insert_raw,
    _change_bytes,
    _change_bytes,
)

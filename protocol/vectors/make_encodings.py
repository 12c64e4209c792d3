"""encodings.json: vectors in each encoding, worked out element by element in exact arithmetic,
without the library."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from fractions import Fraction
from math import ceil, floor
from typing import Any
from zlib import adler32

BITS = 2**64 - 1
SEED = 20_26
SMALL = [0.5, -3.0, 1.0, 0.0, 2.0, -0.1, 1e-9, 65504.0]
RAMP = [(place * 37 % 101 - 50) / 8 for place in range(300)]
TWO_BLOCKS = [(place * 389 % 1009 - 500) / 16 for place in range(4099)]


def mix(state: int) -> int:
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & BITS
    state = (state ^ state >> 27) * 0x94D049BB133111EB & BITS
    return state ^ state >> 31


def drawn(seed: int) -> Iterator[Fraction]:
    state = mix(mix(seed) + 2**32 & BITS)
    while True:
        state = state + 0x9E3779B97F4A7C15 & BITS
        number = mix(state)
        yield from (Fraction(number % 2**32, 2**32), Fraction(number >> 32, 2**32))


def single(value: float) -> bytes:
    return struct.pack("<f", value)


def bits_of(value: float) -> int:
    return int.from_bytes(single(value), "little")


def value_of(bits: int) -> float:
    (value,) = struct.unpack("<f", bits.to_bytes(4, "little"))
    return float(value)


def brain(value: float) -> bytes:
    bits = bits_of(value)
    return (bits + 0x7FFF + (bits >> 16 & 1) >> 16).to_bytes(2, "little")


def quantised(
    block: list[float], levels: int, fractions: Iterator[Fraction]
) -> tuple[float, list[int]]:
    largest = max(abs(Fraction(value)) for value in block)
    scale = value_of(bits_of(float(largest / levels)))
    while Fraction(scale) * levels < largest:
        scale = value_of(bits_of(scale) + 1)
    return scale, [
        floor((Fraction(value) / Fraction(scale) if scale else 0) + next(fractions))
        for value in block
    ]


def int8(block: list[float], fractions: Iterator[Fraction]) -> bytes:
    scale, integers = quantised(block, 127, fractions)
    return single(scale) + bytes(integer % 256 for integer in integers)


def int4(block: list[float], fractions: Iterator[Fraction]) -> bytes:
    scale, integers = quantised(block, 7, fractions)
    halves = [integer % 16 for integer in integers] + [0] * (len(integers) % 2)
    return single(scale) + bytes(
        low + 16 * high for low, high in zip(halves[::2], halves[1::2], strict=True)
    )


def top_k(block: list[float], share: Fraction) -> list[int]:
    by_magnitude = sorted(range(len(block)), key=lambda place: (-abs(block[place]), place))
    return sorted(by_magnitude[: ceil(share * len(block))])


def encode(name: str, vector: list[float], seed: int) -> bytes:
    fractions = drawn(seed)
    family, *words = name.split("-")
    size = {"int8": 256, "int4": 64, "topk": 4096}.get(family, 1)
    made = b""
    for start in range(0, len(vector), size):
        block = vector[start : start + size]
        if family == "topk":
            places = top_k(block, Fraction(words[0]))
            made += b"".join(place.to_bytes(2, "little") for place in places)
            block, kind = [block[place] for place in places], (words[1:] or ["float32"])[0]
        else:
            kind = family
        match kind:
            case "int8":
                made += int8(block, fractions)
            case "int4":
                made += int4(block, fractions)
            case _:
                write = {
                    "float32": single,
                    "float16": lambda value: struct.pack("<e", value),
                    "bfloat16": brain,
                }[kind]
                made += b"".join(map(write, block))
    return made


def stored(content: bytes) -> bytes:
    """Return a zlib stream (RFC 1950) with the content as it is, in one block (RFC 1951, 3.2.4)."""
    length = len(content).to_bytes(2, "little")
    return (
        b"\x78\x01\x01"
        + length
        + bytes(byte ^ 255 for byte in length)
        + content
        + adler32(content).to_bytes(4)
    )


def difference(base: list[float], vector: list[float]) -> bytes:
    pairs = zip(b"".join(map(single, base)), b"".join(map(single, vector)), strict=True)
    combined = bytes(one ^ other for one, other in pairs)
    return b"".join(combined[place::4] for place in range(4))


def deltas() -> dict[str, Any]:
    base, vector = [1.0, 2.0, -0.5], [1.5, 2.0, 0.1]
    planes = difference(base, vector)
    valid = {
        "name": "three elements",
        "base": b"".join(map(single, base)).hex(),
        "hex": stored(planes).hex(),
    }
    valid["vector"] = b"".join(map(single, vector)).hex()
    wrong = {
        "an element too few": stored(planes[:8]),
        "a byte too many": stored(planes + b"\x00"),
        "cut short": stored(planes)[:-1],
        "no zlib stream": planes,
        "another checksum": stored(planes)[:-1] + b"\xff",
    }
    invalid = [
        {"name": name, "base": valid["base"], "hex": given.hex(), "code": "bad-encoding"}
        for name, given in wrong.items()
    ]
    return {"deltas": [valid], "invalid_deltas": invalid}


def encodings() -> dict[str, Any]:
    def valid(name: str, vector: list[float]) -> dict[str, Any]:
        numbers = [value_of(bits_of(value)) for value in vector]
        made = encode(name, numbers, SEED).hex()
        return {
            "encoding": name,
            "seed": SEED,
            "vector": b"".join(map(single, numbers)).hex(),
            "hex": made,
        }

    def invalid(what: str, name: str, elements: int, content: str, code: str) -> dict[str, Any]:
        return {"name": what, "encoding": name, "elements": elements, "hex": content, "code": code}

    one, nan, infinity = single(1).hex(), "0000c07f", "0000807f"
    return {
        "valid": [
            *(
                valid(name, SMALL)
                for name in ("float32", "float16", "bfloat16", "int8", "int4", "topk-0.3")
            ),
            *(
                valid(name, RAMP)
                for name in ("int8", "int4", "topk-0.02-float16", "topk-0.02-int8")
            ),
            *(valid(name, [0.0] * 5) for name in ("int8", "int4", "topk-0.5-int8")),
            valid("topk-0.01-int8", TWO_BLOCKS),
            valid("bfloat16", [1.00390625, 1.01171875, 1e-40, -3.3e38]),
            valid("int8", [1e-45, -3e-45]),
        ],
        "invalid": [
            invalid("an encoding that does not exist", "int16", 2, "00000000", "bad-encoding"),
            invalid("a share of all", "topk-1", 1, "0000" + one, "bad-encoding"),
            invalid("a share with a last 0", "topk-0.10", 1, "0000" + one, "bad-encoding"),
            invalid("float16: infinity", "float16", 2, "003c007c", "not-finite"),
            invalid("float16: NaN", "float16", 2, "003c01fe", "not-finite"),
            invalid("bfloat16: infinity", "bfloat16", 1, "80ff", "not-finite"),
            invalid("bfloat16: half an element", "bfloat16", 1, "80", "wrong-length"),
            invalid("int8: the scale is NaN", "int8", 1, nan + "00", "not-finite"),
            invalid("int8: the scale is infinite", "int8", 1, infinity + "01", "not-finite"),
            invalid(
                "int8: an element becomes infinite",
                "int8",
                1,
                single(3e38).hex() + "7f",
                "not-finite",
            ),
            invalid("int8: no scale", "int8", 1, "01", "wrong-length"),
            invalid(
                "int8: the second block has no scale", "int8", 257, one + "01" * 257, "wrong-length"
            ),
            invalid("int4: the scale is NaN", "int4", 2, nan + "00", "not-finite"),
            invalid("int4: a byte too many", "int4", 2, one + "0000", "wrong-length"),
            invalid("topk: a place twice", "topk-0.5", 4, "01000100" + one + one, "bad-encoding"),
            invalid(
                "topk: descending places", "topk-0.5", 4, "02000100" + one + one, "bad-encoding"
            ),
            invalid(
                "topk: a place beyond the block",
                "topk-0.5",
                4,
                "01000400" + one + one,
                "bad-encoding",
            ),
            invalid("topk: a value is NaN", "topk-0.5", 4, "01000200" + one + nan, "not-finite"),
            invalid("topk: a value is missing", "topk-0.5", 4, "01000200" + one, "wrong-length"),
        ],
        **deltas(),
    }

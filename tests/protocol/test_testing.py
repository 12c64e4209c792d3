"""The kit for own encodings: ours pass, the page's passes, planted mistakes are found."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
from fleetlearn_protocol import BlockFormat
from fleetlearn_protocol.testing import check_encoding
from own_formats import OURS, as_own, signs

LOST = {"float32": 0.0, "float16": 1e-3, "bfloat16": 5e-3, "int8": 0.2}


@pytest.mark.parametrize("name", OURS)
def test_ours_pass(name: str) -> None:
    check_encoding(as_own(name), error=LOST.get(name, 1.0), unbiased=not name.startswith("topk"))


def test_the_page_s_own_passes() -> None:
    check_encoding(signs())
    check_encoding(signs(block=2))


INT8 = as_own("int8")
numbers = count()


def encoding(rows: Any, fractions: Any) -> Any:
    return INT8.encode(rows, fractions)


def with_encode(encode: Callable[..., Any]) -> BlockFormat:
    return replace(INT8, encode=encode)


def with_decode(decode: Callable[..., Any]) -> BlockFormat:
    return replace(INT8, decode=decode)


class Half:
    """The middle of every rounding: not random, and so biased."""

    def next(self, amount: int) -> Any:
        return np.zeros(amount)


class Chance:
    def next(self, amount: int) -> Any:
        return np.random.default_rng().random(amount)


def in_place(rows: Any, fractions: Any) -> Any:
    rows += 1
    return encoding(rows, fractions)


def counted(rows: Any, fractions: Any) -> Any:
    return encoding(rows + np.float32(next(numbers)), fractions)


def drifts(content: Any, n: int) -> Any:
    return INT8.decode(content, n) + np.float32(next(numbers))


def among_others(content: Any, n: int) -> Any:
    found = INT8.decode(content, n)
    return found - np.float32(1e-3) * found.mean()


def memory(content: Any, n: int) -> Any:
    np.zeros(4 * 10**7 * int(content[0, 0] == 255), np.uint8)
    return INT8.decode(content, n)


def whole_blocks(content: Any, n: int) -> Any:
    return INT8.decode(content, n).reshape(-1, 256)


MISTAKES: dict[str, tuple[BlockFormat, dict[str, Any], str]] = {
    "chance": (with_encode(lambda rows, _: encoding(rows, Chance())), {}, "gave other bytes"),
    "encodes by state": (with_encode(counted), {}, "gave other bytes"),
    "in place": (with_encode(in_place), {}, "encode failed: ValueError"),
    "rounds down": (
        with_encode(lambda rows, _: encoding(rows, Half())),
        {"unbiased": True},
        "the encoding is biased",
    ),
    "loses": (as_own("topk-0.1"), {"error": 0.5}, "at most 0.5 of it may be lost"),
    "float64": (
        with_decode(lambda content, n: INT8.decode(content, n).astype(np.float64)),
        {},
        "decode returned float64",
    ),
    "decodes by state": (with_decode(drifts), {}, "decode gave others"),
    "decodes by neighbours": (with_decode(among_others), {}, "alone than among others"),
    "memory": (with_decode(memory), {}, "bytes of memory"),
    "a short last block": (with_decode(whole_blocks), {}, "refuses the bytes"),
    "a wrong size": (replace(INT8, size=lambda n: n), {}, "encode returned uint8"),
    "a block of 100": (replace(INT8, block=100), {}, "a power of two"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes_are_found(mistake: str) -> None:
    made, options, text = MISTAKES[mistake]
    with pytest.raises(AssertionError, match=text):
        check_encoding(made, **options)


def test_it_takes_seconds() -> None:
    begin = time.process_time()
    check_encoding(signs(4096), unbiased=False)
    assert time.process_time() - begin < 10

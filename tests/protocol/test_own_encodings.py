"""Own encodings: the page's own, ours written as own ones, their names, and what is refused."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from fleetlearn_protocol import BlockFormat
from fleetlearn_protocol.encodings import (
    MOST_OWN,
    chunk_unit,
    find_encoding,
    is_own,
    leaves_residual,
)
from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.extensions import ExtensionError
from fleetlearn_protocol.messages import OwnEncoding, Task, VectorReference
from fleetlearn_protocol.own_encodings import (
    CHECKED,
    block_sizes,
    encoding_of_task,
    guarded,
    numbers,
    open_encoding,
)
from own_formats import OURS, as_own, signs


def opened(made: BlockFormat, name: str = "a:b", **parameters: float) -> Any:
    return open_encoding(OwnEncoding(name, parameters), made, "encoding.up")


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("length", [1, 63, 4096, 4097, 100_000])
def test_ours_as_an_own_one_gives_ours_to_the_bit(name: str, length: int) -> None:
    ours, own = find_encoding(name), opened(as_own(name))
    vector = np.random.default_rng(1).standard_normal(length).astype(np.float32)
    content = ours.encode(vector, 5)
    assert own.size(length) == ours.size(length) == content.nbytes
    assert own.encode(vector, 5) == content
    assert own.decode(content, length).tobytes() == ours.decode(content, length).tobytes()
    assert own.check(content, length) == np.abs(ours.decode(content, length)).max()


def test_the_page_s_own_travels_in_an_eighth_of_a_byte_an_element() -> None:
    own = opened(signs(256))
    vector = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    content = own.encode(vector)
    assert content.nbytes == own.size(1000) == 3 * 36 + 4 + 29
    found = own.decode(content, 1000)
    assert np.array_equal(np.sign(found), np.sign(vector))
    assert np.allclose(np.abs(found[:256]), np.abs(vector[:256]).mean())


def test_the_name_says_function_parameters_and_the_bytes_of_a_block() -> None:
    given = OwnEncoding("a:b", {"z": 2.0, "block": 0.5})
    own = open_encoding(given, signs(256), "encoding.up", residual=True)
    text = b'["a:b",{"block":0.5,"z":2.0}]'
    assert own.name == f"own-36-{hashlib.sha256(text).hexdigest()[:12]}-residual"
    assert find_encoding(own.name) is own
    assert is_own(own.name)
    assert leaves_residual(own.name)
    assert chunk_unit(own.name) == own.block_bytes == 36
    assert numbers(given) == {"z": 2, "block": 0.5}
    plain = open_encoding(given, signs(256), "encoding.up")
    assert plain.name == own.name.removesuffix("-residual")
    assert not leaves_residual(plain.name)
    others = [opened(signs(256), "a:c"), opened(signs(256), z=2.0), opened(signs(128), z=2.0)]
    assert len({plain.name, *(each.name for each in others)}) == 4


def test_a_chunk_can_be_cut_where_nobody_has_made_the_encoding() -> None:
    name = f"own-36-{'0' * 12}"
    assert chunk_unit(name) == 36
    assert chunk_unit("int8") == 260
    with pytest.raises(
        ProtocolError, match=r"the own encoding own-36-0{12} is not known"
    ) as refused:
        find_encoding(name)
    assert refused.value.code is Code.BAD_ENCODING
    for wrong in ("own-0-000000000000", "own-36-0", "own-36-000000000000-more", "own"):
        assert not is_own(wrong)


def test_those_that_were_made_first_are_forgotten() -> None:
    first = opened(as_own("float16"), "a:first")
    for number in range(MOST_OWN):
        opened(as_own("float16"), number=number)
    with pytest.raises(ProtocolError):
        find_encoding(first.name)
    assert opened(as_own("float16"), "a:first").name == first.name
    assert find_encoding(first.name).name == first.name


def changed(**changes: Any) -> BlockFormat:
    whole = as_own("float32")
    fields = {name: getattr(whole, name) for name in ("size", "encode", "decode")}
    return BlockFormat(**{"block": 64, **fields, **changes})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"block": 0}, "block = 0; expected a power of two up to 4096"),
        ({"block": 100}, "block = 100"),
        ({"block": 8192}, "block = 8192"),
        ({"block": 8.0}, "block = 8.0"),
        ({"size": lambda n: 0}, "size(1) is 0; expected a whole number of bytes, 1 to 68"),
        ({"size": lambda n: 4 * n + 65}, "size(1) is 69"),
        (
            {"size": lambda n: 4 * n + 1},
            "size(64) is 257; expected a whole number of bytes, 1 to 256",
        ),
        ({"size": lambda n: n / 2}, "size(1) is 0.5"),
        ({"size": lambda n: 1 // (n - 3)}, "size(1) is -1"),
        ({"size": lambda n: n // (n - 3) if n == 3 else n}, "size(3) failed: "),
    ],
)
def test_sizes_are_bounded(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ExtensionError) as refused:
        block_sizes(changed(**changes), "encoding.up")
    assert text in str(refused.value)


VECTOR = np.linspace(-1, 1, 100).astype(np.float32)


def in_place(rows: Any, fractions: Any) -> Any:
    rows *= 2
    return rows.view(np.uint8)


@pytest.mark.parametrize(
    ("encode", "text"),
    [
        (in_place, "encode failed: ValueError"),
        (lambda rows, fractions: rows, "encode returned float32(1, 64); expected uint8(1, 256)"),
        (lambda rows, fractions: rows.view(np.uint8)[:, 1:], "encode returned uint8(1, 255)"),
        (lambda rows, fractions: None, "encode returned a NoneType"),
        (lambda rows, fractions: 1 // 0, "encode failed: ZeroDivisionError"),
        (lambda rows, fractions: sys.exit(), "encode failed: SystemExit"),
    ],
)
def test_what_encode_does_wrong_is_said(encode: Callable[..., Any], text: str) -> None:
    own, before = guarded(changed(encode=encode), "own", "encoding.up"), VECTOR.copy()
    with pytest.raises(ExtensionError) as refused:
        own.encode(VECTOR)
    assert text in str(refused.value)
    assert np.array_equal(VECTOR, before)


def test_encode_may_say_that_it_cannot_hold_a_number() -> None:
    def encode(rows: Any, fractions: Any) -> Any:
        raise ProtocolError(Code.OUT_OF_RANGE, "too large")

    with pytest.raises(ProtocolError, match="too large"):
        guarded(changed(encode=encode), "own", "encoding.up").encode(VECTOR)


def overflow(content: Any, n: int) -> Any:
    return np.exp(np.full((len(content), n), 1e6, np.float32))


@pytest.mark.parametrize(
    ("decode", "text"),
    [
        (lambda content, n: np.full((len(content), n), np.nan, np.float32), "is nan"),
        (overflow, "is inf"),
        (lambda content, n: np.zeros((len(content), n)), "decode returned float64(1, 64)"),
        (lambda content, n: np.zeros((len(content), n + 1), np.float32), "float32(1, 65)"),
        (lambda content, n: None, "decode returned a NoneType"),
        (lambda content, n: 1 // 0, "refuses the bytes: ZeroDivisionError"),
        (lambda content, n: sys.exit(3), "refuses the bytes: SystemExit"),
        (lambda content, n: content.fill(0), "refuses the bytes: ValueError"),
    ],
)
def test_what_decode_does_wrong_refuses_the_update(decode: Callable[..., Any], text: str) -> None:
    own = guarded(changed(decode=decode), "own", "encoding.up")
    content = own.encode(VECTOR)
    for ask in (own.check, own.decode):
        with pytest.raises(ProtocolError) as refused:
            ask(content, 100)
        assert text in refused.value.text
        assert refused.value.code in (Code.BAD_ENCODING, Code.NOT_FINITE)
    with pytest.raises(ProtocolError) as refused:
        own.check(bytes(content)[:-1], 100)
    assert refused.value.code is Code.WRONG_LENGTH


def test_bytes_that_say_many_elements_are_checked_a_part_at_a_time() -> None:
    """Of a byte for 4096 elements, a chunk may say as many as the whole model."""
    asked = []

    def decode(content: Any, n: int) -> Any:
        asked.append(len(content) * n)
        return np.repeat(content.astype(np.float32), n, axis=1)

    made = BlockFormat(4096, lambda n: 1, lambda rows, fractions: None, decode)
    content = bytes(range(200))
    assert guarded(made, "own", "x").check(content, 200 * 4096) == 199.0
    assert sum(asked) == 200 * 4096
    assert max(asked) == CHECKED


def task(encoding: OwnEncoding | None, update: str) -> Task:
    model = VectorReference("model", "b" * 64, 8, "float32")
    common: dict[str, Any] = {"hyper": {}, "epochs": 1, "batch_size": 1, "seed": 1, "deadline": 1.0}
    parts = {"update": update}
    return Task("t-1", 1, "a" * 64, (model,), parts, **common, encoding=encoding)


def test_a_device_makes_what_its_task_asks_for() -> None:
    wanted = OwnEncoding("thin_updates:signs", {"block": 64.0})
    name = open_encoding(wanted, signs(64), "there").name
    encoding_of_task(task(None, "int8"), {})
    encoding_of_task(task(wanted, name), {"thin_updates:signs": signs})
    assert find_encoding(name).block == 64
    with pytest.raises(ExtensionError, match="the device's owner allows none"):
        encoding_of_task(task(wanted, name), {})
    with pytest.raises(ExtensionError, match="they have different versions of it"):
        encoding_of_task(task(wanted, name.replace("own-12", "own-13")), {wanted.function: signs})
    for other, text in [
        (lambda state, rows: None, "has no parameter block; it takes state, rows"),
        (lambda block: block, "returned a int; an encoding is BlockFormat"),
        (dict, "is no function that can be called"),
        (print, "has no parameter block"),
    ]:
        with pytest.raises(ExtensionError) as refused:
            encoding_of_task(task(wanted, name), {wanted.function: other})
        assert text in str(refused.value)


def test_the_wire_has_numbers_alone() -> None:
    decoded = msgspec.json.decode(b'{"function":"a:b","parameters":{"a":2}}', type=OwnEncoding)
    assert decoded.parameters == {"a": 2.0}
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"function":"a b"}', type=OwnEncoding)

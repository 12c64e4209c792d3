"""Own encodings: formats of other packages, by which devices write the part ``update``.

A plan names a factory, the device's owner allows the factory by the same name, and both sides make
the ``BlockFormat`` with the same parameters. No code travels. On the wire the encoding is called
``own-BYTES-HASH``, or ``own-BYTES-HASH-residual``: the bytes of a whole block, by which uploads are
cut into chunks, and the beginning of the SHA-256 of the factory's name and parameters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from fleetlearn_protocol.encodings import OWN_FAMILY, RESIDUAL, Encoding, add_encoding
from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.extensions import ExtensionError, ExtensionPoint, made_by, make_once
from fleetlearn_protocol.formats.rows import Bytes, Format
from fleetlearn_protocol.messages import UPDATE, OwnEncoding, Task
from fleetlearn_protocol.splitmix64 import Fractions
from fleetlearn_protocol.user_errors import ANY_FAILURE, failure, in_one_line
from fleetlearn_protocol.vector import Vector, check_finite

LARGEST_BLOCK = 4096
"""Elements of the largest block: updates are read in pieces of as many."""
HEADER = 64
"""Bytes that a last block, which is shorter, may have beyond those of its elements as float32."""
CHECKED = 2**18
"""Elements that are decoded at a time where bytes are checked: a few bytes may say many."""
HASH = 12
"""Hexadecimal digits of the hash in an encoding's name."""


@dataclass(frozen=True, eq=False)
class BlockFormat:
    """How an own encoding writes a vector: it is cut into blocks, and each block is written by
    itself, the last one too if it is shorter.

    All functions are without state: the same arguments have the same result, in any process.
    """

    block: int
    """Elements of a block: a power of two, up to 4096."""
    size: Callable[[int], int]
    """n, from 1 to ``block`` -> bytes of a block of n elements: of a whole one at most as many as
    float32 takes, 4 n; of a shorter one 64 more."""
    encode: Callable[[Vector, Fractions], Bytes]
    """Blocks of one length, float32, finite, shape (blocks, n) -> their bytes, uint8, shape
    (blocks, size(n)). What is random is drawn by ``fractions.next(count)``: float64 from 0 up to 1,
    which follow from the task's seed. ``ProtocolError(Code.OUT_OF_RANGE, text)`` says that an
    element is larger than the format can hold."""
    decode: Callable[[Bytes, int], Vector]
    """Bytes, shape (blocks, size(n)), and n -> float32, shape (blocks, n). The bytes may be of
    anybody: whatever they are, it returns finite numbers or raises an error, such as
    ``ValueError``, with a text for people."""


ENCODING = ExtensionPoint("encoding", BlockFormat)


def numbers(own: OwnEncoding) -> dict[str, float | int]:
    """Return the parameters as its factory takes them: numbers travel as float64, and a parameter
    may be of type int."""
    values = ((name, float(value)) for name, value in own.parameters.items())
    return {name: int(value) if value.is_integer() else value for name, value in values}


def open_encoding(
    own: OwnEncoding, made: BlockFormat, where: str, *, residual: bool = False
) -> Encoding:
    """Return the encoding of a format, which ``find_encoding`` knows from now on.

    own: whose factory made the format. where: names it in errors. residual: whether what it leaves
    out of an update is added to the device's next. Raises ExtensionError where the format's block
    or sizes are out of bounds.
    """
    given = tuple(sorted((name, float(value)) for name, value in own.parameters.items()))
    encoding = _opened(own.function, given, made, where, residual)
    add_encoding(encoding)
    return encoding


def listed_encoding(own: OwnEncoding, where: str, *, residual: bool) -> Encoding:
    """Return the encoding that a function of a listed module makes, as ``open_encoding`` does.
    where: the key that names the function. Raises ExtensionError where there is none."""
    made = make_once(ENCODING, own.function, numbers(own), where)
    return open_encoding(own, made, f"{where} = {own.function!r}", residual=residual)


@lru_cache(maxsize=64)  # asked for with each task
def _opened(
    function: str,
    given: tuple[tuple[str, float], ...],
    made: BlockFormat,
    where: str,
    residual: bool,
) -> Encoding:
    sizes = block_sizes(made, where)
    encoded = msgspec.json.encode([function, dict(given)])
    name = f"{OWN_FAMILY}-{sizes[-1]}-{hashlib.sha256(encoded).hexdigest()[:HASH]}"
    return guarded(made, f"{name}-{RESIDUAL}" if residual else name, where)


def block_sizes(made: BlockFormat, where: str) -> list[int]:
    """Return the bytes of blocks of 0 to ``block`` elements. Raises ExtensionError."""
    block = made.block
    if not isinstance(block, int) or not 0 < block <= LARGEST_BLOCK or LARGEST_BLOCK % block:
        raise ExtensionError(
            f"{where}: block = {block!r}; expected a power of two up to {LARGEST_BLOCK}"
        )
    sizes = [0]
    for elements in range(1, block + 1):
        try:
            size = made.size(elements)
        except ANY_FAILURE as error:
            raise ExtensionError(failure(f"{where}: size({elements})", error)) from error
        most = 4 * elements + (0 if elements == block else HEADER)
        if not isinstance(size, int) or not 0 < size <= most:
            raise ExtensionError(
                f"{where}: size({elements}) is {size!r}; expected a whole number of bytes, 1 to "
                f"{most}"
            )
        sizes.append(size)
    return sizes


def guarded(made: BlockFormat, name: str, where: str) -> Encoding:
    """Return the format as an encoding of this name, which trusts neither the bytes nor the
    format: each result is of the right type and shape, and finite."""
    sizes = block_sizes(made, where)

    def encode(rows: Vector, fractions: Fractions) -> Bytes:
        given = rows.view()
        given.flags.writeable = False  # it is the update, which is needed as it was
        try:
            found = made.encode(given, fractions)
        except ProtocolError:
            raise
        except ANY_FAILURE as error:
            raise ExtensionError(failure(f"{where}: encode", error)) from error
        wanted = len(rows), sizes[rows.shape[1]]
        if not _is_array(found, np.uint8, wanted):
            raise ExtensionError(f"{where}: encode returned {_kind(found)}; expected uint8{wanted}")
        return found

    def decode(content: Bytes, elements: int) -> Vector:
        rows = content.reshape(-1, sizes[elements])
        rows.flags.writeable = False
        try:
            with np.errstate(all="ignore"):  # of bytes that nobody wrote; the result is checked
                found = made.decode(rows, elements)
        except ANY_FAILURE as error:
            text = f"{where} refuses the bytes: {in_one_line(error)}"
            raise ProtocolError(Code.BAD_ENCODING, text) from error
        wanted = len(rows), elements
        if not _is_array(found, np.float32, wanted):
            text = f"{where}: decode returned {_kind(found)}; expected float32{wanted}"
            raise ProtocolError(Code.BAD_ENCODING, text)
        check_finite(found.reshape(-1))
        # A block of one element comes, and goes, without an axis of blocks.
        return found.reshape(*content.shape[:-1], -1)

    def check(content: Bytes, elements: int) -> float:
        rows, largest = content.reshape(-1, sizes[elements]), 0.0
        step = max(1, CHECKED // elements)
        for start in range(0, len(rows), step):
            found = decode(rows[start : start + step], elements)
            largest = max(largest, check_finite(found.reshape(-1)))
        return largest

    return Encoding(name, made.block, Format(sizes.__getitem__, encode, decode, check))


def _is_array(found: object, dtype: type[np.generic], shape: tuple[int, int]) -> bool:
    return isinstance(found, np.ndarray) and found.dtype == dtype and found.shape == shape


def _kind(found: object) -> str:
    if isinstance(found, np.ndarray):
        return f"{found.dtype}{found.shape}"
    return f"a {type(found).__name__}"


def encoding_of_task(task: Task, functions: Mapping[str, Callable[..., Any]]) -> None:
    """Make the own encoding that a task asks for, if it asks for one. ``functions``: those that the
    device's owner allows. Raises ExtensionError where it is not among them, or is another than the
    coordinator's."""
    own, name = task.encoding, task.parts.get(UPDATE, "")
    if own is None:
        return
    if own.function not in functions:
        raise ExtensionError(
            f"the task asks for the encoding {own.function}, and the device's owner allows "
            f"{', '.join(functions) or 'none'}. Where it is installed, --allow-function "
            f"{own.function} allows it (docs/start/your-own-algorithm.md)"
        )
    where = f"the encoding {own.function}"
    residual = name.endswith(f"-{RESIDUAL}")
    made = made_by(ENCODING, functions[own.function], numbers(own), where)
    encoding = open_encoding(own, made, where, residual=residual)
    if encoding.name != name:
        raise ExtensionError(
            f"{where} is called {encoding.name} here, and {name} by the coordinator: they have "
            "different versions of it"
        )

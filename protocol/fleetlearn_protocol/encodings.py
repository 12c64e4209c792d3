"""How a vector of float32 becomes the bytes that travel, and becomes a vector again.

A task names the encoding of each vector that it sends and of each part that it asks for. An
encoding cuts the vector into blocks and writes each block by itself (formats/), the last one too if
it is shorter. To add an encoding, add it to ENCODINGS, or to ``find_encoding`` if its name has
parameters, and to section 4 of PROTOCOL.md. own_encodings.py has those of other packages.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache

import numpy as np

from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.formats import floats, masked, quantised, whole
from fleetlearn_protocol.formats.rows import Bytes, Format
from fleetlearn_protocol.formats.sparse import top_k
from fleetlearn_protocol.frames import Buffer
from fleetlearn_protocol.messages import Part, VectorReference
from fleetlearn_protocol.secure.fixed_point import modulus_bits
from fleetlearn_protocol.splitmix64 import Fractions
from fleetlearn_protocol.vector import Vector, check_finite, checksum, digest

SLAB = 32768
"""Elements that are encoded at a time, so that the temporaries stay in the processor's cache."""


@dataclass(frozen=True)
class Encoding:
    """One way to write a vector as bytes. Any run of whole blocks can be decoded and checked by
    itself, the vector's last block included, whatever its length."""

    name: str
    """Its name on the wire."""
    block: int
    """Elements of a block. Divides 4096."""
    format: Format
    """How a block's elements are written: each block is a row."""
    beside: int = 0
    """Elements after those of the vector that a part says: the weight of a masked update."""
    cuts_zeros: bool = False
    """Whether zeros at the end need not be sent: a part may be shorter than its vector."""

    @cached_property  # asked for with each chunk
    def block_bytes(self) -> int:
        """Bytes of a whole block."""
        return self.format.size(self.block)

    def size(self, elements: int) -> int:
        """Return the bytes of this many elements, from a block's beginning on."""
        blocks, rest = divmod(elements, self.block)
        return blocks * self.block_bytes + (self.format.size(rest) if rest else 0)

    def elements(self, vector: int) -> int:
        """Return the elements of a part in this encoding that says a vector of this many."""
        return vector + self.beside

    def most_bytes(self, vector: int) -> int:
        """Return the most bytes that are let through for a part that says a vector of this many
        elements: those of this encoding or of float32, whichever are more."""
        return max(self.size(self.elements(vector)), FLOAT32.size(vector))

    def accepts_size(self, size: int, vector: int) -> bool:
        """Return whether a part of this many bytes can say a vector of this many elements."""
        whole_size = self.size(self.elements(vector))
        if not self.cuts_zeros:
            return size == whole_size
        return size == whole_size or (0 < size < whole_size and size % self.block_bytes == 0)

    def encode(self, vector: Vector, seed: int = 0) -> memoryview:
        """Return the bytes of a float32 vector, shape (n,). ``seed`` decides how elements are
        rounded, where the encoding draws that. Raises ProtocolError (not-finite, out-of-range;
        bad-encoding: masked words are made of more than the vector)."""
        # as it is in memory: nothing is checked, and a contiguous vector is not copied
        if self.name == FLOAT32.name:
            return np.ascontiguousarray(vector, "<f4").data.cast("B")
        check_finite(vector)
        content, fractions, end = np.empty(self.size(len(vector)), np.uint8), Fractions(seed), 0
        for start in range(0, len(vector), SLAB):
            for rows in self._rows(vector[start : start + SLAB]):
                written = self.format.encode(rows, fractions).reshape(-1)
                content[end : end + len(written)] = written
                end += len(written)
        return content.data

    def decode(self, content: Buffer, elements: int | None = None) -> Vector:
        """Return the vector, float32, shape (elements,), whose bytes ``content`` are. It may be a
        view into them.

        Without ``elements``, the bytes must be whole blocks. They are taken to have passed
        ``check``; what becomes of others is undefined. Raises ProtocolError (wrong-length;
        bad-encoding: masked words are no floats).
        """
        if self.block == 1:  # quicker by half of the cost of a chunk of float32
            return self.format.decode(self._given(content, elements)[0], 1)
        pieces = [
            self.format.decode(rows, length).reshape(-1)
            for rows, length in self._read(content, elements)
        ]
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.zeros(0, np.float32), *pieces])

    def check(self, content: Buffer, elements: int | None = None) -> float:
        """Return the greatest magnitude of the elements whose bytes ``content`` are (``elements``
        as for ``decode``).

        Raises ProtocolError (wrong-length, not-finite; bad-encoding: bytes that no encoder writes).
        """
        if self.block == 1:
            return self.format.check(self._given(content, elements)[0], 1)
        return max(
            (self.format.check(rows, length) for rows, length in self._read(content, elements)),
            default=0.0,
        )

    def reference(self, name: str, vector: Vector) -> VectorReference:
        """Return what a task says about a vector that it sends in this encoding."""
        content = self.encode(vector)
        return VectorReference(name, digest(content), content.nbytes, self.name)

    def part(self, name: str, content: Buffer) -> Part:
        """Return what a report says about a part whose bytes, in this encoding, are ``content``."""
        return Part(name, self.name, memoryview(content).nbytes, checksum(content))

    def _rows(self, vector: Vector) -> Iterator[Vector]:
        """Yield the whole blocks, as rows, and then the rest as one."""
        whole = len(vector) - len(vector) % self.block
        if whole:
            yield vector[:whole].reshape(-1, self.block)
        if whole < len(vector):
            yield vector[None, whole:]

    def _read(self, content: Buffer, elements: int | None) -> Iterator[tuple[Bytes, int]]:
        """Yield the bytes of the whole blocks, as rows, and then the rest's bytes as one row, each
        with the number of elements of a row. Raises ProtocolError (wrong-length)."""
        given, elements = self._given(content, elements)
        blocks, rest = divmod(elements, self.block)
        if blocks:
            yield given[: blocks * self.block_bytes].reshape(blocks, -1), self.block
        if rest:
            yield given[None, blocks * self.block_bytes :], rest

    def _given(self, content: Buffer, elements: int | None) -> tuple[Bytes, int]:
        """Return the bytes and the number of their elements. Raises ProtocolError
        (wrong-length)."""
        given, block_bytes = np.frombuffer(content, np.uint8), self.block_bytes
        if elements is None:
            if given.size % block_bytes:
                text = (
                    f"{given.size} bytes of {self.name} were given; expected a multiple of "
                    f"{block_bytes}"
                )
                raise ProtocolError(Code.WRONG_LENGTH, text)
            elements = given.size // block_bytes * self.block
        elif given.size != self.size(elements):
            text = (
                f"{given.size} bytes of {self.name} were given; {elements} elements take "
                f"{self.size(elements)}"
            )
            raise ProtocolError(Code.WRONG_LENGTH, text)
        return given, elements


FLOAT32 = Encoding("float32", 1, floats.FLOAT32)
FLOAT16 = Encoding("float16", 1, floats.FLOAT16)
BFLOAT16 = Encoding("bfloat16", 1, floats.BFLOAT16)
INT8 = Encoding("int8", 256, quantised.INT8)
INT4 = Encoding("int4", 64, quantised.INT4)

ENCODINGS = {encoding.name: encoding for encoding in (FLOAT32, FLOAT16, BFLOAT16, INT8, INT4)}
"""Name on the wire -> encoding, for those without parameters."""
MASKED = Encoding("masked", 1, masked.MASKED, beside=1)
"""Of updates that only their sum is known of (section "Secure aggregation" of PROTOCOL.md). It is
no encoding of floats, so it is not in ENCODINGS: no model travels so, and a device says that it
knows it only where it can mask."""
MASKED24 = Encoding("masked24", 1, masked.MASKED24, beside=1)
"""The same where elements are short enough to be added modulo 2^24."""
MASKED64 = Encoding("masked64", 1, masked.MASKED64)
"""Of a computation's sums, which are masked too: three words for each."""
MASKED_ENCODINGS = {24: MASKED24, 32: MASKED}
"""m -> how words of updates travel that are added modulo 2^m."""
_MASKED = {encoding.name: encoding for encoding in (MASKED, MASKED24, MASKED64)}
MASKED_NAMES = tuple(_MASKED)
"""What a device that can mask says that it knows, beside FAMILIES."""
INT64 = Encoding("int64", 1, whole.INT64, cuts_zeros=True)
"""Of a computation's sums (section "Computations" of PROTOCOL.md). It is no encoding of floats
either."""
UINT32 = Encoding("uint32", 1, whole.UINT32, cuts_zeros=True)
"""Of the numbers of rows (section "Rows of tables" of PROTOCOL.md), which ascend: there may be
fewer of them than the table has."""
FLOATS = tuple(name for name, encoding in ENCODINGS.items() if encoding.block == 1)
"""The encodings of each element by itself: a vector can be decoded before its length is known."""
_WHOLE = {encoding.name: encoding for encoding in (INT64, UINT32)}
TOP_K = "topk"
"""The family of the encodings that top-k has: ``topk-SHARE``, ``topk-SHARE-float16`` and
``topk-SHARE-int8``."""
TOP_K_BLOCK = 4096
"""Elements of a block of top-k."""
FAMILIES = (*ENCODINGS, TOP_K)
"""What a device says that it knows: the encodings, those with parameters by the first word of their
names."""
RESIDUAL = "residual"
"""The tied vector with what top-k has left out of a device's updates so far."""
OWN_FAMILY = "own"
"""The family of own encodings (own_encodings.py), in whose names are the bytes of a whole block, a
hash, and whether they leave a residual."""
_OWN_NAME = re.compile(rf"{OWN_FAMILY}-([1-9]\d{{0,4}})-[0-9a-f]{{12}}(?:-{RESIDUAL})?", re.ASCII)
MOST_OWN = 256
"""Own encodings that a process knows: of more, those that were made first are forgotten."""
_own: dict[str, Encoding] = {}
_TOP_K_NAME = re.compile(r"topk-(0\.\d{0,5}[1-9])(?:-(float16|int8))?", re.ASCII)


def family(name: str) -> str:
    """Return the family of the encoding of this name."""
    return name.split("-")[0]


def masked_encoding(bits: int) -> Encoding:
    """Return how masked words travel whose elements have this many bits before the mask."""
    return MASKED_ENCODINGS[modulus_bits(bits)]


def word_bytes(encoding: Encoding) -> int:
    """Return the bytes that each word of masked ones takes in this encoding."""
    return MASKED.block_bytes if encoding is MASKED64 else encoding.block_bytes


def leaves_residual(name: str) -> bool:
    """Return whether a device adds to its next update what this encoding left out of the last
    one."""
    return family(name) == TOP_K or (is_own(name) and name.endswith(RESIDUAL))


def is_own(name: str) -> bool:
    """Return whether this is the name of an own encoding, known here or not."""
    return _OWN_NAME.fullmatch(name) is not None


def chunk_unit(name: str) -> int:
    """Return the bytes of a whole block of the encoding of this name, which an upload's chunks must
    hold; of an own encoding also where nobody has made it in this process. Raises ProtocolError
    (bad-encoding)."""
    found = _OWN_NAME.fullmatch(name)
    return find_encoding(name).block_bytes if found is None else int(found[1])


def add_encoding(encoding: Encoding) -> None:
    """Let ``find_encoding`` find an own encoding in this process. Other threads may be looking for
    it: it is there all the time."""
    _own[encoding.name] = encoding
    if len(_own) > MOST_OWN:
        del _own[next(iter(_own))]


def is_known(name: str, families: Collection[str]) -> bool:
    """Return whether there is an encoding of this name, and its family is one of ``families``."""
    try:
        return family(find_encoding(name).name) in families
    except ProtocolError:
        return False


def find_encoding(name: str) -> Encoding:
    """Return the encoding of this name. Raises ProtocolError (bad-encoding), which says which names
    there are."""
    own = _own.get(name)
    return _find(name) if own is None else own


@lru_cache(maxsize=64)
def _find(name: str) -> Encoding:
    if name in ENCODINGS:
        return ENCODINGS[name]
    if name in _WHOLE:
        return _WHOLE[name]
    if name in _MASKED:
        return _MASKED[name]
    if is_own(name):
        raise ProtocolError(
            Code.BAD_ENCODING,
            f"the own encoding {name} is not known in this process: it is of another plan, or of "
            "other parameters (docs/start/your-own-algorithm.md)",
        )
    found = _TOP_K_NAME.fullmatch(name)
    if found is None:
        raise ProtocolError(
            Code.BAD_ENCODING,
            f"there is no encoding {name}; expected {', '.join(ENCODINGS)}, or top-k with its "
            "share: topk-0.01, topk-0.01-float16 or topk-0.01-int8 (above 0, below 1, up to six "
            "decimals, the last one not 0)",
        )
    share, values = found.groups(default="float32")
    return Encoding(name, TOP_K_BLOCK, top_k(Fraction(share), ENCODINGS[values].format))

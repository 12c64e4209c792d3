"""The file of a live buffer: a bounded number of records on the disk, which one process writes
while others read.

docs/internals/buffer.md describes the format for people who write another program for it;
``device_sdk/c/`` is one. All numbers are little-endian.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Literal, NamedTuple

import numpy as np

from fleetlearn_device.runtimes.checks import DataError

MAGIC = b"FLBUFFER"
VERSION = 1
HEADER_BYTES = 4096
COUNT_PLACES = (3840, 3904)
"""Where the number of all records ever appended stands, in turns."""
RECORD_HEADER_BYTES = 24
MAX_ARRAYS = 32
DTYPES = ("<f4", "<f8", "<i8", "<i4", "|u1", "|b1")

_HEADER = struct.Struct("<8sIIQIIIIQI")
_ARRAY = struct.Struct("<32s8sI5I")
_COUNT = struct.Struct("<QI")
RECORD_HEADER = struct.Struct("<QdII")
"""Sequence number, time, CRC-32, 0."""
_ARRAYS_AT = 64

Policy = Literal["newest", "reservoir"]
POLICIES: tuple[Policy, ...] = ("newest", "reservoir")
_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15


class BufferArray(NamedTuple):
    """One array of a record."""

    name: str
    """At most 31 bytes of UTF-8."""
    dtype: str
    """NumPy's name with its byte order, such as ``<f4``: one of DTYPES."""
    shape: tuple[int, ...]
    """Shape in one record, at most five axes."""

    @property
    def bytes(self) -> int:
        """Bytes in one record."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize


class BufferLayout(NamedTuple):
    """What the header of a buffer says. It never changes."""

    capacity: int
    """Most records."""
    arrays: tuple[BufferArray, ...]
    policy: Policy = "newest"
    """Which records stay when there is no room: the newest, or a uniform sample of all that were
    ever appended."""
    durable: bool = False
    """Whether each record is safe from a power cut when ``append`` returns."""
    seed: int = 0
    """Decides which records the reservoir keeps."""

    @property
    def record_bytes(self) -> int:
        """Bytes from one record to the next."""
        size = RECORD_HEADER_BYTES + sum(array.bytes for array in self.arrays)
        return -(-size // 8) * 8

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole file."""
        return HEADER_BYTES + self.capacity * self.record_bytes

    @property
    def dtype(self) -> np.dtype[Any]:
        """A record as a structured type."""
        fields: list[Any] = [("sequence", "<u8"), ("time", "<f8"), ("crc", "<u4"), ("zero", "<u4")]
        fields += [(f"a.{array.name}", array.dtype, array.shape) for array in self.arrays]
        exact = np.dtype(fields)
        pad = self.record_bytes - exact.itemsize
        return np.dtype([*fields, ("pad", "V", pad)]) if pad else exact


def make_layout(
    arrays: Mapping[str, tuple[Any, Sequence[int]]],
    capacity: int,
    policy: Policy = "newest",
    durable: bool = False,
    seed: int = 0,
) -> BufferLayout:
    """Return the layout of records with these arrays: name -> (dtype, shape). Raises DataError."""
    rows = []
    for name, (dtype, shape) in arrays.items():
        given = np.dtype(dtype)
        written = given.newbyteorder("<").str
        if written not in DTYPES:
            allowed = ", ".join(np.dtype(each).name for each in DTYPES)
            raise DataError(f"the array {name} has dtype {given}; expected one of {allowed}")
        if (
            not 0 < len(name.encode()) < 32
            or len(shape) > 5
            or not all(0 < n < 2**32 for n in shape)
        ):
            raise DataError(
                f"the array {name!r} has shape {tuple(shape)}; expected a name of 1 to 31 bytes "
                "and at most five axes, each at least 1 long"
            )
        rows.append(BufferArray(name, written, tuple(int(n) for n in shape)))
    if not 0 < len(rows) <= MAX_ARRAYS:
        raise DataError(f"{len(rows)} arrays were given; expected 1 to {MAX_ARRAYS}")
    if capacity < 1 or policy not in POLICIES or not 0 <= seed < 2**64:
        raise DataError(
            f"capacity={capacity}, policy={policy!r}, seed={seed}; expected at least 1 record, one "
            f"of {', '.join(POLICIES)}, and 0 to 2^64 - 1"
        )
    return BufferLayout(capacity, tuple(rows), policy, durable, seed)


def write_header(layout: BufferLayout) -> bytes:
    """Return the header of a file of this layout to which nothing was appended."""
    content = bytearray(HEADER_BYTES)
    fields = (
        MAGIC,
        VERSION,
        HEADER_BYTES,
        layout.capacity,
        layout.record_bytes,
        len(layout.arrays),
        POLICIES.index(layout.policy),
        int(layout.durable),
        layout.seed,
    )
    _HEADER.pack_into(content, 0, *fields, 0)
    for number, array in enumerate(layout.arrays):
        sizes = [*array.shape, *[0] * (5 - len(array.shape))]
        _ARRAY.pack_into(
            content,
            _ARRAYS_AT + number * _ARRAY.size,
            array.name.encode(),
            array.dtype.encode(),
            len(array.shape),
            *sizes,
        )
    _HEADER.pack_into(content, 0, *fields, zlib.crc32(content[: COUNT_PLACES[0]]))
    for place in COUNT_PLACES:
        content[place : place + _COUNT.size] = pack_count(0)
    return bytes(content)


def read_header(content: bytes, path: object) -> BufferLayout:
    """Return what a header says. Raises DataError where it is none, or is damaged."""
    if content[:8] != MAGIC or len(content) < HEADER_BYTES:
        raise DataError(f"{path} is no live buffer: it does not begin with {MAGIC.decode()}")
    _, version, _, capacity, record, count, policy, durable, seed, crc = _HEADER.unpack_from(
        content
    )
    if version != VERSION:
        raise DataError(
            f"{path} is a live buffer of version {version}; this fleetlearn reads {VERSION}"
        )
    blank = bytearray(content[: COUNT_PLACES[0]])
    blank[_HEADER.size - 4 : _HEADER.size] = bytes(4)
    if zlib.crc32(blank) != crc or count > MAX_ARRAYS or policy >= len(POLICIES):
        raise DataError(
            f"{path}: the header of this live buffer is damaged; move the file away, and the "
            "program that writes it makes a new one"
        )
    arrays = []
    for number in range(count):
        name, dtype, axes, *sizes = _ARRAY.unpack_from(content, _ARRAYS_AT + number * _ARRAY.size)
        arrays.append(
            BufferArray(
                name.rstrip(b"\0").decode(), dtype.rstrip(b"\0").decode(), tuple(sizes[:axes])
            )
        )
    layout = BufferLayout(capacity, tuple(arrays), POLICIES[policy], bool(durable & 1), seed)
    if layout.record_bytes != record:
        raise DataError(f"{path}: records of {record} bytes; expected {layout.record_bytes}")
    return layout


def pack_count(count: int) -> bytes:
    """Return the number of all records ever appended, with its checksum."""
    number = count.to_bytes(8, "little")
    return number + zlib.crc32(number).to_bytes(4, "little")


def read_count(header: bytes) -> int:
    """Return the number of all records ever appended. A writer that died may have left one of the
    two places damaged; the other is one less."""
    counts = [0]
    for place in COUNT_PLACES:
        number, crc = _COUNT.unpack_from(header, place)
        if zlib.crc32(header[place : place + 8]) == crc:
            counts.append(number)
    return max(counts)


def record_crc(sequence: int, time: float, payload: bytes | memoryview) -> int:
    """Return the CRC-32 (zlib's polynomial) of a record: of its number, its time and its arrays."""
    return zlib.crc32(payload, zlib.crc32(struct.pack("<Qd", sequence, time)))


def slot_of(sequence: int, layout: BufferLayout) -> int | None:
    """Return the place of the record with this number, from 1 on. None: the reservoir drops it.

    The reservoir is algorithm R (Vitter, "Random sampling with a reservoir", ACM TOMS 1985): record
    s replaces place j, uniform in 0 to s - 1, if there is such a place. j is a function of seed and
    s: a record whose writing was interrupted gets the same place again.
    """
    if layout.policy == "newest" or sequence <= layout.capacity:
        return (sequence - 1) % layout.capacity
    place = uniform(layout.seed, sequence)
    return place if place < layout.capacity else None


def uniform(seed: int, sequence: int) -> int:
    """Return a number from 0 to sequence - 1, each with the same probability over the seeds."""
    state = _mix((_mix(seed) + sequence) & _MASK)
    left_over = 2**64 % sequence  # numbers above the last whole multiple would come too often
    while True:
        state = (state + _GAMMA) & _MASK
        number = _mix(state)
        if number < 2**64 - left_over:
            return number % sequence


def _mix(x: int) -> int:
    """SplitMix64's finalizer, as ``fleetlearn_protocol.splitmix64.mix`` for one number."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)

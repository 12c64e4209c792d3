"""Finds the rows that several parties have, by keyed hashes of the rows' ids.

Each party hashes the ids of its rows with HMAC-SHA-256 (RFC 2104) under a key that the parties
share and the coordinator does not know. The coordinator gets the hashes, in rising order, and
tells each party which of its hashes all parties have. Row number r of the training is the r-th of
the common hashes in rising order, so that all parties number the rows alike.

The coordinator learns how many rows each party has, how many are common, and which hashes each
party has; not the ids, which it cannot try out without the key. A party learns which of its own
rows the others have too. Whoever has the key and the hashes can test any id.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fleetlearn_protocol.errors import Code, ProtocolError

DOMAIN = b"fleetlearn row id\x00"
"""What is hashed before an id, so that a hash has no other use."""
HASH_BYTES = 32
SHORTEST_KEY = 32
"""Characters of the shortest key: 16 random bytes in hexadecimal."""
MOST_ROWS = 2**24
"""Most rows of a party: its hashes have half a GiB."""
LISTED = 3
"""Ids that an error names."""

RowHashes: TypeAlias = NDArray[np.bytes_]
"""Hashes of rows: dtype S32, shape (n,). Bytes of 0 at a hash's end are kept, since all have the
same length."""


def canonical_id(value: object) -> bytes:
    """Return the bytes of a row's id: a text's UTF-8, or a whole number's decimal digits. So 17
    and "17" are the same id. Raises ValueError."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return str(int(value)).encode()
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return str(int(value)).encode()
    raise ValueError(f"{value!r} is no id; expected a text or a whole number")


def hash_rows(ids: Sequence[Any] | NDArray[Any], key: bytes) -> RowHashes:
    """Return the hash of each row's id, in the order of the rows.

    Raises ValueError: no row, too many, an empty id, an id that is there twice, a key too short.
    The text names ids: it is for the party itself.
    """
    if len(key) < SHORTEST_KEY:
        raise ValueError(
            f"the key has {len(key)} characters; expected at least {SHORTEST_KEY}, random ones, "
            "the same for all parties and unknown to the coordinator: openssl rand -hex 32"
        )
    if not 0 < len(ids) <= MOST_ROWS:
        raise ValueError(f"{len(ids)} rows were given; a party has 1 to {MOST_ROWS}")
    plain = [canonical_id(value) for value in ids]
    if b"" in plain:
        raise ValueError(f"row {plain.index(b'')} (the first is 0) has no id")
    seen: dict[bytes, int] = {}
    twice = []
    for row, one in enumerate(plain):
        first = seen.setdefault(one, row)
        if first != row:
            twice.append(f"{one.decode(errors='replace')!r} in rows {first} and {row}")
    if twice:
        more = f", and {len(twice) - LISTED} more" if len(twice) > LISTED else ""
        raise ValueError(
            f"ids are there twice: {'; '.join(twice[:LISTED])}{more}. Each row needs an id of its "
            "own: which of them would be the other parties' row?"
        )
    digests = b"".join(hmac.digest(key, DOMAIN + one, "sha256") for one in plain)
    return read_hashes(digests)


def read_hashes(content: bytes | memoryview) -> RowHashes:
    """Return the hashes that these bytes are. Raises ProtocolError (wrong-length)."""
    if len(content) % HASH_BYTES:
        raise ProtocolError(
            Code.WRONG_LENGTH, f"{len(content)} bytes are no hashes of {HASH_BYTES} bytes each"
        )
    return np.frombuffer(content, f"S{HASH_BYTES}")


def hashes_as_bytes(hashes: RowHashes) -> bytes:
    """Return the hashes one after the other, 32 bytes each."""
    return np.ascontiguousarray(hashes).tobytes()


def check_sorted(hashes: RowHashes) -> None:
    """Raise ProtocolError (bad-message) unless the hashes rise, without one that is there twice."""
    if not bool((hashes[1:] > hashes[:-1]).all()):
        raise ProtocolError(Code.BAD_MESSAGE, "the hashes of rows do not rise")


def common_hashes(parties: Sequence[RowHashes]) -> RowHashes:
    """Return the hashes that all parties have, in rising order. Each party's rise."""
    common = parties[0]
    for other in parties[1:]:
        common = np.intersect1d(common, other, assume_unique=True)
    return common


def membership(hashes: RowHashes, common: RowHashes) -> bytes:
    """Return a bit for each of a party's hashes in their order, 1 where it is common: the first
    bit is the lowest of the first byte."""
    return np.packbits(np.isin(hashes, common), bitorder="little").tobytes()


def read_membership(content: bytes | memoryview, rows: int) -> NDArray[np.bool_]:
    """Return the bits, shape (rows,). Raises ProtocolError (wrong-length)."""
    if len(content) != (rows + 7) // 8:
        raise ProtocolError(
            Code.WRONG_LENGTH,
            f"{len(content)} bytes for {rows} rows; expected {(rows + 7) // 8}",
        )
    bits = np.unpackbits(np.frombuffer(content, np.uint8), count=rows, bitorder="little")
    return bits.astype(bool)


def digest_of(hashes: RowHashes) -> str:
    """Return the SHA-256 of hashes in this order: what says that parties mean the same rows."""
    return hashlib.sha256(hashes_as_bytes(hashes)).hexdigest()

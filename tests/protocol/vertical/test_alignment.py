"""Rows are aligned by keyed hashes."""

from __future__ import annotations

import hashlib
import hmac

import numpy as np
import pytest
from fleetlearn_protocol.errors import ProtocolError
from fleetlearn_protocol.vertical.alignment import (
    DOMAIN,
    canonical_id,
    check_sorted,
    common_hashes,
    digest_of,
    hash_rows,
    hashes_as_bytes,
    membership,
    read_hashes,
    read_membership,
)

KEY = b"k" * 32


def test_bytes_that_are_no_hashes_are_refused_by_name() -> None:
    """A party's 33 bytes ended what handles all parties' messages."""
    with pytest.raises(ProtocolError, match="33 bytes are no hashes of 32 bytes each"):
        read_hashes(b"x" * 33)


def test_a_hash_is_hmac_sha_256_of_the_id_under_the_key() -> None:
    found = hash_rows(["anna", 17], KEY)
    expected = [hmac.new(KEY, DOMAIN + one, hashlib.sha256).digest() for one in (b"anna", b"17")]
    assert hashes_as_bytes(found) == b"".join(expected)
    assert np.array_equal(read_hashes(b"".join(expected)), found)


def test_a_number_and_its_digits_are_one_id() -> None:
    assert [canonical_id(one) for one in ("17", 17, np.int32(17), 17.0, b"17")] == [b"17"] * 5


@pytest.mark.parametrize("value", [1.5, True, None, ("a",)])
def test_what_is_no_id_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="is no id; expected a text or a whole number"):
        canonical_id(value)


@pytest.mark.parametrize(
    ("ids", "key", "said"),
    [
        ([], KEY, "0 rows were given"),
        (["a", ""], KEY, "row 1 .the first is 0. has no id"),
        (["a", "b", "a", "b"], KEY, "'a' in rows 0 and 2; 'b' in rows 1 and 3"),
        (["a"] * 6, KEY, "and 2 more"),
        (["a"], b"short", "the key has 5 characters; expected at least 32"),
    ],
)
def test_rows_that_cannot_be_aligned_are_refused(ids: list[str], key: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        hash_rows(ids, key)


def test_all_parties_number_the_common_rows_alike() -> None:
    ids = [["a", "b", "c", "d"], ["d", "x", "b", "a"], ["b", "y", "d"]]
    parties = [np.sort(hash_rows(one, KEY)) for one in ids]
    common = common_hashes(parties)
    assert set(common.tolist()) == set(hash_rows(["b", "d"], KEY).tolist())
    chosen = [party[read_membership(membership(party, common), len(party))] for party in parties]
    assert {digest_of(one) for one in chosen} == {digest_of(common)}


def test_a_hash_that_ends_with_zeros_stays_a_hash_of_its_own() -> None:
    rows = np.sort(read_hashes(b"\x01" * 31 + b"\x00" + b"\x01" * 30 + b"\x00\x00"))
    check_sorted(rows)
    assert np.array_equal(common_hashes([rows, rows]), rows)
    assert len(hashes_as_bytes(rows)) == 64


def test_hashes_that_do_not_rise_and_other_lengths_are_refused() -> None:
    rows = np.sort(hash_rows(["a", "b"], KEY))
    for wrong in (rows[::-1], rows[[0, 0]]):
        with pytest.raises(ProtocolError, match="do not rise"):
            check_sorted(wrong)
    with pytest.raises(ProtocolError, match="2 bytes for 3 rows; expected 1"):
        read_membership(b"\x01\x02", 3)

"""Signatures of devices, held to RFC 8032's own."""

from __future__ import annotations

import pytest
from fleetlearn_protocol.secure.signatures import is_signed

# RFC 8032, section 7.1, test 2
PUBLIC = "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c"
CONTENT = b"\x72"
SIGNATURE = (
    "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
    "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
)


def test_the_rfc_s_signature_is_one() -> None:
    assert is_signed(bytes.fromhex(PUBLIC), bytes.fromhex(SIGNATURE), CONTENT)


@pytest.mark.parametrize(
    ("public", "signature", "content"),
    [
        (PUBLIC, SIGNATURE, b"\x73"),
        (PUBLIC, SIGNATURE[:-2] + "01", CONTENT),
        (PUBLIC, SIGNATURE[:-2], CONTENT),
        (PUBLIC, "", CONTENT),
        (PUBLIC[:-2], SIGNATURE, CONTENT),
        ("02" + 31 * "00", SIGNATURE, CONTENT),
    ],
    ids=["content", "changed", "short", "none", "short key", "no point"],
)
def test_all_else_is_none(public: str, signature: str, content: bytes) -> None:
    assert not is_signed(bytes.fromhex(public), bytes.fromhex(signature), content)

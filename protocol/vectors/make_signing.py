"""Signatures: RFC 8032's, and messages' signatures, made with the key of the RFC's first test."""

from __future__ import annotations

from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from fleetlearn_protocol.signing import signed_bytes
from make_messages import EXAMPLES, dumps, plain

# Section 7.1: secret key, public key, message, signature.
RFC_8032 = [
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24"
        "655141438e7a100b",
    ),
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aee"
        "b00d291612bb0c00",
    ),
    (
        "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28d"
        "c027beceea1ec40a",
    ),
]
ORDER = 2**252 + 27742317777372353535851937790883648493
"""Of the group. A signature whose second half is not below it is none, or every signature would
have a second form."""


def signing() -> dict[str, Any]:
    secret = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(RFC_8032[0][0]))
    key, other = RFC_8032[0][1], RFC_8032[1][1]
    challenge, device = EXAMPLES["check-in"].challenge, EXAMPLES["check-in"].device  # type: ignore[union-attr]
    assert challenge is not None

    def case(name: str, message: str) -> dict[str, Any]:
        content = signed_bytes(challenge, device, message)
        fields = {"challenge": challenge, "device": device, "message": message, "key": key}
        return {
            "name": name,
            **fields,
            "bytes": content.hex(),
            "signature": secret.sign(content).hex(),
        }

    tags = ("task", "question", "trust")
    valid = [case(tag, dumps(plain(tag))) for tag in tags]
    valid += [case("not ASCII, with line ends", '{"type":"trust",\n"keys":[],"later":"\u00e9\\n"}')]
    good = {name: value for name, value in valid[0].items() if name != "bytes"}
    signature = secret.sign(bytes.fromhex(valid[0]["bytes"]))
    second_form = signature[:32] + (int.from_bytes(signature[32:], "little") + ORDER).to_bytes(
        32, "little"
    )
    invalid = [
        good | {"name": "another challenge", "challenge": "5eee" * 16},
        good | {"name": "another device", "device": "camera-8.attic"},
        good | {"name": "another message", "message": good["message"].replace("0.1", "0.2")},
        good | {"name": "the same message, written otherwise", "message": " " + good["message"]},
        good | {"name": "another key", "key": other},
        good
        | {
            "name": "one bit of the signature",
            "signature": (bytes([signature[0] ^ 1]) + signature[1:]).hex(),
        },
        good | {"name": "the signature's second form", "signature": second_form.hex()},
        good
        | {
            "name": "of the message alone",
            "signature": secret.sign(good["message"].encode()).hex(),
        },
    ]
    names = ("secret", "public", "message", "signature")
    return {
        "rfc8032": [
            {"name": f"test {n}", **dict(zip(names, row, strict=True))}
            for n, row in enumerate(RFC_8032, 1)
        ],
        "valid": valid,
        "invalid": invalid,
    }

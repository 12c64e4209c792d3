"""For tests: the keys and JWTs of a NATS server whose users have credentials (a .creds file), as
NATS's own tool ``nsc`` makes them: one operator, one account, one user."""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

OPERATOR, ACCOUNT, USER = 14 << 3, 0, 20 << 3
"""What a public key of each begins with."""


def base32(raw: bytes) -> str:
    checksum = binascii.crc_hqx(raw, 0).to_bytes(2, "little")
    return base64.b32encode(raw + checksum).decode().rstrip("=")


class Key:
    """A key pair of one kind."""

    def __init__(self, kind: int) -> None:
        self.key = Ed25519PrivateKey.generate()
        raw = self.key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        self.public = base32(bytes([kind]) + raw)
        seed = bytes([18 << 3 | kind >> 5, (kind & 31) << 3])
        self.seed = base32(seed + self.key.private_bytes_raw())

    def jwt(self, subject: Key, kind: str, **claims: Any) -> str:
        """Return what this key says of another one."""

        def part(content: dict[str, Any]) -> str:
            text = json.dumps(content).encode()
            return base64.urlsafe_b64encode(text).decode().rstrip("=")

        said = {"jti": "1", "iat": 1, "iss": self.public, "sub": subject.public, "name": kind}
        said["nats"] = {"type": kind, "version": 2, **claims}
        text = f"{part({'typ': 'JWT', 'alg': 'ed25519-nkey'})}.{part(said)}"
        signature = base64.urlsafe_b64encode(self.key.sign(text.encode())).decode().rstrip("=")
        return f"{text}.{signature}"


def accounts() -> tuple[str, str]:
    """Return the configuration of a server, and the text of its user's .creds file."""
    operator, account, user = Key(OPERATOR), Key(ACCOUNT), Key(USER)
    limits = dict.fromkeys(("subs", "conn", "leaf", "imports", "exports", "data", "payload"), -1)
    of_account = operator.jwt(account, "account", limits=limits | {"wildcards": True})
    configuration = (
        f"operator: {operator.jwt(operator, 'operator')}\nresolver: MEMORY\n"
        f"resolver_preload: {{ {account.public}: {of_account} }}\n"
    )
    of_user = account.jwt(user, "user", pub={}, sub={}, subs=-1, data=-1, payload=-1)
    credentials = (
        f"-----BEGIN NATS USER JWT-----\n{of_user}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed}\n------END USER NKEY SEED------\n"
    )
    return configuration, credentials

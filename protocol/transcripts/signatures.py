"""The coordinator's signatures in transcripts, for a device that was given the key ``{key}`` to
trust."""

from __future__ import annotations

import json
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from fleetlearn_protocol.signing import signed_bytes
from values import Mismatch


class Signer:
    """Two pairs of keys: one that the device is given (``$key``), and one that it is not
    (``$other key``)."""

    def __init__(self) -> None:
        secrets = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
        self._secrets = {secret.public_key().public_bytes_raw().hex(): secret for secret in secrets}
        self.key, self.other = self._secrets

    @property
    def placeholders(self) -> dict[str, Any]:
        return {"$key": self.key, "$other key": self.other}

    def sign(self, text: str, check_in: dict[str, Any], how: str | None) -> str:
        """Return the frame with the message ``text`` for the device that checked in so.

        ``how``: what is wrong with the signature; None: nothing, and it is by the key that the
        device trusts.
        """
        trusted = [key for key in self._secrets if key in check_in["trusts"]]
        if not trusted:
            raise Mismatch(
                f"the device trusts {check_in['trusts']}; expected the key that its command has "
                "for {key}"
            )
        key = by = trusted[0]
        challenge, device, changed = check_in["challenge"] or "", check_in["device"], ""
        match how:
            case None:
                pass
            case "by another key":
                key = by = self._not(trusted)
            case "by another key under its name":
                by = self._not(trusted)
            case "for another device":
                device = f"{device[:63]}x"
            case "for another connection":
                challenge = challenge[::-1]
            case "and changed":
                changed = " "
            case _:
                raise Mismatch(
                    f"the transcript has a message that is signed {how}, which this program does "
                    "not know"
                )
        signature = self._secrets[by].sign(signed_bytes(challenge, device, text)).hex()
        return json.dumps(
            {"type": "signed", "message": text + changed, "key": key, "signature": signature}
        )

    def _not(self, trusted: list[str]) -> str:
        return next(key for key in self._secrets if key not in trusted)

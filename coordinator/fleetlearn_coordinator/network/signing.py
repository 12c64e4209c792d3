"""Signs what devices are to do, with Ed25519 (RFC 8032), for those that were given public keys to
trust.

A message is signed for one device on one connection, at the moment at which it is sent. What is
signed, and what that covers, is in PROTOCOL.md, section 4, "Signed tasks".
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from fleetlearn_protocol.errors import Code, FleetError, in_words
from fleetlearn_protocol.messages import MAX_KEYS, CheckIn, Question, Signed, Task, Trust, encode
from fleetlearn_protocol.signing import signed_bytes


class Signer:
    """The coordinator's signing keys."""

    def __init__(self, files: Sequence[Path]) -> None:
        """``files``: PEM files of private keys. Raises FleetError (bad-message) where one cannot be
        used."""
        if len(files) > MAX_KEYS:
            raise FleetError(
                Code.BAD_MESSAGE,
                f"signing_keys names {len(files)} keys; a device trusts {MAX_KEYS} at most",
            )
        self._secrets = {public_key(secret): secret for secret in map(read_signing_key, files)}
        self.keys = tuple(self._secrets)
        """The public keys, in the order of the files."""

    def for_device(self, check_in: CheckIn) -> DeviceSigner | None:
        """Return what signs for the device that checked in so: the first key that it trusts. None
        if it trusts none of these keys."""
        key = next((key for key in self.keys if key in check_in.trusts), None)
        if key is None or check_in.challenge is None:
            return None
        new = () if {*self.keys} == {*check_in.trusts} else self.keys
        return DeviceSigner(key, self._secrets[key], check_in.challenge, check_in.device, new)


class DeviceSigner:
    """Signs for one device, on one connection."""

    __slots__ = ("_challenge", "_device", "_key", "_new", "_secret")

    def __init__(
        self, key: str, secret: Ed25519PrivateKey, challenge: str, device: str, new: tuple[str, ...]
    ) -> None:
        """``new``: the keys that the device is to trust from now on. Empty: it trusts them
        already."""
        self._key, self._secret, self._challenge, self._device, self._new = (
            key,
            secret,
            challenge,
            device,
            new,
        )

    def sign(self, message: Task | Question | Trust) -> Signed:
        """Return the message, signed."""
        text = encode(message)
        signature = self._secret.sign(signed_bytes(self._challenge, self._device, text))
        return Signed(text, self._key, signature.hex())

    def new_keys(self) -> Signed | None:
        """Return what makes the device trust the coordinator's keys as they are now. None if it
        does."""
        return self.sign(Trust(self._new)) if self._new else None


def make_signing_key(file: Path) -> bool:
    """Make a private key, readable by its owner alone. Returns False if the file is there already:
    it stays."""
    pem = Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "wb") as opened:
        opened.write(pem)
    return True


def read_signing_key(file: Path) -> Ed25519PrivateKey:
    """Return a private key. Raises FleetError (bad-message) where the file has none."""
    try:
        secret = serialization.load_pem_private_key(file.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:  # TypeError: it has a password
        raise FleetError(
            Code.BAD_MESSAGE, f"{file} cannot be used to sign: {in_words(error)}; {_EXPECTED}"
        ) from None
    if not isinstance(secret, Ed25519PrivateKey):
        raise FleetError(
            Code.BAD_MESSAGE, f"{file} has a key of another kind than Ed25519; {_EXPECTED}"
        )
    return secret


_EXPECTED = (
    "expected a PEM file without a password, as `fleetlearn-coordinator signing-key` makes it"
)


def public_key(secret: Ed25519PrivateKey) -> str:
    """Return a private key's public key, as devices are given it."""
    return secret.public_key().public_bytes_raw().hex()

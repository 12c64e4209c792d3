"""Whose tasks a device trains: where it was given public keys, only those that one of them
signed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fleetlearn_protocol.errors import Code, ProtocolError
from fleetlearn_protocol.messages import Question, Signed, Task, Trust, decode_from_coordinator
from fleetlearn_protocol.signing import signed_bytes

Verify = Callable[[str, str, bytes], bool]
"""(public key, signature, content) -> whether the key's owner signed the content."""


class Trusted(NamedTuple):
    """The keys that the device trusts."""

    keys: tuple[str, ...]
    """Public keys, as in ``CheckIn.trusts``."""
    verify: Verify

    def why_not(self, signed: Signed, challenge: str, device: str) -> str | None:
        """Return why the message in ``signed`` is not to be believed, for people; None if it is."""
        if signed.key not in self.keys:
            return (
                f"it is signed with the key {signed.key}; this device trusts {', '.join(self.keys)}"
            )
        if not self.verify(
            signed.key, signed.signature, signed_bytes(challenge, device, signed.message)
        ):
            return (
                "its signature is wrong: it was changed on the way, or signed for another device "
                "or at another time"
            )
        return None


def message_in(signed: Signed) -> Task | Question | Trust:
    """Return the message. Raises ProtocolError where it is none, or none that is signed."""
    message = decode_from_coordinator(signed.message)
    if not isinstance(message, Task | Question | Trust):
        raise ProtocolError(
            Code.OUT_OF_TURN, "a message was signed that is no task, question or trust"
        )
    return message

"""What is signed where a coordinator signs its tasks.

Ed25519 (RFC 8032), one signature for each message. The signed bytes begin with fixed words, so that
a signature of anything else that the key may ever sign is no signature of a message. They hold the
device's name and what the device drew at random for this connection: a message that was signed for
another device, or earlier, is of no use.
"""

from __future__ import annotations

_BEGIN = "fleetlearn.v1 signed message"


def signed_bytes(challenge: str, device: str, message: str) -> bytes:
    """Return the bytes that are signed: three lines, then the message's JSON.

    Args:
        challenge: From the device's check-in on this connection.
        device: The device's name.
        message: As in ``Signed.message``.
    """
    return "\n".join((_BEGIN, challenge, device, message)).encode()

"""What a TLS handshake that failed most likely means, in words for the log.

A device that does not accept the coordinator's certificate says so with an alert, or, as Python's
asyncio does, ends the connection without a word. What is wrong with the certificate the coordinator
knows itself: its dates, and its names beside the name that the device asked for.
"""

from __future__ import annotations

import ssl
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fleetlearn_protocol.errors import in_words

if TYPE_CHECKING:  # few services have TLS
    from fleetlearn_coordinator.network.own_certificate import OwnCertificate


@dataclass(slots=True)
class Hello:
    """What a peer said when it began its TLS handshake."""

    address: str
    """The coordinator's address to which the peer connected: an IP address."""
    said: bool = False
    """Whether the peer began a handshake at all."""
    name: str = ""
    """The host name that the peer asked for. Peers that connect to an IP address ask for none."""


HELLO: ContextVar[Hello | None] = ContextVar("HELLO", default=None)
"""The greeting of the connection whose handshake is under way. Callbacks see it: asyncio runs them
in the context of the task that began the handshake."""


def note_hello(_: object, name: str | None, __: ssl.SSLContext) -> None:
    """Note what a peer asks for. A context's ``sni_callback``: called for each handshake, with or
    without a name."""
    hello = HELLO.get()
    if hello is not None:
        hello.said, hello.name = True, name or ""


def explain(error: BaseException, hello: Hello, own: OwnCertificate | None, now: float) -> str:
    """Return why a handshake failed, and what can be done; empty where the peer only came and went.
    ``own``: the certificate that it was shown, if that can be read. ``now``: Unix time."""
    reason = (getattr(error, "reason", None) or "") if isinstance(error, ssl.SSLError) else ""
    if isinstance(error, ssl.SSLCertVerificationError):
        # OpenSSL's words, such as "certificate has expired".
        mend = "It must be valid now, and of the CA in tls.clients of the service file"
        return f"the device's own certificate is not accepted: {error.verify_message}. {mend}"
    if reason == "HTTP_REQUEST":
        return (
            "it speaks without TLS, and this port has TLS: it must connect to wss:// (or https://) "
            "instead of ws://"
        )
    if reason in (
        "UNSUPPORTED_PROTOCOL",
        "NO_SHARED_CIPHER",
        "VERSION_TOO_LOW",
        "TLSV1_ALERT_PROTOCOL_VERSION",
    ):
        return "it knows neither TLS 1.2 nor 1.3: its software is too old"
    refused = "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason)
    gone = hello.said and isinstance(error, ConnectionResetError)
    if refused or gone:
        said = (
            "refuses this coordinator's certificate"
            if refused
            else "hung up when it saw this coordinator's certificate"
        )
        return f"it {said}. {_why_refused(reason, hello, own, now)}"
    return f"OpenSSL says {reason or in_words(error)}" if isinstance(error, ssl.SSLError) else ""


def _why_refused(reason: str, hello: Hello, own: OwnCertificate | None, now: float) -> str:
    """Return what is wrong with the certificate for this peer, as far as it can be known here."""
    if own is None:
        return f"OpenSSL says {reason}" if reason else "The reason is in the device's log"
    if why := own.out_of_date(now):
        return f"The certificate {why}"
    asked = hello.name or hello.address
    if not own.is_for(asked):
        what = (
            f"The device asks for {asked}"
            if hello.name
            else f"The device connects to the address {asked}"
        )
        return f"{what}, and the certificate is for {own.listed}"
    if "EXPIRED" in reason:
        return "For the device it has expired, and here it is valid: is the device's clock right?"
    return (
        f'Most likely the device does not trust the CA that made it ("{own.issuer}"): give it the '
        "CA's file (--ca ca.pem). Or its clock is wrong"
    )

"""The coordinator's address: what a device may connect to, and whom TLS trusts."""

from __future__ import annotations

import os
import ssl
from ipaddress import ip_address
from typing import NamedTuple

from websockets.exceptions import InvalidURI
from websockets.uri import parse_uri


class Address(NamedTuple):
    """Where the coordinator is."""

    url: str
    """``ws://`` or ``wss://``."""
    tls: ssl.SSLContext | None
    """Whom TLS trusts; None for an address without TLS."""


def checked_address(url: str, *, ca: str | os.PathLike[str] | None = None, insecure: bool = False) -> Address:
    """Return the address. Raises ValueError where a device may not connect to it.

    ``ca``: a PEM file of the only CAs that TLS trusts; None: those that the system trusts. ``insecure``: whether
    another machine's address may be without TLS.
    """
    try:
        parsed = parse_uri(url)
    except InvalidURI as error:
        raise ValueError(f"{error}; expected ws://HOST:PORT or wss://HOST:PORT") from None
    if parsed.secure:
        return Address(url, _context(ca))
    if ca is not None:
        raise ValueError(f"a CA was given for {url}, which has no TLS; expected wss://")
    if not insecure and not _is_loopback(parsed.host):
        raise ValueError(
            f"{url} is another machine's address without TLS: whoever is on the way reads and changes all that is "
            "sent. Expected wss://; or insecure=True (--insecure) where everybody on the network is trusted"
        )
    return Address(url, None)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")  # RFC 6761, section 6.3


def _context(ca: str | os.PathLike[str] | None) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=ca)
    except OSError as error:  # an SSLError, too
        raise ValueError(f"{ca} cannot be used as a CA: {error}; expected a PEM file of certificates") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context

"""The coordinator's address: what a device may connect to, whom TLS trusts, and how the device says
who it is."""

from __future__ import annotations

import os
import re
import ssl
from pathlib import Path
from typing import NamedTuple

from fleetlearn_protocol.addresses import is_loopback
from websockets.exceptions import InvalidURI
from websockets.uri import parse_uri

from fleetlearn_device.storage.credential import (
    end_change,
    make_credential,
    note_let_in,
    read_credential,
    was_let_in,
)

_TOKEN = re.compile(r"([A-Za-z0-9_-]{43,128})((?:\.[0-9a-f]{64})*)")
"""A secret, and behind dots the public keys that its device is to trust."""


class Enrolment:
    """What the device shows of itself when it connects, as headers of the handshake."""

    def __init__(self, folder: Path, device: str, token: str | None) -> None:
        """``folder``: the state directory. ``token``: what enrols the device, if it is given one;
        the device then makes itself a credential. Raises StateError."""
        self._folder, self._device, self._token = folder, device, token
        self._announced: str | None = None
        self.was_accepted = was_let_in(folder)
        """A coordinator has accepted a handshake of this state directory, now or earlier."""
        if token is not None:
            make_credential(folder)

    def headers(self) -> dict[str, str]:
        """Return the headers of the next handshake; none where the device has no credential. Raises
        StateError."""
        credential = read_credential(self._folder)
        if credential is None:
            return {}
        self._announced = credential.next
        headers = {
            "Authorization": f"Bearer {credential.secret}",
            "Fleetlearn-Device": self._device,
        }
        if self._token is not None:
            headers["Fleetlearn-Enrolment"] = self._token
        if credential.next is not None:
            headers["Fleetlearn-Next-Credential"] = credential.next
        return headers

    def accepted(self) -> None:
        """The coordinator has accepted the handshake: it knows the credential, and the next one.
        Raises StateError."""
        self._token = None
        if not self.was_accepted:
            note_let_in(self._folder)
            self.was_accepted = True
        if self._announced is not None:
            end_change(self._folder)
            self._announced = None


class Address(NamedTuple):
    """Where the coordinator is."""

    url: str
    """``ws://`` or ``wss://``."""
    tls: ssl.SSLContext | None
    """Whom TLS trusts; None for an address without TLS."""


def checked_address(
    url: str,
    *,
    ca: str | os.PathLike[str] | None = None,
    certificate: str | os.PathLike[str] | None = None,
    key: str | os.PathLike[str] | None = None,
    insecure: bool = False,
) -> Address:
    """Return the address. Raises ValueError where a device may not connect to it.

    ``ca``: a PEM file of the only CAs that TLS trusts; None: those that the system trusts.
    ``certificate``, ``key``: PEM files by which the coordinator knows the device. ``insecure``:
    whether another machine's address may be without TLS.
    """
    try:
        parsed = parse_uri(url)
    except InvalidURI as error:
        raise ValueError(f"{error}; expected ws://HOST:PORT or wss://HOST:PORT") from None
    if parsed.username is not None:
        raise ValueError(
            "the address has a user name or a password; expected wss://HOST:PORT alone, and "
            "token=..."
        )
    if (certificate is None) != (key is None):
        raise ValueError(
            "a certificate and its key go together, and one of them was given without the other"
        )
    if parsed.secure:
        context = _context(ca)
        if certificate is not None and key is not None:
            _show(context, certificate, key)
        return Address(url, context)
    for what, file in (("CA", ca), ("certificate", certificate)):
        if file is not None:
            raise ValueError(f"a {what} was given for {url}, which has no TLS; expected wss://")
    if not insecure and not is_loopback(parsed.host):
        raise ValueError(
            f"{url} is another machine's address without TLS: whoever is on the way reads and "
            "changes all that is sent. Expected wss://; or insecure=True (--insecure) where "
            "everybody on the network is trusted"
        )
    return Address(url, None)


def read_token(token: str) -> tuple[str, tuple[str, ...]]:
    """Return a token's secret, and the public keys that come with it. Raises ValueError if this
    cannot be a token. The text does not have it: it is a secret."""
    parts = _TOKEN.fullmatch(token)
    if parts is None:
        raise ValueError(
            f"the token that was given cannot be one: it has {len(token)} characters. Expected 43 "
            "to 128 letters, digits, - and _, and keys behind dots if there are any, with no space "
            "or line end, as `fleetlearn-coordinator enrol` prints it"
        )
    return parts[1], tuple(parts[2].split(".")[1:])


def _context(ca: str | os.PathLike[str] | None) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=ca)
    except OSError as error:  # an SSLError, too
        raise ValueError(
            f"{ca} cannot be used as a CA: {error}; expected a PEM file of certificates"
        ) from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _show(
    context: ssl.SSLContext, certificate: str | os.PathLike[str], key: str | os.PathLike[str]
) -> None:
    try:
        # Without the callback a key with a password would make OpenSSL ask for it at the terminal.
        context.load_cert_chain(certificate, key, password=_refuse_password)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{certificate} and {key} cannot be used as the device's certificate and key: {error}. "
            "Each is a PEM file, as `fleetlearn-coordinator device-certificate` makes them"
        ) from None


def _refuse_password() -> bytes:
    raise ValueError(
        "the key has a password; write it without one, readable by the device's user alone"
    )

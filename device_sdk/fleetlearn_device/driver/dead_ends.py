"""Why a connection cannot be had, where trying again alone will not help: TLS, who the device is,
the version.

Somebody has to do something first: the operator of the coordinator, or whoever starts the device.
The text says what. A device that nobody watches goes on trying, slowly, since a certificate or a
coordinator can be mended while it waits.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from contextlib import suppress
from typing import Literal, NamedTuple

from fleetlearn_protocol.errors import Code, ProtocolError
from websockets.exceptions import InvalidMessage
from websockets.http11 import Response
from websockets.uri import parse_uri

from fleetlearn_device.driver.address import Address
from fleetlearn_device.driver.addresses import Place
from fleetlearn_device.driver.timeouts import timeout

Kind = Literal["tls", "not-admitted", "version", "unreachable"]

PROBE = 3.0
"""Seconds to find out what is spoken at an address."""

_WRONG_CERTIFICATE = {
    9: (
        "it is not valid yet: the clock of this device may be wrong; otherwise wait, or ask for "
        "another certificate"
    ),
    10: (
        "it has expired, or the clock of this device is wrong: the coordinator's operator renews "
        "the certificate (`fleetlearn-coordinator certificate` makes one)"
    ),
    62: (
        "it is for another name than the one in this address: use the name that the certificate "
        "has, or ask the coordinator's operator for a certificate of this name "
        "(`fleetlearn-coordinator certificate NAME`)"
    ),
    64: (
        "it is for another address than this one: use the name or the address that the certificate "
        "has, or ask the coordinator's operator for a certificate of this one "
        "(`fleetlearn-coordinator certificate ADDRESS`)"
    ),
}
"""What to do, by OpenSSL's error of the verification (X509_V_ERR_...)."""
_UNKNOWN_CA = (
    "no CA that this device trusts signed it: give the CA's file, ca.pem of the coordinator, with "
    "--ca; if --ca is given, the coordinator has another CA by now"
)
_NO_TLS = (
    "the coordinator speaks no TLS at this address: use ws:// where that is allowed, or give it a "
    "certificate"
)
_ONLY_TLS = "the coordinator speaks TLS at this address: use wss://"
_WANTS_CERTIFICATE = (
    "the coordinator does not take this device's certificate, or asks for one: give the one that "
    "its operator made for this device (`fleetlearn-coordinator device-certificate`) with "
    "--certificate and --key"
)
_TITLE = re.compile(r"<title[^>]*>([^<]+)", re.IGNORECASE)
_NOT_THE_COORDINATOR = "a proxy or another server answers there, and no fleetlearn coordinator"
_OTHER_VERSION = (
    "the coordinator speaks another version of the protocol ({}): install the version of "
    "fleetlearn here that the coordinator has"
)


class NoConnectionError(Exception):
    """The device cannot be connected to its coordinator, and ends. The text says why, and what to
    do."""

    def __init__(self, kind: Kind, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class DeadEnd(NamedTuple):
    """Why trying again alone will not help."""

    kind: Kind
    text: str

    def error(self) -> NoConnectionError | ProtocolError:
        """Return what a device that ends for this raises."""
        if self.kind == "version":
            return ProtocolError(Code.BAD_VERSION, self.text)
        return NoConnectionError(self.kind, self.text)


async def dead_end_of(error: Exception, address: Address, at: Place | None) -> DeadEnd | None:
    """Return why a connection could not be opened, or None where trying again may be enough.

    An error that says too little is looked into: ``at`` the place that was connected to, without
    saying who the device is. None: there was a proxy in between, and nothing is looked into.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        advice = _WRONG_CERTIFICATE.get(error.verify_code, _UNKNOWN_CA)
        return DeadEnd(
            "tls",
            f"the coordinator's certificate is not accepted ({error.verify_message}): {advice}",
        )
    if isinstance(error, ssl.SSLError):
        return _tls_failed(error)
    if at is None:
        return None
    if address.tls is None:
        nothing_said = isinstance(error, InvalidMessage)
        return DeadEnd("tls", _ONLY_TLS) if nothing_said and await _speaks_tls(at) else None
    if isinstance(error, ConnectionResetError) and await _speaks_http(at):
        return DeadEnd("tls", _NO_TLS)
    if isinstance(error, InvalidMessage) and await _refuses_certificate(address, at):
        return DeadEnd("tls", _WANTS_CERTIFICATE)
    return None


def refusal(response: Response) -> str:
    """Return why a request was refused, in the coordinator's words. Others, such as a proxy or the
    page of a hotel's network, answer with web pages and redirections: of these, what answered."""
    status = f"HTTP {response.status_code} {response.reason_phrase}".strip()
    said = bytes(response.body or b"").decode(errors="replace").strip()
    if "HTTPS port" in said:  # nginx, in a web page
        return _ONLY_TLS
    if "html" in header(response, "Content-Type").lower() or said.startswith("<"):
        title = _TITLE.search(said)
        page = (
            "a web page" if title is None else f'the web page "{" ".join(title[1].split())[:80]}"'
        )
        said = f"{status}, with {page}: {_NOT_THE_COORDINATOR}"
    elif location := header(response, "Location"):
        said = (
            f"{status}, which leads to {location[:200]} and is not followed: {_NOT_THE_COORDINATOR}"
        )
    if _NOT_THE_COORDINATOR in said and (server := header(response, "Server")):
        said = f"{said} (it calls itself {server[:80]})"
    return said or status


def header(response: Response, name: str) -> str:
    """Return the first value of a response's header, empty where there is none."""
    return next(iter(response.headers.get_all(name)), "")


def dead_end_of_refusal(status: int, said: str) -> DeadEnd | None:
    """Return why the coordinator refused a handshake, with this HTTP status and this ``refusal``,
    or None where trying again may be enough."""
    if status in (401, 403) and _NOT_THE_COORDINATOR not in said:
        return DeadEnd("not-admitted", said)
    if status == 400 and "subprotocol" in said:
        return DeadEnd("version", _OTHER_VERSION.format(said))
    return DeadEnd("tls", said) if said == _ONLY_TLS else None


def _tls_failed(error: ssl.SSLError) -> DeadEnd | None:
    reason = getattr(error, "reason", None) or ""
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"):
        return DeadEnd("tls", _NO_TLS)
    return DeadEnd("tls", f"{_WANTS_CERTIFICATE} ({reason})") if "ALERT" in reason else None


async def _speaks_tls(at: Place) -> bool:
    """Return whether TLS is spoken at an address without TLS. Whose certificate it is does not
    matter: the connection is closed without a word."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # In this order: ssl refuses CERT_NONE while names are checked.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with suppress(OSError, TimeoutError):
        async with timeout(PROBE):
            _, writer = await _open(at, context)
            writer.transport.abort()
            return True
    return False


async def _speaks_http(at: Place) -> bool:
    """Return whether a plain request for nothing in particular is answered at an address with
    TLS."""
    with suppress(OSError, TimeoutError):
        async with timeout(PROBE):
            reader, writer = await _open(at, None)
            try:
                writer.write(b"GET / HTTP/1.1\r\nHost: coordinator\r\nConnection: close\r\n\r\n")
                return await reader.read(5) == b"HTTP/"
            finally:
                writer.transport.abort()
    return False


async def _refuses_certificate(address: Address, at: Place) -> bool:
    """Return whether the coordinator ends the connection after TLS's handshake, where it would wait
    for a request.

    That is when it has read the device's certificate, or has seen that there is none (TLS 1.3).
    Some servers say so with an alert, others close.
    """
    try:
        async with timeout(PROBE):
            reader, writer = await _open(at, address.tls, parse_uri(address.url).host)
            try:
                return await reader.read(1) == b""
            finally:
                writer.transport.abort()
    except ssl.SSLError as error:
        return "ALERT" in (getattr(error, "reason", None) or "")
    except (OSError, TimeoutError):
        return False


async def _open(
    at: Place, tls: ssl.SSLContext | None, host: str | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """``host``: the name that the certificate must have; the address itself where there is none."""
    name = None if tls is None else host
    return await asyncio.open_connection(
        at.address[0], at.address[1], ssl=tls, server_hostname=name
    )

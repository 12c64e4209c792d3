"""The way to the coordinator, step by step: its name, the proxy, the connection, TLS, and whether
the device is let in."""

from __future__ import annotations

import ssl
import time
from typing import Any, NamedTuple

from fleetlearn_protocol.messages import PROTOCOL_NAME
from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.typing import Subprotocol
from websockets.uri import WebSocketURI, parse_uri

from fleetlearn_device.doctor.finding import Finding
from fleetlearn_device.driver.address import Address
from fleetlearn_device.driver.addresses import UnreachableError, find_places
from fleetlearn_device.driver.connection import DirectConnect
from fleetlearn_device.driver.dead_ends import (
    dead_end_of,
    dead_end_of_refusal,
    header,
    refusal,
)
from fleetlearn_device.driver.proxies import find_proxy
from fleetlearn_device.driver.timeouts import timeout
from fleetlearn_device.driver.way import Way, explain, open_way
from fleetlearn_device.storage.credential import Credential

SECONDS = 10.0
"""For each step."""
DAYS_LEFT = 14
"""Days before a certificate's end from which on it is a warning."""
NO_CHECK_TIME = 0x200000
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME: to read the dates of a certificate that is out of date."""


class Checked(NamedTuple):
    """What was found on the way."""

    findings: list[Finding]
    date: str | None
    """The header Date of the coordinator's answer."""


async def check_network(address: Address, device: str, credential: Credential | None) -> Checked:
    """Check the way to the coordinator, and what it answers to this device's handshake.

    The device does not check in: one that runs goes on undisturbed. A token is not sent, since it
    would be used up.
    """
    uri = parse_uri(address.url)
    found: list[Finding] = []
    way: Way | None = None
    try:
        proxy = await find_proxy(uri)
        if proxy is None:
            places = await find_places(uri.host, uri.port, SECONDS)
            found.append(Finding("name", "good", f"{uri.host} is {', '.join(map(str, places))}"))
        else:
            found.append(Finding("proxy", "good", f"{proxy}"))
        way = await open_way(uri, SECONDS, 0)
        found.append(Finding("network", "good", f"{uri.host} can be reached {_by(way)}"))
    except UnreachableError as error:
        what = "network" if found else "proxy" if "proxy" in str(error) else "name"
        do = "do what it says; `ping` and `getent hosts` show the network without fleetlearn"
        found.append(Finding(what, "bad", str(error), do))
        return Checked(found, None)
    headers = {}
    if credential is not None:
        headers = {"Authorization": f"Bearer {credential.secret}", "Fleetlearn-Device": device}
    try:
        return await _check_handshake(address, uri, way, headers, found)
    finally:
        way.close()


def _by(way: Way) -> str:
    return f"at {way.place}" if way.proxy is None else f"through {way.proxy}"


async def _check_handshake(
    address: Address, uri: WebSocketURI, way: Way, headers: dict[str, str], found: list[Finding]
) -> Checked:
    options: dict[str, Any] = {
        "additional_headers": headers,
        "subprotocols": [Subprotocol(PROTOCOL_NAME)],
        "compression": None,
        "open_timeout": SECONDS,
        "close_timeout": SECONDS,
        **way.options(),
    }
    try:
        async with DirectConnect(address.url, ssl=address.tls, **options) as socket:
            tls = socket.transport.get_extra_info("ssl_object")
            if tls is not None:
                found.append(_of_certificate(tls.getpeercert(), _chain(tls), time.time()))
            found.append(Finding("coordinator", "good", "it lets this device in"))
            assert socket.response is not None
            return Checked(found, header(socket.response, "Date") or None)
    except InvalidStatus as error:
        answer = refusal(error.response)
        end = dead_end_of_refusal(error.response.status_code, answer)
        if address.tls is not None:
            found.append(Finding("tls", "good", "the coordinator's certificate is accepted"))
        found.append(_refused(answer if end is None else end.text, credential=bool(headers)))
        return Checked(found, header(error.response, "Date") or None)
    except (OSError, WebSocketException, EOFError) as error:
        end = await dead_end_of(error, address, way.place)
        if end is not None and isinstance(error, ssl.SSLError):
            dates, date = await _dates(address, way)
            found.append(Finding("tls", "bad", f"{end.text}{dates}", _advice(error)))
            return Checked(found, date)
        text = explain(error, uri, way) if end is None else end.text
        do = "do what it says, or ask the coordinator's operator"
        found.append(Finding("tls" if end is not None else "coordinator", "bad", text, do))
        return Checked(found, None)


def _refused(text: str, *, credential: bool) -> Finding:
    if credential:
        do = "ask the coordinator's operator; a token enrols the device again"
        return Finding("coordinator", "bad", f"it refuses this device: {text}", do)
    do = "a token enrols the device when it starts: --token or --token-file"
    return Finding("coordinator", "unknown", f"it lets nobody in without a credential: {text}", do)


def _advice(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError) and error.verify_code in (9, 10):
        return "set the clock (timedatectl), or ask the coordinator's operator for a certificate"
    return "do what it says, or ask the coordinator's operator"


def _of_certificate(certificate: dict[str, Any], chain: str, now: float) -> Finding:
    """Return what is to be said of a certificate that was accepted. ``certificate``: as ssl reads
    it; ``chain``: those between it and its CA."""
    left = (ssl.cert_time_to_seconds(certificate["notAfter"]) - now) / 86400
    found = (
        f"the certificate is of {_common_name(certificate, 'issuer')}, from "
        f"{certificate['notBefore']} to {certificate['notAfter']}{chain}"
    )
    if left < DAYS_LEFT:
        do = "the coordinator's operator renews it: `fleetlearn-coordinator certificate`"
        return Finding("tls", "warning", f"{found}: {left:.0f} days are left", do)
    return Finding("tls", "good", found)


def _common_name(certificate: dict[str, Any], whose: str) -> str:
    names = [value for part in certificate.get(whose, ()) for _, value in part]
    return names[-1] if names else "a CA without a name"


def _chain(tls: Any) -> str:
    """Return how long the chain is; Python says so from 3.13 on."""
    try:
        return f", with {len(tls.get_verified_chain())} certificates up to its CA"
    except AttributeError:
        return ""


async def _dates(address: Address, way: Way) -> tuple[str, str | None]:
    """Return the dates of a certificate that is refused for them, and the header Date of the
    coordinator's answer; nothing where they cannot be had. The device says nothing of itself."""
    if address.tls is None or way.place is None:
        return "", None
    before = address.tls.verify_flags
    address.tls.verify_flags = ssl.VerifyFlags(before | NO_CHECK_TIME)
    protocols = [Subprotocol(PROTOCOL_NAME)]
    try:
        async with (
            timeout(SECONDS),
            DirectConnect(
                address.url, ssl=address.tls, subprotocols=protocols, proxy=None
            ) as socket,
        ):
            certificate = socket.transport.get_extra_info("ssl_object").getpeercert()
            assert socket.response is not None
            date = header(socket.response, "Date") or None
            return f" (from {certificate['notBefore']} to {certificate['notAfter']})", date
    except InvalidStatus as error:
        return "", header(error.response, "Date") or None
    except (OSError, WebSocketException, EOFError):
        return "", None
    finally:
        address.tls.verify_flags = before

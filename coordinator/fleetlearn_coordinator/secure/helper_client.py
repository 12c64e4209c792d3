"""A coordinator's questions to the helper: blocking calls, for a thread that may wait.

The coordinator knows the helper's certificate, or the private CA that made the certificate: no
certificate authority of the system may stand in for the other operator.
"""

from __future__ import annotations

import hashlib
import re
import socket
import ssl
from contextlib import suppress
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from threading import Timer
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec
import numpy as np
from fleetlearn_protocol.errors import Code, FleetError, ProtocolError, clip, in_words
from fleetlearn_protocol.secure.fixed_point import Words
from fleetlearn_protocol.secure.helper_messages import (
    CARD_PATH,
    MEDIA_TYPE,
    SUM_PATH,
    TRY_AGAIN,
    WITHOUT_THEM,
    HelperCard,
    MaskSumAnswer,
    MaskSumRefusal,
    MaskSumRequest,
    read_message,
    write_message,
)

FINGERPRINT = r"[0-9a-f]{64}"
OTHER_BYTES = 256 * 1024
"""Bytes of an answer beside a sum's words: a refusal with the names of its devices is shorter."""


class HelperError(FleetError):
    """The helper's sum cannot be had."""


class NoHelperError(HelperError):
    """The helper does not answer, or not now: the same request may be answered later."""


class HelperRefusedError(HelperError):
    """The helper adds nothing up. ``refusal`` has the name of the reason."""

    def __init__(self, refusal: MaskSumRefusal) -> None:
        text = f"the helper refuses ({refusal.name.value}): {refusal.text}"
        super().__init__(Code.NOT_WANTED, text)
        self.refusal = refusal

    @property
    def without(self) -> frozenset[str]:
        """The devices without which the sum may be asked for. Empty: there is no such sum."""
        return frozenset(self.refusal.devices if self.refusal.name in WITHOUT_THEM else ())


class WrongHelperError(HelperError):
    """Who answers is not the helper that was named, or what it says is no answer."""


class HelperAddress(NamedTuple):
    """Where a helper is, and how it is known."""

    url: str
    """``https://host:port``."""
    certificate: str | None = None
    """SHA-256 of its certificate (DER), 64 hexadecimal digits."""
    ca: Path | None = None
    """PEM: the CA of its certificate. One of the two is given."""


def ask_for_sum(helper: HelperAddress, asked: MaskSumRequest, timeout: float) -> Words:
    """Return the sum of the masks of a request's set: uint32, shape (asked.size,).

    timeout: seconds for all of it. The same request may be repeated: it has the same answer. Raises
    NoHelperError (ask again later), HelperRefusedError, WrongHelperError.
    """
    body = write_message(asked)
    words = 4 * asked.size
    answer = _exchange(helper, SUM_PATH, body, MaskSumAnswer, words + OTHER_BYTES, timeout)
    if answer.digest != asked.digest():
        raise WrongHelperError(Code.WRONG_HASH, f"{helper.url} answered for another set of updates")
    if len(answer.words) != words:
        text = f"{helper.url} sent {len(answer.words)} bytes of a sum; {words} were expected"
        raise WrongHelperError(Code.WRONG_LENGTH, text)
    return np.frombuffer(answer.words, "<u4").astype(np.uint32)


def ask_for_card(helper: HelperAddress, key: bytes, timeout: float) -> HelperCard:
    """Return what the helper says of itself. ``key``: its public key, as devices were given it.
    Raises NoHelperError, WrongHelperError (another key among others)."""
    card = _exchange(helper, CARD_PATH, None, HelperCard, OTHER_BYTES, timeout)
    if card.key != key:
        text = f"{helper.url} has the key {card.key.hex()}; {key.hex()} was expected"
        raise WrongHelperError(Code.WRONG_HASH, text)
    return card


Answer = TypeVar("Answer", bound=msgspec.Struct)


def _exchange(
    helper: HelperAddress,
    path: str,
    body: bytes | None,
    kind: type[Answer],
    most: int,
    timeout: float,
) -> Answer:
    connection = _connection(helper, timeout)
    # The connection's own timeout is of each read: a peer that sends a byte now and then has no end
    over = Timer(timeout, _end, [connection])
    over.daemon = True
    over.start()
    try:
        connection.connect()
        _check_pin(helper, connection.sock)
        method = "GET" if body is None else "POST"
        connection.request(method, path, body, {"Content-Type": MEDIA_TYPE})
        response = connection.getresponse()
        content = response.read(most + 1)
    except ssl.SSLCertVerificationError as error:
        text = f"{helper.url} shows a certificate that is not the helper's: {error.verify_message}"
        raise WrongHelperError(Code.WRONG_HASH, text) from None
    except (OSError, HTTPException) as error:
        text = f"{helper.url} does not answer: {in_words(error)}"
        raise NoHelperError(Code.BUSY, text) from None
    finally:
        over.cancel()
        connection.close()
    if len(content) > most:
        text = f"{helper.url} sent more than {most} bytes"
        raise WrongHelperError(Code.TOO_LARGE, text)
    if response.length:  # bytes that did not come
        text = f"{helper.url} went away in the middle of its answer"
        raise NoHelperError(Code.BUSY, text)
    try:
        if response.status == 200:
            return read_message(content, kind)
        refusal = read_message(content, MaskSumRefusal)
    except ProtocolError as error:
        text = f"{helper.url} answered with status {response.status} and {error.text}"
        raise WrongHelperError(Code.BAD_MESSAGE, text) from None
    if refusal.name in TRY_AGAIN:
        raise NoHelperError(Code.BUSY, f"{helper.url} cannot answer now: {refusal.text}")
    raise HelperRefusedError(refusal)


def _connection(helper: HelperAddress, timeout: float) -> HTTPSConnection:
    """Return a connection that is not open yet. Raises WrongHelperError where the address cannot be
    used."""
    target = urlsplit(helper.url)
    try:
        port = target.port or 443
    except ValueError:
        port = 0
    if target.scheme != "https" or not target.hostname or not port or target.path.strip("/"):
        text = f'the helper {helper.url!r} was given; "https://host:port" is expected'
        raise WrongHelperError(Code.BAD_MESSAGE, text)
    if (helper.certificate is None) == (helper.ca is None):
        text = "a helper is known by the SHA-256 of its certificate, or by a CA: give one of them"
        raise WrongHelperError(Code.BAD_MESSAGE, text)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if helper.ca is None:
        if not re.fullmatch(FINGERPRINT, helper.certificate or ""):
            text = f"{helper.certificate!r} is no SHA-256: 64 of 0-9 and a-f are expected"
            raise WrongHelperError(Code.BAD_MESSAGE, text)
        # _check_pin compares the whole certificate before anything is sent
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    else:
        try:
            context.load_verify_locations(helper.ca)
        except OSError as error:
            text = f"{helper.ca} cannot be used as the helper's CA: {in_words(error)}"
            raise WrongHelperError(Code.BAD_MESSAGE, text) from None
    return HTTPSConnection(target.hostname, port, timeout=timeout, context=context)


def _end(connection: HTTPSConnection) -> None:
    """End a connection that another thread reads from."""
    connected = connection.sock
    if connected is not None:
        # Not SSLSocket's own method: after that the socket would read what is not encrypted.
        with suppress(OSError):
            socket.socket.shutdown(connected, socket.SHUT_RDWR)


def _check_pin(helper: HelperAddress, connected: ssl.SSLSocket) -> None:
    if helper.certificate is None:
        return
    shown = hashlib.sha256(connected.getpeercert(binary_form=True) or b"").hexdigest()
    if shown != helper.certificate:
        text = (
            f"{helper.url} shows a certificate with the SHA-256 {shown}; {helper.certificate} was "
            "expected. If the other operator has a new one, put its SHA-256 in the plan"
        )
        raise WrongHelperError(Code.WRONG_HASH, clip(text))

"""One content by one GET (RFC 9110, RFC 9112): from one of its bytes to its last.

No credential, no cookie and no certificate of the device is sent, and no redirect is followed:
nobody has allowed the place where it leads. The caller checks the bytes' hash.
"""

from __future__ import annotations

import asyncio
import base64
import socket
import ssl
import time
from collections.abc import AsyncGenerator
from http.client import HTTPException, parse_headers
from io import BytesIO
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from fleetlearn_protocol.errors import in_words
from websockets.proxy import parse_proxy
from websockets.uri import WebSocketURI

from fleetlearn_device.driver.addresses import connect_first, find_places
from fleetlearn_device.driver.proxies import Proxy, find_proxy
from fleetlearn_device.driver.timeouts import timeout
from fleetlearn_device.driver.timing import Timing

PART = 2**18
"""Most bytes that are handed on at a time."""
MOST_HEADERS = 2**15
"""Bytes of an answer's status and headers."""
LEAST = 2**14
"""Bytes that come in each ``Timing.send`` seconds of waiting for them, at least."""


class HttpFetchError(Exception):
    """Not all bytes came. The text says why, for people, and does not have the URL's query."""


async def http_parts(
    url: str, begin: int, size: int, timing: Timing, ca: Path | None = None
) -> AsyncGenerator[memoryview, None]:
    """Yield the bytes of a content from ``begin`` on, as they come.

    ``size``: bytes of the whole content. ``timing``: how long connecting (``open``) and waiting for
    the next LEAST bytes (``send``) may take. ``ca``: PEM of CAs that are trusted beside the
    system's. Raises HttpFetchError.
    """
    parts = urlsplit(url)
    where = parts.hostname or ""
    place = begin
    writer: asyncio.StreamWriter | None = None
    try:
        async with timeout(2 * timing.open):  # the lookup and the connection, then TLS
            connected = await _connect(parts, timing.open)
            tls = _context(ca) if parts.scheme == "https" else None
            try:
                reader, writer = await asyncio.open_connection(
                    sock=connected,
                    ssl=tls,
                    server_hostname=where if tls is not None else None,
                    limit=PART,
                )
            except BaseException:
                connected.close()
                raise
        async with timeout(timing.send):
            writer.write(_request(parts, begin))
            await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
        _check(head, begin, size)
        # A server that sends a byte now and then would hold the device up for ever.
        left, came = timing.send, 0
        while place < size:
            began = time.monotonic()
            async with timeout(left):
                part = await reader.read(min(PART, size - place))
            if not part:
                raise HttpFetchError(f"{where} ended the answer at byte {place} of {size}")
            place, came = place + len(part), came + len(part)
            left = max(0.0, left - (time.monotonic() - began))
            if came >= LEAST:
                left, came = timing.send, 0
            yield memoryview(part)
    except TimeoutError:
        raise HttpFetchError(f"{where} sent nothing, or hardly anything, for too long") from None
    except asyncio.IncompleteReadError:
        raise HttpFetchError(f"{where} closed the connection without an answer") from None
    except (asyncio.LimitOverrunError, HTTPException, ValueError) as error:
        raise HttpFetchError(f"{where} gave no answer of HTTP: {in_words(error)}") from None
    except OSError as error:  # of TLS, too
        raise HttpFetchError(f"{where} at byte {place}: {in_words(error)}") from None
    finally:
        if writer is not None:
            writer.transport.abort()


def _request(parts: SplitResult, begin: int) -> bytes:
    target = parts.path + (f"?{parts.query}" if parts.query else "")
    lines = [
        f"GET {target} HTTP/1.1",
        f"Host: {parts.netloc}",
        f"Range: bytes={begin}-",
        "Accept-Encoding: identity",
        "Connection: close",
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")


def _check(head: bytes, begin: int, size: int) -> None:
    """Raise HttpFetchError where an answer has not the bytes that were asked for, or says not how
    many there are; ValueError, HTTPException where it is none."""
    if len(head) > MOST_HEADERS:
        raise ValueError(f"{len(head)} bytes of headers")
    line, _, rest = head.partition(b"\r\n")
    version, status = line.decode("latin-1").split(" ")[:2]
    if not version.startswith("HTTP/1.") or not status.isdecimal():
        raise ValueError("the first line is no status")
    headers = parse_headers(BytesIO(rest))
    if status not in ("200", "206"):
        raise HttpFetchError(f"the answer is HTTP {status}")
    if status == "200" and begin:
        raise HttpFetchError("the answer is the whole content: this server knows no ranges")
    expected = f"bytes {begin}-{size - 1}/{size}"
    if status == "206" and headers.get("Content-Range", "").strip() != expected:
        found = headers.get("Content-Range", "none")[:100]
        raise HttpFetchError(f"the answer has the range {found}; expected {expected}")
    if headers.get("Content-Length", "").strip() != str(size - begin):
        found = headers.get("Content-Length", "not said")[:30]
        raise HttpFetchError(f"the answer's length is {found}; expected {size - begin}")
    if headers.get("Content-Encoding", "identity") != "identity":
        raise HttpFetchError("the answer is compressed, which was not asked for")


async def _connect(parts: SplitResult, seconds: float) -> socket.socket:
    """Return a connected socket, through a proxy where the device's settings name one. Raises
    OSError, HttpFetchError."""
    secure = parts.scheme == "https"
    host, port = parts.hostname or "", parts.port or (443 if secure else 80)
    proxy = await find_proxy(WebSocketURI(secure, host, port, "/", "", None, None))
    if proxy is not None:
        return await _through(proxy, host, port, seconds)
    places = await find_places(host, port, seconds)
    connected, _ = await connect_first(places, seconds, f"{host}'s server")
    return connected


async def _through(proxy: Proxy, host: str, port: int, seconds: float) -> socket.socket:
    """Return a socket that a proxy has connected (RFC 9110, 9.3.6)."""
    parsed = parse_proxy(proxy.url)
    if parsed.scheme != "http":
        raise HttpFetchError(f"{proxy} is not used for downloads by HTTP: it is no http:// proxy")
    places = await find_places(parsed.host, parsed.port, seconds)
    connected, _ = await connect_first(places, seconds, "the proxy")
    loop = asyncio.get_running_loop()
    try:
        name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        lines = [f"CONNECT {name} HTTP/1.1", f"Host: {name}"]
        if parsed.username is not None:
            secret = f"{parsed.username}:{parsed.password or ''}".encode()
            lines.append(f"Proxy-Authorization: Basic {base64.b64encode(secret).decode()}")
        await loop.sock_sendall(connected, ("\r\n".join(lines) + "\r\n\r\n").encode())
        answer = b""
        while not answer.endswith(b"\r\n\r\n"):  # what follows is the server's turn, in TLS
            part = await loop.sock_recv(connected, 1)
            if not part or len(answer) > MOST_HEADERS:
                raise HttpFetchError(f"{proxy} gave no answer")
            answer += part
        if answer.split(b" ")[1:2] != [b"200"]:
            status = answer.partition(b"\r\n")[0][:60].decode("latin-1")
            raise HttpFetchError(f"{proxy} refuses to connect to {name}: {status}")
    except BaseException:
        connected.close()
        raise
    return connected


def _context(ca: Path | None) -> ssl.SSLContext:
    """Return whom TLS trusts. Raises OSError where the PEM file cannot be read."""
    context = ssl.create_default_context()
    if ca is not None:
        context.load_verify_locations(ca)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context

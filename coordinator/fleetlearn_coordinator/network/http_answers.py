"""The conversation of an HTTP port that anybody may read from: requests, one after the other, at a
rate for all peers together, each with its answer.

The ports of the page for people (``page_listener``) and of caches (``content_port``) have it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import NamedTuple, Protocol, TypeVar

import h11

from fleetlearn_coordinator.conversation.limits import Bucket
from fleetlearn_coordinator.network.http_port import (
    MOST_HEADERS,
    HttpPort,
    RefusedError,
    read_request,
)

MOST_CONNECTIONS = 128
"""Connections at a time; an address that has limits gets at most half of those that are free."""
REQUEST_TIMEOUT = 10.0
"""Seconds until a connection's next request is there."""
KEEP_FOR = 60.0
"""Seconds of a connection's life after which its next answer is its last."""
REQUEST_RATE, REQUEST_BURST = 300.0, 300.0
"""Requests per second of all peers together, and at once."""


class _HasStatus(Protocol):
    @property
    def status(self) -> HTTPStatus: ...


AnswerType = TypeVar("AnswerType", bound=_HasStatus)


class Manner(NamedTuple):
    """How an answer is sent."""

    silent: bool
    """Its headers alone, as the answer to HEAD."""
    last: bool
    """The connection ends with it."""


def request_rate(now: float) -> Bucket:
    """Return what all peers of a port may ask, in requests."""
    return Bucket(REQUEST_RATE, REQUEST_BURST, now)


async def answer_requests(
    port: HttpPort,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    requests: Bucket,
    *,
    check: Callable[[h11.Request], None],
    answer: Callable[[h11.Request], Awaitable[AnswerType]],
    refusal: Callable[[RefusedError], AnswerType],
    send: Callable[[h11.Connection, asyncio.StreamWriter, AnswerType, Manner], Awaitable[None]],
) -> bool:
    """Answer the requests of one connection. Returns whether one of them was for something that is
    there.

    ``requests``: the rate of all connections. ``check``: as for ``read_request``. ``answer`` may
    raise RefusedError too, and the connection goes on. ``send`` must end the answer's message.
    """
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MOST_HEADERS)
    loop = asyncio.get_running_loop()
    began, useful, last = loop.time(), False, False
    while not last:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT):
                request, _ = await read_request(connection, reader, check)
        except (TimeoutError, EOFError):
            break
        except RefusedError as refused:  # what follows the request may be anything
            silent, last = refused.silent, True
            found = refusal(refused)
        else:
            silent = request.method == b"HEAD"
            await asyncio.sleep(requests.book(loop.time(), 1))
            try:
                found = await answer(request)
            except RefusedError as refused:
                found = refusal(refused)
            useful = useful or found.status < HTTPStatus.BAD_REQUEST
            last = loop.time() - began > KEEP_FOR or port.connections > MOST_CONNECTIONS // 2
        await send(connection, writer, found, Manner(silent, last))
        if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
            break
        connection.start_next_cycle()
    return useful


def check_reads_alone(head: h11.Request, methods: tuple[bytes, ...]) -> None:
    """Refuse a request that wants more than to read, before its body is read. Raises
    RefusedError."""
    headers, silent = dict(head.headers), head.method == b"HEAD"
    if head.method not in methods:
        raise RefusedError(HTTPStatus.METHOD_NOT_ALLOWED, "this port takes GET and HEAD")
    if b"transfer-encoding" in headers or int(headers.get(b"content-length", 0)):
        raise RefusedError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "requests have no body here", silent=silent
        )

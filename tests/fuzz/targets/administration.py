"""Target: bytes before the administrators' port and its page: HTTP requests, and what is none. No
socket, no database."""

from __future__ import annotations

import asyncio
from functools import cache
from http import HTTPStatus
from typing import Any

from fleetlearn_coordinator.dashboard.live_feed import Feed
from fleetlearn_coordinator.dashboard.page_api import PageApi
from fleetlearn_coordinator.dashboard.replay import OneToken
from fleetlearn_coordinator.network.admin_listener import MOST_BODY, AdminListener, Request
from fleetlearn_coordinator.network.http_port import RefusedError


class _Writer:
    """Takes all that is written."""

    def __init__(self) -> None:
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data

    async def drain(self) -> None:
        pass


def _answer(request: Request) -> Any:
    assert len(request.body) <= MOST_BODY
    assert all(isinstance(part, str) for part in request.path)
    if request.path == ("refused",):
        raise RefusedError(HTTPStatus.CONFLICT, "refused")
    return {"path": request.path, "query": request.query}


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def _identify(request: Request) -> object:
    """Nobody may look: the pause before a refused token would be in the way."""
    raise RefusedError(HTTPStatus.FORBIDDEN, "refused")


@cache
def _listener() -> AdminListener:
    sessions = OneToken()
    page = PageApi(_answer, _identify, lambda: sessions, Feed(), secure=True, about={})
    return AdminListener(page.answer, None, browsers=True)


def administration(data: bytes) -> None:
    """The bytes of a connection. It gets an answer, unless the peer is gone before its request is
    complete."""
    _loop().run_until_complete(_talk(data))


async def _talk(data: bytes) -> None:
    reader, writer = asyncio.StreamReader(), _Writer()
    reader.feed_data(data)
    reader.feed_eof()
    try:
        await _listener()._talk(reader, writer)  # type: ignore[arg-type]
    except EOFError:
        return
    assert writer.written.startswith(b"HTTP/1.1 "), writer.written[:100]


def stop() -> None:
    """End the threads, and close the event loop."""
    if not _listener.cache_info().currsize:  # no input was played
        return
    _loop().run_until_complete(_listener().close())
    _loop().close()
    _loop.cache_clear()
    _listener.cache_clear()

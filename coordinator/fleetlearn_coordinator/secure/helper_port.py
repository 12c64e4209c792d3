"""The helper's port: HTTPS, one request for each connection, bounded in every way."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus

import h11
import msgspec
from fleetlearn_protocol.command_line import stop_signals
from fleetlearn_protocol.errors import clip
from fleetlearn_protocol.secure.helper_messages import (
    CARD_PATH,
    MEDIA_TYPE,
    REPORT_BYTES,
    SUM_PATH,
    MaskSumRefusal,
    RefusalName,
    write_message,
)
from fleetlearn_protocol.systemd import ALIVE, READY, STOPPING, notify_systemd

from fleetlearn_coordinator.network import process_settings
from fleetlearn_coordinator.network.http_port import (
    MOST_HEADERS,
    HttpPort,
    RefusedError,
    read_request,
    read_target,
    send_answer,
)
from fleetlearn_coordinator.plan.service_settings import Limits
from fleetlearn_coordinator.secure.helper import Helper
from fleetlearn_coordinator.secure.helper_book import HelperBounds
from fleetlearn_coordinator.secure.helper_settings import HelperSettings

MOST_CONNECTIONS = 8
"""Connections at a time; each may hold a request and an answer in memory."""
THREADS = 1
"""Sums that are made at a time."""
REQUEST_TIMEOUT = 60.0
"""Seconds until a connection's request is there."""
LIFE = 900.0
"""Seconds that a connection lives at most: a sum of the largest size, and its way to a slow
peer."""
ALIVE_EVERY = 1.0
"""Seconds between signs of life for systemd."""

logger = logging.getLogger("fleetlearn.helper")


class HelperPort:
    """The port, within a running event loop."""

    def __init__(self, helper: Helper, settings: HelperSettings) -> None:
        """Raises FleetError where the files of TLS cannot be used."""
        self._helper = helper
        self._most_body = REPORT_BYTES * (settings.most_devices + 2)
        self._port = HttpPort(
            self._talk,
            "a coordinator",
            most=MOST_CONNECTIONS,
            threads=THREADS,
            timeout=LIFE,
            tls=settings.tls,
            limits=Limits(),
        )

    async def listen(self, host: str, port: int) -> str:
        """Begin to accept connections. Returns the address, as a URL. Raises OSError."""
        return await self._port.listen(host, port)

    async def close(self) -> None:
        """Accept nothing more, and end what is open."""
        await self._port.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Read the request, and answer it. Returns whether it was answered as asked."""
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MOST_HEADERS)
        status = HTTPStatus.OK
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT):
                head, body = await read_request(connection, reader, self._check)
            if head.method == b"GET":
                answer: msgspec.Struct = self._helper.card
            else:
                loop = asyncio.get_running_loop()
                answer = await loop.run_in_executor(self._port.pool, self._helper.answer, body)
            if isinstance(answer, MaskSumRefusal):
                busy = answer.name is RefusalName.BUSY
                status = HTTPStatus.SERVICE_UNAVAILABLE if busy else HTTPStatus.CONFLICT
        except RefusedError as refused:
            answer = MaskSumRefusal(RefusalName.BAD_REQUEST, clip(refused.text))
            status = refused.status
        headers = [("Cache-Control", "no-store"), ("Content-Type", MEDIA_TYPE)]
        return await send_answer(connection, writer, status, headers, write_message(answer))

    def _check(self, head: h11.Request) -> None:
        """Refuse a request before its body is read. Raises RefusedError."""
        path = "/" + "/".join(read_target(head).path)
        wanted = {SUM_PATH: b"POST", CARD_PATH: b"GET"}
        if path not in wanted:
            text = f"there are {SUM_PATH} and {CARD_PATH} here"
            raise RefusedError(HTTPStatus.NOT_FOUND, text)
        if head.method != wanted[path]:
            text = f"{path} takes {wanted[path].decode()}"
            raise RefusedError(HTTPStatus.METHOD_NOT_ALLOWED, text)
        headers = dict(head.headers)
        # each of many small chunks would cost as much as a large one
        if b"transfer-encoding" in headers:
            text = "a body needs the header Content-Length"
            raise RefusedError(HTTPStatus.LENGTH_REQUIRED, text)
        if int(headers.get(b"content-length", 0)) > self._most_body:
            text = f"the body is longer than {self._most_body} bytes"
            raise RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text)


def open_helper(settings: HelperSettings) -> Helper:
    """Return the helper of these settings. Raises StoreError where its file cannot be used."""
    bounds = HelperBounds(settings.minimum, settings.most_devices, settings.most_elements)
    return Helper(settings.database, bounds)


@asynccontextmanager
async def listening_helper(settings: HelperSettings) -> AsyncIterator[str]:
    """Serve a helper until the block is left. Yields its address. Raises FleetError, OSError."""
    helper = open_helper(settings)
    port = HelperPort(helper, settings)
    try:
        address = await port.listen(settings.host, settings.port)
        logger.info(
            "listening on %s, with the key %s; at least %d devices",
            address,
            helper.card.key.hex(),
            settings.minimum,
        )
        yield address
    finally:
        await port.close()


def serve_helper(settings: HelperSettings) -> None:
    """Answer coordinators until a signal comes. Raises FleetError (a file cannot be used), OSError
    (the address cannot be listened on)."""
    asyncio.run(_serve(settings))


async def _serve(settings: HelperSettings) -> None:
    process_settings.raise_file_limit()
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[str] = loop.create_future()

    def stop(number: signal.Signals) -> None:
        if not stopped.done():
            notify_systemd(STOPPING)
            stopped.set_result(number.name)

    with stop_signals(loop, stop):
        async with listening_helper(settings):
            notify_systemd(READY)
            while not stopped.done():
                notify_systemd(ALIVE)
                await asyncio.wait({stopped}, timeout=ALIVE_EVERY)
    logger.info("stopped by %s", stopped.result())

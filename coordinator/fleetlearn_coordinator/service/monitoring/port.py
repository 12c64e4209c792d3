"""The port of programs that watch the coordinator: /metrics, /healthz and /readyz.

It has no login: whoever can connect may read it, and it says nothing of single devices. One answer
does for all who ask within a second, so a flood of scrapes costs as much as one.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

import h11
import msgspec
from fleetlearn_protocol.errors import Code, in_words

from fleetlearn_coordinator.network.http_port import (
    MOST_HEADERS,
    HttpPort,
    RefusedError,
    read_request,
    read_target,
    send_answer,
)
from fleetlearn_coordinator.network.run_host import RunHost
from fleetlearn_coordinator.plan.service_settings import (
    AlertSettings,
    ServiceError,
    ServiceSettings,
    Tls,
)
from fleetlearn_coordinator.service.json_log import said
from fleetlearn_coordinator.service.monitoring.alerts import Alerts
from fleetlearn_coordinator.service.monitoring.monitor import END_TIMEOUT, Kept, Monitor
from fleetlearn_coordinator.service.monitoring.notifier import Notifier

logger = logging.getLogger("fleetlearn.coordinator")

MOST_CONNECTIONS = 16
"""Connections at a time; further ones are ended."""
TIMEOUT = 10.0
"""Seconds that a connection lives, from its first byte to the last of its answer."""
OPENMETRICS = "application/openmetrics-text"
JSON = "application/json"


class MonitoringAnswer(NamedTuple):
    """What a request is answered."""

    status: HTTPStatus
    content_type: str
    body: bytes


class MonitoringPort:
    """The port, within a running event loop."""

    def __init__(self, monitor: Monitor, tls: Tls | None) -> None:
        """Raises FleetError where the files of TLS cannot be used."""
        # 20 ms and 4 MB, for coordinators with this port
        from fleetlearn_coordinator.service.monitoring.exposition import encode

        self._monitor, self._encode = monitor, encode
        self._metrics = {
            accept: Kept(partial(self._make_metrics, accept)) for accept in (OPENMETRICS, "")
        }
        self._answers: dict[tuple[str, ...], Callable[[str], Awaitable[MonitoringAnswer]]] = {
            ("metrics",): self._answer_metrics,
            ("healthz",): self._answer_health,
            ("readyz",): self._answer_ready,
        }
        self._port = HttpPort(
            self._talk, "a monitor", most=MOST_CONNECTIONS, threads=1, timeout=TIMEOUT, tls=tls
        )

    async def listen(self, host: str, port: int) -> str:
        """Begin to accept connections. Returns the address, as a URL. Raises OSError."""
        return await self._port.listen(host, port)

    async def close(self) -> None:
        """Accept nothing more, and end what is open."""
        await self._port.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Read a request, and answer it. Returns whether it was answered as asked."""
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MOST_HEADERS)
        silent = False
        try:
            head, _ = await read_request(connection, reader, _check)
            silent = head.method == b"HEAD"
            answer = await self._answer(head)
        except RefusedError as refused:
            text = f"{refused.text}\n".encode()
            answer = MonitoringAnswer(refused.status, "text/plain; charset=utf-8", text)
            silent = silent or refused.silent
        headers = [("Cache-Control", "no-store"), ("Content-Type", answer.content_type)]
        return await send_answer(
            connection, writer, answer.status, headers, answer.body, silent=silent
        )

    async def _answer(self, head: h11.Request) -> MonitoringAnswer:
        path = read_target(head).path
        answer = self._answers.get(path)
        if answer is None:
            known = ", ".join("/" + "/".join(each) for each in self._answers)
            raise RefusedError(HTTPStatus.NOT_FOUND, f"this port has {known}")
        try:
            return await answer(dict(head.headers).get(b"accept", b"").decode("latin-1"))
        except Exception:
            # Without an answer a scraper learns only that the connection was closed.
            logger.exception("a monitor's request for /%s could not be answered", "/".join(path))
            raise RefusedError(
                HTTPStatus.INTERNAL_SERVER_ERROR, "this could not be told: the log says why"
            ) from None

    async def _answer_metrics(self, accept: str) -> MonitoringAnswer:
        body, content_type = await self._metrics[OPENMETRICS if OPENMETRICS in accept else ""].get()
        return MonitoringAnswer(HTTPStatus.OK, content_type, body)

    async def _make_metrics(self, accept: str) -> tuple[bytes, str]:
        samples = await self._monitor.samples()
        return await self._monitor.in_thread(lambda: self._encode(samples, accept))

    async def _answer_health(self, accept: str) -> MonitoringAnswer:
        """The event loop answers: whatever a disk does, the process is alive."""
        return MonitoringAnswer(HTTPStatus.OK, JSON, b'{"healthy":true}\n')

    async def _answer_ready(self, accept: str) -> MonitoringAnswer:
        health = await self._monitor.health()
        status = HTTPStatus.OK if health.ready else HTTPStatus.SERVICE_UNAVAILABLE
        return MonitoringAnswer(status, JSON, msgspec.json.encode(health._asdict()) + b"\n")


def _check(head: h11.Request) -> None:
    """Refuse a request before its body is read. Raises RefusedError."""
    headers, silent = dict(head.headers), head.method == b"HEAD"
    if head.method not in (b"GET", b"HEAD"):
        raise RefusedError(HTTPStatus.METHOD_NOT_ALLOWED, "this port takes GET and HEAD")
    if b"transfer-encoding" in headers or int(headers.get(b"content-length", 0)):
        raise RefusedError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "requests have no body here", silent=silent
        )


@asynccontextmanager
async def monitoring_port(service: ServiceSettings, monitor: Monitor) -> AsyncIterator[None]:
    """Listen on the metrics' port, if the service file has one, until the block is left. Raises
    FleetError (the files of TLS cannot be used), OSError (the address cannot be listened on)."""
    settings = service.metrics
    if settings is None:
        yield
        return
    # Whatever the devices' port asks of its peers, this one asks for no certificate.
    tls = (
        None
        if service.tls is None
        else Tls(certificate=service.tls.certificate, key=service.tls.key)
    )
    port = MonitoringPort(monitor, tls)
    address = await port.listen(settings.host, settings.port)
    logger.info("metrics: %s/metrics", address, extra=said("metrics-port", address=address))
    try:
        yield
    finally:
        await port.close()


@asynccontextmanager
async def monitoring(
    service: ServiceSettings, host: RunHost, stopping: Callable[[], bool], folder: Path
) -> AsyncIterator[Monitor | None]:
    """Watch a coordinator as its service file says, until the block is left. Yields None where
    nobody wants to know. ``stopping``: as for ``Monitor``. ``folder``: where what alerts fire is
    remembered, if it is a folder. Raises what ``monitoring_port`` does, ServiceError (the webhook's
    CA cannot be used)."""
    if service.metrics is None and service.alerts is None and service.traces is None:
        yield None
        return
    notifier, alerts = None, None
    if service.alerts is not None:
        notifier = _notifier(service.alerts)
        there = folder if folder.is_dir() else None
        alerts = Alerts(service.alerts, there, notifier.tell)
    monitor = Monitor(host, stopping, alerts)
    try:
        async with tracing(service, monitor), monitoring_port(service, monitor):
            yield monitor
    finally:
        await monitor.end()
        if notifier is not None:
            await asyncio.to_thread(notifier.close)


@asynccontextmanager
async def tracing(service: ServiceSettings, monitor: Monitor) -> AsyncIterator[None]:
    """Let the monitor trace its runs, if the service file has [traces], until the block is left.
    Raises ServiceError (the extra is not installed)."""
    settings = service.traces
    if settings is None:
        yield
        return
    try:  # 0.3 s and 20 MB, for coordinators with traces
        from fleetlearn_coordinator.service.monitoring.run_traces import RunTraces, open_tracing
    except ModuleNotFoundError as error:
        text = f'[traces] needs: pip install "fleetlearn[traces]" ({error})'
        raise ServiceError(Code.BAD_MESSAGE, text) from None
    opened = open_tracing(settings)
    tracer = opened.get_tracer("fleetlearn")
    monitor.make_tracer = lambda name: RunTraces(name, tracer, settings.tasks)
    try:
        yield
    finally:
        # A thread of the pool would hold up the end of the loop where a collector does not answer.
        ending = threading.Thread(target=opened.shutdown, daemon=True)
        ending.start()
        until = time.monotonic() + END_TIMEOUT
        while ending.is_alive() and time.monotonic() < until:
            await asyncio.sleep(0.02)


def _notifier(settings: AlertSettings) -> Notifier:
    try:
        return Notifier(settings)
    except (OSError, ValueError) as error:
        text = (
            f"alerts.webhook_ca = {settings.webhook_ca} cannot be used: {in_words(error)}; "
            "expected a PEM file"
        )
        raise ServiceError(Code.BAD_MESSAGE, text) from None

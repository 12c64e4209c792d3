"""The WebSocket to the coordinator: opened again after each end, and never waited for beyond a
limit."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from functools import partial

from fleetlearn_protocol.errors import clip
from fleetlearn_protocol.frames import MAX_FRAME_BYTES
from fleetlearn_protocol.json_log import said
from fleetlearn_protocol.messages import PROTOCOL_NAME
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.typing import Subprotocol
from websockets.uri import parse_uri

from fleetlearn_device.driver.address import Address, Enrolment
from fleetlearn_device.driver.dead_ends import (
    DeadEnd,
    dead_end_of,
    dead_end_of_refusal,
    header,
    refusal,
)
from fleetlearn_device.driver.status import StatusFile, Traffic
from fleetlearn_device.driver.timeouts import timeout
from fleetlearn_device.driver.timing import Timing, retry_after, seconds_to_wait
from fleetlearn_device.driver.way import Way, explain, open_way
from fleetlearn_device.limits.byte_rate import ByteRate
from fleetlearn_device.session.commands import Commands
from fleetlearn_device.session.session import Session
from fleetlearn_device.session.statement import Statement
from fleetlearn_device.session.states import Closing, Online

log = logging.getLogger("fleetlearn.device")

QUEUED_FRAMES = 4
"""Frames that are received before those before them are handled."""
Event = Callable[[], Commands]
"""Tells the session what happened. Returns its commands."""


class DirectConnect(connect):
    """Follows no redirects: nobody has checked the address where they lead, and it would get the
    device's token."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc


class Connection:
    """One open WebSocket."""

    def __init__(self, socket: ClientConnection, timing: Timing, traffic: Traffic) -> None:
        self._socket, self._timing, self._traffic = socket, timing, traffic

    async def send(self, message: str | bytes) -> bool:
        """Send within the time limit. Returns False where the connection is gone.

        The connection to a coordinator that reads nothing is aborted: neither close() nor the
        keepalive ends a connection whose write buffer is full.
        """
        try:
            async with timeout(self._timing.send):
                await self._socket.send(message)
        except TimeoutError:
            log.warning(
                "the coordinator took nothing for %g s; the connection is aborted",
                self._timing.send,
            )
            self.abort()
            return False
        except ConnectionClosed:
            return False
        self._traffic.sent += len(message)
        return True

    async def check(self) -> None:
        """Ask for a sign of life; abort where none comes within the time limit.

        A timer of its own would wake the processor between two heartbeats.
        """
        try:
            async with timeout(self._timing.ping):
                await (await self._socket.ping())
        except TimeoutError:
            log.warning(
                "the coordinator gave no sign of life for %g s; the connection is aborted",
                self._timing.ping,
            )
            self.abort()
        except ConnectionClosed:
            pass

    async def close(self, code: int) -> None:
        """Close with this closing code; abort where the closing handshake takes too long."""
        try:
            async with timeout(self._timing.close):
                await self._socket.close(code)
        except TimeoutError:
            self.abort()

    def abort(self) -> None:
        """End the connection at once, without a closing handshake."""
        self._socket.transport.abort()


class Connector:
    """Keeps the device connected.

    Args:
        address: Of the coordinator.
        enrolment: Says who the device is.
        timing: Time limits.
        session: Is told of each opened and ended connection, and of each frame.
        state: Returns what the device states at a check-in.
        handle: Passes an event to the session, and returns when its commands were carried out.
        on_end: Called when a connection has ended, before the session is told.
        status: Is told whether there is a connection, what goes wrong, and how much is sent.
        wait_for_conditions: Returns when the device may connect.
        rate: Limits what is received. None: nothing does.
    """

    def __init__(
        self,
        address: Address,
        enrolment: Enrolment,
        timing: Timing,
        session: Session,
        state: Callable[[], Statement],
        handle: Callable[[Event], Awaitable[None]],
        on_end: Callable[[], None],
        status: StatusFile,
        wait_for_conditions: Callable[[], Awaitable[None]],
        rate: ByteRate | None = None,
    ) -> None:
        self.connection: Connection | None = None
        """The open connection."""
        self.come_back_after: float | None = None
        """Seconds after which the coordinator said to connect again, on the last connection."""
        self.why_not = ""
        """Why there is no connection; the driver sets it where the session closes one."""
        self._retry_after = 0.0
        """Least seconds to wait before the next connection, which the answer to the last handshake
        asked for."""
        self._dead_end: DeadEnd | None = None
        """Why the last connection could not be opened, where trying again alone will not help."""
        self._failing_since: float | None = None
        """When the first attempt to connect began since the last connection."""
        self._failures = 0
        """Attempts to connect since the device was last welcomed."""
        self._trouble = RepeatedLine()
        self._address, self._enrolment, self._timing = address, enrolment, timing
        self._session, self._state = session, state
        self._handle, self._on_end, self._status = handle, on_end, status
        self._wait_for_conditions, self._rate = wait_for_conditions, rate
        if rate is not None:  # an answer to a ping waits behind what is received
            queued = (QUEUED_FRAMES + 1) * MAX_FRAME_BYTES / rate.bytes_per_second
            self._timing = timing._replace(ping=timing.ping + queued)
        self._dice = random.SystemRandom()

    async def run(self) -> None:
        """Connect again after each end of a connection, until the session stops."""
        while not self._session.stopping:
            self.come_back_after, self._retry_after, self._dead_end = None, 0.0, None
            asked = time.monotonic()
            await self._wait_for_conditions()
            if self._failing_since is not None:  # a pause is no failure to connect
                self._failing_since += time.monotonic() - asked
            welcomed = await self._converse()
            end = self._end()
            if end is not None:
                error = end.error()
                await self._handle(partial(self._session.abandon, error, "stopping"))
            if self._session.stopping:
                return
            self._failures = 0 if welcomed else self._failures + 1
            if self._session.pause is not None:  # it connects when its conditions hold
                self._status.update(f"not connected ({self.why_not})")
                continue
            # A coordinator whose messages make the device close each connection must not be asked
            # again at once either.
            failures, timing = self._failures + self._session.faults, self._timing
            if self._dead_end is not None:
                timing = timing._replace(cap=timing.slow_cap)
            delay = seconds_to_wait(timing, failures, self.come_back_after, self._dice)
            delay += self._retry_after
            at = datetime.now().astimezone() + timedelta(seconds=delay)
            self._status.update(f"not connected ({self.why_not})", at.timestamp())
            when = f", at {at:%H:%M:%S}" if delay >= 60.0 else ""
            log.log(self._trouble.level(logging.INFO), "connecting again in %.1f s%s", delay, when)
            await asyncio.sleep(delay)

    def _end(self) -> DeadEnd | None:
        """Return why the device is to end rather than to try again, or None."""
        end, until_finished = self._dead_end, self._session.until_finished
        if end is not None and (
            until_finished or (end.kind == "not-admitted" and not self._enrolment.was_accepted)
        ):
            return end
        if (
            not until_finished
            or self._failing_since is None
            or self._session.running_task_id is not None
        ):
            return None
        if time.monotonic() - self._failing_since < self._timing.give_up:
            return None
        text = (
            f"no connection to {self._address.url} in {self._timing.give_up:g} s: the coordinator "
            "may have ended with the training. This device was to run until the training is "
            "finished (--until-finished), so it ends"
        )
        return DeadEnd("unreachable", text)

    async def _converse(self) -> bool:
        """Open a connection and pass on its frames until it ends. Returns whether the device was
        welcomed."""
        session, timing, url = self._session, self._timing, self._address.url
        uri = parse_uri(url)
        way: Way | None = None
        welcomed = False
        if self._failing_since is None:
            self._failing_since = time.monotonic()
        try:
            way = await open_way(uri, timing.open, self._failures)
            # Text frames are smaller than chunks. Few frames are queued: a slow disk slows the
            # coordinator down.
            async with DirectConnect(
                url,
                ssl=self._address.tls,
                additional_headers=self._enrolment.headers(),
                subprotocols=[Subprotocol(PROTOCOL_NAME)],
                compression=None,
                max_size=MAX_FRAME_BYTES,
                max_queue=QUEUED_FRAMES,
                open_timeout=timing.open,
                close_timeout=timing.close,
                ping_interval=None,  # the driver asks for a sign of life with each heartbeat
                **way.options(),
            ) as socket:
                self.connection = Connection(socket, timing, self._status.traffic)
                self._trouble.clear()
                log.info("connected to %s (%s)", url, way, extra=said("connected", url=url))
                self._status.update(f"connected to {url} ({way})")
                self._failing_since = None
                self._enrolment.accepted()
                await self._handle(lambda: session.connected(time.monotonic(), self._state()))
                # One frame after the other: the next is read when the session's commands are
                # carried out.
                async for frame in socket:
                    self._status.traffic.received += len(frame)
                    await self._handle(partial(_received, session, frame))
                    welcomed = welcomed or isinstance(session.link, Online)
                    if self._rate is not None:  # what is not read, the network holds back
                        await self._rate.passed(len(frame))
            if not isinstance(session.link, Closing):
                self.why_not = f"the coordinator closed the connection: {_close_reason(socket)}"
                log.info("%s", self.why_not, extra=said("disconnected"))
        except ConnectionClosed as error:
            if not isinstance(session.link, Closing):
                self.why_not = f"the connection is lost: {printable(str(error))}"
                log.warning("%s", self.why_not, extra=said("disconnected"))
        except InvalidStatus as error:
            self._retry_after = retry_after(header(error.response, "Retry-After"))
            answer = refusal(error.response)
            self._dead_end = dead_end_of_refusal(error.response.status_code, answer)
            why = answer if self._dead_end is None else self._dead_end.text
            through = "" if way is None or way.proxy is None else f" ({way})"
            self.why_not = f"{url}{through} refuses the connection: {printable(clip(why))}"
            self._trouble.warn(self.why_not)
            self._status.fail(self.why_not)
        except (OSError, WebSocketException, EOFError) as error:  # TimeoutError is an OSError
            if way is not None:
                self._dead_end = await dead_end_of(error, self._address, way.place)
            why = explain(error, uri, way) if self._dead_end is None else self._dead_end.text
            through = "" if way is None else f" ({way})"
            self.why_not = f"cannot connect to {url}{through}: {printable(why)}"
            self._trouble.warn(self.why_not)
            self._status.fail(self.why_not)
        finally:
            if way is not None:
                way.close()
            self.connection = None
            self._on_end()
        await self._handle(session.disconnected)
        return welcomed


def _received(session: Session, frame: str | bytes) -> Commands:
    now = time.monotonic()
    return (
        session.received(frame, now)
        if isinstance(frame, str)
        else session.received_chunk(frame, now)
    )


class RepeatedLine:
    """Writes a warning once, and again after ten minutes and when it changes: a device may be
    offline for weeks."""

    AGAIN = 600.0
    """Seconds."""

    def __init__(self) -> None:
        self._text, self._written, self._times = "", 0.0, 0
        self._repeats = False

    def warn(self, text: str) -> None:
        """Write the line, at the level DEBUG where it was written not long ago."""
        now = time.monotonic()
        self._times = self._times + 1 if text == self._text else 1
        self._repeats = text == self._text and now < self._written + self.AGAIN
        if not self._repeats:
            self._text, self._written = text, now
        often = f" ({self._times} times in a row)" if self._times > 1 else ""
        event = said("not-connected", times=self._times)
        log.log(self.level(logging.WARNING), "%s%s", text, often, extra=event)
        if self._times == 2 and self._repeats:
            log.info(
                "the device goes on trying; this is written again in %g min, if it lasts",
                self.AGAIN / 60,
            )

    def level(self, level: int) -> int:
        """Return the level for a line that goes with the last warning."""
        return logging.DEBUG if self._repeats else level

    def clear(self) -> None:
        """Forget the line: what it said is over."""
        self._text, self._repeats = "", False


def printable(text: str) -> str:
    """Replace what is not printable, so that the coordinator's text cannot begin a line of the log
    or colour it."""
    return "".join(
        character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text
    )


def _close_reason(socket: ClientConnection) -> str:
    return printable(f"{socket.close_code} {socket.close_reason or ''}".strip())

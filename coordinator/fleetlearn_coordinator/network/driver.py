"""The owner of one connection's conversation: reads messages for it, and carries out its effects on
the WebSocket.

Three things bound memory and stalls. Frames of contents are made once, and after each of them other
connections have their turn. Everything that waits for a peer to read has a bound. A peer that
stalls is ended by ``abort()``, since a closing handshake would wait for ever behind a full write
buffer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from fleetlearn_protocol.errors import ProtocolError, in_words
from fleetlearn_protocol.messages import (
    CheckIn,
    ComeBack,
    Content,
    FromCoordinator,
    Question,
    Task,
    Waiting,
    encode,
)
from msgspec import structs
from websockets.frames import CloseCode

from fleetlearn_coordinator.conversation.conversation import Conversation
from fleetlearn_coordinator.conversation.effects import (
    Allow,
    CheckedIn,
    CloseConnection,
    Effect,
    End,
    HandOnMessages,
    HoldMessages,
    LogNote,
    SendMessage,
    StartDownload,
    StopDownload,
)
from fleetlearn_coordinator.conversation.limits import BYTE_BURST, MESSAGE_BURST, WRITE_LIMIT
from fleetlearn_coordinator.conversation.pending import Pending
from fleetlearn_coordinator.conversation.port import Admitted, Port, RunPort
from fleetlearn_coordinator.conversation.uploads import Uploads
from fleetlearn_coordinator.network.connection import DeviceConnection
from fleetlearn_coordinator.network.device_budgets import DeviceBudgets
from fleetlearn_coordinator.network.gate import confirmed
from fleetlearn_coordinator.network.output_gate import OutputGate, OutputOrder
from fleetlearn_coordinator.network.peer_log import ConnectionLog, say_seldom
from fleetlearn_coordinator.network.transfers.contents import (
    Contents,
    FramedContent,
    SelectedContent,
    StoredContent,
)
from fleetlearn_coordinator.network.transfers.downloads import Download, Downloads
from fleetlearn_coordinator.network.transfers.elsewhere import (
    COMING,
    LEAST_ELSEWHERE,
    NOWHERE,
    Elsewhere,
)

if TYPE_CHECKING:  # few services sign
    from fleetlearn_coordinator.network.signing import DeviceSigner, Signer

SEND_TIMEOUT = 30.0
"""Seconds that a write to a device may wait for it to read."""
WAITING_INTERVAL = 20.0
"""Seconds between the messages that tell a device that its fetch waits: a third of a device's
patience."""


class ServedRun(NamedTuple):
    """A run, as a host serves it."""

    port: Port
    contents: Contents
    """What its devices may fetch."""
    failed: Callable[[Exception], None]
    """Called with an error that no device is to blame for."""
    name: str
    """The run's, of several; empty where the host serves it alone."""
    gate: OutputGate
    """Holds back what is sent to its devices until what it promises is stored."""
    elsewhere: Elsewhere = NOWHERE
    """Where its contents can be fetched by HTTP."""


@dataclass(slots=True)
class Shared:
    """What the drivers of one process have in common."""

    admit: Callable[[ConnectionDriver, CheckIn], Admitted | ComeBack | Pending[Admitted | ComeBack]]
    """Sets the driver's ``run``, if one run alone is served."""
    uploads: Uploads
    downloads: Downloads
    failed: Callable[[Exception], None]
    """Called with an error that is not a device's fault."""
    checked_in: Callable[[DeviceConnection], None]
    """Called when a device has checked in: its connection does not count as a newcomer any more."""
    budgets: DeviceBudgets
    signer: Signer | None = None
    """Signs for devices that trust keys, if the service has some."""
    connections: set[ConnectionDriver] = field(default_factory=set)
    devices: dict[str, ConnectionDriver] = field(default_factory=dict)
    """Device -> the driver of its connection, once it has checked in."""
    ended: bool = False
    """Nothing more may be done: the host is being closed, or an error left its only run's memory
    and disk different."""


class ConnectionDriver:
    """One connection with its conversation and its download."""

    __slots__ = (
        "_log",
        "_loop",
        "_output",
        "_returned",
        "_shared",
        "_signer",
        "blocked",
        "connection",
        "conversation",
        "download",
        "replaced_by",
        "run",
    )

    def __init__(self, connection: DeviceConnection, shared: Shared) -> None:
        self.connection, self._shared, self._loop = connection, shared, connection.loop
        self.conversation = Conversation(shared.uploads, self, connection.since)
        shared.connections.add(self)
        self.run: ServedRun | None = None
        """The run that its device serves, or served last. None before the first."""
        self._output: OutputOrder | None = None
        """What waits to be sent. Made for the first that does."""
        self.download: Download | None = None
        self.blocked: float | None = None
        """Since when a write has been waiting for the device to read."""
        self.replaced_by: tuple[str, str] | None = None
        """The device, and the address from which it connected again while this connection was
        open."""
        self._returned = False
        """Whether its device has the budgets that an earlier connection left."""
        self._signer: DeviceSigner | None = None
        """Signs for its device, if that trusts keys."""
        self._log: ConnectionLog | None = None
        """Made for the first line."""

    # What the connection says

    def received(self, message: str | bytes) -> None:
        """Hand a message to the conversation."""
        if self._shared.ended:
            self.connection.close(1000, "")
            return
        try:
            self.conversation.received(message, self._loop.time())
        except Exception as error:
            self._shared.failed(error)

    def flooded(self) -> None:
        """The peer has waited for its budget for too long."""
        self.conversation.flooded()

    def closed(self) -> None:
        """The connection is closed."""
        self._shared.connections.discard(self)
        device = self.conversation.device
        if self._log is not None:
            self._log.end(device)
        self._stop_download()
        if self.replaced_by is not None:
            self._warn_of_two(*self.replaced_by)
        if device is not None:
            del self._shared.devices[device]
            self._shared.budgets.keep(device, self.connection.budgets())
        if self._shared.ended:
            return
        try:
            self.conversation.disconnected(self._loop.time())
        except Exception as error:
            self._shared.failed(error)

    def _warn_of_two(self, device: str, address: str) -> None:
        """Say that two machines speak as one device, if so: what answers the close of a connection
        that another replaced is alive. A device has one connection at a time, and leaves the one
        before without an answer."""
        answer = self.connection.protocol.close_rcvd
        if answer is not None and answer.code == CloseCode.POLICY_VIOLATION:
            say_seldom(
                f"device {device}",
                f"two processes speak as this device, from {self.connection.address} and from "
                f"{address}: each ends the other's connection. Was its state directory copied? "
                "Give each machine a name, a state directory and a token of its own",
            )

    def cut_cycles(self) -> None:
        """Nothing is asked of the driver any more. The conversation, whose owner it is, is freed
        with it."""
        del self.conversation

    # What the host asks

    def overdue(self, now: float, silence: float) -> str | None:
        """Return why the connection should be ended, or None. Either the conversation has a reason,
        or the device does not read."""
        if not self.connection.made:
            return None
        unread = self.download.stalled(now) if self.download is not None else inf
        blocked = min(unread, now - self.blocked) if self.blocked is not None else 0.0
        if self.connection.stalled is not None:
            blocked = max(blocked, now - self.connection.stalled)
        if blocked > SEND_TIMEOUT:
            return f"did not read for {SEND_TIMEOUT:.0f} s"
        return self.conversation.overdue(now, silence)

    def confirm(self, check_in: CheckIn) -> CheckIn:
        """Return what may be believed of a check-in. Raises ProtocolError (bad-message) if the
        credential is of another device."""
        known, signer = self.connection.known, self._shared.signer
        if known is not None:
            check_in = confirmed(check_in, known)
        # From here on the device is who it says. What an earlier check-in asked for, which was
        # refused, does not count.
        self._signer = (
            signer.for_device(check_in) if signer is not None and check_in.trusts else None
        )
        return check_in

    def admit(self, check_in: CheckIn) -> Admitted | ComeBack | Pending[Admitted | ComeBack]:
        """Admit the device, or send it away."""
        # else its check-in was counted before the WebSocket was accepted
        if self.connection.known is None:
            wait = self._shared.budgets.check_in(check_in.device, self._loop.time())
            if wait:
                return ComeBack(wait, "busy")
        return self._shared.admit(self, check_in)

    # Effects

    def perform(self, effect: Effect) -> None:
        """Carry out what the conversation asks for."""
        match effect:
            case SendMessage(message):
                self.send(message)
            case CheckedIn():
                self._check_in(effect)
            case Allow(messages, download, upload):
                self.connection.allow(messages, download, upload)
            case StartDownload():
                self._in_order(partial(self._start_download, effect))
            case StopDownload():
                self._in_order(self._stop_download)
            case HoldMessages():
                self.connection.hold()
            case HandOnMessages():
                self.connection.go_on()
            case CloseConnection(code, reason):
                self._in_order(partial(self.connection.close, code, reason))
            case End(reason):
                self._in_order(partial(self.connection.end, 1008, reason))
            case LogNote(text, warning, seldom=True):
                say_seldom(self._who(), text, logging.WARNING if warning else logging.INFO)
            case LogNote(text, warning):
                self.log(text, logging.WARNING if warning else logging.INFO)

    @property
    def _is_held(self) -> bool:
        """Whether what is said now has to wait."""
        is_behind = self._output is not None and not self._output.is_empty
        return is_behind or (self.run is not None and not self.run.gate.is_open)

    def _in_order(self, action: Callable[[], object]) -> None:
        """Do what the device notices: at once, or once what was decided before is stored."""
        if self._is_held:
            self._output = self._output or OutputOrder(self._cut)
            gate = None if self.run is None else self.run.gate
            self._output.do(partial(self._unless_closed, action), gate)
        else:
            action()

    def _cut(self) -> None:
        """What the device waits for is lost with its run. It connects again, and is told so."""
        if not self._shared.ended:
            self.log("connection ended: its run could not store what the device was to be told")
            self.connection.transport.abort()

    def _unless_closed(self, action: Callable[[], object]) -> None:
        if self not in self._shared.connections:
            return
        try:
            action()
        except Exception as error:
            self._shared.failed(error)

    def send(self, message: FromCoordinator) -> None:
        """Send a control message, once what was decided before is stored."""
        if self._is_held:
            self._in_order(partial(self._send, message))
        else:
            self._send(message)

    def _send(self, message: FromCoordinator) -> None:
        """Send a control message now. A peer that lets more than WRITE_LIMIT bytes pile up is cut
        off."""
        if isinstance(message, ComeBack):
            self.connection.sent_away = message.reason
        if self._signer is not None and isinstance(message, Task | Question):
            message = self._signer.sign(message)
        self.connection.send(encode(message))
        if self.connection.transport.get_write_buffer_size() > WRITE_LIMIT:
            self.connection.transport.abort()

    def log(self, text: str, level: int = logging.INFO) -> None:
        """Log a line about the device, or only count it if there were too many."""
        now = self._loop.time()
        self._log = self._log or ConnectionLog(now)
        self._log.say(now, level, "%s: %s", self._who(), text)

    def _who(self) -> str:
        """Return whose connection it is, for the log."""
        device, run = self.conversation.device, self.run
        if device is None:
            return f"device (not checked in, at {self.connection.address})"
        return (
            f"device {device}, run {run.name}"
            if run is not None and run.name
            else f"device {device}"
        )

    def _check_in(self, effect: CheckedIn) -> None:
        device, connection, budgets = effect.device, self.connection, self._shared.budgets
        earlier, left = self._shared.devices.get(device), budgets.take(device)
        if earlier is not None:
            earlier.replaced_by = device, connection.address
            earlier.conversation.replaced()
            left = earlier.connection.budgets()
        if left is not None:
            self._returned = True
            connection.go_on_with(left)
        if budgets.allows(device, self._loop.time()) or left is None:
            connection.allow(MESSAGE_BURST, effect.download, effect.upload)
        self._shared.devices[device] = self
        self._shared.checked_in(connection)
        if self._signer is not None and (keys := self._signer.new_keys()) is not None:
            self.log("is told to trust the service's signing keys as they are now")
            self.send(keys)

    def serve(self, run: ServedRun, port: RunPort, *, is_first: bool) -> None:
        """The device serves this run, of several, from now on. ``is_first``: for the first time on
        this connection."""
        self.run = run
        if is_first:
            self.allow_first_task(port.task_prefix, port.download, port.upload)

    def allow_first_task(self, run: str, download: int, upload: int) -> None:
        """Let the device fetch the bundle of a run that it begins to serve on this connection,
        unless an earlier connection could do so just now. ``run``: what its tasks' names begin
        with."""
        device = self.conversation.device
        assert device is not None
        if self._shared.budgets.allows(device, self._loop.time(), run) or not self._returned:
            self.connection.allow(0, download, upload)

    @property
    def uploading(self) -> str | None:
        """The task whose update is on its way on this connection."""
        upload = self.conversation.upload
        return None if upload is None else upload.report.task

    def arriving(self) -> int:
        """Return how many bytes of an incomplete message have arrived."""
        return len(self.connection.protocol.reader.buffer)

    # Downloads

    def _start_download(self, start: StartDownload) -> None:
        device = self.conversation.device
        if device is None:  # it has connected again while this was held back
            return
        assert self.run is not None
        try:
            # of pieces, ``offset`` is not the whole content's
            begin = start.offset if start.selection is None else 0
            content = self.run.contents.find(start.sha256, begin)
        except ProtocolError as error:  # it is served no more since it was asked for
            self.conversation.withdrawn(start.sha256, error.text)
            return
        elsewhere, port = self.run.elsewhere, self.run.port
        url = elsewhere.url(start.sha256) if start.http else None
        if start.size < LEAST_ELSEWHERE:
            url = None
        if url:
            self._tell_where(content, start, url)
            return
        download = self.download = Download(device, start.sha256, self.connection.transport)
        if url is None:
            sending = self._send_content(download, content, start, port)
        else:  # it is coming
            sending = self._send_or_tell_where(download, content, start, port, elsewhere)
        download.task = self._loop.create_task(sending)

    def _tell_where(
        self, content: FramedContent | StoredContent, start: StartDownload, url: str
    ) -> None:
        where = start.sha256, start.size, start.offset
        self._send(Content(content.transfer, *where, url=url))
        self.conversation.told_where()

    async def _send_or_tell_where(
        self,
        download: Download,
        content: FramedContent | StoredContent,
        start: StartDownload,
        port: Port,
        elsewhere: Elsewhere,
    ) -> None:
        """Wait for the URL of a content that is on its way to the object store. Send the content
        where there is none in time."""
        port.wait(download.device, self._loop.time())
        url: str | None = COMING
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(WAITING_INTERVAL):
                    while url == COMING:
                        await elsewhere.changed()
                        url = elsewhere.url(start.sha256)
        finally:
            port.proceed(download.device, self._loop.time())
        if url:
            self.download = None
            self._tell_where(content, start, url)
        else:
            await self._send_content(download, content, start, port)

    def _stop_download(self) -> None:
        """End the download.

        The cancelled asyncio task keeps a traceback, which keeps the download, its content and this
        driver. If the download kept the task, that cycle would wait for the garbage collector,
        which runs rarely, with a whole model.
        """
        download, self.download = self.download, None
        if download is not None:
            assert download.task is not None
            download.task.cancel()
            download.task = None

    async def _send_content(
        self,
        download: Download,
        content: FramedContent | StoredContent,
        start: StartDownload,
        port: Port,
    ) -> None:
        connection, conversation, loop = self.connection, self.conversation, self._loop
        transport = connection.transport
        try:
            end = start.size if start.end is None else start.end
            size = end - start.offset
            if start.selection is not None:
                download.pieces = SelectedContent(content, start.selection)
                size = download.pieces.size  # all are made, whatever part of them is wanted
            await self._wait_for_budget(download, size)
            selected = await self._begin_turn(download, port)
            said = Content(content.transfer, start.sha256, start.size, start.offset, start.end)
            if selected is not None:
                connection.downloads.tokens -= size - (end - start.offset)
                said = structs.replace(said, selected=selected)
            self._send(said)
            for frame in (download.pieces or content).frames(start.offset, end):
                if connection.paused:
                    await self._drain()
                else:
                    # other connections have their turn, even if the kernel takes everything
                    await asyncio.sleep(0)
                conversation.seen = now = loop.time()  # a device that takes chunks is not silent
                if not download.turn.is_set():
                    await self._begin_turn(download, port)
                if not connection.open:
                    return
                transport.write(frame)
                download.sent += len(frame)
                here = start.offset + download.sent
                port.sent(download.device, start.sha256, here, len(frame), now)
                connection.downloads.tokens -= len(frame)
        except OSError as error:  # its file
            self.log(f"a download is ended: {in_words(error, file=True)}", logging.WARNING)
            conversation.withdrawn(
                start.sha256, "the coordinator cannot read what was fetched any more"
            )
        finally:
            if self.download is download:
                self.download = None
                conversation.fetched()
            self._shared.downloads.leave(download)
            self._shared.downloads.go_on(loop.time())

    async def _wait_for_budget(self, download: Download, size: int) -> None:
        """Wait until the device, which has fetched more than its tasks need, may fetch again."""
        budget, needed = self.connection.downloads, min(size, BYTE_BURST)
        while wait := budget.wait(self._loop.time(), least=needed):
            self.send(Waiting(sha256=download.sha256))
            await asyncio.sleep(min(wait, WAITING_INTERVAL))

    async def _begin_turn(self, download: Download, port: Port) -> str | None:
        """Wait for a place, and make the pieces that are to be sent, if not all is. Returns their
        SHA-256. Raises OSError."""
        while True:
            await self._take_turn(download, port)
            selected = None if download.pieces is None else await download.pieces.make()
            if download.turn.is_set():
                return selected
            if download.pieces is not None:
                download.pieces.drop()

    async def _take_turn(self, download: Download, port: Port) -> None:
        """Wait for a place. First wait until the device has read what was sent: before, it could
        not use one."""
        await self._drain()
        downloads, now = self._shared.downloads, self._loop.time()
        has_task = port.wait(download.device, now)
        try:
            downloads.ask(download, idle=not has_task)
            downloads.go_on(now)
            while not download.turn.is_set():
                if not downloads.places.waits(download):  # another took its place before it woke up
                    downloads.ask(download, idle=not has_task)
                    downloads.go_on(self._loop.time())
                    continue
                self.send(Waiting(sha256=download.sha256))
                with suppress(TimeoutError):
                    async with asyncio.timeout(WAITING_INTERVAL):
                        await download.turn.wait()
        finally:
            port.proceed(download.device, self._loop.time())

    async def _drain(self) -> None:
        """Wait until the device has read most of what was written."""
        self.blocked = self._loop.time()
        try:
            await self.connection.drain()
        finally:
            self.blocked = None

"""Carries a session's commands out, one after the other, and tells the session what came of
them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any

from fleetlearn_protocol.command_line import installed_version
from fleetlearn_protocol.json_log import said
from fleetlearn_protocol.messages import Fetch, Heartbeat, encode
from fleetlearn_protocol.user_errors import in_one_line

from fleetlearn_device.conditions.watch import ConditionWatch
from fleetlearn_device.driver.address import Address, Enrolment
from fleetlearn_device.driver.condition_looks import ConditionLooks
from fleetlearn_device.driver.connection import Connection, Connector, Event, printable
from fleetlearn_device.driver.describing import Description
from fleetlearn_device.driver.failures import failure_of
from fleetlearn_device.driver.http_fetch import HttpFetchError, http_parts
from fleetlearn_device.driver.status import StatusFile
from fleetlearn_device.driver.task_jobs import TaskJobs
from fleetlearn_device.driver.timeouts import timeout
from fleetlearn_device.driver.timing import Timing
from fleetlearn_device.driver.watchdog import WorkNow
from fleetlearn_device.limits.byte_rate import ByteRate
from fleetlearn_device.limits.device_limits import NO_LIMITS, DeviceLimits
from fleetlearn_device.session.commands import (
    Close,
    Command,
    Commands,
    DropPending,
    FetchByHttp,
    FinishContent,
    FinishEarly,
    Locate,
    MaskPending,
    Note,
    SavePending,
    SaveTrusted,
    Send,
    SendUpdate,
    StartAnswer,
    StartTraining,
    StopHttp,
    StopTraining,
    StopUpdate,
    StoreChunk,
)
from fleetlearn_device.session.session import Session
from fleetlearn_device.session.statement import Statement
from fleetlearn_device.session.states import Training
from fleetlearn_device.storage.errors import StateError
from fleetlearn_device.storage.state_directory import StateDirectory
from fleetlearn_device.storage.status import DeviceStatus
from fleetlearn_device.storage.trusted_keys import write_trusted_keys
from fleetlearn_device.training.trainer import Trainer

log = logging.getLogger("fleetlearn.device")


class Driver:
    """One run of a device. Events wait in a queue. The commands with which the session answers an
    event are carried out before the next event; what takes long is done by a job, whose end is an
    event."""

    def __init__(
        self,
        address: Address,
        enrolment: Enrolment,
        timing: Timing,
        directory: StateDirectory,
        trainer: Trainer,
        session: Session,
        description: Description,
        watch: ConditionWatch,
        limits: DeviceLimits = NO_LIMITS,
        on_change: Callable[[DeviceStatus], None] | None = None,
        ca: Path | None = None,
    ) -> None:
        """``on_change``: called with each new status. ``ca``: PEM of CAs that TLS trusts for
        downloads by HTTP, beside the system's."""
        self._contents, self._outbox = directory.contents, directory.outbox
        self._folder = directory.path
        self._trainer, self._session, self._description = trainer, session, description
        self._looks = ConditionLooks(watch, session, self.post)
        self._jobs = TaskJobs(directory, trainer, session, self._looks, limits, self.post)
        self._status = StatusFile(
            directory.path, session, coordinator=address.url, on_change=on_change
        )
        self._ca, self._timing = ca, timing
        self._download_rate = None if limits.download is None else ByteRate(1024 * limits.download)
        """Of the WebSocket and HTTP together."""
        self._connector = Connector(
            address,
            enrolment,
            timing,
            session,
            self._state,
            self._handle,
            self._stop_transfers,
            self._status,
            self._looks.wait_until_all_hold,
            self._download_rate,
        )
        self._upload_rate = None if limits.upload is None else ByteRate(1024 * limits.upload)
        self._events: asyncio.Queue[tuple[Event, asyncio.Future[None] | None]] = asyncio.Queue()
        self._running: set[asyncio.Task[None]] = set()
        self._upload: asyncio.Task[None] | None = None
        self._http: asyncio.Task[None] | None = None
        self._check: asyncio.Task[None] | None = None
        """Asks for a sign of life, since a heartbeat."""

    def post(self, event: Event) -> None:
        """Let the session know; call in the event loop's thread."""
        self._events.put_nowait((event, None))

    def stop(self) -> None:
        """End the device soon; call in the event loop's thread."""
        self.post(lambda: self._session.stop(keep=self._trainer.worth_keeping))

    def work_now(self) -> WorkNow | None:
        """Return how far the work in the training's thread is; None where there is none."""
        session = self._session
        if session.running_task_id is None:
            return None
        work = session.work
        deadline = work.assignment.deadline if isinstance(work, Training) else None
        return WorkNow(session.running_task_id, self._trainer.batches, deadline)

    def pause(self) -> None:
        """The owner pauses the device; call in the event loop's thread. A task that is worth it is
        kept for as long as its lease lives."""
        self._looks.pause(keeps=self._trainer.worth_keeping)

    def resume(self) -> None:
        """End ``pause``; call in the event loop's thread."""
        self._looks.resume()

    async def _handle(self, event: Event) -> None:
        """Let the session know, and wait until its commands were carried out."""
        handled = asyncio.get_running_loop().create_future()
        self._events.put_nowait((event, handled))
        await handled

    def _state(self) -> Statement:
        """Return what the device states at a check-in."""
        challenge = None if self._session.trusted is None else token_hex(32)
        return self._description.state()._replace(
            models=self._contents.models(), challenge=challenge
        )

    async def run(self) -> None:
        """Run until the session is over. Raises its error."""
        session = self._session
        log.info(
            "device %s (fleetlearn %s) begins, with %d examples and the state in %s",
            session.device,
            installed_version(),
            session.examples,
            self._folder,
            extra=said("started", device=session.device, examples=session.examples),
        )
        self._status.update("not connected yet")
        connections = asyncio.create_task(self._connector.run())
        looks = asyncio.create_task(self._looks.run())
        for task in (connections, looks):
            task.add_done_callback(self._raise_error_of)
        try:
            while not session.over:
                now, due = time.monotonic(), session.due()
                if due is not None and due <= now:
                    await self._carry_out(session.tick(now, self._trainer.batches))
                    continue
                try:
                    async with timeout(None if due is None else due - now):
                        event, handled = await self._events.get()
                except TimeoutError:
                    continue
                await self._carry_out(event())
                if handled is not None and not handled.done():
                    handled.set_result(None)
        finally:
            self._trainer.halt.set()
            self._stop_transfers()
            if self._connector.connection is not None:
                self._connector.connection.abort()
            connections.cancel()
            looks.cancel()
            # A thread cannot be cancelled; the directory stays locked until the last one ended.
            # Their errors were events, or come from being cancelled: here only the end matters.
            await asyncio.gather(connections, looks, *self._running, return_exceptions=True)
            self._jobs.shut_down()
            end = self._why_ended()
            if session.error is not None:
                self._status.fail(end)
            log.info("ended: %s", end, extra=said("ended"))
            self._status.update("not connected", end=end)
        if session.error is not None:
            raise session.error

    def _why_ended(self) -> str:
        session = self._session
        if session.error is not None:
            return printable(in_one_line(session.error))
        if session.finished:
            return "the training is finished"
        return "it was stopped" if session.stopping else "its program ended it"

    # Commands

    async def _carry_out(self, commands: Commands) -> None:
        queue = deque(commands)
        if queue:
            self._looks.now.set()
        while queue:
            try:
                await self._carry_out_one(queue.popleft())
            except StateError as error:
                if self._session.error is not None:
                    raise
                queue = deque(self._session.abandon(error, failure_of(error).code))
        self._status.update()

    async def _carry_out_one(self, command: Command) -> None:
        """Do what the command says; what takes long is started as a job."""
        connection = self._connector.connection
        match command:
            case Note(text=text, warning=warning, event=event):
                level = logging.WARNING if warning else logging.INFO
                log.log(level, "%s", printable(text), extra=self._about_task(event))
            case Send(message=message):
                if isinstance(message, Fetch):  # it replaces any other
                    self._stop_http()
                sent = connection is not None and await connection.send(encode(message))
                if connection is not None and sent and isinstance(message, Heartbeat):
                    self._ask_for_life(connection)
            case StoreChunk(wanted=wanted, offset=offset, payload=payload):
                self._contents.append(wanted, offset, payload)
            case FetchByHttp():
                self._stop_http()
                self._http = self._start(self._fetch_by_http(command))
            case StopHttp():
                self._stop_http()
            case Locate(task=task):
                self._start(self._jobs.locate(task))
            case FinishContent():
                self._start(self._jobs.finish(command))
            case StartTraining(task=task, seconds=seconds):
                self._trainer.halt.clear()
                self._trainer.enough.clear()
                self._start(self._jobs.train(task, seconds))
            case StartAnswer(task=task, seconds=seconds):
                self._trainer.halt.clear()
                self._start(self._jobs.answer(task, seconds))
            case StopTraining(keep=keep):
                self._trainer.keep_when_stopped = keep
                self._trainer.halt.set()
            case FinishEarly():
                self._trainer.enough.set()
            case SaveTrusted(keys=keys):
                write_trusted_keys(self._folder, keys)
            case SavePending(report=report):
                self._start(self._jobs.save(report.task))
            case MaskPending():
                self._start(self._jobs.mask(command))
            case DropPending(task_id=task_id):
                self._stop_upload()
                self._outbox.drop(task_id)
            case SendUpdate():
                self._stop_upload()
                if connection is not None:
                    self._upload = self._start(self._send_update(connection, command))
            case StopUpdate():
                self._stop_upload()
            case Close():
                self._close(command)

    def _about_task(self, event: str) -> dict[str, Any]:
        """Return what a program reads in the log beside the event's name."""
        history = self._session.history
        return {"event": event, "fields": {"task": history.task, "round": history.round}}

    def _close(self, command: Close) -> None:
        reason = printable(command.reason)
        # Who was told when to come back, or asked to stop, has nothing to worry about.
        calm = command.after is not None or self._session.stopping
        level = logging.INFO if calm else logging.WARNING
        if self._session.pause is not None:  # the log has the reason already
            level = logging.DEBUG
        log.log(level, "closing the connection: %s", reason, extra=said("closing"))
        self._connector.why_not = reason
        self._connector.come_back_after = command.after
        self._stop_transfers()
        if self._connector.connection is not None:
            self._start(self._connector.connection.close(command.code))

    def _ask_for_life(self, connection: Connection) -> None:
        """Find out whether the coordinator lives, unless it was asked and may still answer."""
        if self._check is None or self._check.done():
            self._check = self._start(connection.check())

    def _stop_upload(self) -> None:
        if self._upload is not None:
            self._upload.cancel()
            self._upload = None

    def _stop_http(self) -> None:
        if self._http is not None:
            self._http.cancel()
            self._http = None

    def _stop_transfers(self) -> None:
        self._stop_upload()
        self._stop_http()

    # Jobs

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        job = asyncio.create_task(coroutine)
        self._running.add(job)
        job.add_done_callback(self._running.discard)
        job.add_done_callback(self._raise_error_of)
        return job

    def _raise_error_of(self, job: asyncio.Task[None]) -> None:
        """End ``run`` with the error that a job did not expect."""
        if not job.cancelled() and (error := job.exception()) is not None:
            self.post(partial(_raise, error))

    async def _send_update(self, connection: Connection, command: SendUpdate) -> None:
        try:
            rate, chunk_bytes = self._upload_rate, command.chunk_bytes
            if rate is not None:
                chunk_bytes = rate.chunk_bytes(chunk_bytes)
            for chunk in self._outbox.chunks(command.transfer, command.offset, chunk_bytes):
                if not await connection.send(chunk):
                    return
                if rate is not None:
                    await rate.passed(len(chunk))
        except StateError as error:
            self._jobs.abandon(error)
        else:
            self.post(lambda: self._session.update_sent(command.transfer, time.monotonic()))

    async def _fetch_by_http(self, command: FetchByHttp) -> None:
        """Hand on the bytes of a content part by part: the next is read when one is written."""
        session, sha256, place = self._session, command.wanted.sha256, command.begin
        try:
            url, size = command.url, command.size
            async with aclosing(http_parts(url, place, size, self._timing, self._ca)) as parts:
                async for part in parts:
                    self._status.traffic.received += len(part)
                    await self._handle(
                        partial(session.http_bytes, sha256, place, part, time.monotonic())
                    )
                    place += len(part)
                    if self._download_rate is not None:
                        await self._download_rate.passed(len(part))
        except HttpFetchError as error:
            why = printable(str(error))
            self.post(lambda: session.http_ended(sha256, why, time.monotonic()))


def _raise(error: BaseException) -> Commands:
    raise error

"""Carries a session's commands out, one after the other, and tells the session what came of
them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from secrets import token_hex
from typing import Any, TypeVar

from fleetlearn_protocol.command_line import installed_version
from fleetlearn_protocol.errors import BundleError
from fleetlearn_protocol.json_log import said
from fleetlearn_protocol.messages import Heartbeat, Question, Task, encode
from fleetlearn_protocol.task_names import run_of
from fleetlearn_protocol.user_errors import in_one_line, is_expected, traceback_lines

from fleetlearn_device.conditions.watch import ConditionWatch
from fleetlearn_device.driver.address import Address, Enrolment
from fleetlearn_device.driver.connection import Connection, Connector, Event, printable
from fleetlearn_device.driver.describing import Description
from fleetlearn_device.driver.failures import failure_of
from fleetlearn_device.driver.status import StatusFile
from fleetlearn_device.driver.timeouts import timeout
from fleetlearn_device.driver.timing import Timing
from fleetlearn_device.driver.watchdog import WorkNow
from fleetlearn_device.limits.byte_rate import ByteRate
from fleetlearn_device.limits.device_limits import NO_LIMITS, DeviceLimits
from fleetlearn_device.limits.priority import lower_priority
from fleetlearn_device.session.commands import (
    Close,
    Command,
    Commands,
    DropPending,
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
    StopTraining,
    StopUpdate,
    StoreChunk,
)
from fleetlearn_device.session.pause import Pause
from fleetlearn_device.session.privacy_demands import is_counted
from fleetlearn_device.session.session import Session
from fleetlearn_device.session.statement import Statement
from fleetlearn_device.session.states import Idle, Online, Training
from fleetlearn_device.storage.errors import StateError
from fleetlearn_device.storage.state_directory import StateDirectory
from fleetlearn_device.storage.status import DeviceStatus
from fleetlearn_device.storage.trusted_keys import write_trusted_keys
from fleetlearn_device.training.algorithms import UnsupportedError
from fleetlearn_device.training.secure_update import mask_pending
from fleetlearn_device.training.train import StoppedError, TrainingError
from fleetlearn_device.training.trainer import FinishedUpdate, Trainer

OWN_PAUSE = Pause(("pause",), "its owner paused it")
WorkItem = TypeVar("WorkItem", Task, Question)
Result = TypeVar("Result")

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
    ) -> None:
        """``on_change``: called with each new status."""
        self._contents, self._outbox, self._folder = (
            directory.contents,
            directory.outbox,
            directory.path,
        )
        self._directory, self._update_counts = directory, directory.update_counts
        self._trainer, self._session, self._description = trainer, session, description
        self._status = StatusFile(
            directory.path, session, coordinator=address.url, on_change=on_change
        )
        self._connector = Connector(
            address,
            enrolment,
            timing,
            session,
            self._state,
            self._handle,
            self._stop_upload,
            self._status,
            self._wait_for_conditions,
            None if limits.download is None else ByteRate(1024 * limits.download),
        )
        self._upload_rate = None if limits.upload is None else ByteRate(1024 * limits.upload)
        self._training_thread = ThreadPoolExecutor(
            1,
            "fleetlearn-training",
            initializer=partial(lower_priority, limits.nice, limits.io),
        )
        """Trains, and works answers out, with a priority of its own."""
        self._conditions = watch
        self._own_pause: Pause | None = None
        """The owner's, beside those of the conditions."""
        self._look_now = asyncio.Event()
        """Set when the device wakes for something else, or begins to work: it looks at the
        conditions then."""
        self._look_lock = asyncio.Lock()
        self._may_work = asyncio.Event()
        """Set while all conditions hold, as far as the session was told."""
        self._finished: FinishedUpdate | None = None
        self._events: asyncio.Queue[tuple[Event, asyncio.Future[None] | None]] = asyncio.Queue()
        self._jobs: set[asyncio.Task[None]] = set()
        self._cache_lock = asyncio.Lock()
        """Held by the one job that looks up or files contents: a lookup deletes what only the task
        before needed."""
        self._upload: asyncio.Task[None] | None = None
        self._check: asyncio.Task[None] | None = None
        """Asks for a sign of life, since a heartbeat."""
        self._last_error = ""
        """What the last exception that was no error of ours said."""

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
        self._own_pause = OWN_PAUSE._replace(keeps=self._trainer.worth_keeping)
        self.post(partial(self._tell_session, self._conditions.pause))

    def resume(self) -> None:
        """End ``pause``; call in the event loop's thread."""
        self._own_pause = None
        self.post(partial(self._tell_session, self._conditions.pause))

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
        looks = asyncio.create_task(self._look_at_conditions())
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
            self._stop_upload()
            if self._connector.connection is not None:
                self._connector.connection.abort()
            connections.cancel()
            looks.cancel()
            # A thread cannot be cancelled; the directory stays locked until the last one ended.
            # Their errors were events, or come from being cancelled: here only the end matters.
            await asyncio.gather(connections, looks, *self._jobs, return_exceptions=True)
            self._training_thread.shutdown()
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
            self._look_now.set()
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
                sent = connection is not None and await connection.send(encode(message))
                if connection is not None and sent and isinstance(message, Heartbeat):
                    self._ask_for_life(connection)
            case StoreChunk(wanted=wanted, offset=offset, payload=payload):
                self._contents.append(wanted, offset, payload)
            case Locate(task=task):
                self._start(self._locate(task))
            case FinishContent():
                self._start(self._finish(command))
            case StartTraining(task=task, seconds=seconds):
                self._trainer.halt.clear()
                self._trainer.enough.clear()
                self._start(self._train(task, seconds))
            case StartAnswer(task=task, seconds=seconds):
                self._trainer.halt.clear()
                self._start(self._answer(task, seconds))
            case StopTraining(keep=keep):
                self._trainer.keep_when_stopped = keep
                self._trainer.halt.set()
            case FinishEarly():
                self._trainer.enough.set()
            case SaveTrusted(keys=keys):
                write_trusted_keys(self._folder, keys)
            case SavePending(report=report):
                self._start(self._save(report.task))
            case MaskPending():
                self._start(self._mask(command))
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
        self._stop_upload()
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

    # Conditions

    async def _look(self, *, fresh: bool) -> None:
        """Look at the conditions, and tell the session what was found."""
        watch = self._conditions
        if not watch.conditions:
            if self._own_pause is None:
                self._may_work.set()
            return
        async with self._look_lock:
            if not (fresh or watch.is_due()):
                return
            # In a thread, since an owner's check may take its time.
            pause = await asyncio.to_thread(partial(watch.look, fresh=fresh))
            self.post(partial(self._tell_session, pause))

    def _tell_session(self, pause: Pause | None) -> Commands:
        pause = self._own_pause or pause
        if pause is None:
            self._may_work.set()
            return self._session.end_pause()
        self._may_work.clear()
        return self._session.begin_pause(pause)

    async def _look_at_conditions(self) -> None:
        """Look at the conditions while the device runs: often while it works, and when it wakes
        for something else while it waits."""
        while self._conditions.conditions:
            session = self._session
            transfers = isinstance(session.link, Online) and not isinstance(session.work, Idle)
            works = transfers or session.running_task_id is not None
            try:
                async with timeout(self._conditions.next_look(works=works)):
                    await self._look_now.wait()
            except TimeoutError:
                pass
            self._look_now.clear()
            await self._look(fresh=session.pause is not None)

    async def _wait_for_conditions(self) -> None:
        """Return when all conditions hold: before a connection is opened."""
        self._may_work.clear()
        await self._look(fresh=True)
        await self._may_work.wait()

    # Jobs

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        job = asyncio.create_task(coroutine)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        job.add_done_callback(self._raise_error_of)
        return job

    def _raise_error_of(self, job: asyncio.Task[None]) -> None:
        """End ``run`` with the error that a job did not expect."""
        if not job.cancelled() and (error := job.exception()) is not None:
            self.post(partial(_raise, error))

    def _abandon(self, error: Exception, ended_task_id: str | None = None) -> None:
        """End the device with this error; ``ended_task_id`` names the task whose training or saving
        it ended."""

        def event() -> Commands:
            commands = self._session.abandon(error, failure_of(error).code)
            return (
                commands
                if ended_task_id is None
                else [*commands, *self._session.ended(ended_task_id)]
            )

        self.post(event)

    async def _locate(self, task: Task | Question) -> None:
        # The session hears of a condition that does not hold before it hears of the files: it then
        # gives the task back.
        await self._look(fresh=True)
        try:
            await asyncio.to_thread(self._trainer.check_fits, task)  # it may import cryptography
            async with self._cache_lock:
                trainer, look = self._trainer, self._contents.lacking
                infer = trainer.needs_infer
                lacking = await asyncio.to_thread(
                    look, task, trainer.kind, trainer.from_features, infer
                )
        except StateError as error:
            self._abandon(error)
        except (BundleError, TrainingError, MemoryError) as error:
            text, code = in_one_line(error), failure_of(error).code
            self.post(lambda: self._session.unusable(task.task, text, code))
        else:
            self.post(lambda: self._session.located(task.task, lacking, time.monotonic()))

    async def _finish(self, command: FinishContent) -> None:
        wanted = command.wanted
        try:
            async with self._cache_lock:
                good = await asyncio.to_thread(self._contents.finish, wanted)
        except StateError as error:
            self._abandon(error)
        else:
            self.post(lambda: self._session.stored(wanted.sha256, good, time.monotonic()))

    async def _in_training_thread(
        self, work: Callable[[WorkItem, float], Result], task: WorkItem, seconds: float
    ) -> Result:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._training_thread, work, task, seconds)

    async def _answer(self, task: Question, seconds: float) -> None:
        log.info("task %s: working on the answer (%s)", task.task, task.kind)
        try:
            message = await self._in_training_thread(self._trainer.answer, task, seconds)
        except Exception as error:
            self._end_failed(task.task, error)
        else:
            log.info("task %s: answered in %.2f s", task.task, message.seconds)
            examples = self._trainer.counted
            self.post(lambda: self._session.answered(message, examples))

    def _end_failed(self, task_id: str, error: Exception) -> None:
        """Tell the session that a training, or the work on an answer, ended without a result."""
        session, failure, text = self._session, failure_of(error), in_one_line(error)
        if isinstance(error, StoppedError):
            log.info("task %s: stopped after %d batches", task_id, self._trainer.batches)
            self.post(lambda: session.ended(task_id))
        elif failure.ends_device:
            self._abandon(error, task_id)
        else:
            if not is_expected(error):
                self._log_traceback(task_id, error, text)
            self.post(lambda: session.ended(task_id, failure.code, text))

    def _log_traceback(self, task_id: str, error: Exception, text: str) -> None:
        """Write where an exception of the user's code came from; the same one again only at the
        level DEBUG.

        Its lines are indented, so that a text with line ends cannot begin a line of the log.
        """
        level = logging.DEBUG if text == self._last_error else logging.ERROR
        self._last_error = text
        lines = "\n".join(f"    {printable(line)}" for line in traceback_lines(error))
        log.log(
            level,
            "task %s failed by an exception, most likely of the code that gives the data:\n%s",
            task_id,
            lines,
        )

    async def _train(self, task: Task, seconds: float) -> None:
        session = self._session
        known = said("training", task=task.task, round=task.round)
        log.info("task %s: training", task.task, extra=known)
        try:
            finished = await self._in_training_thread(self._trainer.train, task, seconds)
        except Exception as error:
            self._end_failed(task.task, error)
        else:
            report = self._trainer.own_report or finished.report
            log.info(
                "task %s: trained %d steps, %.4g epochs%s, loss %.6g on this device's data, in "
                "%.2f s%s",
                report.task,
                report.steps,
                report.epochs,
                "" if report.complete else f" (partial: {self._why_partial()})",
                report.loss,
                report.seconds,
                f"; {self._trainer.features}" if self._trainer.features else "",
                extra=said(
                    "trained",
                    task=report.task,
                    round=report.round,
                    steps=report.steps,
                    examples=report.examples,
                    complete=report.complete,
                    loss=report.loss,
                    seconds=report.seconds,
                ),
            )
            self._finished = finished
            if is_counted(session.demands, task):
                try:
                    # Before the update is saved: nobody has seen it yet.
                    run = run_of(task.task)
                    await asyncio.to_thread(self._update_counts.add, run, task.task)
                except StateError as error:
                    self._abandon(error, task.task)
                    return
            later = None if finished.later is None else finished.later.task.secure
            least = None if later is None else later.least_factor
            self.post(lambda: session.trained(finished.report, report.examples, least))

    def _why_partial(self) -> str:
        return "the device pauses" if self._trainer.enough.is_set() else "the time is over"

    async def _save(self, task_id: str) -> None:
        finished, self._finished = self._finished, None
        assert finished is not None
        assert finished.report.task == task_id
        try:
            await asyncio.to_thread(self._outbox.save, *finished)
            self._trainer.forget_checkpoint()
        except StateError as error:
            self._abandon(error, task_id)
        else:
            self.post(lambda: self._session.saved(task_id))

    async def _mask(self, command: MaskPending) -> None:
        """Mask the update that waits for what it counts."""
        task_id = command.task_id
        try:
            report = await asyncio.to_thread(mask_pending, self._directory, task_id, command.factor)
        except StateError as error:
            self._abandon(error, task_id)
        except UnsupportedError as error:
            text = in_one_line(error)
            self.post(lambda: self._session.ended(task_id, "unsupported", text))
        else:
            self.post(lambda: self._session.masked(report))

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
            self._abandon(error)
        else:
            self.post(lambda: self._session.update_sent(command.transfer, time.monotonic()))


def _raise(error: BaseException) -> Commands:
    raise error

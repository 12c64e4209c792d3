"""What takes long of a task, outside of the event loop: looking its files up, training, saving. The
session is told how each of them ended."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from fleetlearn_protocol.computations.settings import KIND_NAMES
from fleetlearn_protocol.errors import BundleError
from fleetlearn_protocol.json_log import said
from fleetlearn_protocol.messages import ROWS, Question, Report, Task
from fleetlearn_protocol.task_names import run_of
from fleetlearn_protocol.user_errors import ANY_FAILURE, in_one_line, is_expected, traceback_lines

from fleetlearn_device.driver.condition_looks import ConditionLooks
from fleetlearn_device.driver.connection import Event, printable
from fleetlearn_device.driver.failures import failure_of
from fleetlearn_device.limits.device_limits import DeviceLimits
from fleetlearn_device.limits.priority import lower_priority
from fleetlearn_device.runtimes.checks import DataError
from fleetlearn_device.session.commands import Commands, FinishContent, MaskPending
from fleetlearn_device.session.privacy_demands import is_counted
from fleetlearn_device.session.session import Session
from fleetlearn_device.storage.content_cache import Choose, choose_all
from fleetlearn_device.storage.errors import StateError
from fleetlearn_device.storage.state_directory import StateDirectory
from fleetlearn_device.training.algorithms import UnsupportedError
from fleetlearn_device.training.secure_update import mask_pending
from fleetlearn_device.training.train import FunctionFailedError, StoppedError, TrainingError
from fleetlearn_device.training.trainer import FinishedUpdate, Trainer

WorkItem = TypeVar("WorkItem", Task, Question)
Result = TypeVar("Result")

log = logging.getLogger("fleetlearn.device")


class TaskJobs:
    """The jobs of one device. Each is a coroutine that ends with an event for the session."""

    def __init__(
        self,
        directory: StateDirectory,
        trainer: Trainer,
        session: Session,
        looks: ConditionLooks,
        limits: DeviceLimits,
        post: Callable[[Event], None],
    ) -> None:
        """``post``: takes an event, in the event loop's thread."""
        self._directory, self._contents, self._outbox = (
            directory,
            directory.contents,
            directory.outbox,
        )
        self._trainer, self._session, self._looks, self._post = trainer, session, looks, post
        self._training_thread = ThreadPoolExecutor(
            1,
            "fleetlearn-training",
            initializer=partial(lower_priority, limits.nice, limits.io),
        )
        """Trains, and works answers out, with a priority of its own."""
        self._cache_lock = asyncio.Lock()
        """Held by the one job that looks up or files contents: a lookup deletes what only the task
        before needed."""
        self._finished: FinishedUpdate | None = None
        self._last_error = ""
        """What the last exception that was no error of ours said."""

    def shut_down(self) -> None:
        """Wait until the training's thread has ended."""
        self._training_thread.shutdown()

    def abandon(self, error: Exception, ended_task_id: str | None = None) -> None:
        """End the device with this error; ``ended_task_id`` names the task whose training or saving
        it ended."""

        def event() -> Commands:
            commands = self._session.abandon(error, failure_of(error).code)
            return (
                commands
                if ended_task_id is None
                else [*commands, *self._session.ended(ended_task_id)]
            )

        self._post(event)

    async def locate(self, task: Task | Question) -> None:
        # The session hears of a condition that does not hold before it hears of the files: it then
        # gives the task back.
        await self._looks.look(fresh=True)
        try:
            await asyncio.to_thread(self._trainer.check_fits, task)  # it may import cryptography
            loop, trainer = asyncio.get_running_loop(), self._trainer
            choose: Choose = choose_all
            if isinstance(task, Task) and ROWS in task.parts:
                await loop.run_in_executor(self._training_thread, trainer.choose_rows, task)
                # What is signed is the SHA-256 of the whole model.
                choose = choose_all if self._session.trusted is not None else trainer.pieces
            async with self._cache_lock:
                look, infer = self._contents.lacking, trainer.needs_infer
                lacking = await asyncio.to_thread(
                    look, task, trainer.kind, trainer.from_features, infer, choose
                )
        except StateError as error:
            self.abandon(error)
        except (BundleError, TrainingError, MemoryError, DataError) as error:
            text, code = in_one_line(error), failure_of(error).code
            self._post(lambda: self._session.unusable(task.task, text, code))
        else:
            self._post(lambda: self._session.located(task.task, lacking, time.monotonic()))

    async def finish(self, command: FinishContent) -> None:
        wanted = command.wanted
        try:
            async with self._cache_lock:
                good = await asyncio.to_thread(self._contents.finish, wanted)
        except StateError as error:
            self.abandon(error)
        else:
            self._post(lambda: self._session.stored(wanted.sha256, good, time.monotonic()))

    async def _in_training_thread(
        self, work: Callable[[WorkItem, float], Result], task: WorkItem, seconds: float
    ) -> Result:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._training_thread, work, task, seconds)

    async def answer(self, task: Question, seconds: float) -> None:
        log.info("task %s: working on the answer (%s)", task.task, task.kind)
        try:
            message = await self._in_training_thread(self._trainer.answer, task, seconds)
        except ANY_FAILURE as error:
            self._end_failed(task.task, error)
        else:
            log.info("task %s: answered in %.2f s", task.task, message.seconds)
            examples = self._trainer.counted
            self._post(lambda: self._session.answered(message, examples))

    def _end_failed(self, task_id: str, error: BaseException) -> None:
        """Tell the session that a training, or the work on an answer, ended without a result."""
        session, failure, text = self._session, failure_of(error), in_one_line(error)
        if isinstance(error, StoppedError):
            log.info("task %s: stopped after %d batches", task_id, self._trainer.batches)
            self._post(lambda: session.ended(task_id))
        elif failure.ends_device and isinstance(error, Exception):
            self.abandon(error, task_id)
        else:
            if isinstance(error, FunctionFailedError):
                if error.__cause__ is not None:
                    self._log_traceback(task_id, error.__cause__, text, "of the owner's function")
            elif not is_expected(error):
                of = "most likely of the code that gives the data"
                self._log_traceback(task_id, error, text, of)
            self._post(lambda: session.ended(task_id, failure.code, text))

    def _log_traceback(self, task_id: str, error: BaseException, text: str, of: str) -> None:
        """Write where an exception of the user's code came from; the same one again only at the
        level DEBUG.

        Its lines are indented, so that a text with line ends cannot begin a line of the log.
        """
        level = logging.DEBUG if text == self._last_error else logging.ERROR
        self._last_error = text
        lines = "\n".join(f"    {printable(line)}" for line in traceback_lines(error))
        log.log(
            level,
            "task %s failed by an exception, %s:\n%s",
            task_id,
            of,
            lines,
        )

    async def train(self, task: Task, seconds: float) -> None:
        session = self._session
        known = said("training", task=task.task, round=task.round)
        computes = task.algorithm in KIND_NAMES
        what = f"computing {task.algorithm}" if computes else "training"
        log.info("task %s: %s", task.task, what, extra=known)
        try:
            finished = await self._in_training_thread(self._trainer.train, task, seconds)
        except ANY_FAILURE as error:
            self._end_failed(task.task, error)
        else:
            report = self._trainer.own_report or finished.report
            found = self._trained(report)
            if computes:
                found = f"computed the sums of {report.examples} rows"
            log.info(
                "task %s: %s, in %.2f s%s",
                report.task,
                found,
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
                    await asyncio.to_thread(self._directory.update_counts.add, run, task.task)
                except StateError as error:
                    self.abandon(error, task.task)
                    return
            later = None if finished.later is None else finished.later.task.secure
            least = None if later is None else later.least_factor
            self._post(lambda: session.trained(finished.report, report.examples, least))

    def _trained(self, report: Report) -> str:
        partial = "" if report.complete else f" (partial: {self._why_partial()})"
        return (
            f"trained {report.steps} steps, {report.epochs:.4g} epochs{partial}, loss "
            f"{report.loss:.6g} on this device's data"
        )

    def _why_partial(self) -> str:
        return "the device pauses" if self._trainer.enough.is_set() else "the time is over"

    async def save(self, task_id: str) -> None:
        finished, self._finished = self._finished, None
        assert finished is not None
        assert finished.report.task == task_id
        try:
            await asyncio.to_thread(self._outbox.save, *finished)
            self._trainer.forget_checkpoint()
        except StateError as error:
            self.abandon(error, task_id)
        else:
            self._post(lambda: self._session.saved(task_id))

    async def mask(self, command: MaskPending) -> None:
        """Mask the update that waits for what it counts."""
        task_id = command.task_id
        try:
            report = await asyncio.to_thread(mask_pending, self._directory, task_id, command.factor)
        except StateError as error:
            self.abandon(error, task_id)
        except UnsupportedError as error:
            text = in_one_line(error)
            self._post(lambda: self._session.ended(task_id, "unsupported", text))
        else:
            self._post(lambda: self._session.masked(report))

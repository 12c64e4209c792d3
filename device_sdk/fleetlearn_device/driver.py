"""Drives a session: the WebSocket, the state directory, the training thread, the clock and the dice."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from fleetlearn_protocol.errors import BundleError, FleetError
from fleetlearn_protocol.frames import MAX_FRAME_BYTES
from fleetlearn_protocol.messages import PROTOCOL_NAME, FailureCode, Task, encode

from fleetlearn_device.runtimes.checks import Batch, DataError
from fleetlearn_device.runtimes.import_onnxruntime import (
    RuntimeUnavailableError,
    import_onnxruntime,
    import_training_api,
)
from fleetlearn_device.runtimes.runtime import KINDS, Kind
from fleetlearn_device.session.commands import (
    Close,
    Command,
    Commands,
    DropPending,
    FinishContent,
    Locate,
    Note,
    SavePending,
    Send,
    SendUpdate,
    StartTraining,
    StopTraining,
    StopUpdate,
    StoreChunk,
)
from fleetlearn_device.session.session import Link, Session
from fleetlearn_device.storage.state import State, StateError
from fleetlearn_device.training.data import Data, as_data, load_npz
from fleetlearn_device.training.train import StoppedError, TrainingError
from fleetlearn_device.training.trainer import Trained, Trainer

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

log = logging.getLogger("fleetlearn.device")

Event = Callable[[], Commands]


class Timing(NamedTuple):
    """Seconds. The defaults suit devices on real networks; tests take smaller ones."""

    open: float = 10.0
    """Connecting and the WebSocket handshake."""
    send: float = 30.0
    """One message or chunk; then the connection is aborted."""
    ping: float = 20.0
    """Interval of the keepalive's pings, and the longest wait for an answer."""
    close: float = 5.0
    """The closing handshake; then the connection is aborted."""
    base: float = 0.5
    cap: float = 60.0
    """The n-th connection after a failure waits between 0 and min(cap, base * 2**n) seconds, evenly distributed
    (Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog 2015: full jitter)."""


class Device:
    """A device that serves a coordinator with its own data.

    Args:
        url: ``ws://`` or ``wss://`` address of the coordinator.
        data: Arrays ((x, y) or {"x": x, "y": y}), the path of an .npz file of them, or an iterable of batches, which
            needs ``examples``.
        state_dir: Directory for what outlives the process (state.py). One device, one directory.
        runtime: ``onnx``, ``ort-training`` or ``auto`` (``onnx``).
        threads: Threads inside an operator.
        examples: How many examples one pass over an iterable of batches yields.
        name: The device's name at its first start; made up where it is None.
        until_finished: Return when the coordinator says that the training is finished.

    Raises DataError, ValueError on a url, runtime or number of threads that cannot be.
    """

    def __init__(
        self,
        url: str,
        data: Data | Batch | Iterable[Batch] | str | os.PathLike[str],
        state_dir: str | os.PathLike[str],
        *,
        runtime: Kind = "auto",
        threads: int = 1,
        examples: int | None = None,
        name: str | None = None,
        until_finished: bool = False,
        timing: Timing | None = None,
    ) -> None:
        _check_url(url)
        if runtime not in KINDS:
            raise ValueError(f"runtime {runtime!r}; expected one of {', '.join(KINDS)}")
        if threads < 1:
            raise ValueError(f"{threads} threads; expected at least 1")
        self.url, self.state_dir, self.name = url, state_dir, name
        self.runtime: Kind = "onnx" if runtime == "auto" else runtime
        self.threads, self.until_finished, self.timing = threads, until_finished, timing or Timing()
        self.data = as_data(load_npz(data) if isinstance(data, str | os.PathLike) else data, examples)
        self.stopped_by: signal.Signals | None = None
        """The signal that ended ``run``."""
        self._stopped = False
        self._stop: Callable[[], object] | None = None

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT, or until the training is finished (``until_finished``).

        A task under way is given back; a finished update stays in the state directory for the next start. A second
        signal ends the process at once. Raises what ``serve`` raises.
        """
        asyncio.run(self._serve_until_signal())

    async def serve(self) -> None:
        """Serve until ``stop``, or until the training is finished (``until_finished``).

        Raises StateError (the directory is in use, damaged, full), DataError (the data do not fit the bundle),
        RuntimeUnavailableError, ProtocolError (the coordinator refuses the check-in: another version; ``replaced``:
        another process speaks for the same device).
        """
        try:
            if not self._stopped:
                await self._serve()
        finally:
            self._stopped = False

    async def _serve(self) -> None:
        module = import_training_api() if self.runtime == "ort-training" else import_onnxruntime()
        version = getattr(module, "__version__", None) or import_onnxruntime().__version__
        state = State(self.state_dir, self.name)
        try:
            session = Session(
                state.device,
                self.data.examples,
                runtime=f"{self.runtime} {version}",
                software=f"fleetlearn {_version()}",
                held=state.load_pending(),
                until_finished=self.until_finished,
            )
            driver = Driver(self, state, session)
            loop = asyncio.get_running_loop()
            self._stop = lambda: loop.call_soon_threadsafe(driver.post, session.stop)
            if self._stopped:  # while the directory was opened
                self._stop()
            await driver.run()
        finally:
            self._stop = None
            state.close()

    def stop(self) -> None:
        """End ``serve`` soon, from any thread; if it has not begun, it ends as soon as it does."""
        self._stopped = True
        if self._stop is not None:
            self._stop()

    async def _serve_until_signal(self) -> None:
        loop = asyncio.get_running_loop()

        def caught(number: signal.Signals) -> None:
            log.info("stopping: %s", number.name)
            self.stopped_by = number
            loop.remove_signal_handler(number)
            self.stop()

        for number in (signal.SIGTERM, signal.SIGINT):
            # Not on Windows, and not outside of the main thread.
            with suppress(NotImplementedError, RuntimeError, ValueError):
                loop.add_signal_handler(number, caught, number)
        await self.serve()


class Driver:
    """One run of a device. Events wait in a queue; what the session answers is carried out, one after the other."""

    def __init__(self, device: Device, state: State, session: Session) -> None:
        self._url, self._timing = device.url, device.timing
        self._state, self._session = state, session
        self._kind = device.runtime
        self._trainer = Trainer(state, device.data, device.runtime, device.threads)
        self._trained: Trained | None = None
        self._events: asyncio.Queue[tuple[Event, asyncio.Future[None] | None]] = asyncio.Queue()
        self._jobs: set[asyncio.Task[None]] = set()
        self._disk = asyncio.Lock()
        """One at a time looks up or files contents: a task's lookup deletes what only the task before needed."""
        self._upload: asyncio.Task[None] | None = None
        self._ws: ClientConnection | None = None
        self._after: float | None = None
        self._dice = random.SystemRandom()

    def post(self, event: Event) -> None:
        """Let the session know; call in the event loop's thread."""
        self._events.put_nowait((event, None))

    async def run(self) -> None:
        """Until the session is over. Raises its error."""
        session = self._session
        connections = asyncio.create_task(self._stay_connected())
        connections.add_done_callback(self._check)
        try:
            while not session.over:
                now, due = time.monotonic(), session.due()
                if due is not None and due <= now:
                    await self._perform(session.tick(now, self._trainer.batches))
                    continue
                try:
                    async with asyncio.timeout(None if due is None else due - now):
                        event, handled = await self._events.get()
                except TimeoutError:
                    continue
                await self._perform(event())
                if handled is not None and not handled.done():
                    handled.set_result(None)
        finally:
            self._trainer.halt.set()
            self._stop_upload()
            if self._ws is not None:
                self._ws.transport.abort()
            connections.cancel()
            # A thread cannot be cancelled; the directory stays locked until the last one ended.
            await asyncio.gather(connections, *self._jobs, return_exceptions=True)
        if session.error is not None:
            raise session.error

    # The connection

    async def _stay_connected(self) -> None:
        failures = 0
        while not self._session.stopping:
            self._after = None
            welcomed = await self._converse()
            if self._session.stopping:
                return
            failures = 0 if welcomed else failures + 1
            delay = self._delay(failures)
            log.info("connecting again in %.1f s", delay)
            await asyncio.sleep(delay)

    def _delay(self, failures: int) -> float:
        if self._after is not None:
            return self._dice.uniform(0.5, 1.5) * self._after
        exponent = min(failures + self._session.faults, 30)
        return self._dice.uniform(0.0, min(self._timing.cap, self._timing.base * 2.0**exponent))

    async def _converse(self) -> bool:
        """One connection, from its opening to its end. Returns whether the device was welcomed."""
        from websockets.asyncio.client import connect
        from websockets.exceptions import ConnectionClosed, WebSocketException
        from websockets.typing import Subprotocol

        session, timing = self._session, self._timing
        welcomed = False
        try:
            # Text frames are smaller than chunks. Few frames are queued: a slow disk slows the coordinator down.
            async with connect(
                self._url,
                subprotocols=[Subprotocol(PROTOCOL_NAME)],
                compression=None,
                max_size=MAX_FRAME_BYTES,
                max_queue=4,
                open_timeout=timing.open,
                close_timeout=timing.close,
                ping_interval=timing.ping,
                ping_timeout=timing.ping,
            ) as ws:
                self._ws = ws
                log.info("connected to %s", self._url)
                await self._handled(lambda: session.connected(time.monotonic()))
                async for frame in ws:
                    received = session.received if isinstance(frame, str) else session.received_chunk
                    await self._handled(lambda received=received, frame=frame: received(frame, time.monotonic()))  # type: ignore[misc]
                    welcomed = welcomed or session.link is Link.ONLINE
            if session.link is not Link.CLOSING:
                log.info("the coordinator closed the connection: %s", _close_reason(ws))
        except ConnectionClosed as error:
            if session.link is not Link.CLOSING:
                log.warning("the connection is lost: %s", _printable(str(error)))
        except (OSError, WebSocketException, EOFError) as error:  # TimeoutError is an OSError
            log.warning("cannot connect to %s: %s", self._url, error or type(error).__name__)
        finally:
            self._ws = None
            self._stop_upload()
        await self._handled(session.disconnected)
        return welcomed

    async def _handled(self, event: Event) -> None:
        """Let the session know, and wait until its commands were carried out."""
        handled = asyncio.get_running_loop().create_future()
        self._events.put_nowait((event, handled))
        await handled

    async def _send(self, ws: ClientConnection, message: str | bytes) -> bool:
        """Send within the time limit; False where the connection is gone. A coordinator that stalls is aborted:
        neither close() nor keepalive ends a connection whose write buffer is full."""
        from websockets.exceptions import ConnectionClosed

        try:
            async with asyncio.timeout(self._timing.send):
                await ws.send(message)
        except TimeoutError:
            log.warning("the coordinator took nothing for %g s; the connection is aborted", self._timing.send)
            ws.transport.abort()
            return False
        except ConnectionClosed:
            return False
        return True

    async def _close(self, ws: ClientConnection, code: int) -> None:
        try:
            async with asyncio.timeout(self._timing.close):
                await ws.close(code)
        except TimeoutError:
            ws.transport.abort()

    # Commands

    async def _perform(self, commands: Commands) -> None:
        queue = deque(commands)
        while queue:
            try:
                await self._do(queue.popleft())
            except StateError as error:
                if self._session.error is not None:
                    raise
                queue = deque(self._session.abandon(error, error.code))

    async def _do(self, command: Command) -> None:
        match command:
            case Note(text=text, warning=warning):
                log.log(logging.WARNING if warning else logging.INFO, "%s", _printable(text))
            case Send(message=message):
                if self._ws is not None:
                    await self._send(self._ws, encode(message))
            case StoreChunk(wanted=wanted, offset=offset, payload=payload):
                self._state.append(wanted, offset, payload)
            case Locate(task=task):
                self._start(self._locate(task))
            case FinishContent(wanted=wanted):
                self._start(self._finish(command))
            case StartTraining(task=task, seconds=seconds):
                self._trainer.halt.clear()
                self._start(self._train(task, seconds))
            case StopTraining():
                self._trainer.halt.set()
            case SavePending(report=report):
                self._start(self._save(report.task))
            case DropPending(task=task):
                self._stop_upload()
                self._state.drop_pending(task)
            case SendUpdate():
                self._stop_upload()
                if self._ws is not None:
                    self._upload = self._start(self._send_update(self._ws, command))
            case StopUpdate():
                self._stop_upload()
            case Close(reason=reason, after=after, code=code):
                calm = after is not None or self._session.stopping
                log.log(logging.INFO if calm else logging.WARNING, "closing the connection: %s", _printable(reason))
                self._after = after
                self._stop_upload()
                if self._ws is not None:
                    self._start(self._close(self._ws, code))

    # Jobs

    def _start(self, job: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(job)
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)
        task.add_done_callback(self._check)
        return task

    def _check(self, job: asyncio.Task[None]) -> None:
        """An error that no job expects ends the run with it."""
        if not job.cancelled() and (error := job.exception()) is not None:
            self.post(partial(_raise, error))

    def _abandon(self, error: Exception, code: FailureCode, task: str | None = None) -> None:
        def event() -> Commands:
            commands = self._session.abandon(error, code)
            return commands if task is None else [*commands, *self._session.ended(task)]

        self.post(event)

    async def _locate(self, task: Task) -> None:
        try:
            async with self._disk:
                lacking = await asyncio.to_thread(self._state.lacking, task, self._kind)
        except StateError as error:
            self._abandon(error, error.code)
        except (BundleError, MemoryError) as error:
            text, code = _one_line(error), _failure_code(error)
            self.post(lambda: self._session.unusable(task.task, text, code))
        else:
            self.post(lambda: self._session.located(task.task, lacking, time.monotonic()))

    async def _finish(self, command: FinishContent) -> None:
        wanted = command.wanted
        try:
            async with self._disk:
                good = await asyncio.to_thread(self._state.finish, wanted)
        except StateError as error:
            self._abandon(error, error.code)
        else:
            self.post(lambda: self._session.stored(wanted.sha256, good, time.monotonic()))

    async def _train(self, task: Task, seconds: float) -> None:
        session = self._session
        log.info("task %s: training", task.task)
        try:
            trained = await asyncio.to_thread(self._trainer.train, task, seconds)
        except StoppedError:
            log.info("task %s: training stopped after %d steps", task.task, self._trainer.steps)
            self.post(lambda: session.ended(task.task))
        except DataError as error:
            self._abandon(error, "bad-data", task.task)
        except (RuntimeUnavailableError, StateError) as error:
            self._abandon(error, _failure_code(error), task.task)
        except Exception as error:
            log.debug("task %s: training failed", task.task, exc_info=error)  # the session says it in one line
            text, code = _one_line(error), _failure_code(error)
            self.post(lambda: session.ended(task.task, code, text))
        else:
            report = trained.report
            log.info(
                "task %s: trained %d steps, %.4g epochs%s, loss %.6g, in %.2f s",
                report.task,
                report.steps,
                report.epochs,
                "" if report.complete else " (partial: the time is over)",
                report.loss,
                report.seconds,
            )
            self._trained = trained
            self.post(lambda: session.trained(report))

    async def _save(self, task: str) -> None:
        trained, self._trained = self._trained, None
        assert trained is not None
        assert trained.report.task == task
        try:
            save = self._state.save_pending
            await asyncio.to_thread(save, trained.report, trained.content, trained.bundle, trained.kept)
        except StateError as error:
            self._abandon(error, error.code, task)
        else:
            self.post(lambda: self._session.saved(task))

    async def _send_update(self, ws: ClientConnection, command: SendUpdate) -> None:
        try:
            for chunk in self._state.update_chunks(command.transfer, command.offset, command.chunk_bytes):
                if not await self._send(ws, chunk):
                    return
        except StateError as error:
            self._abandon(error, error.code)
        else:
            self.post(lambda: self._session.update_sent(command.transfer, time.monotonic()))

    def _stop_upload(self) -> None:
        if self._upload is not None:
            self._upload.cancel()
            self._upload = None


def _failure_code(error: Exception) -> FailureCode:
    """The protocol's word for why a task failed."""
    if isinstance(error, TrainingError | StateError):
        return error.code
    if isinstance(error, MemoryError):
        return "out-of-memory"
    return "bad-bundle" if isinstance(error, FleetError) else "runtime-error"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _raise(error: BaseException) -> Commands:
    raise error


def _check_url(url: str) -> None:
    from websockets.exceptions import InvalidURI
    from websockets.uri import parse_uri

    try:
        parse_uri(url)
    except InvalidURI as error:
        raise ValueError(f"{error}; expected ws://HOST:PORT or wss://HOST:PORT") from None


def _version() -> str:
    from importlib.metadata import version

    return version("fleetlearn")


def _close_reason(ws: ClientConnection) -> str:
    return _printable(f"{ws.close_code} {ws.close_reason or ''}".strip())


def _printable(text: str) -> str:
    """What the coordinator wrote cannot begin a line of the log or colour it."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)

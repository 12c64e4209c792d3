"""The port of a device that serves several runs: what it says goes to the run that gave its
task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

from fleetlearn_protocol.errors import Code, FleetError, ProtocolError
from fleetlearn_protocol.messages import CheckIn, ComeBack, Reply, Report

from fleetlearn_coordinator.conversation.begun import Announced, BegunUpload
from fleetlearn_coordinator.conversation.port import Admitted, Spool
from fleetlearn_coordinator.network.several.turns import SharedDevice, SharedRun, Turns

P = ParamSpec("P")
T = TypeVar("T")
Done = TypeVar("Done")


class SharedPort:
    """A ``Port``, of one connection. Methods do what the port's do."""

    __slots__ = ("_device", "_turns")

    def __init__(self, turns: Turns, device: SharedDevice) -> None:
        self._turns, self._device = turns, device

    def _serves(self) -> SharedRun:
        run = self._device.serves
        if run is None:
            raise ProtocolError(Code.UNKNOWN_TASK, "the device has no task")
        return run

    def _ask(self, run: SharedRun, ask: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Ask something of the run. An error that no device caused ends the run, and for the device
        its task."""
        try:
            return ask(*args, **kwargs)
        except ProtocolError:
            raise
        except Exception as error:
            run.served.failed(error)
            raise ProtocolError(
                Code.STALE_ROUND, "the task's run was stopped by an error of its coordinator"
            ) from None

    @property
    def spool(self) -> Spool:
        return self._serves().port.spool

    def elements_of(self, task: str, part: str) -> int:
        return self._serves().port.elements_of(task, part)

    def admit(self, check_in: CheckIn) -> Admitted | ComeBack:
        raise AssertionError("the host admits")

    def join(self, check_in: CheckIn, now: float) -> None:
        self._turns.join(self._device, check_in)

    def leave(self, device: str, now: float) -> None:
        self._turns.leave(self._device, now)

    def announce(self, device: str, report: Report, now: float) -> Announced:
        counted = Announced(wanted=False)
        return self._of_done(
            device, report.task, counted, lambda run: run.port.announce(device, report, now)
        )

    def keep_upload(self, device: str, begun: BegunUpload) -> None:
        run = self._turns.of_task(begun.task)
        if run is not None:
            self._turns.ask_run(run, lambda: run.port.keep_upload(device, begun))

    def weigh(self, device: str, task: str, now: float) -> float | None:
        return self._of_done(device, task, None, lambda run: run.port.weigh(device, task, now))

    def _of_done(
        self, device: str, task: str, counted: Done, ask: Callable[[SharedRun], Done]
    ) -> Done:
        """Ask the run of a task that the device has done. ``counted``: the answer where its report
        has counted already."""
        run = self._turns.of_task(task)
        if run is None:
            raise ProtocolError(Code.STALE_ROUND, f"the run of task {task} is not served here now")
        if self._device.serves not in (None, run):
            if run.port.has_counted(device, task):
                return counted
            raise ProtocolError(
                Code.NOT_WANTED, f"task {task} ended; the device has a task of another run"
            )
        try:
            return self._ask(run, ask, run)
        finally:
            if (
                self._device.serves is None
                and run in self._turns.runs
                and run.port.task_of(device) is not None
            ):
                self._turns.claim(run, [device])  # its lease goes on

    def save_update(
        self, device: str, report: Report, spool: int, largest: Mapping[str, float]
    ) -> None:
        run = self._serves()
        self._ask(run, run.port.save_update, device, report, spool, largest)

    def count_report(self, device: str, task: str, now: float) -> None:
        run = self._serves()
        self._turns.ask_run(run, lambda: run.port.count_report(device, task, now))

    def has_counted(self, device: str, task: str) -> bool:
        run = self._turns.of_task(task)
        return run is not None and run.port.has_counted(device, task)

    def save_answer(self, device: str, message: Reply) -> bool:
        run = self._turns.of_task(message.task)
        if run is None:
            raise ProtocolError(
                Code.UNKNOWN_TASK, f"the run of task {message.task} is not served here now"
            )
        return self._ask(run, run.port.save_answer, device, message)

    def count_answer(self, device: str, task: str, now: float) -> None:
        run = self._turns.of_task(task)
        assert run is not None  # it has just saved the answer
        self._turns.ask_run(run, lambda: run.port.count_answer(device, task, now))

    def end_task(
        self, device: str, task: str, cause: str, now: float, text: str | None = None
    ) -> None:
        run = self._turns.of_task(task)
        if run is not None:
            self._turns.ask_run(run, lambda: run.port.end_task(device, task, cause, now, text))

    def shown(self, task: str | None, text: str) -> str:
        run = None if task is None else self._turns.of_task(task)
        run = run or self._device.serves or self._device.last
        return text if run is None else run.port.shown(task, text)

    def refused(self, device: str, error: FleetError) -> None:
        run = self._device.serves or self._device.last
        if run is not None:
            run.port.refused(device, error)

    def steps_done(self, device: str, task: str | None, steps: int, now: float) -> None:
        if self._device.serves is not None:
            self._device.serves.port.steps_done(device, task, steps, now)

    def received(self, device: str, task: str, end: int, size: int, now: float) -> None:
        if self._device.serves is not None:
            self._device.serves.port.received(device, task, end, size, now)

    def sent(self, device: str, sha256: str, end: int, size: int, now: float) -> None:
        if self._device.serves is not None:
            self._device.serves.port.sent(device, sha256, end, size, now)

    def wait(self, device: str, now: float) -> bool:
        return self._device.serves is not None and self._device.serves.port.wait(device, now)

    def proceed(self, device: str, now: float) -> None:
        if self._device.serves is not None:
            self._device.serves.port.proceed(device, now)

    def find(self, sha256: str, offset: int) -> int:
        run = self._device.serves or self._device.last
        if run is None:
            raise ProtocolError(
                Code.UNKNOWN_CONTENT, f"nothing with SHA-256 {sha256} is served to this device now"
            )
        try:
            return run.port.find(sha256, offset)
        except FleetError:  # the device is told
            raise
        except Exception as error:
            run.served.failed(error)
            raise ProtocolError(
                Code.UNKNOWN_CONTENT, "the run was stopped by an error of its coordinator"
            ) from None

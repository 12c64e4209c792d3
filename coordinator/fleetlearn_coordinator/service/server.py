"""One run, as the connections of its host see it: the engine's and the run's decisions behind the
port."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from fleetlearn_protocol.encodings import FLOAT32
from fleetlearn_protocol.errors import Code, FleetError, ProtocolError, in_words
from fleetlearn_protocol.manifest import MANIFEST
from fleetlearn_protocol.messages import (
    Cancel,
    CheckIn,
    ComeBack,
    OwnEncoding,
    Reply,
    Report,
)

from fleetlearn_coordinator.aggregation.partial_sum import Adders
from fleetlearn_coordinator.conversation.begun import Announced, BegunUpload
from fleetlearn_coordinator.conversation.port import Admitted, Spool
from fleetlearn_coordinator.dashboard.run_history import FleetNow
from fleetlearn_coordinator.network.host import spread, welcome
from fleetlearn_coordinator.network.run_host import RunHost
from fleetlearn_coordinator.plan.distil_files import distillation_bundles
from fleetlearn_coordinator.rounds.commands import (
    Abandon,
    Ask,
    Assign,
    CancelTask,
    Command,
    Commit,
    ExchangeClosed,
    Finish,
    SendAway,
)
from fleetlearn_coordinator.rounds.pace import FinishedReturns
from fleetlearn_coordinator.rounds.selection_rules import stated_in
from fleetlearn_coordinator.rounds.waiting_words import waits_for_in_general
from fleetlearn_coordinator.service.able_devices import why_unable
from fleetlearn_coordinator.service.contribution_asker import ContributionAsker
from fleetlearn_coordinator.service.device_history import DeviceHistory
from fleetlearn_coordinator.service.distil_asker import DistilAsker
from fleetlearn_coordinator.service.fleet_minutes import KEYS, FleetMinutes, read_minutes
from fleetlearn_coordinator.service.helper_asker import HelperAsker
from fleetlearn_coordinator.service.live_state import LiveState
from fleetlearn_coordinator.service.live_values import RunConnections, live_values
from fleetlearn_coordinator.service.observers import (
    DeviceJoined,
    DeviceLeft,
    HeldOutMeasured,
    MessageRefused,
    TaskFailed,
)
from fleetlearn_coordinator.service.round_asker import RoundAsker
from fleetlearn_coordinator.service.run_clock import Clocks, RunClock
from fleetlearn_coordinator.service.served_models import ServedModels
from fleetlearn_coordinator.service.task_messages import question_message, task_message
from fleetlearn_coordinator.service.training_run.distilling import DistilQuestion
from fleetlearn_coordinator.service.training_run.mask_sum import Answer, MaskQuestion
from fleetlearn_coordinator.service.training_run.members import RunMember
from fleetlearn_coordinator.service.training_run.own_origins import combine_by_own_code
from fleetlearn_coordinator.service.training_run.pre_sums import PreSums, most_apart, pays_off
from fleetlearn_coordinator.service.training_run.report_checks import check_report
from fleetlearn_coordinator.service.training_run.run import Run
from fleetlearn_coordinator.service.worker_process import WorkerAnswer, WorkerProcess

LARGE_MODEL = 8 * 2**20
"""Bytes from which on a model's updates are added, saved and committed in another thread. Measured
on a busy machine with FedAdam, a commit of 4 MB takes 50 ms, of 16 MB 200 to 400 ms, of 40 MB about
a second."""

NOT_SHOWN = (
    "not shown, as the text may follow from the device's data; the device's own log has the reason"
)
"""What people read in the place of a device's words."""


def download_of(member: RunMember) -> int:
    """Return the bytes that a device may have to fetch for its first task of this member."""
    files = member.bundle.manifest.files.values()
    manifest = len(member.bundle.read(MANIFEST))
    return manifest + sum(entry.size for entry in files) + FLOAT32.size(member.size)


class RunServer:
    """A run on a host, within a running event loop. ``serve.running`` makes one whose host
    listens."""

    name = ""
    """The run's, of several. Empty: the host serves it alone."""

    def __init__(self, run: Run, host: RunHost) -> None:
        self.run, self.engine, self.host = run, run.engine, host
        self.spool: Spool = run.store.blobs
        self._served = host.serve_run(
            self, run.members.bundles(), self.fail, self.name, run.store.blobs.served
        )
        self.gate = self._served.gate
        """Holds back what devices are told until it is stored."""
        self.models = ServedModels(run, host, self._served)
        self.history = DeviceHistory()
        """What is new of each device, for the ledger."""
        run.observers.add(self.history)
        self.live_state = LiveState(self.live)
        """What ``status`` shows, for the ledger."""
        run.observers.add(self.live_state)
        known = read_minutes(map(run.store.ledger.get, KEYS), time.time())
        self.minutes = FleetMinutes(known)
        """What devices did in each minute, for the ledger and for whoever shows it."""
        run.observers.add(self.minutes)
        self.download = max(map(download_of, run.members.all))
        self.upload = 2 * max(FLOAT32.size(member.size) for member in run.members.all)
        self.loop = asyncio.get_running_loop()
        self.clock = RunClock(self.loop.time)
        self.ended = False
        """Nothing more may be done: the run is being closed, or memory may be ahead of the disk."""
        self.done: asyncio.Future[str] = self.loop.create_future()
        """Set when the run is finished or was told to stop."""
        self._idle: set[str] = set()
        """Connected devices that lack what this run's tasks need. The engine does not know them."""
        self._returns = FinishedReturns(run.plan.pace.finished)
        self._alarm: asyncio.TimerHandle | None = None
        self._planned_before = 0
        """The last round whose tasks may be of an earlier process, with another plan."""
        self._working: asyncio.Task[None] | None = None
        """The run's background work in another thread."""
        self._asker: HelperAsker | None = None
        """Asks the helper, where updates are masked."""
        if run.mask_sums is not None:
            self._asker = HelperAsker(run.mask_sums, self.loop, self._answered, self.fail)
        manifests = (bundle.manifest for bundle in run.members.bundles())
        self._combines_by_own_code = combine_by_own_code(run.plan, manifests)
        self.round_asker = self._find_round_asker()
        """Asks a worker process what closed rounds wait for, where the plan says so."""

    def _find_round_asker(self) -> RoundAsker[Any] | None:
        run = self.run
        if run.plan.distil is not None and run.distilling is not None:
            files = [run.plan.distil.data, *distillation_bundles(run.plan)]
            worker = WorkerProcess("fleetlearn_device.distil", *map(str, files))
            return DistilAsker(run.distilling, worker, run.log, self._distilled, self.fail)
        if run.contributions is not None:
            measured_on = str(run.plan.bundle), str(run.plan.evaluation.data)
            worker = WorkerProcess("fleetlearn_device.measure", *measured_on)
            return ContributionAsker(run.contributions, worker, self._refine, self.fail)
        return None

    def start(self, pending: Sequence[Command]) -> None:
        """Serve the run from now on. ``pending``: what ``Run.resume`` returned."""
        self.models.publish()
        self._tell_all(pending)
        if self._asker is not None:
            self._asker.look()
        if self.round_asker is not None:
            self.round_asker.look()
        self._planned_before = self.engine.round
        if self.run.finished is not None:  # before, or by the round that was just resumed
            self._finish(self.run.finished)

    def end(self, why: str = "") -> None:
        """Do nothing more, whatever devices say and however late it is. ``why`` is for the devices
        of one of several runs, for people."""
        self.ended = True
        self.host.end()
        self._ask_no_more()

    def fail(self, error: Exception) -> None:
        """Something that no device is to blame for: end the run rather than go on half-done. Disk
        has the truth."""
        self.end("the run was stopped by an error of its coordinator")
        if not self.done.done():
            self.done.set_exception(error)
        else:
            # such as a full disk: its text says all
            expected = isinstance(error, FleetError | OSError)
            self.run.log.error(
                "after the end: %s",
                in_words(error, file=True),
                exc_info=None if expected else error,
            )

    # The port of the conversations: what devices do

    def admit(self, check_in: CheckIn) -> Admitted | ComeBack:
        newest = self.models.newest_for(check_in)
        if self.run.finished is not None and newest is None:
            return self._finished()
        if self.done.done() and self.run.finished is None:
            return self._stopping()
        limits, waits = self.engine.limits, waits_for_in_general(self.engine)
        if limits is not None:
            waits = limits.why_not(check_in.device) or waits
        warning = self.warning_for(check_in.device)
        why = self.unfit(check_in)
        welcomed = welcome(check_in, self.host.heartbeat, why, waits, newest, warning)
        return Admitted(self, welcomed, self.download, self.upload)

    def warning_for(self, device: str) -> str:
        """Return what went wrong with the device's last update after it was accepted, for its
        owner; empty if nothing did."""
        sums = self.run.mask_sums
        return "" if sums is None else sums.refusals.words_for(device)

    def unfit(self, check_in: CheckIn) -> str:
        """Return why the device can have no task of this run, for its owner; empty if it can."""
        if why := why_unable(self.run, self.host, check_in):
            return why
        limits, selection = self.engine.limits, self.run.selection
        if limits is not None and limits.is_done(check_in.device):
            return limits.why_not(check_in.device)
        return "" if selection is None else selection.why_not(check_in)

    def join(self, check_in: CheckIn, now: float) -> None:
        device, held, now = check_in.device, check_in.held, self.clock.read(now)
        self.run.observers.tell([DeviceJoined(check_in)])
        if held is not None:
            self.run.budget.look_at_held(held, self.engine.round)
        if why_unable(self.run, self.host, check_in):  # it stays connected, for another plan
            if device not in self._idle:  # its connection before this one may have been able
                self._part_from(device)
                self._idle.add(device)
                self._carry_out(self.engine.disconnect(device, now), now)
            return
        self._idle.discard(device)
        self.run.members.policy.join(check_in)
        self.models.join(check_in)
        if self.run.selection is not None:
            region = self.run.regions.region_of(check_in, self.host.region_of(device))
            stated = stated_in(check_in)._replace(region=region)
            self.run.selection.selection.stated[device] = stated
        for kind in {*check_in.exchanges} & self.run.exchanges.keys():
            self.run.exchanges[kind].join(check_in)
            self.engine.exchanges[kind].join(device)
        self._carry_out(self.engine.check_in(device, None if held is None else held.task, now), now)

    def leave(self, device: str, now: float) -> None:
        # else the leases stay as they are, for the next process
        if device not in self._idle and not self.done.done():
            now = self.clock.read(now)
            self._carry_out(self.engine.disconnect(device, now), now)
        self._forget(device)

    def _forget(self, device: str) -> None:
        """The device is not connected to this run any more."""
        self.run.observers.tell([DeviceLeft(device)])
        self._part_from(device)

    def _part_from(self, device: str) -> None:
        """Forget what the device said that it can do."""
        self._idle.discard(device)
        for records in self.run.exchanges.values():
            records.leave(device)
        self.run.members.policy.leave(device)
        self.models.leave(device)
        if self.run.selection is not None:
            self.run.selection.selection.stated.pop(device, None)

    def announce(self, device: str, report: Report, now: float) -> Announced:
        if self.has_counted(device, report.task):
            return Announced(wanted=False)
        now = self.clock.read(now)
        self._carry_out(self.engine.announce(device, report.task, report.round, now), now)
        check_report(self.run, report, self._planned_before)
        begun = self.run.begun.take(report.task, report.parts)
        return Announced(wanted=True, begun=begun)

    def keep_upload(self, device: str, begun: BegunUpload) -> None:
        if self.engine.leases.get(device) == begun.task:
            self.run.begun.keep(begun)
        else:
            self.spool.free_spool_file(begun.spool_file)

    def let_add(self, adders: Adders, count: int) -> PreSums | None:
        """Have these processes, of which there are ``count``, add the updates that they store.
        Returns whom they tell; None: they are to add none."""
        plan = self.run.plan
        goal, regions = plan.round.goal, 1 if plan.regions is None else len(plan.regions.named)
        # The bytes are in an object store: whoever is on another machine has them at hand.
        most = most_apart(goal) if self.run.store.blobs.is_slow else None
        if not most and (most == 0 or not pays_off(goal, count, regions)):
            return None
        pre_sums = self.run.reports.pre_sums = PreSums(adders, self._do_work_when_safe, most)
        return pre_sums

    def own_encoding(self) -> tuple[OwnEncoding | None, bool]:
        """Return the run's own encoding, for gateways, and whether devices keep its residual."""
        encoding = self.run.plan.encoding
        return encoding.own, encoding.residual

    def release_upload(self, spool_file: int) -> bool:
        """Part from the begun upload in this spool file, which a gateway has: its connection
        outlived the process that lent the file. Returns whether the run had it."""
        return self.run.begun.release(spool_file)

    def weigh(self, device: str, task: str, now: float) -> float | None:
        if self.has_counted(device, task):
            return None
        now = self.clock.read(now)
        self._carry_out(self.engine.announce(device, task, self._round_of(task), now), now)
        secure = self.run.tasks.secure
        if secure is None or secure.least_factor is None:
            text = f"task {task} has no `secure.least_factor`: its update is reported at once"
            raise ProtocolError(Code.BAD_MESSAGE, text)
        staleness = self.engine.report_terms(device).staleness
        return min(1.0, self.run.plan.staleness_factor(staleness))

    def _round_of(self, task: str) -> int:
        """Return the round of a task, or 0 where the name is not one of this run's."""
        with suppress(ValueError):
            return self.engine.round_of(task)
        return 0

    def elements_of(self, task: str, part: str) -> int:
        return self.run.members.of_task(task).bundle.manifest.elements_of(part)

    def save_update(
        self, device: str, report: Report, spool: int, largest: Mapping[str, float]
    ) -> None:
        if not self.engine.takes_report(device, report.task):
            raise ProtocolError(
                Code.STALE_ROUND, f"round {report.round} ended before the update was here"
            )
        # once more, as a gateway may ask to save what was not announced to this process
        check_report(self.run, report, self._planned_before)
        self.run.save_update(device, report, spool, largest, self.clock.now())

    def count_report(self, device: str, task: str, now: float) -> None:
        now = self.clock.read(now)
        self._carry_out(self.engine.count_report(device, task, now), now)
        self._do_work()

    def has_counted(self, device: str, task: str) -> bool:
        return self.engine.has_counted(device, task)

    def save_answer(self, device: str, message: Reply) -> bool:
        series = self.engine.exchanges.get(message.kind)
        if series is not None and series.has_counted(device, message.task):
            return False
        if series is None or not series.takes_answer(device, message.task):
            text = f"task {message.task} is not device {device}'s, or not any more"
            raise ProtocolError(Code.UNKNOWN_TASK, text)
        self.run.save_answer(device, message)
        return True

    def count_answer(self, device: str, task: str, now: float) -> None:
        now = self.clock.read(now)
        self._carry_out(self.engine.count_answer(device, task, now), now)

    def end_task(
        self, device: str, task: str, cause: str, now: float, text: str | None = None
    ) -> None:
        if text is not None:
            self.run.observers.tell([TaskFailed(device, task, cause, text)])
        now = self.clock.read(now)
        self._carry_out(self.engine.end(device, task, cause, now), now)

    def shown(self, task: str | None, text: str) -> str:
        return NOT_SHOWN if self.run.plan.hides_devices else text

    def refused(self, device: str, error: FleetError) -> None:
        self.run.observers.tell([MessageRefused(device, error.code, error.text)])

    def steps_done(self, device: str, task: str | None, steps: int, now: float) -> None:
        self.engine.progress(device, task, "steps", steps, self.clock.read(now))

    def received(self, device: str, task: str, end: int, size: int, now: float) -> None:
        self.engine.progress(device, task, "upload", end, self.clock.read(now))
        self.run.bytes_up += size

    def sent(self, device: str, sha256: str, end: int, size: int, now: float) -> None:
        task = self.engine.leases.get(device)
        self.engine.progress(device, task, sha256, end, self.clock.read(now))
        self.run.bytes_down += size

    def wait(self, device: str, now: float) -> bool:
        self.engine.wait(device, self.clock.read(now))
        return self.engine.has_task(device)

    def proceed(self, device: str, now: float) -> None:
        self.engine.proceed(device, self.clock.read(now))

    def find(self, sha256: str, offset: int) -> int:
        return self._served.contents.find(sha256, offset).size

    # The engine

    def now(self) -> Clocks:
        """Return this moment."""
        return Clocks(self.clock.now(), time.time())

    def _carry_out(self, commands: Iterable[Command], now: float) -> None:
        self._tell_all(self.run.record(commands, Clocks(now, time.time())))

    def _tell_all(self, commands: Sequence[Command]) -> None:
        """Tell the devices what was decided and recorded; then set the engine's alarm."""
        closed: list[ExchangeClosed] = []
        for command in commands:
            match command:
                case Assign():
                    self._assign(command)
                case CancelTask(device, task, code, text):
                    self.host.tell(device, Cancel(task, code, text))
                case SendAway(device, after):
                    self._send_away(device, after)
                case Commit():
                    self._forget_uploads()
                    self._tell_all(self.run.begin_commit(command, self.now()))
                    self._do_work()
                case Abandon():
                    self._forget_uploads()
                case Ask():
                    self._ask(command)
                case ExchangeClosed():
                    closed.append(command)
                case Finish(reason):
                    self._finish(reason)
        for each in closed:  # after all else is told: it may end tasks that were just given
            self._tell_all(self.run.end_exchange(each, self.now()))
        self._set_alarm()

    def _send_away(self, device: str, after: float) -> None:
        self.host.tell(device, ComeBack(after, "no-task"))

    def _set_alarm(self) -> None:
        wake = None if self.engine.paused else self.engine.wake_at()
        if wake is not None:
            wake = self.clock.when(wake)
        if self._alarm is not None:
            if self._alarm.when() == wake:
                return
            self._alarm.cancel()
        self._alarm = None if wake is None else self.loop.call_at(wake, self._tick)

    def _tick(self) -> None:
        self._alarm = None
        if self.ended:
            return
        try:
            now = self.clock.now()
            self._carry_out(self.engine.tick(now), now)
            self.host.grant()
        except Exception as error:
            self.fail(error)

    def _answered(self, question: MaskQuestion, answer: Answer) -> None:
        """The helper was asked for the sum of a round's masks."""
        if self.ended or self.done.done():
            return
        assert self.run.mask_sums is not None
        self._tell_all(self.run.mask_sums.answered(question, answer, self.now()))
        self._do_work()
        self._set_alarm()  # a model without a command may let a round wait for devices to gather
        self.host.grant()

    def _distilled(self, question: DistilQuestion, answer: WorkerAnswer) -> None:
        """The worker process was asked to distil a round's model."""
        assert self.run.distilling is not None
        self._refine(partial(self.run.distilling.answered, question, answer))

    def _refine(self, hand_in: Callable[[], None]) -> None:
        """Hand in what a worker process answered about a round that waits, and go on with it."""
        if self.ended or self.done.done():
            return
        hand_in()
        self._do_work()
        self._set_alarm()
        self.host.grant()

    def _do_work(self) -> None:
        """Do what is to be done with accepted updates: those of a large model in another thread,
        while this one answers the devices. Pairwise masks of any model take long, so does writing
        to an object store, and nobody knows how long own algorithms take."""
        small = self.run.models.newest.model.nbytes < LARGE_MODEL
        quick = small and not self.run.store.blobs.is_slow and not self._combines_by_own_code
        if quick and self.run.pairwise is None:
            if commands := self.run.work.do_work(self.now()):
                self._tell_all(commands)
        elif self._working is None or self._working.done():
            self._working = self.loop.create_task(self._work_in_thread())
        self._go_on_when_safe()

    def _go_on_when_safe(self) -> None:
        """What waits for rows to be safe is done then."""
        if not self.run.store.may_replace_bytes:
            self.run.store.when_safe(self._do_work_when_safe)

    def _do_work_when_safe(self) -> None:
        if self.ended or self.done.done():
            return
        try:
            self._do_work()
            self._set_alarm()
        except Exception as error:
            self.fail(error)

    async def _work_in_thread(self) -> None:
        """Do one thing after the other. What a stop leaves undone, the next start does."""
        try:
            while not self.done.done() and (next_work := self.run.work.next_work()) is not None:
                result = await asyncio.to_thread(next_work.work)
                if self.ended:
                    break
                self._tell_all(next_work.end(result, self.now()))
                self.host.grant()
            self._working = None
            self._go_on_when_safe()
        except Exception as error:
            self.fail(error)

    async def wait_for_thread(self) -> None:
        """Wait until no background work is under way: its thread cannot be stopped."""
        while self._working is not None and not self._working.done():
            await asyncio.wait({self._working})

    def _forget_uploads(self) -> None:
        """A round is over: forget the uploads of its tasks, except those that go on."""
        unless = {*self.engine.leases.values()}
        self.host.forget_uploads(self.spool, unless)
        self.run.begun.forget(unless)

    def _assign(self, lease: Assign) -> None:
        task = task_message(self.run, self.models, lease, self.clock.now())
        self.host.tell(lease.device, task)

    def _ask(self, lease: Ask) -> None:
        question = question_message(self.run, self.models, lease, self.clock.now())
        self.host.tell(lease.device, question)

    def held_out_measured(self, version: int, metrics: dict[str, float]) -> None:
        """A model was measured on held-out data: its metrics may stop the run."""
        self.run.observers.tell([HeldOutMeasured(version, metrics)])
        counts = (
            self.run.plan.stop.measured_by == "held-out" and version >= self.run.roll_backs.newest
        )
        if counts and self.run.finished is None and not self.done.done():
            now = self.clock.now()
            self._carry_out(self.engine.measured(metrics, version, now), now)

    def add_second(self) -> None:
        """Add what devices do now to the minute. Called each second."""
        run = self.run
        self.minutes.sample(self.fleet(), self.present(), run.bytes_up, run.bytes_down)

    def fleet(self) -> FleetNow:
        """Return what the run's devices do now."""
        book = self.engine.book
        uploading = self.host.uploads_of(self.spool).arriving
        silent = len(book.absent)
        training = max(0, len(book.tasks) - silent - uploading)
        return FleetNow(self.connected, training, uploading, silent)

    def present(self) -> int:
        """Return how many devices are connected, or away because they were told to be."""
        pace = self.engine.pace
        away = 0 if pace is None else pace.bookings.away(self.clock.now())
        return self.connected + away

    def look_for_request(self) -> None:
        """Open an exchange, or roll back, if somebody asked for it. For a finished run its next
        start does."""
        if self.run.finished is not None or self.done.done():
            return
        if self.run.roll_backs.look(time.time()):
            self._do_work()
        # A request is removed once the rows that answer it are safe.
        self.run.store.when_safe(self._look_for_exchanges)

    def _look_for_exchanges(self) -> None:
        for kind, records in self.run.exchanges.items():
            if not self.done.done() and records.look_for_request():
                now = self.clock.now()
                self._carry_out(self.engine.request_exchange(kind, now), now)

    def _finish(self, reason: str) -> None:
        self._say_to_all(self._finished)
        if not self.done.done():
            self.done.set_result(reason)

    # People

    @property
    def connected(self) -> int:
        """How many devices are connected that may serve the run."""
        return len(self.host.devices)

    @property
    def unable(self) -> int:
        """How many connected devices lack what this run's tasks need."""
        return len(self._idle)

    def live(self) -> dict[str, Any]:
        """Return what ``status`` shows of a running coordinator."""
        there = RunConnections(
            self.connected,
            self.unable,
            self.host.uploads_of(self.spool),
            self.host.gateways_now(),
        )
        return live_values(self.run, there, self.clock.now())

    async def stop(self, reason: str, *, tell: bool = True) -> None:
        """Tell every device to come back later, and wait STOP_TIMEOUT seconds at most for them to
        leave. ``tell``: False where devices stay connected, and are to notice nothing."""
        if not self.done.done():
            self.done.set_result(reason)
        self._ask_no_more()
        if not tell:
            return
        if self.run.finished is None:
            self._say_to_all(self._stopping)
        await self.host.empty()

    def _ask_no_more(self) -> None:
        if self._asker is not None:
            self._asker.end()
        if self.round_asker is not None:
            self.round_asker.end()

    def free(self) -> None:
        """The process goes on without this run: let what is large be freed now, as ``Run.free``
        does."""
        self.run.free()
        self._served.contents.clear()
        self._served.elsewhere.close()
        # the one before may keep an error, whose frames have vectors
        self.done = self.loop.create_future()
        self.done.set_result("freed")

    def _finished(self) -> ComeBack:
        return ComeBack(round(self._returns.book(self.loop.time()), 3), "finished")

    def _stopping(self) -> ComeBack:
        return ComeBack(spread(10.0), "stopping")

    def _say_to_all(self, answer: Callable[[], ComeBack]) -> None:
        for device in self.host.devices_of(self._served):
            self.host.tell(device, answer())

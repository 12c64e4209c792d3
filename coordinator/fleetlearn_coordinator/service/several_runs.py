"""A coordinator's process with any number of runs, which come and go while devices stay
connected."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from functools import partial
from typing import Any

from fleetlearn_protocol import Bundle, open_bundle
from fleetlearn_protocol.errors import Code, FleetError, in_words
from fleetlearn_protocol.messages import CheckIn, ComeBack
from fleetlearn_protocol.systemd import READY, notify_systemd

from fleetlearn_coordinator.gateways.engine_host import EngineHost
from fleetlearn_coordinator.gateways.parent import parent_ended
from fleetlearn_coordinator.gateways.replacing import asked_to_replace
from fleetlearn_coordinator.network import peer_log, process_settings
from fleetlearn_coordinator.network.content_port import content_descriptors
from fleetlearn_coordinator.network.gate import Gate
from fleetlearn_coordinator.network.host import Host, spread
from fleetlearn_coordinator.plan.plan import Plan, PlanError
from fleetlearn_coordinator.plan.scaled_plan import scale_plan
from fleetlearn_coordinator.plan.service_settings import ServiceSettings
from fleetlearn_coordinator.rounds.commands import Command
from fleetlearn_coordinator.service.admin_api import administrators_port
from fleetlearn_coordinator.service.canary.about import about_of
from fleetlearn_coordinator.service.canary.first_model import begin_model, take_newest
from fleetlearn_coordinator.service.canary.watch import CanaryWatch
from fleetlearn_coordinator.service.helper_check import look_at_helper
from fleetlearn_coordinator.service.hosted_run import HostedRun, open_run
from fleetlearn_coordinator.service.json_log import said
from fleetlearn_coordinator.service.live_page import LivePage
from fleetlearn_coordinator.service.monitoring.monitor import Monitor
from fleetlearn_coordinator.service.monitoring.port import monitoring
from fleetlearn_coordinator.service.page import page_descriptors, page_port
from fleetlearn_coordinator.service.run_clock import Clocks
from fleetlearn_coordinator.service.run_log import RunLog
from fleetlearn_coordinator.service.serve import (
    REPLACED,
    SWEEP,
    caches_port,
    check_places,
    end_by,
    leave,
    process_for_serving,
    wait_for_lock,
)
from fleetlearn_coordinator.service.server import RunServer
from fleetlearn_coordinator.service.several.operations import Operations, log_operations
from fleetlearn_coordinator.service.several.shared_server import SharedRunServer
from fleetlearn_coordinator.service.training_run.run import Run
from fleetlearn_coordinator.storage.errors import (
    StoreAwayError,
    StoreError,
    StoreUnavailableError,
)
from fleetlearn_coordinator.storage.identities import Identities, open_identities
from fleetlearn_coordinator.storage.ledger import ModelMade
from fleetlearn_coordinator.storage.requests import RollBack
from fleetlearn_coordinator.storage.runs import Runs, State, WantedRun
from fleetlearn_coordinator.storage.store import Store, most_spool_files

logger = logging.getLogger("fleetlearn.coordinator")

RUNS_TO_COME = 8
"""Runs that may be added to those that are there at the start: file descriptors are set aside for
them."""

AGAIN = 10.0
"""Seconds until a run whose store was away is tried again."""


def serve_runs(service: ServiceSettings, *, engine: bool = False) -> str:
    """Serve the runs of a service, ``service.runs``, until SIGTERM, SIGINT or SIGHUP ends it.
    Blocks. Returns why it ended. ``engine``: as the engine process of ``service.gateways``
    gateways, which a supervisor has started: it ends in an orderly way when the supervisor does.

    Raises StoreError (another coordinator serves these runs), OSError (the address cannot be
    listened on).
    """
    return asyncio.run(_serve(service, engine))


async def _serve(service: ServiceSettings, engine: bool) -> str:
    with process_for_serving() as stopped, ExitStack() as stack:
        if engine:
            stack.enter_context(parent_ended(partial(end_by, stopped)))
            stack.enter_context(asked_to_replace(partial(leave, stopped)))
            await _wait_for_lock(service, stopped)
        async with hosting(service, stopped.done) as runs:
            process_settings.collect_garbage_rarely()
            await runs.wait(stopped)
            if not stopped.done() or stopped.result() != REPLACED:
                await runs.send_all_away()
        logger.info("%s", stopped.result(), extra=said("ended", reason=stopped.result()))
        return stopped.result()


async def _wait_for_lock(service: ServiceSettings, stopped: asyncio.Future[str]) -> None:
    """Wait until an engine process whose supervisor was killed has ended, LOCK_PATIENCE seconds at
    most."""
    assert service.runs is not None
    with closing(Runs(service.runs)) as wanted:
        await wait_for_lock(wanted.is_locked, stopped)


@asynccontextmanager
async def hosting(
    service: ServiceSettings, stopping: Callable[[], bool] = lambda: False
) -> AsyncIterator[HostedRuns]:
    """Serve the runs of a service, with their data directories open and the host listening, until
    the block is left. ``stopping``: returns whether the process was told to stop."""
    assert service.runs is not None
    with closing(Runs(service.runs)) as wanted, wanted.lock():
        identities = None if service.identities is None else open_identities(service.identities)
        try:
            host, places = _make_host(service, len(wanted.runs()), identities, stopping)
            runs = HostedRuns(service, host, places, wanted, identities)
            async with (
                host,
                administrators_port(service, host) as runs.live,
                monitoring(service, host, stopping, service.runs) as runs.monitor,
            ):
                if places is None:  # devices may be here at once: each must find its run
                    await runs.look()
                await host.listen()
                runs.listen_at(host.address)
                notify_systemd(READY)
                logger.info(
                    "listening on %s, runs in %s",
                    host.address,
                    service.runs,
                    extra=said("listening", address=host.address),
                )
                try:
                    runs.begin()
                    async with page_port(service, host), caches_port(service, host):
                        yield runs
                finally:
                    await runs.end()
        finally:
            if identities is not None:
                identities.close()


def _make_host(
    service: ServiceSettings,
    runs: int,
    identities: Identities | None,
    stopping: Callable[[], bool],
) -> tuple[Host | EngineHost, process_settings.DescriptorShares | None]:
    """Return the host of this many runs, and how many connections it has descriptors for; None:
    gateways have the connections."""
    if service.gateways:
        assert service.runs is not None
        host = EngineHost(service, service.gateways, service.runs, stopping, several=True)
        return host, None
    files = most_spool_files(service.uploads) * (runs + RUNS_TO_COME)
    files += page_descriptors(service) + content_descriptors(service)
    places = process_settings.places(service.max_connections, files=files)
    gate = None if identities is None else Gate(identities)
    return Host(service, places, gate, several=True), places


class HostedRuns:
    """The runs of a host. Each second it looks at what is wanted of them, and makes it so."""

    def __init__(
        self,
        service: ServiceSettings,
        host: Host | EngineHost,
        places: process_settings.DescriptorShares | None,
        wanted: Runs,
        identities: Identities | None,
    ) -> None:
        self.host, self._service, self._places = host, service, places
        self._wanted, self._identities = wanted, identities
        self._open: dict[int, HostedRun] = {}
        """Number of a run that is served -> the run."""
        self._names: dict[int, str] = {}
        self._over: dict[int, int] = {}
        """Number of a run that has ended here -> ``WantedRun.asked`` of that time. It is begun
        again when it is asked for once more."""
        self._again: dict[int, float] = {}
        """Number of a run whose store was away -> when it is tried again, by the loop's clock."""
        self.live: LivePage | None = None
        """What shows the runs to administrators."""
        self._closing: dict[int, asyncio.Task[None]] = {}
        """Number of a run that is not served any more -> what closes it."""
        operations = Operations(service, wanted, identities, "coordinator")
        self._canaries = CanaryWatch(wanted, operations, self._check_ins)
        self._served_as: dict[int, tuple[str, float]] = {}
        """Number of a run that is served -> its name, and for which share of the devices its plan
        was made."""
        self._sweeper: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self.monitor: Monitor | None = None
        """Watches the runs, if somebody wants to know."""
        self._starting = True
        """The runs that are there at the start have not all begun."""

    # The process

    def begin(self) -> None:
        """Serve the runs from now on."""
        self._log_operations()
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep())

    async def _sweep(self) -> None:
        while not self._stopping.is_set():
            try:
                self.host.sweep(SWEEP)
                peer_log.flush()
                await self.look()
            except Exception as error:
                self.host.fail(error)
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(SWEEP):
                    await self._stopping.wait()

    async def _stop_sweeping(self) -> None:
        self._stopping.set()
        if self._sweeper is not None:  # it may be closing a run
            await asyncio.wait({self._sweeper})

    async def wait(self, stopped: asyncio.Future[str]) -> None:
        """Wait until the process is stopped. Raises what is wrong with the host itself, if
        something is."""
        ends: set[asyncio.Future[Any]] = {stopped, self.host.failure}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not stopped.done():
            self.host.failure.result()

    async def send_all_away(self) -> None:
        """Tell every device to come back later, and wait STOP_TIMEOUT seconds at most for them to
        leave."""
        await self._stop_sweeping()
        for run in self._open.values():
            if not run.server.done.done():  # from now on, leases stay as they are on disk
                run.server.done.set_result("stopped")
        for device in list(self.host.devices):
            self.host.tell(device, ComeBack(spread(10.0), "stopping"))
        await self.host.empty()

    async def end(self) -> None:
        """Close all runs, and leave what devices have as it is."""
        await self._stop_sweeping()
        self.host.end()
        for number in list(self._open):
            await self._close(number, "stopped")
        if self._closing:
            await asyncio.wait([*self._closing.values()])

    # The runs

    def servers(self) -> Iterable[tuple[str, RunServer]]:
        """Return the runs that are served, by name."""
        return [(self._names[number], run.server) for number, run in self._open.items()]

    def listen_at(self, address: str) -> None:
        """Devices connect to this URL."""
        for run in self._open.values():
            run.listens_at(address)

    async def look(self) -> None:
        """Look at what is wanted of the runs, and at how they are, and do what follows."""
        try:
            wanted, changed = self._wanted.runs(), self._wanted.changed()
        except StoreUnavailableError as error:
            logger.error("what is wanted of the runs cannot be read: %s", error.text)
            return
        if changed:
            self._log_operations()
        closed = [number for number, task in self._closing.items() if task.done()]
        for number in closed:
            self._closing.pop(number).result()
        if self._look_at_canaries(wanted):
            wanted = self._wanted.runs()
        if self.live is not None:
            self.live.are_wanted(wanted, self._canaries.views)
        for number in self._open.keys() - {run.number for run in wanted}:
            await self._close(number, "removed")
        for run in wanted:
            if run.number in self._open and self._served_as[run.number] != _served_as(run):
                is_other = self._names[run.number] != run.name
                await self._close(run.number, "renamed" if is_other else "for more devices now")
        # What is to be stopped goes first: its devices must not get one more task of it.
        for run in sorted(wanted, key=lambda run: run.wanted != "stopped"):
            if run.number in self._open:
                await self._look_at(run, self._open[run.number])
            elif (
                run.wanted != "stopped"
                and run.number not in self._closing
                and not run.failed
                and self._over.get(run.number) != run.asked
                and asyncio.get_running_loop().time() >= self._again.get(run.number, 0.0)
            ):
                await self._begin(run)
        self._starting = False
        if self.monitor is not None:
            self.monitor.loaded = True
            self.monitor.canaries = self._canaries.views
            self.monitor.look({run.name: bool(run.failed) for run in wanted})

    def _look_at_canaries(self, wanted: Sequence[WantedRun]) -> bool:
        """Let canaries go on or back. Returns whether one does."""
        served = {number: run.server for number, run in self._open.items()}
        now = asyncio.get_running_loop().time()
        over = {
            run.number
            for run in wanted
            if self._over.get(run.number) == run.asked and not run.failed
        }
        try:
            return self._canaries.look(wanted, served, now, over)
        except StoreUnavailableError as error:
            logger.error("the canaries stay as they are for now: %s", error.text)
            return False

    def _check_ins(self) -> Iterable[CheckIn]:
        """Return what the connected devices say of themselves."""
        assert self.host.turns is not None
        return [device.check_in for device in self.host.turns.devices.values()]

    async def _begin(self, wanted: WantedRun) -> None:
        """Open a run and serve it, in the state that is wanted. If that cannot be, it has
        failed."""
        number = wanted.number
        try:
            plan = Plan.load(wanted.plan)
            if wanted.split is not None and wanted.split.is_canary:
                plan = scale_plan(plan, wanted.split.share)
            prepare = self._prepare_canary(wanted, plan)
            plan.check_served(self._service)
            if self._places is not None:
                check_places(plan, self._service, self._places)
            if plan.secure is not None:
                manifest = open_bundle(plan.bundle).manifest
                await look_at_helper(plan, manifest, RunLog(wanted.name))
            begin = partial(
                self._open_and_resume,
                wanted.name,
                plan,
                wanted.wanted,
                asyncio.get_running_loop().time,
                prepare,
            )
            # At the start devices wait: each must find the run whose task it has from an earlier
            # process.
            found, pending = begin() if self._starting else await asyncio.to_thread(begin)
            run = HostedRun(
                found,
                self.host,
                name=wanted.name,
                population=wanted.population,
                split=wanted.split,
            )
        except Exception as error:
            self._fail(wanted, error)
            return
        self._open[number], self._names[number] = run, wanted.name
        self._served_as[number] = _served_as(wanted)
        self._canaries.add(number, run.server)
        try:
            run.server.run.roll_backs.audit = partial(self._log_roll_back, wanted.name)
            run.server.run.budget.audit = partial(self._log_privacy, wanted.name)
            if self.live is not None:
                self.live.add_run(wanted.name, run.server)
            if self.monitor is not None:
                self.monitor.add(wanted.name, run.server)
            run.begin(pending)
            run.listens_at(self.host.address)
        except Exception as error:
            run.server.fail(error)
        else:
            where = run.server.run.where
            logger.info(
                "run %s is served (%s), data in %s: it %s",
                wanted.name,
                wanted.wanted,
                plan.data_dir,
                where,
                extra=said("run-served", run=wanted.name, wanted=wanted.wanted),
            )
            self._log("started", wanted.name)
        await self._look_at(wanted, run)

    def _prepare_canary(
        self, wanted: WantedRun, plan: Plan
    ) -> Callable[[Bundle, Store], None] | None:
        """Return what writes the model of a canary's run before it is opened. None: it is no
        canary."""
        rows = {row.run: row for row in self._wanted.canaries.rows()}
        if wanted.split is None or wanted.number not in rows:
            return None
        row = rows[wanted.number]
        first = about_of(row).first
        old = next(run for run in self._wanted.runs() if run.number == row.of)

        def prepare(bundle: Bundle, store: Store) -> None:
            before = Plan.load(old.plan)
            begin_model(store, bundle, plan, before, first, time.time())
            if row.share >= 1 and first.take_over == "newest":
                take_newest(store, bundle, plan, before, time.time())

        return prepare

    def _open_and_resume(
        self,
        name: str,
        plan: Plan,
        state: State,
        clock: Callable[[], float],
        prepare: Callable[[Bundle, Store], None] | None,
    ) -> tuple[Run, list[Command]]:
        """Open a run's data directory and take up what an earlier process left there, in this
        state. After the start it is called in another thread, while devices serve the other runs: a
        model of 400 MB takes seconds. ``clock``: the event loop's. Returns what ``Run.resume`` does
        beside the run."""
        now = Clocks(clock(), time.time())
        run = open_run(plan, self._service, now, name=name, any_thread=True, prepare=prepare)
        try:
            _refuse_twins(run, [each.server.run for each in self._open.values()])
            run.engine.paused, run.engine.draining = state == "paused", state == "draining"
            return run, run.resume(Clocks(clock(), time.time()))
        except BaseException:
            run.store.close()
            raise

    async def _look_at(self, wanted: WantedRun, run: HostedRun) -> None:
        server = run.server
        assert isinstance(server, SharedRunServer)
        if not server.done.done() and wanted.wanted != "stopped":
            try:
                server.split_devices(wanted.split)
                _bring_into_state(wanted, server)
                run.look()
            except Exception as error:
                server.fail(error)
        if server.done.done():
            failure = server.done.exception()
            if failure is not None:
                self._fail(wanted, failure)
                await self._close(wanted.number, "failed")
            # The last models are measured first, unless that has failed.
            elif wanted.wanted == "stopped" or not run.measures or server.ended:
                self._over[wanted.number] = wanted.asked
                await self._close(wanted.number, "finished")
        elif wanted.wanted == "stopped":
            await self._close(wanted.number, "stopped")
        elif wanted.wanted == "draining" and server.is_drained:
            self._write(lambda: self._wanted.drained(wanted))
            self._over[wanted.number] = wanted.asked
            await self._close(wanted.number, "drained")

    def _fail(self, wanted: WantedRun, error: BaseException) -> None:
        """The run is stopped by an error: say so. The others go on. Where its store is away, it is
        tried again."""
        expected = isinstance(error, FleetError | OSError)
        why = in_words(error, file=True)
        if isinstance(error, StoreAwayError):
            self._again[wanted.number] = asyncio.get_running_loop().time() + AGAIN
            logger.warning(
                "run %s waits for its store: %s",
                wanted.name,
                why,
                extra=said("run-waits-for-store", run=wanted.name, why=why),
            )
            return
        logger.error(
            "run %s is stopped: %s",
            wanted.name,
            why,
            exc_info=None if expected else error,
            extra=said("run-failed", run=wanted.name, why=why),
        )
        self._over[wanted.number] = wanted.asked
        self._write(lambda: self._wanted.failed(wanted, why))
        self._log("failed", wanted.name, why=why)

    async def _close(self, number: int, what: str) -> None:
        """Serve a run no more. What its devices were given stays in its store as it is. A store
        that is slow is closed beside the other runs: they go on."""
        run, name = self._open.pop(number), self._names.pop(number)
        if self.live is not None:
            self.live.end_run(name)
        if self.monitor is not None:
            self.monitor.remove(name)
        run.server.end(f"the run {name} is {what}")
        if not run.server.done.done():
            run.server.done.set_result(what)
        ending = self._end_run(run, name, what)
        if run.is_slow:
            self._closing[number] = asyncio.get_running_loop().create_task(ending)
        else:
            await ending

    async def _end_run(self, run: HostedRun, name: str, what: str) -> None:
        try:
            await run.end()
        except Exception as error:  # its disk is full, for example
            logger.error(
                "run %s: its last state cannot be recorded: %s", name, in_words(error, file=True)
            )
        run.close()
        run.server.free()
        if what != "failed":
            logger.info(
                "run %s is %s; its newest model is version %d",
                name,
                what,
                run.server.engine.version,
                extra=said("run-ended", run=name, why=what, version=run.server.engine.version),
            )
            self._log("stopped", name, why=what)

    def _write(self, write: Callable[[], None]) -> None:
        try:
            write()
        except StoreUnavailableError as error:
            logger.error("what became of a run cannot be recorded: %s", error.text)

    def _log_operations(self) -> None:
        """Let the audit log have what somebody asked for whose process was killed before it wrote
        there."""
        if self._identities is not None:
            identities = self._identities
            self._write(lambda: log_operations(self._wanted, identities))

    def _log_privacy(self, name: str, at: float, about: Mapping[str, Any]) -> None:
        if self._identities is not None:
            self._identities.log_once(at, "privacy changed", {"run": name, **about})

    def _log_roll_back(self, name: str, request: RollBack, made: ModelMade) -> None:
        if self._identities is not None:
            about = {
                "run": name,
                "version": request.version,
                "as": made.version,
                "who": request.who,
            }
            self._identities.log_once(made.at, "rolled back", about)

    def _log(self, what: str, name: str, **more: str | int) -> None:
        """Add a row to the audit log, if there is one."""
        if self._identities is not None:
            identities = self._identities
            self._write(lambda: identities.log(time.time(), what, {"run": name, **more}))


def _served_as(run: WantedRun) -> tuple[str, float]:
    """Return what a run is opened again for when it changes: its name, and for which share of the
    devices its plan is made."""
    scaled = run.split is not None and run.split.is_canary
    return run.name, run.split.share if scaled and run.split is not None else 1.0


def _bring_into_state(wanted: WantedRun, server: SharedRunServer) -> None:
    """Bring a run that is served into the state that is wanted. Harmless where it is in it."""
    match wanted.wanted:
        case "running":
            server.go_on()
        case "paused":
            server.pause()
        case "draining":
            server.go_on(draining=True)


def _refuse_twins(run: Run, others: Iterable[Run]) -> None:
    """Raise StoreError if tasks of two runs could be taken for each other, or PlanError if what
    devices keep could."""
    for other in others:
        if other.store.run == run.store.run:
            text = (
                f"{run.plan.data_dir} is a copy of {other.plan.data_dir}, whose run is served too; "
                "give each its own"
            )
            raise StoreError(Code.DUPLICATE, text)
        if run.plan.tied and other.plan.tied and run.bundle.sha256 == other.bundle.sha256:
            text = (
                f"{run.plan.file}: devices keep vectors of this bundle for {other.plan.file}, "
                "which is served too (one run of a bundle may have error feedback or SCAFFOLD). "
                "Export the model again, under another name"
            )
            raise PlanError(Code.BUSY, text)

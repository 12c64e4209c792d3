"""A coordinator as a process: its data directory, its listener, its signals, its end."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fleetlearn_protocol import extensions, open_bundle
from fleetlearn_protocol.command_line import refuse_in_loop, stop_signals
from fleetlearn_protocol.errors import Code, FleetError
from fleetlearn_protocol.extensions import ExtensionError
from fleetlearn_protocol.systemd import ALIVE, READY, STOPPING, notify_systemd

from fleetlearn_coordinator.gateways.engine_host import EngineHost
from fleetlearn_coordinator.gateways.parent import parent_ended
from fleetlearn_coordinator.gateways.replacing import asked_to_replace
from fleetlearn_coordinator.network import peer_log, process_settings
from fleetlearn_coordinator.network.content_port import content_descriptors, content_port
from fleetlearn_coordinator.network.gate import Gate
from fleetlearn_coordinator.network.host import Host
from fleetlearn_coordinator.network.run_host import RunHost
from fleetlearn_coordinator.plan.plan import Plan, PlanError
from fleetlearn_coordinator.plan.service_settings import ServiceError, ServiceSettings
from fleetlearn_coordinator.service.admin_api import administrators_port
from fleetlearn_coordinator.service.helper_check import look_at_helper
from fleetlearn_coordinator.service.hosted_run import HostedRun, open_run
from fleetlearn_coordinator.service.json_log import said
from fleetlearn_coordinator.service.monitoring.monitor import Monitor
from fleetlearn_coordinator.service.monitoring.port import monitoring
from fleetlearn_coordinator.service.page import page_descriptors, page_port
from fleetlearn_coordinator.service.run_clock import Clocks
from fleetlearn_coordinator.service.run_log import RunLog
from fleetlearn_coordinator.service.server import RunServer
from fleetlearn_coordinator.service.standby import serve_when_free
from fleetlearn_coordinator.storage.find_storage import begin_elsewhere, find_storage
from fleetlearn_coordinator.storage.identities import Identities, open_identities
from fleetlearn_coordinator.storage.ledger import ModelMade
from fleetlearn_coordinator.storage.requests import RollBack
from fleetlearn_coordinator.storage.store import most_spool_files
from fleetlearn_coordinator.storage.stored_elsewhere import StoredElsewhere

logger = logging.getLogger("fleetlearn.coordinator")

SWEEP = 1.0
"""Seconds between looks at all connections, and between the records that ``status`` reads."""
LOCK_PATIENCE = 15.0
"""Seconds that an engine process waits for an earlier one of the run to end."""
REPLACED = "ended for the next engine process"
"""Why an engine process ended, where the supervisor starts another in its place."""


class RunResult(NamedTuple):
    """How a run ended, for now or for good."""

    reason: str
    finished: bool
    """False: it was stopped and can be started again."""
    version: int
    """Version of the newest model; 0 where it stood by until its end."""
    met_by: int | None = None
    """The version of the model whose metric met the target, or is the best with patience, where
    that ended the run."""


def serve(
    plan: Plan,
    *,
    service: ServiceSettings | None = None,
    stay: bool = False,
    standby: bool = False,
    plugins: Sequence[str] = (),
) -> RunResult:
    """Run the plan's training until it is finished, or SIGTERM, SIGINT or SIGHUP ends it. Blocks.
    With a bus, SIGUSR1 ends it for the reason REPLACED: gateways are told nothing, and hold the
    devices' connections until the next coordinator serves the run.

    ``service``: the settings of the process; the defaults where there are none. ``stay``: once
    finished, go on telling devices so until a signal comes. ``standby``: wait while another
    coordinator serves the run or the store is away, rather than to raise. ``plugins``: modules
    that may bring own algorithms, beside those of the service's [plugins].

    Raises ServiceError (the service names a folder of runs), PlanError (also where the plan does
    not fit the service, or the process may not open enough files for a round's devices),
    BundleError, StoreError (the data directory is in use or another bundle's), OSError (the address
    cannot be listened on), RuntimeError (an event loop runs in this thread: await ``serve_async``).
    """
    refuse_in_loop("serve", "serve_async(...)")
    return asyncio.run(
        serve_async(plan, service=service, stay=stay, standby=standby, plugins=plugins)
    )


def serve_engine(
    plan: Plan,
    *,
    service: ServiceSettings,
    stay: bool = False,
    standby: bool = False,
    socket: Path | None = None,
) -> RunResult:
    """Do what ``serve`` does, as the engine process of ``service.gateways`` gateways, which a
    supervisor has started: it ends in an orderly way when the supervisor does. SIGUSR1 ends it for
    the reason REPLACED: devices are told nothing, since gateways hold their connections until the
    next engine process is there. ``standby``: as for ``serve``. ``socket``: where gateways come in,
    if not in the data directory."""

    async def within() -> RunResult:
        with (
            process_for_serving() as stopped,
            parent_ended(partial(end_by, stopped)),
            asked_to_replace(partial(leave, stopped)),
        ):
            once = partial(_serve, plan, service, stopped, stay=stay, socket=socket)
            if standby:
                return await _stand_by(plan, service, once, stopped)
            await wait_for_lock(lambda: find_storage(plan.data_dir).is_locked(), stopped)
            return await once()

    return asyncio.run(within())


async def wait_for_lock(is_locked: Callable[[], bool], stopped: asyncio.Future[str]) -> None:
    """Wait LOCK_PATIENCE seconds at most until no other process has the run, or the runs: an engine
    process whose supervisor was killed ends soon. ``is_locked`` is called in a thread."""
    until = time.monotonic() + LOCK_PATIENCE
    with suppress(FleetError, OSError):  # who opens the run says it better
        while not stopped.done() and time.monotonic() < until:
            if not await asyncio.to_thread(is_locked):
                return
            await asyncio.wait({stopped}, timeout=0.1)


def leave(stopped: asyncio.Future[str]) -> None:
    """Set ``stopped``, unless it is, with REPLACED."""
    if not stopped.done():
        logger.info("SIGUSR1: ending, for the next engine process; devices stay connected")
        stopped.set_result(REPLACED)


def end_by(stopped: asyncio.Future[str], why: str) -> None:
    """Set ``stopped``, unless it is, with this reason for people."""
    if not stopped.done():
        logger.info("%s: telling the devices to come back later, then stopping", why)
        stopped.set_result(f"stopped: {why}")


async def serve_async(
    plan: Plan,
    *,
    service: ServiceSettings | None = None,
    stay: bool = False,
    standby: bool = False,
    plugins: Sequence[str] = (),
) -> RunResult:
    """Do what ``serve`` does, in a running event loop. The process's signal handlers are as before
    when it returns."""
    settings = service or ServiceSettings()
    try:
        extensions.allow(plugins)
    except ExtensionError as error:
        raise ServiceError(Code.BAD_MESSAGE, f"plugins: {error}") from None
    if settings.gateways:
        raise ServiceError(
            Code.BAD_MESSAGE,
            f"gateways = {settings.gateways} starts processes: serve the plan by the command "
            "`fleetlearn-coordinator serve`, or leave gateways out",
        )
    # With a bus gateways hold the devices' connections, as those of a supervisor do.
    may_leave = nullcontext if settings.bus is None else asked_to_replace
    with process_for_serving() as stopped, may_leave(partial(leave, stopped)):
        if not standby:
            return await _serve(plan, settings, stopped, stay=stay)
        once = partial(_serve, plan, settings, stopped, stay=stay)
        return await _stand_by(plan, settings, once, stopped)


async def _stand_by(
    plan: Plan,
    service: ServiceSettings,
    serve: Callable[[], Awaitable[RunResult]],
    stopped: asyncio.Future[str],
) -> RunResult:
    """Serve the plan once nobody else does, and again after each loss of the store."""
    check_alone(plan, service)

    def is_locked() -> bool:
        wanted = StoredElsewhere(plan.name, service.ledger, service.blobs)
        begin_elsewhere(plan.data_dir, wanted)
        return find_storage(plan.data_dir).is_locked()

    served = await serve_when_free(is_locked, serve, stopped)
    return served or RunResult(stopped.result(), finished=False, version=0)


async def _serve(
    plan: Plan,
    service: ServiceSettings,
    stopped: asyncio.Future[str],
    *,
    stay: bool,
    socket: Path | None = None,
) -> RunResult:
    async with running(plan, service, stopped.done, socket) as server:
        process_settings.collect_garbage_rarely()
        await asyncio.wait({server.done, stopped}, return_when=asyncio.FIRST_COMPLETED)
        # the last models are still to be measured
        if server.done.done() and server.run.work.held_out is not None:
            while server.run.work.held_out.waiting() and not stopped.done() and not server.ended:
                await asyncio.wait({stopped}, timeout=SWEEP)
        if stay and server.done.done() and server.done.exception() is None:
            logger.info("finished; staying until a signal comes")
            while not stopped.done() and not server.ended:
                await asyncio.wait({stopped}, timeout=SWEEP)
        reason = stopped.result() if stopped.done() else ""
        await server.stop(reason, tell=reason != REPLACED)
        if reason != REPLACED or (server.run.finished is not None and not stay):
            reason = server.done.result()
    run = server.run
    known = said("ended", reason=reason, version=run.engine.version)
    newest = f"the newest model is version {run.engine.version}"
    if run.plan.algorithm.computes:
        newest = "`fleetlearn-coordinator result` shows what came out"
    logger.info("%s; %s", reason, newest, extra=known)
    if run.met_by is not None:
        words = "which is the best" if run.best_ends else "which met the target"
        logger.info("export-model writes version %d, %s", run.met_by, words)
    return RunResult(reason, run.finished is not None, run.engine.version, run.met_by)


@asynccontextmanager
async def running(
    plan: Plan,
    service: ServiceSettings,
    stopping: Callable[[], bool] = lambda: False,
    socket: Path | None = None,
) -> AsyncIterator[RunServer]:
    """Serve a plan, with its data directory open and its host listening, until the block is left.
    ``stopping``: returns whether the process was told to stop. ``socket``: where gateways of this
    machine come in, if not in the data directory."""
    check_alone(plan, service)
    bundle = open_bundle(plan.bundle)
    await look_at_helper(plan, bundle.manifest, RunLog())
    identities = None if service.identities is None else open_identities(service.identities)
    try:
        host = _make_host(plan, service, identities, stopping, socket)
        now = Clocks(asyncio.get_running_loop().time(), time.time())
        run = HostedRun(open_run(plan, service, now, bundle=bundle), host)
        try:
            if identities is not None:
                run.server.run.roll_backs.audit = partial(_log_roll_back, identities, plan.name)
                run.server.run.budget.audit = partial(_log_privacy, identities, plan.name)
            async with (
                host,
                administrators_port(service, host, plan) as live,
                monitoring(service, host, stopping, plan.data_dir) as monitor,
            ):
                if live is not None:
                    live.add_run(plan.name, run.server)
                if monitor is not None:
                    monitor.add(plan.name, run.server)
                    monitor.loaded = True
                run.begin(run.server.run.resume(run.server.now()))
                await host.listen()
                run.listens_at(host.address)
                notify_systemd(READY)
                _log(identities, "started", plan, run)
                if host.address:  # empty: it was told to stop before a gateway was there
                    logger.info(
                        "listening on %s, data in %s: the run %s",
                        host.address,
                        plan.data_dir,
                        run.server.run.where,
                        extra=said("listening", address=host.address, plan=plan.name),
                    )
                sweeper = asyncio.get_running_loop().create_task(_sweep(host, run, monitor))
                try:
                    async with page_port(service, host, plan), caches_port(service, host):
                        yield run.server
                finally:
                    sweeper.cancel()
                    await run.end()
            _log(identities, "stopped", plan, run)
        finally:
            run.close()
    finally:
        if identities is not None:
            identities.close()


def caches_port(
    service: ServiceSettings, host: Host | EngineHost
) -> AbstractAsyncContextManager[object]:
    """Listen on the caches' port, if the service file has one and no gateway listens there, until
    the block is left."""
    return content_port(service, host.find_content) if isinstance(host, Host) else nullcontext()


def _make_host(
    plan: Plan,
    service: ServiceSettings,
    identities: Identities | None,
    stopping: Callable[[], bool],
    socket: Path | None,
) -> Host | EngineHost:
    if service.gateways or service.bus:  # they have the connections, and look who may connect
        gate, data = None if identities is None else Gate(identities), plan.data_dir
        count, name = service.gateways, plan.name
        return EngineHost(service, count, data, stopping, name, gate=gate, socket=socket)
    files = most_spool_files(service.uploads, plan.updates_kept) + page_descriptors(service)
    files += content_descriptors(service)
    places = process_settings.places(service.max_connections, files=files)
    check_places(plan, service, places)
    return Host(service, places, None if identities is None else Gate(identities))


def _log(identities: Identities | None, what: str, plan: Plan, run: HostedRun) -> None:
    if identities is not None:
        identities.log(time.time(), what, {"plan": plan.name, "run": run.id})


def _log_roll_back(identities: Identities, plan: str, request: RollBack, made: ModelMade) -> None:
    about = {"plan": plan, "version": request.version, "as": made.version, "who": request.who}
    identities.log_once(made.at, "rolled back", about)


def _log_privacy(identities: Identities, plan: str, at: float, about: Mapping[str, Any]) -> None:
    identities.log_once(at, "privacy changed", {"plan": plan, **about})


def check_places(
    plan: Plan, service: ServiceSettings, places: process_settings.DescriptorShares
) -> None:
    """Raise PlanError if the process may open too few files for a round; warn if for fewer devices
    than asked for."""
    wanted = service.max_connections
    if places.devices >= wanted:
        return
    text = (
        f"this process may open {places.limit} files (RLIMIT_NOFILE), which is enough for "
        f"{max(0, places.devices)} devices at a time; max_connections = {wanted} of the service "
        f"needs {places.limit + wanted - places.devices}. Raise the limit (ulimit -n, or "
        "LimitNOFILE= of systemd), or lower max_connections"
    )
    if places.devices < plan.round.cohort:
        raise PlanError(
            Code.BUSY, f"{plan.file}: {text}. A round needs {plan.round.cohort} devices."
        )
    # who asked for no number of devices need not be alarmed by ours
    default = ServiceSettings().max_connections
    if wanted != default or places.devices < process_settings.ENOUGH:
        logger.warning("%s", text)


def check_alone(plan: Plan, service: ServiceSettings) -> None:
    """Raise ServiceError or PlanError if the plan is none that this service can serve."""
    if service.runs is not None:
        text = (
            f"a plan was given ({plan.file}), and runs = {service.runs} in the service file: one "
            "process serves either a plan or a folder of runs. Leave runs out, or serve the "
            "service file alone and add the plan to it with `fleetlearn-coordinator run add`"
        )
        raise ServiceError(Code.BAD_MESSAGE, text)
    plan.check_served(service)
    plan.check_privacy()  # before there is a data directory


@contextmanager
def process_for_serving() -> Iterator[asyncio.Future[str]]:
    """A context that sets what is the process's. Yields what is set, with the reason, when a signal
    stops it."""
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[str] = loop.create_future()
    process_settings.keep_freed_memory()
    process_settings.raise_file_limit()
    alive = loop.create_task(_tell_alive())
    try:
        with stop_signals(loop, partial(_stop, stopped)), asked_to_replace(_cannot_replace):
            yield stopped
    finally:
        alive.cancel()


def _cannot_replace() -> None:
    logger.warning(
        "SIGUSR1 replaces the processes of a service with gateways, one after the other; this is "
        "one process: restart it for a new release or other settings"
    )


async def _tell_alive() -> None:
    """Tell systemd once a second that the event loop turns."""
    while True:
        notify_systemd(ALIVE)
        await asyncio.sleep(SWEEP)


def _stop(stopped: asyncio.Future[str], number: signal.Signals) -> None:
    if not stopped.done():
        text = "%s: telling the devices to come back later, then stopping"
        logger.info(text, number.name, extra=said("stopping", signal=number.name))
        notify_systemd(STOPPING)
        stopped.set_result(f"stopped by {number.name}")


async def _sweep(host: RunHost, run: HostedRun, monitor: Monitor | None) -> None:
    while not run.server.ended:
        try:
            host.sweep(SWEEP)
            peer_log.flush()
            run.look()
            if monitor is not None:
                monitor.look()
        except Exception as error:
            run.server.fail(error)
            return
        await asyncio.sleep(SWEEP)

"""A coordinator as a process: its data directory, its listener, its signals, its end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import NamedTuple

import msgspec
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.errors import Code, FleetError

from fleetlearn_coordinator.network import peer_log, process_settings
from fleetlearn_coordinator.network.gate import Gate
from fleetlearn_coordinator.network.host import Host
from fleetlearn_coordinator.plan.plan import Plan, PlanError
from fleetlearn_coordinator.plan.service_settings import ServiceSettings
from fleetlearn_coordinator.service.held_out import HeldOut, check_installed
from fleetlearn_coordinator.service.run import Clocks, Run
from fleetlearn_coordinator.service.server import RunServer
from fleetlearn_coordinator.storage.identities import Identities, check_identities
from fleetlearn_coordinator.storage.ledger import Metadata, Row
from fleetlearn_coordinator.storage.store import Store, descriptors, open_store

logger = logging.getLogger("fleetlearn.coordinator")

ENOUGH_PLACES = 1000
"""Devices at a time that are enough for whoever left ``max_connections`` at its default."""
SWEEP = 1.0
"""Seconds between looks at all connections, and between the records that ``status`` reads."""


class Result(NamedTuple):
    """How a run ended, for now or for good."""

    reason: str
    finished: bool
    """False: it was stopped and can be started again."""
    version: int
    """Of the newest model: the number of committed rounds."""


def serve(plan: Plan, *, service: ServiceSettings | None = None, stay: bool = False) -> Result:
    """Run the plan's training until it is finished, or SIGTERM or SIGINT ends it. Blocks.

    ``service``: the settings of the process; the defaults where there are none. ``stay``: once finished, go on telling
    devices so until a signal comes.

    Raises PlanError (also where the plan does not fit the service, or the process may not open enough files for a
    round's devices), BundleError, StoreError (the data directory is in use or another bundle's), OSError (the address
    cannot be listened on).
    """
    return asyncio.run(serve_async(plan, service=service, stay=stay))


async def serve_async(plan: Plan, *, service: ServiceSettings | None = None, stay: bool = False) -> Result:
    """The same in a running event loop."""
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[str] = loop.create_future()
    for number in (signal.SIGTERM, signal.SIGINT):
        with suppress(NotImplementedError, RuntimeError):  # not in the main thread, or on Windows
            loop.add_signal_handler(number, _stop, stopped, f"stopped by {number.name}")
    process_settings.keep_freed_memory()
    process_settings.raise_file_limit()
    async with running(plan, service or ServiceSettings()) as server:
        process_settings.collect_garbage_rarely()
        await asyncio.wait({server.done, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if server.done.done() and server.run.held_out is not None:  # the last models are still to be measured
            while server.run.held_out.waiting() and not stopped.done() and not server.ended:
                await asyncio.wait({stopped}, timeout=SWEEP)
        if stay and server.done.done() and server.done.exception() is None:
            logger.info("finished; staying until a signal comes")
            while not stopped.done() and not server.ended:
                await asyncio.wait({stopped}, timeout=SWEEP)
        await server.stop(stopped.result() if stopped.done() else "")
        reason = server.done.result()
    run = server.run
    logger.info("%s; the newest model is version %d", reason, run.engine.version)
    return Result(reason, run.finished is not None, run.engine.version)


@asynccontextmanager
async def running(plan: Plan, service: ServiceSettings) -> AsyncIterator[RunServer]:
    """Serve a plan, with its data directory open and its host listening, until the block is left."""
    plan.check_service(service)
    bundle = open_bundle(plan.bundle)
    kept = plan.round.goal if plan.aggregator().keeps_updates else 0
    places = process_settings.places(service.max_connections, files=descriptors(service.uploads, kept))
    _check_places(plan, service, places)
    store = open_store(plan.data_dir, bundle.sha256, durable=plan.durable, uploads=service.uploads, kept=kept)
    identities: Identities | None = None
    try:
        now = Clocks(asyncio.get_running_loop().time(), time.time())
        if service.identities is not None:
            check_identities(service.identities)
            identities = Identities(service.identities)
        host = Host(service, places, None if identities is None else Gate(identities))
        server = RunServer(Run(plan, bundle, store, now, service.heartbeat), host)
        held_out = _held_out(server, store)
        server.start()
        async with host:
            await host.listen()
            store.write([Metadata("address", host.address)])
            if identities is not None:
                identities.log(time.time(), "started", {"plan": plan.name, "run": store.run})
            logger.info("listening on %s, data in %s", host.address, plan.data_dir)
            sweeper = server.loop.create_task(_sweep(server))
            measuring = None if held_out is None else server.loop.create_task(_measure(held_out, server))
            try:
                yield server
            finally:
                await server.wait_for_thread()
                sweeper.cancel()
                if held_out is not None and measuring is not None:
                    measuring.cancel()
                    await held_out.close()
                failed = server.done.done() and server.done.exception() is not None
                with suppress(FleetError) if failed else nullcontext():  # the first error says why: such as a full disk
                    _record(server, ended=True)
                server.end()  # an alarm may still be set, and devices still talk
            if identities is not None:
                identities.log(time.time(), "stopped", {"plan": plan.name, "run": store.run})
    finally:
        if identities is not None:
            identities.close()
        store.close()


def _held_out(server: RunServer, store: Store) -> HeldOut | None:
    """Return what measures the run's models on held-out data, if the plan names some. Raises PlanError."""
    run, rule = server.run, server.run.plan.evaluation
    if rule.data is None:
        return None
    if not rule.data.is_file():
        raise PlanError(Code.UNKNOWN_CONTENT, f"{run.plan.file}: evaluation.data = {rule.data} is not a file")
    check_installed()

    def is_due(version: int) -> bool:
        newest = run.engine.version  # the file of a newer one may be there, which does not count yet
        last = run.finished is not None and version == newest
        return 0 < version <= newest and (version % rule.data_every == 0 or last)

    run.held_out = HeldOut(run.bundle, run.plan.data_dir, rule.data, store.blobs, run.digest_of, is_due)
    run.held_out.measured = server.held_out_measured
    return run.held_out


async def _measure(held_out: HeldOut, server: RunServer) -> None:
    try:
        await held_out.run()
    except Exception as error:
        server.fail(error)


def _check_places(plan: Plan, service: ServiceSettings, places: process_settings.Places) -> None:
    """Raise PlanError if the process may open too few files for a round; warn if for fewer devices than asked for."""
    wanted = service.max_connections
    if places.devices >= wanted:
        return
    text = (
        f"this process may open {places.limit} files (RLIMIT_NOFILE), which is enough for {max(0, places.devices)} "
        f"devices at a time; max_connections = {wanted} of the service needs {places.limit + wanted - places.devices}. "
        "Raise the limit (ulimit -n, or LimitNOFILE= of systemd), or lower max_connections"
    )
    if places.devices < plan.round.cohort:
        raise PlanError(Code.BUSY, f"{plan.file}: {text}. A round needs {plan.round.cohort} devices.")
    default = ServiceSettings().max_connections  # who asked for no number of devices need not be alarmed by ours
    if wanted != default or places.devices < ENOUGH_PLACES:
        logger.warning("%s", text)


def _stop(stopped: asyncio.Future[str], reason: str) -> None:
    if not stopped.done():
        stopped.set_result(reason)


async def _sweep(server: RunServer) -> None:
    while not server.ended:
        try:
            server.host.sweep()
            server.look_for_request()
            peer_log.flush()
            _record(server)
        except Exception as error:
            server.fail(error)
            return
        await asyncio.sleep(SWEEP)


def _record(server: RunServer, *, ended: bool = False) -> None:
    live = {**server.live(), "pid": None if ended else os.getpid()}
    rows: list[Row] = [Metadata("live", msgspec.json.encode(live).decode())]
    server.run.store.write(rows + server.run.pace_rows(server.now()))

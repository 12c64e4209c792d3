"""What watches a coordinator's process and its runs, for metrics and health."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from fleetlearn_protocol.errors import in_words

from fleetlearn_coordinator.aggregation.round_summary import has_noise
from fleetlearn_coordinator.network.host import SOFTWARE
from fleetlearn_coordinator.network.run_host import RunHost
from fleetlearn_coordinator.service.monitoring.alerts import Alerts
from fleetlearn_coordinator.service.monitoring.canary_metrics import canary_samples
from fleetlearn_coordinator.service.monitoring.catalogue import (
    SPECS,
    Buckets,
    HistogramValue,
    Sample,
    Samples,
    add_to,
)
from fleetlearn_coordinator.service.monitoring.gauges import host_gauges, run_gauges, waits
from fleetlearn_coordinator.service.monitoring.run_metrics import LOSSES, RunMetrics
from fleetlearn_coordinator.service.observers import Observer
from fleetlearn_coordinator.service.server import RunServer
from fleetlearn_coordinator.service.views.records import CanaryView

T = TypeVar("T")

logger = logging.getLogger("fleetlearn.coordinator")

EVALUATION_PAUSE = 10.0
"""Seconds between two looks whether an alert begins or is over."""
END_TIMEOUT = 5.0
"""Seconds for which the end of the process waits for the last look."""
NO_ROUND = "NoRound"
"""The alert about the time since the last round (alert_rules.py)."""
FRESH = 1.0
"""Seconds for which one answer does for all who ask."""
PROBE = b"\0" * 4096
"""What is written to find whether a disk takes anything."""
LAG = "fleetlearn_event_loop_lag_seconds"


class WatchedRun(NamedTuple):
    """A run that is served."""

    server: RunServer
    metrics: RunMetrics


class Health(NamedTuple):
    """Whether the coordinator does its work."""

    ready: bool
    why: list[str]
    """What is missing, for people. Empty: nothing."""


class Monitor:
    """Watches within a running event loop, until ``close``. What may take long, a disk's answer and
    the text of all metrics, is left to a separate thread: whoever asks, and however slow a disk
    is, the event loop goes on."""

    def __init__(
        self, host: RunHost, stopping: Callable[[], bool], alerts: Alerts | None = None
    ) -> None:
        """``stopping``: returns whether the process was told to stop."""
        self._host, self._stopping, self._alerts = host, stopping, alerts
        self._evaluating: asyncio.Task[None] | None = None
        self._evaluated = -inf
        self.make_tracer: Callable[[str], Observer] | None = None
        """Returns what traces the run of this name. None: nobody wants traces."""
        self.loaded = False
        """Whether all runs that are there at the start were begun."""
        self._runs: dict[str, WatchedRun] = {}
        self._failed: Mapping[str, bool] = {}
        self.canaries: Sequence[CanaryView] = ()
        """Those of a host of several runs."""
        self._lag = Buckets(SPECS[LAG].buckets)
        host.lag.watch(self._lag.count)
        self._pool = ThreadPoolExecutor(1, "monitor")
        self._health = Kept(self._look_at_health)
        self._loop = asyncio.get_running_loop()

    def add(self, name: str, server: RunServer) -> None:
        """Watch a run that is about to be served."""
        ledger = server.run.store.ledger
        rounds = [summary for _, summary in ledger.committed_rounds(LOSSES)]
        measured = [summary["metrics"] for summary in rounds if not has_noise(summary)]
        losses = [metrics["loss"] for metrics in measured if "loss" in metrics]
        ended = None
        if self._alerts is not None and self._alerts.is_firing(NO_ROUND, name):
            # Else each restart would say that the alert is over, and fire again later.
            made = ledger.known_models()
            ended = self._loop.time() - (time.time() - made[-1].at) if made else None
        metrics = RunMetrics(name, losses, self._loop.time, ended)
        server.run.observers.add(metrics)
        if self.make_tracer is not None:
            server.run.observers.add(self.make_tracer(name))
        server.run.store.timed = metrics.count_write
        self._runs[name] = WatchedRun(server, metrics)

    def remove(self, name: str) -> None:
        """The run is served no more."""
        self._runs.pop(name, None)

    def look(self, failed: Mapping[str, bool] | None = None) -> None:
        """Look at the runs. Called each second. ``failed``: the names of the runs that there are to
        be -> whether an error stopped it; None: the one that is served."""
        self._failed = self._find_failed() if failed is None else failed
        for server, metrics in self._runs.values():
            metrics.look(waits=waits(server))
        due = self._loop.time() - self._evaluated >= EVALUATION_PAUSE
        if due and self.loaded and (self._evaluating is None or self._evaluating.done()):
            self._evaluating = self._loop.create_task(self._evaluate())

    def _find_failed(self) -> dict[str, bool]:
        return {name: _has_failed(server) for name, (server, _) in self._runs.items()}

    async def _evaluate(self) -> None:
        """Look whether an alert begins or is over."""
        if self._alerts is None:
            return
        self._evaluated = self._loop.time()
        try:
            samples = await self.samples()
            await self.in_thread(partial(self._alerts.evaluate, samples, time.time()))
        except Exception:
            logger.exception("alerts could not be looked at; they are again in a while")

    async def end(self) -> None:
        """Watch no more. A run that has failed is told of before."""
        if any(_has_failed(server) for server, _ in self._runs.values()):
            if self._evaluating is not None:
                await asyncio.wait({self._evaluating}, timeout=END_TIMEOUT)
            self._failed = self._find_failed()
            with suppress(TimeoutError):
                async with asyncio.timeout(END_TIMEOUT):
                    await self._evaluate()
        self._close()

    def _close(self) -> None:
        self._host.lag.leave(self._lag.count)
        self._pool.shutdown(wait=False, cancel_futures=True)

    # What is told

    async def samples(self) -> Samples:
        """Return all metrics of this moment."""
        found: Samples = {}
        add_to(found, host_gauges(self._host))
        for name, (server, metrics) in self._runs.items():
            live, run = server.live(), server.run
            add_to(found, run_gauges(name, server, live))
            add_to(found, metrics.samples(received=run.bytes_up, sent=run.bytes_down))
        for name, failed in self._failed.items():
            add_to(found, [("fleetlearn_run_failed", Sample((name,), float(failed)))])
        add_to(found, canary_samples(self.canaries))
        lag = HistogramValue(self._lag.cumulative(), self._lag.total)
        version = SOFTWARE.partition(" ")[2]
        add_to(
            found,
            [
                (LAG, Sample((), lag)),
                ("fleetlearn_build_info", Sample((version,), 1.0)),
                ("fleetlearn_ready", Sample((), float((await self.health()).ready))),
            ],
        )
        folders = self._folders()
        disks = await self._loop.run_in_executor(self._pool, _free_of, folders)
        add_to(
            found,
            [("fleetlearn_disk_free_bytes", Sample((run,), free)) for run, free in disks.items()],
        )
        return found

    async def health(self) -> Health:
        """Return whether the coordinator does its work, as of FRESH seconds ago at most."""
        return await self._health.get()

    async def _look_at_health(self) -> Health:
        why = []
        if self._stopping():
            why.append("the coordinator stops")
        if not self.loaded:
            why.append("the runs are being loaded")
        why += [
            f"run {name} was stopped by an error"
            for name, (server, _) in self._runs.items()
            if _has_failed(server)
        ]
        folders = self._folders()
        why += await self._loop.run_in_executor(self._pool, _unwritable, folders)
        return Health(not why, why)

    def _folders(self) -> dict[str, Path]:
        """Return run -> its data directory, of those that are on this machine."""
        return {name: server.run.plan.data_dir for name, (server, _) in self._runs.items()}

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Do work beside the event loop."""
        return await self._loop.run_in_executor(self._pool, work)


def _has_failed(server: RunServer) -> bool:
    return server.done.done() and server.done.exception() is not None


def _free_of(folders: Mapping[str, Path]) -> dict[str, float]:
    found = {}
    for run, folder in folders.items():
        with suppress(OSError):  # a store that is no folder
            found[run] = float(shutil.disk_usage(folder).free)
    return found


def _unwritable(folders: Mapping[str, Path]) -> Collection[str]:
    """Return why runs cannot write, for people."""
    found = []
    for run, folder in folders.items():
        if not folder.is_dir():
            continue
        try:
            # Linux gives the file no name: nothing is left behind, however this ends.
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(PROBE)
        except OSError as error:
            found.append(f"run {run} cannot write into {folder}: {in_words(error)}")
    return found


class Kept(Generic[T]):
    """What is made when it is asked for, and kept for FRESH seconds. Whoever asks while it is made
    waits for the same."""

    def __init__(self, make: Callable[[], Awaitable[T]]) -> None:
        self._make = make
        self._made_at = -inf
        self._task: asyncio.Task[T] | None = None

    async def get(self) -> T:
        """Return it. Raises what making it raised."""
        loop = asyncio.get_running_loop()
        old = loop.time() - self._made_at >= FRESH
        if self._task is None or (old and self._task.done()):
            self._task, self._made_at = loop.create_task(self._run()), loop.time()
        return await asyncio.shield(self._task)

    async def _run(self) -> T:
        return await self._make()

"""The live page of a coordinator: its runs, its process, and the viewers' sessions, on the
administrators' port (admin_api.py). Within the coordinator's event loop.

Nothing here is needed by the runs: what fails is logged, and the page says nothing new from then
on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fleetlearn_protocol.errors import FleetError

from fleetlearn_coordinator.dashboard.growing_list import GrowingList
from fleetlearn_coordinator.dashboard.live_feed import Feed, Topic
from fleetlearn_coordinator.dashboard.page_api import SignedIn
from fleetlearn_coordinator.network.host import SOFTWARE
from fleetlearn_coordinator.network.run_host import RunHost
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.service.live_run import LiveRun, read_history, stopped_state
from fleetlearn_coordinator.service.server import RunServer
from fleetlearn_coordinator.service.views.records import CanaryView
from fleetlearn_coordinator.storage.administrators import Administrator, Administrators
from fleetlearn_coordinator.storage.runs import WantedRun

logger = logging.getLogger("fleetlearn.coordinator")

TICK = 0.5
"""Seconds between two looks at all that is watched."""
RUN_TOPIC = "run/"
"""What the name of a run's topic begins with."""
SECONDS = 900
"""Seconds for which the process's figures are kept."""


class LivePage:
    """What the page is told, of the process and of each run that it serves or served."""

    def __init__(self, host: RunHost) -> None:
        self.feed, self._host = Feed(), host
        self._began = time.time()
        self._loop = asyncio.get_running_loop()
        self._runs: dict[str, LiveRun] = {}
        self._wanted: dict[str, WantedRun] = {}
        self._canaries: dict[str, dict[str, Any]] = {}
        """Run that has a canary, or is one -> what is shown of it."""
        self._stopped: dict[str, dict[str, Any]] = {}
        """Run that this process has not served -> what the list of runs shows of it."""
        self._process = GrowingList(SECONDS)
        """Rows [time, event loop's lag in ms, resident memory in bytes, CPU's share]."""
        self._lag, self._sampled, self._cpu = 0.0, int(time.time()), time.process_time()
        self._ticker: asyncio.Task[None] | None = None
        self.feed.add(Topic("host", self._look, {"process": self._process}))

    # The runs

    def add_run(self, name: str, server: RunServer) -> None:
        """Show a run, which is served from now on. A run whose records cannot be read is not
        shown."""
        try:
            run = LiveRun(name, server)
        except FleetError as error:
            logger.error("the page does not show the run %s: %s", name, error.text)
            return
        server.run.observers.add(run)
        self._runs[name] = run
        self._stopped.pop(name, None)
        self.feed.add(Topic(RUN_TOPIC + name, run.state, run.history.lists))

    def end_run(self, name: str) -> None:
        """The run is served no more. What is known of it stays. Harmless where it is not shown."""
        if name in self._runs:
            self._runs[name].end()

    def are_wanted(self, runs: Sequence[WantedRun], canaries: Sequence[CanaryView] = ()) -> None:
        """These are the host's runs, what is wanted of them, and their canaries, the oldest
        first."""
        self._wanted = {run.name: run for run in runs}
        self._canaries = {}
        for canary in canaries:
            shown = msgspec.to_builtins(canary)
            shown["seconds"] = shown["seconds"] // 10 * 10  # else it would differ each time
            self._canaries |= {canary.of: shown, canary.name: shown}
        for name in (self._runs.keys() | self._stopped.keys()) - self._wanted.keys():
            self._runs.pop(name, None)
            self._stopped.pop(name, None)
            self.feed.remove(RUN_TOPIC + name)
        for name in self._wanted.keys() - self._runs.keys() - self._stopped.keys():
            self._stopped[name] = _not_served(self._wanted[name])

    def make_topic(self, name: str, plan: Plan) -> None:
        """Let a run that is not served be looked at. Called in other threads. Raises FleetError."""
        if RUN_TOPIC + name in self.feed.topics:
            return
        state, history = stopped_state(name, plan), read_history(plan.data_dir)
        topic = Topic(RUN_TOPIC + name, lambda: state, history.lists)
        self._loop.call_soon_threadsafe(self._add_topic, topic)

    def _add_topic(self, topic: Topic) -> None:
        if topic.name not in self.feed.topics:
            self.feed.add(topic)

    # Time

    def begin(self) -> None:
        """Look from now on, at all that happens."""
        self._host.lag.watch(self._note_lag)
        self._ticker = self._loop.create_task(self._tick())

    async def end(self) -> None:
        """Look no more, and send all viewers away."""
        self._host.lag.leave(self._note_lag)
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.wait({self._ticker})
        await self.feed.close()

    def _note_lag(self, late: float) -> None:
        self._lag = max(self._lag, late)

    async def _tick(self) -> None:
        try:
            while True:
                await asyncio.sleep(TICK)
                if int(time.time()) != self._sampled:
                    self._sample()
                self.feed.tell()
        except Exception:
            logger.exception("the page shows nothing new from now on; the runs go on")

    def _sample(self) -> None:
        """Close a second."""
        now, cpu = time.time(), time.process_time()
        share = (cpu - self._cpu) / max(1, int(now) - self._sampled)
        row = [int(now), round(1000 * self._lag, 1), _resident(), round(share, 3)]
        self._process.add(row)
        self._sampled, self._cpu, self._lag = int(now), cpu, 0.0
        for run in self._runs.values():
            if run.is_served:
                run.sample()

    def _look(self) -> dict[str, Any]:
        """Return what the page is told of the process."""
        gateways = self._host.gateways_now()
        found: dict[str, Any] = {
            "time": round(time.time(), 1),
            "began": round(self._began, 1),
            "software": SOFTWARE,
            "address": self._host.address,
            "connected": len(self._host.devices),
            **({} if not gateways else {"gateways": [one._asdict() for one in gateways]}),
        }
        for name, run in self._runs.items():
            found[RUN_TOPIC + name] = self._glance(name, run.glance())
        for name, known in self._stopped.items():
            found[RUN_TOPIC + name] = self._glance(name, known)
        return found

    def _glance(self, name: str, known: Mapping[str, Any]) -> dict[str, Any]:
        wanted = self._wanted.get(name)
        if wanted is None:  # the one plan that is served
            return dict(known)
        found = {**known, "wanted": wanted.wanted, "failed": wanted.failed}
        if name in self._canaries:
            found["canary"] = self._canaries[name]
        return found


class AdministratorSessions:
    """The page's sessions of administrators. Each thread has its own."""

    def __init__(self, administrators: Administrators) -> None:
        self._administrators = administrators

    def begin(self, token: str) -> tuple[str, SignedIn] | None:
        found = self._administrators.begin_session(token, time.time())
        return None if found is None else (found[0], _signed_in(found[1]))

    def find(self, secret: str) -> SignedIn | None:
        found = self._administrators.find_session(secret, time.time())
        return None if found is None else _signed_in(found)

    def end(self, secret: str) -> None:
        self._administrators.end_session(secret)


def _not_served(run: WantedRun) -> dict[str, Any]:
    """Return what the list of runs shows of a run that this process has not served."""
    try:
        state = stopped_state(run.name, Plan.load(run.plan))
    except FleetError:  # it has not begun, or its plan is broken, which ``failed`` says
        return {"served": False}
    shown = {key: state[key] for key in ("served", "version", "finished")}
    return {**shown, "of": state["about"]["rounds"]}


def _signed_in(who: Administrator) -> SignedIn:
    return SignedIn(who.name, who.role)


def _resident() -> int:
    """Return the process's resident memory, in bytes. 0 where the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - a Path takes twice as long
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0

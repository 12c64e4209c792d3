"""What people do with a host's runs. It is written into the database of runs, which the host reads, and the audit log.

Commands and the HTTP API come through here, whether the host runs or not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Literal

from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.errors import Code

from fleetlearn_coordinator.network.gate import NAME
from fleetlearn_coordinator.plan.plan import Plan, PlanError
from fleetlearn_coordinator.plan.service_settings import ServiceError, ServiceSettings
from fleetlearn_coordinator.service.roll_back import check_version
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.identities import COMMAND, Identities
from fleetlearn_coordinator.storage.runs import Population, Runs, State, WantedRun

Verb = Literal["paused", "resumed", "drained", "stopped"]
_STATES: dict[Verb, State] = {"paused": "paused", "resumed": "running", "drained": "draining", "stopped": "stopped"}


class Operations:
    """What may be done with the runs of a service, by one person or program."""

    def __init__(self, service: ServiceSettings, runs: Runs, identities: Identities | None, who: str) -> None:
        """``identities``: where the audit log is, if there is one. ``who``: for the log."""
        self.service, self.runs, self._identities, self._who = service, runs, identities, who

    def add(self, name: str, plan: Path, population: Population) -> None:
        """Add a run, which is to be running. Raises StoreError, PlanError, BundleError, ServiceError, and adds
        nothing."""
        if not NAME.fullmatch(name):
            raise ServiceError(Code.BAD_MESSAGE, f"{name!r} is no name of a run: 1 to 64 letters, digits and ._-")
        found = Plan.load(plan)
        found.check_service(self.service)
        found.check_against(open_bundle(found.bundle).manifest)
        for run in self.runs.runs():
            if run.name != name and _data_dir(run) == found.data_dir.resolve():
                text = f"{plan}: the run {run.name} has the same data_dir, {found.data_dir}; each run needs its own"
                raise StoreError(Code.DUPLICATE, text)
        self.runs.add(name, plan, population)
        self._log("added", name)

    def change(self, name: str, verb: Verb) -> None:
        """Pause, resume, drain or stop a run. Raises StoreError."""
        run = self.find(name)
        if verb in ("paused", "drained") and run.wanted == "stopped":
            text = f"the run {name} is stopped: `fleetlearn-coordinator run resume` lets it go on"
            raise StoreError(Code.OUT_OF_TURN, text)
        self.runs.want(name, _STATES[verb])
        self._log(verb, name)

    def roll_back(self, name: str, version: int) -> None:
        """Let a run go on from an earlier version of its model. Raises StoreError, PlanError."""
        check_version(Plan.load(self.find(name).plan).data_dir, version)
        self.runs.want_version(name, version)
        self._log("rolled back", name, version=version)

    def remove(self, name: str) -> None:
        """Forget a run. Its data directory stays. Raises StoreError."""
        self.runs.remove(name)
        self._log("removed", name)

    def find(self, name: str) -> WantedRun:
        """Return the run of this name. Raises StoreError."""
        found = {run.name: run for run in self.runs.runs()}
        if name not in found:
            raise StoreError(Code.UNKNOWN_CONTENT, f"there is no run called {name}; there are: {', '.join(found) or 0}")
        return found[name]

    def _log(self, what: str, name: str, **more: int) -> None:
        if self._identities is not None:
            self._identities.log(time.time(), what, {"run": name, **more, "who": self._who})


@contextmanager
def operating(service: ServiceSettings, who: str = COMMAND) -> Iterator[Operations]:
    """Open what is written to. Raises ServiceError if the service has one run alone, StoreError."""
    if service.runs is None:
        text = 'this service file names no runs: write runs = "runs" there, a folder beside the file'
        raise ServiceError(Code.BAD_MESSAGE, text)
    identities = None if service.identities is None else Identities(service.identities)
    try:
        with closing(Runs(service.runs)) as runs:
            yield Operations(service, runs, identities, who)
    finally:
        if identities is not None:
            identities.close()


def _data_dir(run: WantedRun) -> Path | None:
    try:
        return Plan.load(run.plan).data_dir.resolve()
    except PlanError:  # it was moved away, or is broken now
        return None

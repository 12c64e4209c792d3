"""What people do with a host's runs. It is written where the host finds it, and into the audit log.

Commands and the HTTP API come through here, whether the host runs or not. The database of runs has
each operation with its row of the audit log. The row is copied from there: at once, or after
``kill -9`` when somebody opens the runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal

from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.errors import Code

from fleetlearn_coordinator.network.gate import NAME
from fleetlearn_coordinator.plan.plan import Plan, PlanError
from fleetlearn_coordinator.plan.service_settings import ServiceError, ServiceSettings
from fleetlearn_coordinator.service.training_run.roll_back import ask_to_roll_back
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.identities import COMMAND, Identities
from fleetlearn_coordinator.storage.runs import Population, Runs, State, WantedRun

Verb = Literal["paused", "resumed", "drained", "stopped"]
_STATES: dict[Verb, State] = {
    "paused": "paused",
    "resumed": "running",
    "drained": "draining",
    "stopped": "stopped",
}


class Operations:
    """What may be done with the runs of a service, by one person or program."""

    def __init__(
        self, service: ServiceSettings, runs: Runs, identities: Identities | None, who: str
    ) -> None:
        """``identities``: where the audit log is, if there is one. ``who``: for the log."""
        self.service, self.runs, self._identities, self._who = service, runs, identities, who

    def add(self, name: str, plan: Path, population: Population) -> None:
        """Add a run, which is to be running. Raises StoreError, PlanError, BundleError,
        ServiceError, and adds nothing."""
        if not NAME.fullmatch(name):
            raise ServiceError(
                Code.BAD_MESSAGE, f"{name!r} is no name of a run: 1 to 64 letters, digits and ._-"
            )
        found = Plan.load(plan)
        found.check_service(self.service)
        found.check_against(open_bundle(found.bundle).manifest)
        for run in self.runs.runs():
            if run.name != name and _data_dir(run) == found.data_dir.resolve():
                text = (
                    f"{plan}: the run {run.name} has the same data_dir, {found.data_dir}; each run "
                    "needs its own"
                )
                raise StoreError(Code.DUPLICATE, text)
        differs = {
            key: each
            for key, each in population._asdict().items()
            if each != Population._field_defaults[key]
        }
        with self._logged("added", name, plan=str(plan.absolute()), **differs):
            self.runs.add(name, plan, population)

    def change(self, name: str, verb: Verb) -> None:
        """Pause, resume, drain or stop a run. Raises StoreError."""
        run = self.find(name)
        if verb in ("paused", "drained") and run.wanted == "stopped":
            text = f"the run {name} is stopped: `fleetlearn-coordinator resume` lets it go on"
            raise StoreError(Code.OUT_OF_TURN, text)
        with self._logged(verb, name):
            self.runs.want(name, _STATES[verb])

    def roll_back(self, name: str, version: int) -> None:
        """Let a run go on from an earlier version of its model. The audit log has it when it is
        done. Raises StoreError, PlanError."""
        ask_to_roll_back(Plan.load(self.find(name).plan).data_dir, version, self._who)
        self.runs.ask_again(name)  # it may have finished

    def remove(self, name: str) -> None:
        """Forget a run. Its data directory stays. Raises StoreError."""
        with self._logged("removed", name):
            self.runs.remove(name)

    def find(self, name: str) -> WantedRun:
        """Return the run of this name. Raises StoreError."""
        found = {run.name: run for run in self.runs.runs()}
        if name not in found:
            raise StoreError(
                Code.UNKNOWN_CONTENT,
                f"there is no run called {name}; there are: {', '.join(found) or 0}",
            )
        return found[name]

    @contextmanager
    def _logged(self, what: str, name: str, **more: Any) -> Iterator[None]:
        """Let what the block changes be in the audit log, if there is one."""
        if self._identities is None:
            yield
            return
        with self.runs.logged(time.time(), what, {"run": name, **more, "who": self._who}):
            yield
        log_operations(self.runs, self._identities)


def log_operations(runs: Runs, identities: Identities) -> None:
    """Copy what the database of runs has for the audit log. Raises StoreUnavailableError; nothing
    is lost then."""
    for operation in runs.to_log():
        identities.log_once(operation.at, operation.what, operation.about)
        runs.is_logged(operation)


@contextmanager
def operating(service: ServiceSettings, who: str = COMMAND) -> Iterator[Operations]:
    """Open what is written to. Raises ServiceError if the service has one run alone, StoreError."""
    if service.runs is None:
        text = (
            'this service file names no runs: write runs = "runs" there, a folder beside the file'
        )
        raise ServiceError(Code.BAD_MESSAGE, text)
    identities = None if service.identities is None else Identities(service.identities)
    try:
        with closing(Runs(service.runs)) as runs:
            if identities is not None:
                log_operations(runs, identities)
            yield Operations(service, runs, identities, who)
    finally:
        if identities is not None:
            identities.close()


def _data_dir(run: WantedRun) -> Path | None:
    try:
        return Plan.load(run.plan).data_dir.resolve()
    except PlanError:  # it was moved away, or is broken now
        return None

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
from fleetlearn_coordinator.plan.distil_files import check_distillation
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
        self.service, self.runs, self._identities, self.who = service, runs, identities, who

    def add(self, name: str, plan: Path, population: Population) -> None:
        """Add a run, which is to be running. Raises StoreError, PlanError, BundleError,
        ServiceError, and adds nothing."""
        self.check(name, Plan.load(plan))
        differs = {
            key: each
            for key, each in population._asdict().items()
            if each != Population._field_defaults[key]
        }
        with self.logged("added", name, plan=str(plan.absolute()), **differs):
            self.runs.add(name, plan, population)

    def check(self, name: str, plan: Plan) -> None:
        """Raise FleetError where a run of this name and plan could not be added."""
        if not NAME.fullmatch(name):
            raise ServiceError(
                Code.BAD_MESSAGE, f"{name!r} is no name of a run: 1 to 64 letters, digits and ._-"
            )
        plan.check_served(self.service)
        manifests = {name: open_bundle(path).manifest for name, path in plan.members.items()}
        plan.check_members(manifests)
        check_distillation(plan, manifests)
        for run in self.runs.runs():
            if run.name != name and _data_dir(run) == plan.data_dir.resolve():
                text = (
                    f"{plan.file}: the run {run.name} has the same data_dir, {plan.data_dir}; each "
                    "run needs its own"
                )
                raise StoreError(Code.DUPLICATE, text)

    def change(self, name: str, verb: Verb) -> None:
        """Pause, resume, drain or stop a run. Raises StoreError."""
        with self.logged(verb, name):  # nobody begins a canary between the look and the change
            self._check_change(self.find(name), verb)
            self.runs.want(name, _STATES[verb])

    def _check_change(self, run: WantedRun, verb: Verb) -> None:
        """Raise StoreError where the run is in no state for that."""
        if verb in ("drained", "stopped"):
            _refuse_in_canary(run, verb)
        if verb == "resumed" and any(
            row.run == run.number and row.phase == "back" for row in self.runs.canaries.rows()
        ):
            text = f"{run.name} is a canary that went back: `canary start` begins another one"
            raise StoreError(Code.OUT_OF_TURN, text)
        if verb in ("paused", "drained") and run.wanted == "stopped":
            text = f"the run {run.name} is stopped: `fleetlearn-coordinator resume` lets it go on"
            raise StoreError(Code.OUT_OF_TURN, text)

    def roll_back(self, name: str, version: int) -> None:
        """Let a run go on from an earlier version of its model. The audit log has it when it is
        done. Raises StoreError, PlanError."""
        ask_to_roll_back(Plan.load(self.find(name).plan).data_dir, version, self.who)
        self.runs.ask_again(name)  # it may have finished

    def remove(self, name: str) -> None:
        """Forget a run. Its data directory stays. Raises StoreError."""
        with self.logged("removed", name):
            _refuse_in_canary(self.find(name), "removed")
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
    def logged(self, what: str, name: str, **more: Any) -> Iterator[None]:
        """Let what the block changes be in the audit log, if there is one: all of it, or
        nothing."""
        if self._identities is None:
            with self.runs.together():
                yield
            return
        with self.runs.logged(time.time(), what, {"run": name, **more, "who": self.who}):
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


def _refuse_in_canary(run: WantedRun, verb: str) -> None:
    """Raise StoreError where the run has a canary that goes on, or is one."""
    if run.split is not None:
        what = f"is the canary of {run.split.of}" if run.split.is_canary else "has a canary"
        text = (
            f"the run {run.name} {what}, and cannot be {verb} before that has an end: "
            "`fleetlearn-coordinator canary back` gives the old run its devices again"
        )
        raise StoreError(Code.OUT_OF_TURN, text)


def _data_dir(run: WantedRun) -> Path | None:
    try:
        return Plan.load(run.plan).data_dir.resolve()
    except PlanError:  # it was moved away, or is broken now
        return None

"""A coordinator's files: what commands see and do where they are, whether it runs or not."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetlearn_protocol.errors import Code, FleetError

from fleetlearn_coordinator.plan.plan_place import PlanPlace, read_place
from fleetlearn_coordinator.plan.service_settings import ServiceSettings
from fleetlearn_coordinator.service.views.local_views import LocalViews
from fleetlearn_coordinator.service.views.records import (
    CanaryView,
    EventView,
    HostView,
    OperationView,
    RunView,
    TokenView,
)
from fleetlearn_coordinator.storage.identities import COMMAND, RUN, Identities
from fleetlearn_coordinator.storage.identities import DATABASE as IDENTITIES
from fleetlearn_coordinator.storage.runs import DATABASE as RUNS
from fleetlearn_coordinator.storage.runs import Runs

if TYPE_CHECKING:  # late: what acts needs numpy and more, and what looks does not
    from fleetlearn_coordinator.service.canary.about import CanaryAsked
    from fleetlearn_coordinator.service.canary.decision import Action
    from fleetlearn_coordinator.service.several.operations import Verb

SOON = "within a second"
PAUSE = 1.0
"""Seconds between two looks."""


class LocalTarget(LocalViews):
    """The views, and what people may do."""

    def __init__(
        self,
        where: str,
        service: ServiceSettings | None,
        plan: PlanPlace | None,
        data: Path | None,
        identities: Identities | None,
    ) -> None:
        super().__init__(service=service, plan=plan, data=data, identities=identities)
        self.where = where

    @property
    def settings(self) -> ServiceSettings | None:
        """The service's; None: there is no service file."""
        return self._service

    @property
    def has_runs(self) -> bool:
        """Whether it is known which runs there are."""
        return self._one is not None or (
            self._service is not None and self._service.runs is not None
        )

    def admin_url(self) -> str | None:
        """Return the URL of the administrators' port, if the service file opens one that can be
        known."""
        admin = None if self._service is None else self._service.admin
        if admin is None or not admin.port:
            return None
        scheme = "http" if self._service is None or self._service.tls is None else "https"
        return f"{scheme}://{admin.host}:{admin.port}"

    def canaries(self, name: str | None = None) -> list[CanaryView]:
        """Return the canaries of a host, the oldest first. ``name``: of one run. Raises
        FleetError."""
        from fleetlearn_coordinator.service.canary.canary_views import canary_views

        if name is not None:
            self.place(name)
        if self._service is None or self._service.runs is None:
            return []
        with closing(Runs(self._service.runs)) as runs:
            return canary_views(runs, name)

    # What goes on

    def watch_host(self) -> Iterator[HostView]:
        """Yield all runs in a few words, once a second."""
        while True:
            yield self.host()
            time.sleep(PAUSE)

    def watch_run(self, name: str | None, last: int) -> Iterator[RunView]:
        """Yield a run with its last rounds, once a second."""
        while True:
            yield self.run(name, last=last)
            time.sleep(PAUSE)

    def events(self, name: str | None) -> Iterator[list[EventView]]:
        """Yield what is new in a run, once a second."""
        from fleetlearn_coordinator.service.views.event_views import RunEvents

        events = RunEvents(self.place(name))
        while True:
            yield events.look()
            time.sleep(PAUSE)

    # What people do

    def change(self, name: str, verb: Verb) -> OperationView:
        """Pause, resume, drain or stop one of several runs. Raises FleetError."""
        from fleetlearn_coordinator.service.several.operations import operating

        with operating(self._several(), COMMAND) as operations:
            operations.change(name, verb)
            return OperationView(verb, name, SOON if operations.runs.is_locked() else self._later)

    def begin_canary(self, of: str, asked: CanaryAsked) -> OperationView:
        """Begin a canary of one of several runs. Raises FleetError."""
        from fleetlearn_coordinator.service.canary.about import ALONE
        from fleetlearn_coordinator.service.canary.begin import begin_canary
        from fleetlearn_coordinator.service.several.operations import operating

        if self._service is None or self._service.runs is None:
            raise FleetError(Code.BAD_MESSAGE, f"{self.where} {ALONE}")
        with operating(self._service, COMMAND) as operations:
            begun = begin_canary(operations, of, asked)
            when = SOON if operations.runs.is_locked() else self._later
            return OperationView("canary began", begun.name, when, remark=begun.remark)

    def act_on_canary(self, name: str, action: Action) -> OperationView:
        """Widen a canary, send it back, or finish it. Raises FleetError."""
        from fleetlearn_coordinator.service.canary.acts import DONE, act_on
        from fleetlearn_coordinator.service.several.operations import operating

        with operating(self._several(), COMMAND) as operations:
            canary = act_on(operations, name, action)
            when = SOON if operations.runs.is_locked() else self._later
            return OperationView(DONE[action], canary, when)

    def roll_back(self, name: str | None, version: int) -> OperationView:
        """Go on from an earlier version of the model. Raises FleetError."""
        from fleetlearn_coordinator.service.several.operations import operating
        from fleetlearn_coordinator.service.training_run.roll_back import ask_to_roll_back

        place = self.place(name)
        if self._one is None:
            with operating(self._several(), COMMAND) as operations:
                operations.roll_back(place.name, version)
        else:
            ask_to_roll_back(place.data, version, COMMAND)
        return OperationView("rolled back", place.name, self._when(place.name), version)

    def evaluate(self, name: str | None) -> OperationView:
        """Ask for an evaluation of the newest model. Raises FleetError."""
        from fleetlearn_coordinator.service.training_run.evaluation_request import ask_to_evaluate

        place = self.place(name)
        ask_to_evaluate(place.data)
        return OperationView("evaluation", place.name, self._when(place.name))

    def enrol(
        self, uses: int, hours: float, tags: tuple[str, ...], runs: tuple[str, ...]
    ) -> TokenView:
        """Return a new token for devices. Raises FleetError."""
        from fleetlearn_coordinator.network.gate import public_keys

        service, identities = self._enrolling()
        now = time.time()
        until, keys = now + 3600 * hours, public_keys(service.signing_keys)
        token = identities.make_token(uses, until, [*tags, *(RUN + name for name in runs)], now)
        return TokenView(".".join([token, *keys]), until)

    def revoke(self, device: str) -> OperationView:
        """End a device's credential and certificates. Raises FleetError."""
        service, identities = self._enrolling()
        certified = service.tls is not None and service.tls.clients is not None
        found = identities.revoke(device, time.time(), certified=certified)
        if not found and not certified:
            names = identities.count()
            text = (
                f"no device called {device} is enrolled; {names} are: `fleetlearn-coordinator "
                "devices` lists them"
            )
            raise FleetError(Code.UNKNOWN_CONTENT, text)
        return OperationView("revoked" if found else "certificate revoked", device, SOON)

    def join_link(self, token: str) -> str:
        """Return the link by which browsers join with this token. Raises FleetError where there is
        no page."""
        from fleetlearn_coordinator.service.page import join_link

        return join_link(self._enrolling()[0], token)

    @property
    def identities(self) -> Identities:
        """The service's. Raises FleetError where it has none."""
        return self._enrolling()[1]

    def _several(self) -> ServiceSettings:
        if self._service is None or self._service.runs is None:
            text = (
                f"{self.where} is one run, which its coordinator serves alone: end the process "
                "(SIGTERM) to stop it, and `fleetlearn-coordinator serve` goes on with it. A host "
                "of several runs has a service file with the key runs"
            )
            raise FleetError(Code.BAD_MESSAGE, text)
        return self._service

    def _enrolling(self) -> tuple[ServiceSettings, Identities]:
        if self._service is None:
            text = (
                f"{self.where} is no service file: devices are enrolled where its key identities "
                "says. Give SERVICE.toml, or --service SERVICE.toml"
            )
            raise FleetError(Code.BAD_MESSAGE, text)
        if self._identities is None:
            text = (
                f'{self.where} names no identities: write identities = "identities" there, a '
                "folder beside the file"
            )
            raise FleetError(Code.BAD_MESSAGE, text)
        return self._service, self._identities

    def _when(self, name: str) -> str:
        run = self.run(name, last=1)
        return SOON if run.running and run.finished is None else self._later

    @property
    def _later(self) -> str:
        alone = "when the plan is served again"
        return alone if self._one is not None else "when the service file is served"


@contextmanager
def open_local(
    where: str, service_file: Path | None, *, make: bool = True
) -> Iterator[LocalTarget]:
    """Open a plan's, a service file's or a data directory's files, until the block is left.
    ``make``: make the databases that are not there yet. Raises FleetError."""
    path = Path(where).expanduser()
    plan, data, service = None, None, None
    if path.is_dir() or "://" in where:
        data = Path(where) if "://" in where else path
    elif (raw := _service_in(path)) is not None:
        if service_file is not None:
            text = f"{where} is a service file: --service is for a plan"
            raise FleetError(Code.BAD_MESSAGE, text)
        service = ServiceSettings.read(raw, path.absolute().parent, file=where)
    else:
        plan = read_place(path)
    if service_file is not None:
        service = ServiceSettings.load(service_file)
    if service is None or service.identities is None or not (make or _is_there(service)):
        yield LocalTarget(where, service, plan, data, None)
        return
    with closing(Identities(service.identities)) as identities:
        if service.runs is not None and plan is None:
            with closing(Runs(service.runs)) as runs:  # of a process that was killed before it did
                if runs.to_log():
                    _log(runs, identities)
        yield LocalTarget(where, service, plan, data, identities)


def _service_in(path: Path) -> dict[str, Any] | None:
    """Return what a service file says; None: the file is a plan, or cannot be read, which the
    plan's reader says."""
    try:
        raw = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return None if {"bundle", "round", "recipe", "local", "data_dir"} & raw.keys() else raw


def _is_there(service: ServiceSettings) -> bool:
    """Return whether the databases of a service are there."""
    folder, runs = service.identities, service.runs
    there = folder is not None and (folder / IDENTITIES).is_file()
    return there and (runs is None or (runs / RUNS).is_file())


def _log(runs: Runs, identities: Identities) -> None:
    from fleetlearn_coordinator.service.several.operations import log_operations

    log_operations(runs, identities)

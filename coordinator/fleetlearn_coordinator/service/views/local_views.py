"""Everything that is shown of a coordinator, read where its data are: by the coordinator's own
ports, and by commands on its machine, whether it runs or not."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from fleetlearn_protocol.errors import Code, FleetError, in_words

from fleetlearn_coordinator.plan.plan_place import PlanPlace, read_place
from fleetlearn_coordinator.service.several.population import describe
from fleetlearn_coordinator.service.views import run_views
from fleetlearn_coordinator.service.views.device_search import DeviceSearch
from fleetlearn_coordinator.service.views.device_views import device_detail, device_views
from fleetlearn_coordinator.service.views.records import (
    AuditView,
    DeviceDetail,
    DevicePage,
    DeviceView,
    HostView,
    RoundView,
    RunGlance,
    RunView,
    TurnsView,
    Version,
)
from fleetlearn_coordinator.service.views.run_views import RECENT, RunPlace
from fleetlearn_coordinator.storage.errors import StoreError
from fleetlearn_coordinator.storage.identities import Identities
from fleetlearn_coordinator.storage.runs import DATABASE, Runs, WantedRun

if TYPE_CHECKING:  # late: a plan is read with numpy, and most views need none
    from fleetlearn_coordinator.plan.plan import Plan
    from fleetlearn_coordinator.plan.service_settings import ServiceSettings


class LocalViews:
    """The views of a host with several runs, of a plan that is served alone, or of a data
    directory. Each call reads all that it returns; nothing here writes."""

    def __init__(
        self,
        *,
        service: ServiceSettings | None = None,
        plan: Plan | PlanPlace | None = None,
        data: Path | None = None,
        identities: Identities | None = None,
    ) -> None:
        """``service``: with ``runs``, where neither a plan nor a data directory is given.
        ``identities``: of the service; None: it has none."""
        self._service, self._plan, self._data = service, plan, data
        self._identities = identities

    def host(self) -> HostView:
        """Return all runs in a few words."""
        runs = self.runs()
        return HostView(
            time=time.time(),
            running=self._is_served(runs),
            enrolled=None if self._identities is None else self._identities.count(),
            connected=sum(run.connected for run in runs),
            runs=runs,
        )

    def runs(self) -> list[RunGlance]:
        """Return the runs in a few words, one that has not begun or cannot be read included."""
        if self._one is not None:
            return [_glance(self._one)]
        return [_wanted(run) for run in self._wanted()]

    def run(self, name: str | None = None, *, last: int | None = RECENT) -> RunView:
        """Return a run; by default the one there is. ``last``: how many rounds and evaluations it
        has; None: all. Raises FleetError."""
        return run_views.run_view(self.place(name), last=last)

    def rounds(self, name: str | None = None, *, last: int | None = RECENT) -> list[RoundView]:
        """Return the last rounds of a run that are over, the oldest first. Raises FleetError."""
        return run_views.rounds(self.place(name), last=last)

    def turns(self, name: str | None = None, number: int | None = None) -> TurnsView:
        """Return who took part in a round; None: in the open one. Raises FleetError."""
        return run_views.turns(self.place(name), number)

    def models(
        self, name: str | None = None, *, gone: bool = False, most: int | None = None
    ) -> list[Version]:
        """Return the versions of a run's model, the oldest first. ``gone``: also those whose files
        are not kept. Raises FleetError."""
        from fleetlearn_coordinator.service.views.model_views import model_views

        return model_views(self.plan(name), gone=gone, most=most)

    def devices(self, name: str | None = None) -> list[DeviceView]:
        """Return the devices that are enrolled, were revoked or were seen, by name. ``name``: only
        the one of this name, if there is one. Raises FleetError."""
        only = None if name is None else [name]
        return device_views(self._places(), self._identities, only)

    def device_page(
        self, devices: DeviceSearch, *, search: str, state: str, offset: int, most: int
    ) -> DevicePage:
        """Return the devices that fit, as ``DeviceSearch.page`` does."""
        return devices.page(
            self._places(), self._identities, search=search, state=state, offset=offset, most=most
        )  # fmt: skip

    def device(self, name: str, *, tasks: int = RECENT) -> DeviceDetail:
        """Return a device with its last tasks in each run. Raises FleetError where there is no such
        device."""
        return device_detail(name, self._places(), self._identities, tasks)

    def audit(self, last: int) -> list[AuditView]:
        """Return the newest rows of the audit log, the oldest of them first. Raises FleetError
        where the service has no identities."""
        if self._identities is None:
            raise FleetError(
                Code.UNKNOWN_CONTENT,
                "there is no audit log: it is kept with the identities, and the service file names "
                "none",
            )
        return [AuditView(*row) for row in self._identities.last_events(last)]

    # Which run

    def place(self, name: str | None) -> RunPlace:
        """Return the run of this name; None: the one there is. Raises FleetError."""
        if self._one is not None:
            if name in (None, self._one.name):
                return self._one
            raise StoreError(
                Code.UNKNOWN_CONTENT,
                f"there is no run called {name}; there are: {self._one.name}",
            )
        found = self._find(name)
        return _place(found, read_place(found.plan))

    def plan(self, name: str | None) -> Plan:
        """Return the plan of the run of this name; None: of the one there is. Raises FleetError."""
        from fleetlearn_coordinator.plan.plan import Plan

        self.place(name)
        if self._plan is not None:
            own = self._plan
            return Plan.load(own.file) if isinstance(own, PlanPlace) else own
        if self._data is not None:
            raise FleetError(
                Code.UNKNOWN_CONTENT,
                f"{self._data} is a data directory: this needs the plan's file, PLAN.toml",
            )
        return Plan.load(self._find(name).plan)

    @property
    def _one(self) -> RunPlace | None:
        """The run, where there can only be one."""
        if self._plan is not None:
            return RunPlace(self._plan.name, self._plan.data_dir, str(self._plan.file))
        if self._data is not None:
            return RunPlace(self._data.name, self._data)
        return None

    def _find(self, name: str | None) -> WantedRun:
        wanted = self._wanted()
        if name is None and len(wanted) == 1:
            return wanted[0]
        for run in wanted:
            if run.name == name:
                return run
        there = ", ".join(run.name for run in wanted) or "none"
        missing = "which run? Name one" if name is None else f"there is no run called {name}"
        raise StoreError(Code.UNKNOWN_CONTENT, f"{missing}; there are: {there}")

    def _wanted(self) -> list[WantedRun]:
        if self._service is None or self._service.runs is None:
            text = (
                'this service file names no runs: write runs = "runs" there, a folder beside the '
                "file; or give the plan that it serves"
            )
            raise FleetError(Code.BAD_MESSAGE, text)
        if not (self._service.runs / DATABASE).is_file():
            return []  # opening the database would make it
        with closing(Runs(self._service.runs)) as runs:
            return runs.runs()

    def _is_served(self, runs: list[RunGlance]) -> bool:
        if self._one is not None or self._service is None or self._service.runs is None:
            return any(run.running for run in runs)
        if not (self._service.runs / DATABASE).is_file():
            return False
        with closing(Runs(self._service.runs)) as found:
            return found.is_locked()

    def _places(self) -> list[tuple[str, Path]]:
        """Return the runs whose plans can be read, and where their data are."""
        if self._one is not None:
            return [(self._one.name, self._one.data)]
        if self._service is None or self._service.runs is None:
            return []
        found = []
        for run in self._wanted():
            try:
                found.append((run.name, read_place(run.plan).data_dir))
            except FleetError:  # it was moved away, or is broken now: ``runs`` says so
                continue
        return found


def _place(run: WantedRun, plan: PlanPlace) -> RunPlace:
    return RunPlace(
        run.name,
        plan.data_dir,
        str(run.plan),
        run.wanted,
        run.failed,
        describe(run.population, run.split),
    )


def _wanted(run: WantedRun) -> RunGlance:
    try:
        place = _place(run, read_place(run.plan))
    except (FleetError, OSError) as error:
        return RunGlance(
            name=run.name,
            state="failed" if run.failed else run.wanted,
            plan=str(run.plan),
            wanted=run.wanted,
            failed=run.failed,
            population=describe(run.population, run.split),
            error=in_words(error, file=True),
        )
    return _glance(place)


def _glance(place: RunPlace) -> RunGlance:
    try:
        return run_views.glance(place)
    except (FleetError, OSError) as error:
        new = isinstance(error, StoreError) and error.code is Code.UNKNOWN_CONTENT
        return RunGlance(
            name=place.name,
            state=_state(place, new=new),
            plan=place.plan,
            wanted=place.wanted,
            failed=place.failed,
            population=place.population,
            error="" if place.failed or new else in_words(error, file=True),
        )


def _state(place: RunPlace, *, new: bool) -> str:
    """Return the state of a run without a ledger that can be read."""
    if place.failed:
        return "failed"
    if new and place.wanted in (None, "running"):
        return "new"
    return place.wanted or "stopped"

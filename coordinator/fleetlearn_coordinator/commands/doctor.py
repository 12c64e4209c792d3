"""``fleetlearn-coordinator doctor``: what a coordinator needs, and what to do."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import typer
from fleetlearn_protocol.errors import FleetError
from fleetlearn_protocol.typer_app import show_table

from fleetlearn_coordinator.commands.exits import ExitStatus, expected_errors
from fleetlearn_coordinator.commands.local import LocalTarget, open_local
from fleetlearn_coordinator.commands.options import AsJson, Service, Words
from fleetlearn_coordinator.commands.show import checks_table, tell
from fleetlearn_coordinator.commands.target import split
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.plan.service_settings import ServiceSettings
from fleetlearn_coordinator.service import checks
from fleetlearn_coordinator.service.views.records import CheckView
from fleetlearn_coordinator.service.views.run_views import RunPlace

app = typer.Typer()


@app.command()
def doctor(words: Words = None, service: Service = None, as_json: AsJson = False) -> None:
    """Check what a coordinator needs, and say what to do: the plan and its bundle, folders, disk,
    ports, certificate, clock, limits, libraries, and whether a coordinator runs.

    Exit status: 0 where nothing has to be mended, 6 where something has."""
    where, _ = split(words, 0, 0, "")
    if service is None and where == "plan.toml" and Path("service.toml").is_file():
        service = Path("service.toml")
    found = [*checks.check_software(), *_about(where, service)]
    if as_json:
        print(msgspec.json.encode(found).decode())
    else:
        show_table(checks_table(found))
        for check in found:
            if check.do:
                tell(f"{check.what}: {check.do}")
    if any(check.state == checks.BAD for check in found):
        sys.exit(ExitStatus.UNSOUND)


def _about(where: str, service: Path | None) -> Iterator[CheckView]:
    """Check the files that are meant, in so far as they can be read."""
    with expected_errors():
        if "://" in where:
            raise typer.BadParameter("doctor looks at files: give PLAN.toml or SERVICE.toml")
        try:
            with open_local(where, service, make=False) as target:
                yield from _files(target)
        except FleetError as error:
            yield CheckView("files", checks.BAD, error.text, "mend the file that it names")


def _files(target: LocalTarget) -> Iterator[CheckView]:
    settings = target.settings or ServiceSettings()
    plans, places, running = list[Plan](), list[RunPlace](), False
    host = target.host() if target.has_runs else None
    for run in [] if host is None else host.runs:
        running = running or run.running
        try:
            place = target.place(run.name)
            places.append(place)
            plan = target.plan(run.name) if place.plan else None
        except FleetError as error:
            yield CheckView(
                f"run {run.name}", checks.BAD, error.text, "mend its plan, or remove it"
            )
            continue
        if plan is not None:
            plans.append(plan)
            yield from checks.check_plan(plan, settings, run.name)
        yield checks.check_run(place, plan)
    served = running or (host is not None and host.running)
    yield from checks.check_ports(settings, running=served)
    yield from checks.check_gateways(settings)
    yield from checks.check_bus(settings, [plan.name for plan in plans])
    yield from checks.check_tls(settings, time.time())
    yield from checks.check_identities(settings)
    largest = max(plans, key=lambda plan: plan.round.cohort, default=None)
    yield checks.check_files(settings, largest)
    yield checks.check_clock(places, time.time())

"""``fleetlearn-coordinator algorithms``: the own algorithms that installed packages bring."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from fleetlearn_protocol.typer_app import plain_table, show_table

from fleetlearn_coordinator.commands.exits import expected_errors
from fleetlearn_coordinator.commands.options import AsJson
from fleetlearn_coordinator.commands.show import tell

app = typer.Typer()
OF_DEVICES = ("local algorithm", "device function")
"""Kinds that their owners allow by --allow-function, not the service file."""


class OwnAlgorithmView(msgspec.Struct, frozen=True):
    """An own algorithm that an installed package gives a short name."""

    kind: str
    name: str
    """The short name, by which plans and scenarios name it."""
    function: str
    """``module:function``, by which they may name it as well."""
    package: str
    """The installed package, and its version."""
    allowed: bool
    """Whether the service file lists the module."""


@app.command()
def algorithms(
    service: Annotated[
        Path | None,
        typer.Argument(
            metavar="[SERVICE.toml]",
            help="The service file, whose [plugins] say what is allowed. Default: service.toml of "
            "this folder, if there is one.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the kinds of own algorithms, and those that installed packages give short names; which
    of them plans may name. Nothing of them is imported."""
    from fleetlearn_coordinator.plan.own_algorithms import POINTS
    from fleetlearn_coordinator.plan.service_settings import ServiceSettings

    if service is None and Path("service.toml").is_file():
        service = Path("service.toml")
    with expected_errors():
        settings = ServiceSettings() if service is None else ServiceSettings.load(service)
    listed = () if settings.plugins is None else settings.plugins.modules
    found = installed_algorithms(listed)
    if as_json:
        print(msgspec.json.encode(found).decode())
        return
    table = plain_table("kind", "short name", "function", "package", "allowed", wraps="allowed")
    kinds = dict.fromkeys([*POINTS, *(each.kind for each in found)])
    for kind in kinds:
        rows = [each for each in found if each.kind == kind]
        for each in rows:
            table.add_row(kind, each.name, each.function, each.package, _allowed(each))
        if not rows:
            table.add_row(kind, "none", "", "", "")
    show_table(table)
    if lacking := sorted({_top(each) for each in found if not _may(each)}):
        tell(
            f"to allow them: [plugins] modules = {msgspec.json.encode(lacking).decode()} in the "
            "service file; their code runs in the coordinator's process"
        )


def installed_algorithms(listed: tuple[str, ...]) -> list[OwnAlgorithmView]:
    """Return what installed packages give short names, by kind and name. ``listed``: modules."""
    from fleetlearn_protocol.extensions import GROUP, is_within

    found = []
    seen = set[str]()
    for package in metadata.distributions():
        if package.name in seen:  # the first on the path hides another version
            continue
        seen.add(package.name)
        for each in package.entry_points:
            if each.group.startswith(f"{GROUP}."):
                kind = each.group.removeprefix(f"{GROUP}.").replace("-", " ")
                version, allowed = (
                    f"{package.name} {package.version}",
                    is_within(each.module, listed),
                )
                found.append(OwnAlgorithmView(kind, each.name, each.value, version, allowed))
    return sorted(found, key=lambda each: (each.kind, each.name))


def _may(each: OwnAlgorithmView) -> bool:
    return each.allowed or each.kind in OF_DEVICES


def _allowed(each: OwnAlgorithmView) -> str:
    if each.kind in OF_DEVICES:
        return f"by devices: --allow-function {each.name}"
    return "yes" if each.allowed else f"no: {_top(each)} is not listed"


def _top(each: OwnAlgorithmView) -> str:
    return each.function.partition(":")[0].partition(".")[0]

"""``fleetlearn-coordinator serve``, and the gateways that it may start."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from fleetlearn_protocol.errors import Code

from fleetlearn_coordinator.commands.exits import expected_errors
from fleetlearn_coordinator.commands.logs import log_at
from fleetlearn_coordinator.gateways.engine_host import SOCKET
from fleetlearn_coordinator.gateways.gateway import serve_gateway
from fleetlearn_coordinator.gateways.replacing import START_AGAIN
from fleetlearn_coordinator.gateways.standby_group import supervise_when_it_serves
from fleetlearn_coordinator.gateways.supervisor import Supervised, held_port, supervise
from fleetlearn_coordinator.network.tls import Certificates
from fleetlearn_coordinator.plan.plan import Plan
from fleetlearn_coordinator.plan.service_settings import (
    ServiceError,
    ServiceSettings,
    is_service_file,
)
from fleetlearn_coordinator.service.serve import REPLACED, RunResult, check_alone, serve_engine
from fleetlearn_coordinator.service.serve import serve as serve_plan
from fleetlearn_coordinator.service.several_runs import serve_runs

app = typer.Typer()
PROGRAM = "fleetlearn-coordinator"


@app.command()
def serve(
    plan: Annotated[
        Path,
        typer.Argument(
            metavar="FILE.toml",
            help="The plan of a run, or a service file that names a folder of runs.",
        ),
    ],
    service: Annotated[
        Path | None,
        typer.Option(
            metavar="SERVICE.toml",
            help="Address, limits and the like. Default: every key's default.",
        ),
    ] = None,
    stay: Annotated[bool, typer.Option(help="Once finished, go on telling devices so.")] = False,
    standby: Annotated[
        bool,
        typer.Option(help="Wait while another coordinator serves the run, and go on after it."),
    ] = False,
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
    log_format: Annotated[
        str | None,
        typer.Option(help="text, or json: a line of JSON for each. Default: the service file's."),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            help="Port of /metrics, /healthz and /readyz; 0: any. Default: [metrics] of the file.",
            min=0,
            max=65535,
        ),
    ] = None,
    gateways: Annotated[
        int | None,
        typer.Option(
            help="Processes that hold the devices' connections. 0: this one. Default: the service "
            "file's.",
            min=0,
            max=64,
        ),
    ] = None,
    engine: Annotated[bool, typer.Option(hidden=True)] = False,
    bus: Annotated[Path | None, typer.Option("--socket", hidden=True)] = None,
) -> None:
    """Run a plan's training, or go on with it. Ends by itself when a stop rule is met; SIGTERM
    stops it cleanly.

    With a service file that has the key runs: serve all of its runs (`fleetlearn-coordinator run`),
    until SIGTERM."""
    with expected_errors():
        several = is_service_file(plan)
        if several and (service is not None or stay or standby):
            raise typer.BadParameter(
                f"{plan} is a service file with runs: --service, --stay and --standby are for a "
                "plan"
            )
        file = plan if several else service
        settings = ServiceSettings.load(file) if file else ServiceSettings()
        settings = settings.with_metrics_port(metrics_port).with_gateways(gateways)
        log_at(log_level, log_format or settings.log_format)
        if several and (engine or not settings.gateways):
            if serve_runs(settings, engine=engine) == REPLACED:
                sys.exit(START_AGAIN)
        elif engine:
            _end(
                serve_engine(
                    Plan.load(plan), service=settings, stay=stay, standby=standby, socket=bus
                )
            )
        elif settings.gateways:
            common = ["--gateways", str(settings.gateways), "--log-level", log_level]
            common += [] if log_format is None else ["--log-format", log_format]
            own = [] if service is None else ["--service", str(service)]
            own += ["--stay"] if stay else []
            own += ["--standby"] if standby else []
            own += [] if metrics_port is None else ["--metrics-port", str(metrics_port)]
            folder = settings.runs if several else _folder_of(plan, settings)
            assert folder is not None
            bus = _socket_of(folder.absolute(), alone=not standby)
            common += ["--socket", str(bus)]
            of_gateway = [*common, *([] if file is None else ["--service", str(file)])]
            supervise_them = _supervise_standby if standby else _supervise
            sys.exit(supervise_them(plan, settings, [*common, *own], of_gateway, bus))
        else:  # its last words are in the log
            _end(serve_plan(Plan.load(plan), service=settings, stay=stay, standby=standby))


def _end(result: RunResult) -> None:
    """End the process with START_AGAIN where another is to take its place."""
    if result.reason == REPLACED:
        sys.exit(START_AGAIN)


def _folder_of(plan: Path, settings: ServiceSettings) -> Path:
    """Return the data directory of a plan that this service can serve."""
    loaded = Plan.load(plan)
    check_alone(loaded, settings)
    return loaded.data_dir


def _supervise(
    file: Path,
    settings: ServiceSettings,
    of_engine: Sequence[str],
    of_gateway: Sequence[str],
    bus: Path,
) -> int:
    """Serve a plan, or the runs of a service, by an engine process and gateways, which have these
    options. ``bus``: the socket between them. Returns the exit status."""
    if settings.tls is not None:
        Certificates(settings.tls)  # each gateway would say the same of files that cannot be used
    with held_port(settings.host, settings.port) as port:
        gateway = [*_program(), "gateway", *of_gateway, "--port", str(port)]
        return supervise(
            Supervised(
                [*_program(), "serve", str(file), "--engine", *of_engine],
                [gateway] * settings.gateways,
                (settings.host, port),
            )
        )


def _supervise_standby(
    file: Path,
    settings: ServiceSettings,
    of_engine: Sequence[str],
    of_gateway: Sequence[str],
    bus: Path,
) -> int:
    """Do what ``_supervise`` does, with gateways only while nobody else serves the run."""
    if not settings.port:
        raise ServiceError(
            Code.BAD_MESSAGE,
            "port = 0 with --standby and gateways: the port is taken again whenever this "
            "coordinator serves. Give it a number",
        )
    if settings.tls is not None:
        Certificates(settings.tls)
    gateway = [*_program(), "gateway", *of_gateway, "--port", str(settings.port)]
    commands = Supervised(
        [*_program(), "serve", str(file), "--engine", *of_engine],
        [gateway] * settings.gateways,
        (settings.host, settings.port),
    )
    return supervise_when_it_serves(commands, bus)


def _socket_of(folder: Path, *, alone: bool) -> Path:
    """Return the socket between an engine process and its gateways. Two coordinators that stand by
    for each other may share the folder (not ``alone``): each has a socket of its own."""
    name = Path(SOCKET)
    return folder / (SOCKET if alone else f"{name.stem}-{os.getpid()}{name.suffix}")


def _program() -> list[str]:
    """Return the command that started this process. Where its path goes through a link, processes
    that are started later are of the release to which the link points then."""
    started = Path(sys.argv[0])
    if started.name == PROGRAM:
        return [str(started.absolute())]
    return [sys.executable, "-m", "fleetlearn_coordinator"]


@app.command(hidden=True)
def gateway(
    number: Annotated[int, typer.Option(help="This gateway's, from 0 on.", min=0)],
    gateways: Annotated[int, typer.Option(help="How many gateways there are.", min=1)],
    bus: Annotated[Path, typer.Option("--socket", help="Where the engine process listens.")],
    port: Annotated[int, typer.Option(help="TCP port that the gateways share.", min=1, max=65535)],
    service: Annotated[Path | None, typer.Option(help="The service file.")] = None,
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
    log_format: Annotated[str | None, typer.Option(help="text, or json.")] = None,
    listening: Annotated[
        str, typer.Option(help="Descriptors of sockets that listen, with commas between.")
    ] = "",
    ready: Annotated[
        int | None, typer.Option(help="Descriptor that gets a line once devices are served.")
    ] = None,
) -> None:
    """Hold connections of devices for `serve --gateways`, which starts this command.

    It ends when its standard input ends, or by SIGINT; by SIGTERM once its devices have gone to
    other gateways."""
    with expected_errors():
        settings = ServiceSettings.load(service) if service else ServiceSettings()
        log_at(log_level, log_format or settings.log_format)
        if number >= 2 * gateways:  # a gateway and its replacement have two numbers in turns
            raise ServiceError(
                Code.BAD_MESSAGE, f"--number {number} was given; there are {gateways} gateways"
            )
        sockets = [_inherited(int(each)) for each in listening.split(",") if each]
        settings = settings.with_gateways(gateways).at_port(port)
        serve_gateway(settings, number, gateways, bus, listening=sockets, ready=ready)


def _inherited(descriptor: int) -> socket.socket:
    one = socket.socket(fileno=descriptor)
    one.setblocking(False)
    return one

"""The text of a systemd service that serves a plan or a host, with all the bounds that a
coordinator can live with. Every setting is explained in systemd.exec(5)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from fleetlearn_protocol.errors import Code
from fleetlearn_protocol.systemd import FOR_EVERY_SERVICE, FOR_THE_SYSTEM, HOMES, quoted

from fleetlearn_coordinator.plan.service_settings import ServiceSettings
from fleetlearn_coordinator.service.backup_contents import BackupError, find_contents, plain

STATE = Path("/var/lib")
"""Below it systemd gives a service its own folder (StateDirectory=)."""
OPEN_FILES = 65536

OF_A_SUPERVISOR = """\
KillMode=mixed
# Replaces gateways and engine process one after the other, with devices connected.
ExecReload=/bin/kill -USR1 $MAINPID
"""
UNIT = """\
[Unit]
Description=fleetlearn coordinator of {file}
Wants=network-online.target
After=network-online.target
# After five failed starts in ten minutes it stays down, and `systemctl status` says why.
StartLimitIntervalSec=600
StartLimitBurst=5

[Service]
Type=notify
NotifyAccess={notify}
{supervisor}ExecStart={command}
Restart=on-failure
RestartSec=5
# The coordinator says when it listens, and then once a second that it is alive.
TimeoutStartSec=600
WatchdogSec=60
TimeoutStopSec=60
LimitNOFILE={open_files}
UMask=0077
{identity}
{for_the_system}ProtectHome={home}
PrivateDevices=yes
DevicePolicy=closed
CapabilityBoundingSet={capabilities}
AmbientCapabilities={capabilities}
PrivateUsers={private_users}
MemoryDenyWriteExecute=yes
ProcSubset=pid
{for_every_service}
[Install]
WantedBy=multi-user.target
"""


class ServiceUnit(NamedTuple):
    """A service to be installed."""

    text: str
    user: str | None
    """None: systemd makes one when the service starts (DynamicUser=)."""
    folder: Path
    """The folder in which the service's files are."""
    remarks: list[str]
    """What to look at before it is started."""


def make_unit(
    source: Path,
    *,
    name: str,
    service: Path | None = None,
    user: str | None = None,
    command: str | None = None,
) -> ServiceUnit:
    """Return the unit of a service that serves a plan or a host's service file.

    ``name``: the unit's, without ``.service``. ``service``: the service file with which a plan is
    served. ``user``: an account that is there; None: DynamicUser=, for which all that is written
    must lie in ``/var/lib/NAME``. ``command``: the program ``fleetlearn-coordinator``; None: this
    environment's. Raises BackupError (a plan's folder is not where it can be written), PlanError,
    ServiceError, StoreError.
    """
    contents = find_contents(source, service, keys=True)
    written = [run.data for run in contents.runs]
    written += [each for each in (contents.run_folder, contents.identities) if each is not None]
    used = [plain(source), *contents.toml, *contents.files, *written]
    state = STATE / name
    if user is None:
        outside = [path for path in written if not path.is_relative_to(state)]
        if outside:
            raise BackupError(
                Code.BAD_MESSAGE,
                f"{outside[0]} is written by the coordinator, and a service without an account of "
                f"its own may write in {state} alone: move the plan's folder there, or name an "
                "account with --user",
            )
        identity = f"DynamicUser=yes\nStateDirectory={name}\nStateDirectoryMode=0700"
    else:
        places = " ".join(map(quoted, sorted({str(path.parent) for path in written})))
        identity = f"User={user}\nReadWritePaths={places}"
    program = plain(Path(command or Path(sys.executable).with_name("fleetlearn-coordinator")))
    words = [str(program), "serve", str(plain(source))]
    settings = ServiceSettings()
    if contents.service is not None:
        settings = ServiceSettings.load(contents.service)
        if contents.service != plain(source):
            words += ["--service", str(contents.service)]
    at_home = any(str(path).startswith(HOMES) for path in (*used, program))
    low = min(port for port in _ports(settings) if port) < 1024
    text = UNIT.format(
        file=plain(source),
        command=" ".join(map(quoted, words)),
        open_files=OPEN_FILES,
        # With gateways the main process supervises: the engine process says how it is, and what the
        # main one has started is ended by it.
        notify="all" if settings.gateways else "main",
        supervisor=OF_A_SUPERVISOR if settings.gateways else "",
        identity=identity,
        for_the_system=FOR_THE_SYSTEM,
        for_every_service=FOR_EVERY_SERVICE,
        home="read-only" if at_home else "yes",
        capabilities="CAP_NET_BIND_SERVICE" if low else "",
        private_users="no" if low else "yes",
    )
    remarks = []
    if not program.is_file():
        remarks.append(f"{program} is not there: install fleetlearn, or name it with --command")
    if at_home and user is None:
        remarks.append(
            "the service's account cannot read what lies in a home folder: install fleetlearn and "
            f"keep the plan elsewhere, such as in /opt and {state}"
        )
    return ServiceUnit(text, user, plain(source).parent, remarks)


def _ports(settings: ServiceSettings) -> list[int]:
    ports = [settings.port]
    ports += [part.port for part in (settings.admin, settings.page, settings.metrics) if part]
    return [port for port in ports if port] or [1024]

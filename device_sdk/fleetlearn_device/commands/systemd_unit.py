"""The text of a systemd service that serves a coordinator, with all the bounds that a device can
live with. Every setting is explained in systemd.exec(5) and systemd.service(5)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from fleetlearn_protocol.paths import in_home
from fleetlearn_protocol.systemd import FOR_EVERY_SERVICE, FOR_THE_SYSTEM, HOMES, quoted

from fleetlearn_device.settings.sources import SettingError, Values
from fleetlearn_device.settings.table import SETTINGS

STATE = Path("/var/lib")
"""Below it systemd gives a service its own folder (StateDirectory=)."""
RUN = Path("/run")
"""The same for what lasts as long as the service runs, such as a socket (RuntimeDirectory=)."""

NO_RESTART = {
    2: "wrong settings, or data that do not fit",
    3: "another process speaks for the same device: the two would replace each other for ever",
    4: "no coordinator ever let the device in: it needs another token",
}
"""Exit status after which starting again would help nobody -> what it means. The others, such as a
full disk, may heal."""

UNIT = """\
[Unit]
Description=fleetlearn device
Wants=network-online.target
After=network-online.target
# Nobody is near: it is started again for ever, a minute apart.
StartLimitIntervalSec=0

[Service]
Type=notify
NotifyAccess=main
ExecStart={command}
Restart=on-failure
RestartSec=60
# Exit statuses that no start again can mend: `fleetlearn-device run --help`.
RestartPreventExitStatus={no_restart}
# The device says when it has begun, and then that its event loop turns and that training gets on.
TimeoutStartSec=300
WatchdogSec=120
# A task under way is given back; the last step ends first.
TimeoutStopSec=90
UMask=0077
# Others on this machine come first.
Nice=10
IOSchedulingPriority=7
{identity}{token}{for_the_system}{gpu}{for_every_service}
[Install]
WantedBy={target}
"""


class DeviceUnit(NamedTuple):
    """A service to be installed."""

    text: str
    remarks: list[str]
    """What to look at before it is started."""


def make_unit(
    config: Path,
    values: Values,
    *,
    name: str,
    user: str | None = None,
    own: bool = False,
    token: Path | None = None,
    command: Path | None = None,
) -> DeviceUnit:
    """Return the unit of a service that runs a device with a settings file.

    ``values``: what the file says. ``name``: the unit's, without ``.service``. ``user``: an account
    that is there; None: systemd makes one (DynamicUser=). ``own``: a unit of the user who installs
    it, without root. ``token``: the file from which systemd hands the token over. ``command``: the
    program ``fleetlearn-device``; None: this environment's. Raises SettingError.
    """
    program = plain(command or Path(sys.executable).with_name("fleetlearn-device"))
    words = [quoted(str(program)), "run", "--config", quoted(str(plain(config)))]
    found = values["state"].value
    state = STATE / name if found is None else plain(in_home(found))
    if own and found is None:
        raise SettingError(
            f"{config}: state is not set; a service of yours alone needs it, such as "
            'state = "~/.fleetlearn"'
        )
    if not own and found is None:
        words += ["--state", quoted(str(state))]
    if token is not None:
        words += ["--token-file", "${CREDENTIALS_DIRECTORY}/token"]
    written = [state, *(plain(in_home(each)) for each in _other_files(values))]
    identity = "" if own else _identity(name, user, state, written)
    cuda = values["training.provider"].value == "cuda"
    read = [program, plain(config), *written, *_files_read(values)]
    at_home = any(str(path).startswith(HOMES) for path in read)
    text = UNIT.format(
        command=" ".join(words),
        no_restart=" ".join(map(str, NO_RESTART)),
        identity=identity,
        token="" if token is None else f"LoadCredential=token:{plain(token)}\n",
        for_the_system=""
        if own
        else f"{FOR_THE_SYSTEM}ProtectHome={'read-only' if at_home else 'yes'}\n"
        "CapabilityBoundingSet=\nAmbientCapabilities=\nPrivateUsers=yes\n",
        gpu="" if own else _devices(cuda),
        for_every_service=FOR_EVERY_SERVICE,
        target="default.target" if own else "multi-user.target",
    )
    remarks = _remarks(program, state, written, user, own, at_home, token)
    if values["socket"].value is not None and user is None and not own:
        remarks.append(
            "the socket is for the service's account alone, which no program has: name theirs with "
            "--user"
        )
    return DeviceUnit(text, remarks)


def _identity(name: str, user: str | None, state: Path, written: list[Path]) -> str:
    """Return the lines that say who the service is and what it may write."""
    place = STATE / name
    if user is None and not state.is_relative_to(place):
        raise SettingError(
            f"state is {state}, and a service without an account of its own may write in {place} "
            f"alone: leave state out, set it to {place}, or name an account with --user"
        )
    lines = [f"User={user}"] if user is not None else ["DynamicUser=yes"]
    outside = {str(path.parent) for path in written[1:] if not path.is_relative_to(place)}
    runtime = {each for each in outside if Path(each).parent == RUN}
    outside -= runtime
    if state.is_relative_to(place):
        lines += [f"StateDirectory={name}", "StateDirectoryMode=0700"]
    else:
        outside.add(str(state))
    if runtime:
        lines.append(f"RuntimeDirectory={' '.join(sorted(Path(each).name for each in runtime))}")
    if outside:
        lines.append(f"ReadWritePaths={' '.join(map(quoted, sorted(outside)))}")
    return "\n".join(lines) + "\n"


def _devices(cuda: bool) -> str:
    if cuda:
        return (
            "# A GPU: its device files, and CUDA's compiler, which writes code into memory.\n"
            "PrivateDevices=no\n"
        )
    return "PrivateDevices=yes\nDevicePolicy=closed\nMemoryDenyWriteExecute=yes\n"


def _other_files(values: Values) -> list[str]:
    keys = ("socket", "training.own_model", "log.file", "log.metrics_file")
    return [values[key].value for key in keys if values[key].value is not None]


def _files_read(values: Values) -> list[Path]:
    """Return every other path of the settings."""
    return [
        plain(in_home(values[row.key].value))
        for row in SETTINGS
        if row.kind.path and values[row.key].value is not None
    ]


def _remarks(
    program: Path,
    state: Path,
    written: list[Path],
    user: str | None,
    own: bool,
    at_home: bool,
    token: Path | None,
) -> list[str]:
    remarks = []
    if not program.is_file():
        remarks.append(f"{program} is not there: install fleetlearn, or name it with --command")
    if token is not None and not token.is_file():
        remarks.append(f"put the token into {token}, which root alone may read: chmod 600")
    if own:
        return remarks
    if at_home and user is None:
        remarks.append(
            "the service's account cannot read what lies in a home folder: install fleetlearn in "
            "/opt/fleetlearn, and keep the settings and the data in /etc/fleetlearn and /srv"
        )
    if user is not None and not state.is_relative_to(STATE):
        remarks.append(f"{state} must be there, and be {user}'s: sudo install -d -o {user} {state}")
    outside = {path.parent for path in written[1:] if not path.is_relative_to(state)}
    outside = {each for each in outside if each.parent != RUN}
    rest = [f"the service's account must be able to write in {each}" for each in sorted(outside)]
    return remarks + rest


def plain(path: Path) -> Path:
    """Return an absolute path without ``..``; links stay, since they may be changed on purpose."""
    return Path(path.absolute().as_posix()) if ".." not in path.parts else path.resolve()

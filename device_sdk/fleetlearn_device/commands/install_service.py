"""``fleetlearn-device install-service``: a systemd service that serves from boot on."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fleetlearn_device.settings.sources import (
    SettingError,
    add_flags,
    config_path,
    read_settings,
    required,
)

EPILOG = """examples:
  sudo /opt/fleetlearn/bin/fleetlearn-device install-service --config /etc/fleetlearn/device.toml \\
      --credential /etc/fleetlearn/token
  fleetlearn-device install-service --config ~/.config/fleetlearn/device.toml --user-unit
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what a unit needs to know."""
    parser.description = (
        "Write a systemd service that runs the device with a settings file from boot on, and may\n"
        "do little else. Start it yourself: the command says how."
    )
    parser.epilog = EPILOG
    add_flags(parser, only=())
    parser.add_argument(
        "--name",
        default="fleetlearn-device",
        metavar="NAME",
        help="of the service; default: fleetlearn-device",
    )
    parser.add_argument(
        "--user", metavar="ACCOUNT", help="who it runs as; default: one that systemd makes for it"
    )
    parser.add_argument(
        "--user-unit",
        action="store_true",
        help="a service of yours alone, without root's rights; it has fewer bounds",
    )
    parser.add_argument(
        "--credential",
        type=Path,
        metavar="FILE",
        help="file with the token, which systemd reads for the service (LoadCredential=)",
    )
    parser.add_argument(
        "--command",
        dest="program",
        type=Path,
        metavar="FILE",
        help="the program fleetlearn-device; default: this environment's",
    )
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where systemd finds units")
    parser.add_argument("--dry-run", action="store_true", help="print the unit, and write nothing")


def run(options: argparse.Namespace) -> int:
    """Write the unit. Returns the exit status."""
    from fleetlearn_protocol.systemd import write_unit

    from fleetlearn_device.commands.systemd_unit import make_unit

    config = config_path(options)
    if config is None:
        raise SettingError(
            "a service has its settings in a file: give --config FILE, such as "
            "/etc/fleetlearn/device.toml"
        )
    # The environment of this shell is not the service's.
    values = read_settings(options, {"FLEETLEARN_CONFIG": config})
    for key in ("coordinator", "data.source"):
        required(values, key)
    own = options.user_unit
    if own and options.user is not None:
        raise SettingError("--user-unit and --user were given; expected one of them")
    unit = make_unit(
        Path(config),
        values,
        name=options.name,
        user=options.user,
        own=own,
        token=options.credential,
        command=options.program,
    )
    folder = options.folder or (
        Path.home() / ".config/systemd/user" if own else Path("/etc/systemd/system")
    )
    path = folder / f"{options.name}.service"
    if options.dry_run:
        print(unit.text, end="")
    else:
        folder.mkdir(parents=True, exist_ok=True)
        write_unit(path, unit.text)
    for remark in unit.remarks:
        _say(f"first: {remark}")
    if options.dry_run:
        _say(f"nothing was written; without --dry-run it would be {path}")
        return 0
    _say(f"wrote {path}. Next:")
    control = "systemctl --user" if own else "sudo systemctl"
    if own:
        _say("    loginctl enable-linger     # so that it runs while nobody is logged in")
    _say(f"    {control} daemon-reload")
    _say(f"    {control} enable --now {options.name}")
    show = "journalctl --user-unit" if own else "journalctl -u"
    _say(f"    {control.removeprefix('sudo ')} status {options.name}; {show} {options.name} -f")
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr)

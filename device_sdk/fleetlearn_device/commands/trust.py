"""``fleetlearn-device trust``: change the public keys that the device trusts."""

from __future__ import annotations

import argparse

from fleetlearn_device.commands.exits import fail
from fleetlearn_device.settings.sources import add_flags, state_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the keys, and the flags that say which device is meant."""
    add_flags(parser, only=["state"])
    parser.add_argument(
        "keys", nargs="+", metavar="KEY", help="trusted from then on, and no others are"
    )


def run(options: argparse.Namespace) -> int:
    """Write the keys. Returns the exit status."""
    from fleetlearn_device.storage.errors import os_errors_as_state_errors
    from fleetlearn_device.storage.state_directory import state_folder
    from fleetlearn_device.storage.trusted_keys import checked_keys, write_trusted_keys

    folder = state_folder(state_path(options))
    with os_errors_as_state_errors(folder):
        found = (folder / "identity.json").exists()
    if not found:
        return fail(1, f"{folder} is not a device's state directory")
    try:
        write_trusted_keys(folder, checked_keys(options.keys))
    except ValueError as error:
        return fail(2, str(error))
    print("from its next start on the device does only tasks that these keys signed")
    return 0

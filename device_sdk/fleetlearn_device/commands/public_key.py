"""``fleetlearn-device public-key``: the device's line in the roster of a helper."""

from __future__ import annotations

import argparse

from fleetlearn_device.commands.exits import fail
from fleetlearn_device.settings.sources import add_flags, read_settings, required


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which device is meant."""
    parser.description = (
        "Print the device's name and its public key (Ed25519): its line in the roster of the "
        "helper of secure\naggregation. The first call makes the key, and the state directory "
        "with the device's name where\nthere is none."
    )
    add_flags(parser, only=["state", "name"])


def run(options: argparse.Namespace) -> int:
    """Print the line. Returns the exit status."""
    values = read_settings(options)
    given, name = required(values, "state"), values["name"].value

    from fleetlearn_protocol.errors import FleetError

    from fleetlearn_device.driver.signatures import public_key_of
    from fleetlearn_device.storage.device_key import device_key
    from fleetlearn_device.storage.state_directory import device_in, state_folder

    folder = state_folder(given)
    device = device_in(folder, name)
    try:
        print(device, public_key_of(device_key(folder)).hex())
    except FleetError as error:
        return fail(1, error.text)
    return 0

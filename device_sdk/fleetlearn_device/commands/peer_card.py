"""``fleetlearn-device peer-card``: the device's entry in the peers' address book."""

from __future__ import annotations

import argparse

from fleetlearn_device.commands.exits import fail
from fleetlearn_device.settings.sources import add_flags, read_settings, required


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which device is meant."""
    parser.description = (
        "Print the device's entry in the address book of peers: name, address, certificate. Put "
        "the entries of\nall devices into one file, and give all devices that file: "
        "docs/start/peers.md. The first call makes\nthe device's key, and the state directory "
        "where there is none."
    )
    add_flags(parser, only=["state", "name"])
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="where the other peers reach this device; default: none, for --discover",
    )


def run(options: argparse.Namespace) -> int:
    """Print the entry. Returns the exit status."""
    values = read_settings(options)
    given, name = required(values, "state"), values["name"].value

    from fleetlearn_protocol.errors import FleetError

    from fleetlearn_device.peers.book import split_address
    from fleetlearn_device.peers.certificate import card, own_certificate
    from fleetlearn_device.storage.device_key import device_key
    from fleetlearn_device.storage.state_directory import device_in, state_folder

    if options.address is not None:
        try:
            split_address(options.address)
        except ValueError as error:
            return fail(2, str(error))
    folder = state_folder(given)
    device = device_in(folder, name)
    try:
        print(card(device, options.address, own_certificate(folder, device, device_key(folder))))
    except FleetError as error:
        return fail(1, error.text)
    return 0

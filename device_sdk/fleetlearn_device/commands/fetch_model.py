"""``fleetlearn-device fetch-model``: the newest model, without taking part."""

from __future__ import annotations

import argparse

from fleetlearn_device.commands.exits import fail
from fleetlearn_device.settings.sources import add_flags, read_settings, required

FLAGS = (
    "coordinator",
    "state",
    "name",
    "connection.ca",
    "connection.certificate",
    "connection.key",
    "connection.insecure",
    "connection.token",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.description = (
        "Fetch the newest shared model without taking part, where the coordinator's plan gives it\n"
        "([models] give = true), for `predict` and `export-model`. Needs no data."
    )
    add_flags(parser, only=FLAGS)


def run(options: argparse.Namespace) -> int:
    """Fetch it. Returns the exit status."""
    values = read_settings(options)
    value = {key: values[key].value for key in FLAGS}
    for key in ("coordinator", "state"):
        required(values, key)

    import asyncio

    from fleetlearn_device.driver.address import checked_address, read_token
    from fleetlearn_device.driver.newest_model import NoNewestModelError, fetch_newest_model
    from fleetlearn_device.driver.timing import Timing
    from fleetlearn_device.storage.state_directory import StateDirectory

    try:
        address = checked_address(
            value["coordinator"],
            ca=value["connection.ca"],
            certificate=value["connection.certificate"],
            key=value["connection.key"],
            insecure=value["connection.insecure"],
        )
        token = value["connection.token"]
        secret = None if token is None else read_token(token)[0]
    except ValueError as error:
        return fail(2, str(error))
    directory = StateDirectory(value["state"], value["name"])
    try:
        model = asyncio.run(fetch_newest_model(address, directory, secret, Timing()))
    except NoNewestModelError as error:
        return fail(1, str(error))
    finally:
        directory.close()
    print(f"model {model.model[:12]} of bundle {model.name} is in use")
    return 0

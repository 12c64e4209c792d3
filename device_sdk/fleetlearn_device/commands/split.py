"""``fleetlearn-device split``: take part in a split run, with rows of this device's own."""

from __future__ import annotations

import argparse
import logging

from fleetlearn_device.commands.exits import fail
from fleetlearn_device.settings.sources import add_flags, read_settings, required

log = logging.getLogger("fleetlearn.device")

SETTINGS = (
    "coordinator",
    "data.source",
    "limits.threads",
    "connection.ca",
    "connection.certificate",
    "connection.key",
    "connection.insecure",
    "connection.token",
    "connection.token_file",
    "log.level",
    "log.format",
)

EXIT = """exit status:
  0    the training is finished
  1    the runtime cannot be used, or the run failed
  2    wrong usage or settings, or data that do not fit
  4    the coordinator does not let this device in, or has ended the run
  130  stopped by SIGINT (Ctrl-C)

A device whose coordinator is away goes on trying. It keeps nothing: one that was stopped or killed
gets the newest bottom when it is started again.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.description = (
        "Train the first layers of a model that is divided at a layer, with other devices that "
        "have other rows.\nRows stay here; the bottom's activations and the labels go to the "
        "coordinator, and gradients come back."
    )
    parser.epilog = EXIT
    add_flags(parser, only=list(SETTINGS))
    parser.add_argument(
        "--bundle", required=True, metavar="BUNDLE", help="the bottom, device.bundle"
    )
    parser.add_argument(
        "--name", required=True, metavar="NAME", help="this device's name in the run"
    )


def run(options: argparse.Namespace) -> int:
    """Take part until the training is over. Returns the exit status."""
    values = read_settings(options)
    for key in ("coordinator", "data.source"):
        required(values, key)
    import asyncio

    from fleetlearn_protocol.bundle import open_bundle
    from fleetlearn_protocol.command_line import needs
    from fleetlearn_protocol.errors import FleetError

    from fleetlearn_device.commands.logs import begin_log
    from fleetlearn_device.commands.run import token_in

    with needs("fleetlearn-device", "device"):
        from fleetlearn_device.runtimes.checks import DataError
        from fleetlearn_device.runtimes.sessions import StepError
        from fleetlearn_device.runtimes.split import part_of
        from fleetlearn_device.vertical.party_connection import (
            PartyRefusedError,
            PartySettings,
            take_part,
        )
        from fleetlearn_device.vertical.party_table import read_own_rows
        from fleetlearn_device.vertical.split_device import SplitDevice
    from fleetlearn_device.driver.address import checked_address

    begin_log(values)
    names = ("ca", "certificate", "key", "insecure")
    try:
        address = checked_address(
            values["coordinator"].value,
            **{name: values[f"connection.{name}"].value for name in names},
        )
        bundle = open_bundle(options.bundle)
        part_of(bundle, "bottom")
        rows = read_own_rows(values["data.source"].value, bundle.manifest)
        trainer = SplitDevice(bundle, rows, values["limits.threads"].value or 1)
        token = values["connection.token"].value or token_in(values)
        asyncio.run(take_part(PartySettings(address, options.name, token), trainer))
        log.info("the training is over")
    except (DataError, ValueError) as error:
        return fail(2, str(error))
    except PartyRefusedError as error:
        return fail(4, str(error))
    except (StepError, FleetError) as error:
        return fail(1, error.text if isinstance(error, FleetError) else str(error))
    except KeyboardInterrupt:
        return 130
    return 0

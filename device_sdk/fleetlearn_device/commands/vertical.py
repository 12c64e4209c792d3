"""``fleetlearn-device vertical``: take part in a vertical run as a party."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from fleetlearn_device.commands.exits import fail
from fleetlearn_device.settings.sources import add_flags, read_settings, required

log = logging.getLogger("fleetlearn.device")

SETTINGS = (
    "coordinator",
    "state",
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
  1    the state directory or the runtime cannot be used, or the run failed
  2    wrong usage or settings, or data that do not fit
  4    the coordinator does not let this party in, or has ended the run
  130  stopped by SIGINT (Ctrl-C)

A party whose coordinator is away, or that waits for the others, goes on trying. One that was
stopped or killed goes on from the last checkpoint that all have when it is started again.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.description = (
        "Train this party's bottom of a split model, with other parties that have other features "
        "of the same\nrows. Rows and ids stay here; activations of the bottom go to the "
        "coordinator, and gradients come back."
    )
    parser.epilog = EXIT
    add_flags(parser, only=list(SETTINGS))
    parser.add_argument(
        "--bundle", required=True, metavar="BUNDLE", help="this party's bottom, NAME.bundle"
    )
    parser.add_argument(
        "--ids", default="id", metavar="COLUMN", help="the column of the rows' ids; default: id"
    )
    parser.add_argument(
        "--rows-key",
        required=True,
        metavar="FILE",
        help="the key that the parties share and the coordinator does not know, by which ids are "
        "hashed: openssl rand -hex 32",
    )


def run(options: argparse.Namespace) -> int:
    """Take part until the training is over. Returns the exit status."""
    values = read_settings(options)
    for key in ("coordinator", "state", "data.source"):
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
        from fleetlearn_device.vertical.party import Party
        from fleetlearn_device.vertical.party_connection import (
            PartyRefusedError,
            PartySettings,
            take_part,
        )
        from fleetlearn_device.vertical.party_table import read_key, read_table
    from fleetlearn_device.driver.address import checked_address

    begin_log(values)
    names = ("ca", "certificate", "key", "insecure")
    try:
        address = checked_address(
            values["coordinator"].value,
            **{name: values[f"connection.{name}"].value for name in names},
        )
        bundle = open_bundle(options.bundle)
        party = part_of(bundle, "bottom").cuts[0].party
        table = read_table(
            values["data.source"].value, options.ids, read_key(options.rows_key), bundle.manifest
        )
        threads = values["limits.threads"].value or 1
        trainer = Party(bundle, table, Path(values["state"].value), threads)
        token = values["connection.token"].value or token_in(values)
        asyncio.run(take_part(PartySettings(address, party, token), trainer))
        log.info("the training is over; the bottom is in %s", values["state"].value)
    except (DataError, ValueError) as error:
        return fail(2, str(error))
    except PartyRefusedError as error:
        return fail(4, str(error))
    except (StepError, FleetError) as error:
        return fail(1, error.text if isinstance(error, FleetError) else str(error))
    except KeyboardInterrupt:
        return 130
    return 0

"""What ``fleetlearn-device vertical`` and ``fleetlearn-device split`` have in common: settings, the
connection, and the end."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from fleetlearn_device.commands.exits import fail
from fleetlearn_device.settings.sources import Values, read_settings, required

if TYPE_CHECKING:
    from fleetlearn_protocol.bundle import Bundle

    from fleetlearn_device.vertical.party_connection import PartyTrainer

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
"""Settings of both commands."""


class JoinedRun(NamedTuple):
    """What takes part in a run."""

    name: str
    """By which the coordinator knows this party or device."""
    trainer: PartyTrainer
    ending: str
    """What the log says once the training is over."""


def run_party(
    options: argparse.Namespace, keys: Sequence[str], join: Callable[[Values, Bundle], JoinedRun]
) -> int:
    """Take part until the training is over. Returns the exit status.

    ``keys``: settings that must be there. ``join``: makes what takes part, from the settings and
    the bundle of a bottom. It raises DataError, ValueError, StepError, FleetError.
    """
    values = read_settings(options)
    for key in keys:
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
        from fleetlearn_device.vertical.party_connection import (
            PartyRefusedError,
            PartySettings,
            take_part,
        )
    from fleetlearn_device.driver.address import checked_address

    begin_log(values)
    names = ("ca", "certificate", "key", "insecure")
    try:
        address = checked_address(
            values["coordinator"].value,
            **{name: values[f"connection.{name}"].value for name in names},
        )
        joined = join(values, open_bundle(options.bundle))
        token = values["connection.token"].value or token_in(values)
        asyncio.run(take_part(PartySettings(address, joined.name, token), joined.trainer))
        log.info("%s", joined.ending)
    except (DataError, ValueError) as error:
        return fail(2, str(error))
    except PartyRefusedError as error:
        return fail(4, str(error))
    except (StepError, FleetError) as error:
        return fail(1, error.text if isinstance(error, FleetError) else str(error))
    except KeyboardInterrupt:
        return 130
    return 0

"""``fleetlearn-device vertical``: take part in a vertical run as a party."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fleetlearn_device.commands.party_runs import SETTINGS, JoinedRun, run_party
from fleetlearn_device.settings.sources import Values, add_flags

if TYPE_CHECKING:
    from fleetlearn_protocol.bundle import Bundle

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
    add_flags(parser, only=[*SETTINGS, "state"])
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

    def join(values: Values, bundle: Bundle) -> JoinedRun:
        from fleetlearn_device.runtimes.split import part_of
        from fleetlearn_device.vertical.party import Party
        from fleetlearn_device.vertical.party_table import read_key, read_table

        party = part_of(bundle, "bottom").cuts[0].party
        source, state = values["data.source"].value, values["state"].value
        table = read_table(source, options.ids, read_key(options.rows_key), bundle.manifest)
        trainer = Party(bundle, table, Path(state), values["limits.threads"].value or 1)
        return JoinedRun(party, trainer, f"the training is over; the bottom is in {state}")

    return run_party(options, ("coordinator", "state", "data.source"), join)

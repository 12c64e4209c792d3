"""``fleetlearn-device split``: take part in a split run, with rows of this device's own."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fleetlearn_device.commands.party_runs import SETTINGS, JoinedRun, run_party
from fleetlearn_device.settings.sources import Values, add_flags

if TYPE_CHECKING:
    from fleetlearn_protocol.bundle import Bundle

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

    def join(values: Values, bundle: Bundle) -> JoinedRun:
        from fleetlearn_device.runtimes.split import part_of
        from fleetlearn_device.vertical.party_table import read_own_rows
        from fleetlearn_device.vertical.split_device import SplitDevice

        part_of(bundle, "bottom")
        rows = read_own_rows(values["data.source"].value, bundle.manifest)
        trainer = SplitDevice(bundle, rows, values["limits.threads"].value or 1)
        return JoinedRun(options.name, trainer, "the training is over")

    return run_party(options, ("coordinator", "data.source"), join)

"""``fleetlearn-device check``: data against a bundle, before the first task."""

from __future__ import annotations

import argparse
from contextlib import suppress

from fleetlearn_device.commands.exits import fail

MISFIT = 2
EXIT = f"""exit status:
  0    the data fit the bundle
  1    the bundle cannot be read
  {MISFIT}    the data do not fit, or wrong usage
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the data and the bundle."""
    parser.description = (
        "Check whether data fit a bundle, as the device does before each task: names, shapes and\n"
        "types of the arrays, and labels that the model knows. The text names array, example and\n"
        "value. Nothing is trained, and no coordinator is asked."
    )
    parser.epilog = EXIT
    parser.add_argument("data", metavar="DATA", help="as --data of `run`")
    parser.add_argument("bundle", metavar="BUNDLE", help="the bundle: a folder, or a zip file")
    parser.add_argument(
        "--allow-function",
        metavar="[NAME=]MODULE:FUNCTION",
        action="append",
        default=[],
        help="as of `run`: the bundle's function is called with the data, and what it returns is "
        "checked",
    )


def run(options: argparse.Namespace) -> int:
    """Print what was found. Returns the exit status."""
    from fleetlearn_protocol.errors import FleetError

    from fleetlearn_device.commands.doctor import show
    from fleetlearn_device.doctor.data import check_data, read_bundle
    from fleetlearn_device.doctor.functions import check_functions

    try:
        manifest = read_bundle(options.bundle)
    except FleetError as error:
        with suppress(FleetError):
            read_bundle(options.data)
            return fail(
                MISFIT,
                f"{options.data} is a bundle, and {options.bundle} is none: the data come first, "
                "as in `fleetlearn-device check DATA BUNDLE`",
            )
        return fail(1, error.text)
    findings = [
        *check_data(options.data, manifest),
        *check_functions(options.allow_function, manifest, options.data),
    ]
    for finding in findings:
        show(finding)
    return MISFIT if any(each.state == "bad" for each in findings) else 0

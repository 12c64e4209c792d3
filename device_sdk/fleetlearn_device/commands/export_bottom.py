"""``fleetlearn-device export-bottom``: write the bottom that a party of a vertical run keeps."""

from __future__ import annotations

import argparse
from pathlib import Path

from fleetlearn_device.commands.exits import fail
from fleetlearn_device.settings.sources import add_flags, state_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.description = (
        "Write the newest bottom that a party keeps as an ONNX model: its arrays in, its "
        "activations out."
    )
    add_flags(parser, only=["state"])
    parser.add_argument("--bundle", required=True, metavar="BUNDLE", help="this party's bottom")
    parser.add_argument("--output", required=True, metavar="FILE", help="the ONNX file")


def run(options: argparse.Namespace) -> int:
    """Write the model. Returns the exit status."""
    from fleetlearn_protocol.errors import FleetError

    from fleetlearn_device.runtimes.checks import DataError
    from fleetlearn_device.vertical.party import newest_bottom

    try:
        content, step = newest_bottom(options.bundle, Path(state_path(options)))
        Path(options.output).write_bytes(content)
    except DataError as error:
        return fail(2, str(error))
    except FleetError as error:
        return fail(1, error.text)
    except OSError as error:
        return fail(1, f"{options.output} cannot be written: {error}")
    print(f"wrote {options.output}, the bottom after step {step}")
    return 0

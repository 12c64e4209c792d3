"""``fleetlearn-device export-model``: the model that a device keeps as an ONNX file."""

from __future__ import annotations

import argparse
from pathlib import Path

from fleetlearn_device.commands.exits import fail
from fleetlearn_device.commands.predict import add_which
from fleetlearn_device.settings.sources import add_flags, state_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.description = (
        "Write the newest model of a device that runs, or ran, with --keep-model: a file for any "
        "ONNX Runtime."
    )
    add_flags(parser, only=["state"])
    parser.add_argument("output", metavar="FILE", help="the file to write, such as model.onnx")
    add_which(parser)


def run(options: argparse.Namespace) -> int:
    """Write the file. Returns the exit status."""
    from fleetlearn_protocol.user_errors import in_one_line

    from fleetlearn_device.predictor import Predictor, Which
    from fleetlearn_device.storage.files import write_durably

    which: Which = "shared" if options.shared else "personal"
    predictor = Predictor(state_path(options), which=which)
    try:
        write_durably(Path(options.output), predictor.onnx())
    except OSError as error:
        return fail(1, in_one_line(error))
    model = predictor.model
    print(f"{options.output} has the {which} model {model.model[:12]} of bundle {model.name}")
    return 0

"""``fleetlearn-device predict``: predictions with the model that a device keeps."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetlearn_device.commands.exits import fail
from fleetlearn_device.settings.sources import add_flags, state_path

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fleetlearn_device.predictor import LoadedModel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.description = (
        "Predict with the newest model of a device that runs, or ran, with --keep-model; without a "
        "network.\nThe device may train meanwhile."
    )
    add_flags(parser, only=["state"])
    parser.add_argument("input", metavar="INPUT", help="data, in any form that `run --data` takes")
    parser.add_argument(
        "--output",
        metavar="FILE",
        help=".npy (one output) or .npz (by name); default: a line of JSON for each example",
    )
    add_which(parser)
    parser.add_argument(
        "--batch-size", type=int, default=256, metavar="N", help="examples at a time; default: 256"
    )


def add_which(parser: argparse.ArgumentParser) -> None:
    """Add the flag for the shared model."""
    parser.add_argument(
        "--shared",
        action="store_true",
        help="the model as the coordinator sent it, without what is the device's own",
    )


def run(options: argparse.Namespace) -> int:
    """Predict. Returns the exit status."""
    from fleetlearn_device.predictor import Predictor
    from fleetlearn_device.runtimes.sessions import StepError

    try:
        predictor = Predictor(state_path(options), which="shared" if options.shared else "personal")
        loaded = predictor.loaded
        found = predictor.run(loaded, read_inputs(options.input, loaded), options.batch_size)
    except (ValueError, StepError) as error:  # DataError, too
        return fail(2, str(error))
    outputs = found if isinstance(found, Mapping) else {loaded.outputs[0]: found}
    try:
        write_outputs(outputs, options.output)
    except (OSError, ValueError) as error:
        return fail(1, str(error))
    return 0


def read_inputs(text: str, loaded: LoadedModel) -> dict[str, NDArray[Any]]:
    """Return the model's inputs from data on disk, prepared. Other arrays, such as labels, are
    passed over. Raises DataError."""
    from msgspec import UNSET

    from fleetlearn_device.data.assembling import assembled, with_declared
    from fleetlearn_device.data.preprocessing import only, prepared_rows
    from fleetlearn_device.data.sources import open_source

    source, choices = open_source(text)
    rows = with_declared(source, source.load(), choices)
    told, inputs = loaded.manifest.preprocessing, loaded.inputs
    if told is not UNSET:
        inputs_alone = only(told, [row.name for row in inputs])
        return prepared_rows(rows, inputs_alone, loaded.manifest.batch, source.name).arrays
    names = {row.name for row in inputs}
    if names <= set(rows.arrays):
        rows = rows._replace(arrays={name: rows.arrays[name] for name in names})
    return assembled(source, rows, inputs, choices)


def write_outputs(outputs: Mapping[str, NDArray[Any]], file: str | None) -> None:
    """Write the outputs to a file, or for people and pipes. Raises OSError, ValueError (no .npy
    holds several outputs)."""
    import msgspec
    import numpy as np

    if file is None:
        for row in zip(*outputs.values(), strict=True):
            values = (value.tolist() for value in row)
            line = msgspec.json.encode(dict(zip(outputs, values, strict=True)))
            sys.stdout.buffer.write(line + b"\n")
        sys.stdout.flush()
        return
    path = Path(file)
    draft = path.with_name(f"{path.name}.tmp")
    with draft.open("wb") as stream:
        if path.suffix == ".npz":
            np.savez(stream, **dict(outputs))  # type: ignore[arg-type]
        elif len(outputs) == 1:
            np.save(stream, next(iter(outputs.values())))
        else:
            raise ValueError(f"the model has the outputs {', '.join(outputs)}; expected an .npz")
    draft.replace(path)

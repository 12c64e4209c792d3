"""``fleetlearn-device hash-rows``: write labels with hashes of their rows' ids, for a coordinator
that has the labels of a vertical run."""

from __future__ import annotations

import argparse
from typing import Any

from fleetlearn_device.commands.exits import fail


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.description = (
        "Write columns of data with the hashes of the rows' ids in place of the ids: the "
        "labels_file of a\nvertical run's coordinator, which does not know the key of the hashes."
    )
    parser.add_argument("input", metavar="INPUT", help="data, in any form that `run --data` takes")
    parser.add_argument(
        "--ids", default="id", metavar="COLUMN", help="the column of the rows' ids; default: id"
    )
    parser.add_argument("--rows-key", required=True, metavar="FILE", help="the parties' key")
    parser.add_argument("--columns", required=True, metavar="A,B", help="the columns to write")
    parser.add_argument("--output", required=True, metavar="FILE.npz", help="what is written")


def run(options: argparse.Namespace) -> int:
    """Write the file. Returns the exit status."""
    import numpy as np
    from fleetlearn_protocol.vertical.alignment import HASH_BYTES, hash_rows, hashes_as_bytes

    from fleetlearn_device.data.assembling import with_declared
    from fleetlearn_device.data.sources import open_source
    from fleetlearn_device.runtimes.checks import DataError
    from fleetlearn_device.vertical.party_table import read_key

    try:
        source, choices = open_source(options.input)
        rows = with_declared(source, source.load(), choices).arrays
        names = [name for name in options.columns.split(",") if name]
        absent = [name for name in (options.ids, *names) if name not in rows]
        if absent:
            raise DataError(
                f"{options.input}: there is no column {', '.join(absent)}; there are "
                f"{', '.join(rows)}"
            )
        hashes = hash_rows(rows[options.ids].tolist(), read_key(options.rows_key))
        order = np.argsort(hashes, kind="stable")
        raw = np.frombuffer(hashes_as_bytes(hashes[order]), np.uint8).reshape(-1, HASH_BYTES)
        columns: dict[str, Any] = {name: rows[name][order] for name in names}
        np.savez(options.output, hashes=raw, **columns)
    except ValueError as error:  # DataError, too
        return fail(2, str(error))
    except OSError as error:
        return fail(1, f"{options.output} cannot be written: {error}")
    print(f"wrote {len(raw)} rows to {options.output}")
    return 0

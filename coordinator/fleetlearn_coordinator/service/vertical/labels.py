"""Labels that the coordinator of a vertical run has itself: a file with the hashes of the rows'
ids, which somebody with the parties' key made."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from fleetlearn_protocol.errors import Code
from fleetlearn_protocol.manifest import Input
from fleetlearn_protocol.npz import NpzError, read_npz
from fleetlearn_protocol.vertical.alignment import HASH_BYTES, RowHashes, read_hashes
from numpy.typing import NDArray

from fleetlearn_coordinator.service.vertical.settings import VerticalPlanError

HASHES = "hashes"
"""The array of hashes: uint8, shape (n, 32)."""


class OwnLabels(NamedTuple):
    """The coordinator's labels, sorted by the hashes of their rows' ids."""

    hashes: RowHashes
    arrays: tuple[NDArray[Any], ...]
    """In the order of the top's targets."""


def read_labels(path: Path, targets: Sequence[Input]) -> OwnLabels:
    """Read the labels. Raises VerticalPlanError."""
    try:
        found = read_npz(path)
    except (NpzError, OSError) as error:
        raise VerticalPlanError(Code.BAD_MESSAGE, f"labels_file: {error}") from None
    wanted = [HASHES, *(row.name for row in targets)]
    absent = [name for name in wanted if name not in found]
    if absent:
        raise VerticalPlanError(
            Code.BAD_MESSAGE,
            f"labels_file: {path} has no array {', '.join(absent)}; expected {', '.join(wanted)}, "
            "as `fleetlearn-device hash-rows` writes them",
        )
    raw = found[HASHES]
    if raw.dtype != np.uint8 or raw.shape[1:] != (HASH_BYTES,) or not len(raw):
        raise VerticalPlanError(
            Code.BAD_MESSAGE,
            f"labels_file: {HASHES} in {path} is {raw.dtype} {raw.shape}; expected uint8 (n, 32)",
        )
    hashes = read_hashes(np.ascontiguousarray(raw).tobytes())
    order = np.argsort(hashes, kind="stable")
    if len(np.unique(hashes)) < len(hashes):
        raise VerticalPlanError(
            Code.BAD_MESSAGE, f"labels_file: {path} has rows twice; each id has one row"
        )
    arrays = []
    for row in targets:
        array = found[row.name]
        if array.shape != (len(raw), *row.shape):
            raise VerticalPlanError(
                Code.BAD_MESSAGE,
                f"labels_file: {row.name} in {path} has shape {array.shape}; expected "
                f"{(len(raw), *row.shape)}",
            )
        arrays.append(array.astype(row.dtype)[order])
    return OwnLabels(hashes[order], tuple(arrays))

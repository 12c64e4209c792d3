"""Comparison of a sub-model's training with that of the whole model."""

from __future__ import annotations

from typing import Any

import numpy as np
from fleetlearn_protocol.manifest import SparseRows

from fleetlearn_export.checks.comparison import Array, GraphSession, first_inputs, open_session
from fleetlearn_export.emission.constants import Constants
from fleetlearn_export.errors import ExportError
from fleetlearn_export.model.train_step import TrainStep
from fleetlearn_export.model.user_model import UserModel

STEPS = 2
"""The second one reads the state that the first one made."""
TOLERANCE = 1e-5
"""Of the largest element; norms over all parameters are added up in another order."""
BESIDE = 2
"""Rows that the sub-model has beside those that the example names."""


def check_sub_model(
    user: UserModel,
    step: TrainStep,
    train: bytes,
    evaluate: bytes,
    sparse: SparseRows,
    constants: Constants | None,
) -> float:
    """Return the largest difference between a sub-model's results and the whole model's.

    Raises ExportError where a table is used otherwise than row by row, by the integers of
    ``sparse.arrays`` alone: then a device cannot train without the other rows.
    """
    batch = {f"batch.{name}": value.numpy() for name, value in user.batch.items()}
    named = {f"batch.{name}" for name in sparse.arrays}
    touched = np.unique(np.concatenate([batch[name].reshape(-1) for name in sorted(named)]))
    others = np.setdiff1d(np.arange(min(sparse.rows, len(touched) + BESIDE)), touched)
    rows = np.union1d(touched, others[:BESIDE])
    places = {
        name: np.searchsorted(rows, value).astype(value.dtype) if name in named else value
        for name, value in batch.items()
    }
    hyper = {name: 0.1 if value is None else value for name, value in step.hyper.items()}
    inputs = {name: value.numpy() for name, value in first_inputs(step, hyper, 0).items()}
    inputs |= {name: array for name, array in _scalars(step).items() if name not in inputs}
    whole, largest = {**inputs, **batch}, 0.0
    part = {name: _chosen(name, array, rows, sparse) for name, array in inputs.items()} | places
    session = open_session(train, constants=constants)
    for _ in range(STEPS):
        results, of_part = (_run(session, feed) for feed in (whole, part))
        for name, array in results.items():
            expected = _chosen(name, array, rows, sparse)
            largest = max(largest, _difference(name, of_part[name], expected))
            before = whole.get(name.removeprefix("next."))
            if expected is not array and name.startswith("next.param.") and before is not None:
                _check_untouched(name, array, before, touched)
        whole |= {name[5:]: array for name, array in results.items() if name[:5] == "next."}
        part |= {name[5:]: array for name, array in of_part.items() if name[:5] == "next."}
    session = open_session(evaluate, constants=constants)
    results, of_part = (_run(session, feed) for feed in (whole, part))
    for name, array in results.items():
        largest = max(largest, _difference(name, of_part[name], array))
    return largest


def _scalars(step: TrainStep) -> dict[str, Array]:
    return {"seed": np.array(1, np.int64)} if step.random else {}


def _run(session: GraphSession, feed: dict[str, Any]) -> dict[str, Array]:
    try:
        return session.run(feed)
    except ExportError as error:
        raise ExportError(
            f"sparse= names a table that the model needs all rows of: {error}"
        ) from None


def _chosen(name: str, array: Array, rows: Array, sparse: SparseRows) -> Array:
    """Return the chosen rows of an array of a table's shape; any other array as it is."""
    of_table = any(name.endswith(f".{table}") for table in sparse.tables)
    return array[rows] if of_table and array.shape[:1] == (sparse.rows,) else array


def _difference(name: str, found: Array, expected: Array) -> float:
    scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
    apart = np.inf
    if found.shape == expected.shape:
        apart = float(np.abs(np.subtract(found, expected, dtype=np.float64)).max(initial=0.0))
    if not apart / scale <= TOLERANCE:
        raise ExportError(
            f"sparse= names a table that the model needs all rows of: with the rows alone that the "
            f"example names, {name} is another by {apart / scale:.3g}. A sparse table may only be "
            "looked up in, such as by nn.Embedding, with integers that come from the batch as they "
            "are; a softmax over all of its rows reads the whole table. Export without it"
        )
    return apart / scale


def _check_untouched(name: str, after: Array, before: Array, touched: Array) -> None:
    """Raise ExportError where the step changes rows that no example names."""
    same = (after == before).reshape(len(after), -1).all(axis=1)
    same[touched] = True
    if not same.all():
        raise ExportError(
            f"sparse= names a table that the model needs other rows of: a step changes row "
            f"{int(same.argmin())} of {name.removeprefix('next.param.')}, which no example names. "
            "A sparse table may only be looked up in, with integers that come from the batch as "
            "they are"
        )

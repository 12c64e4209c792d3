"""Which tables of a model are sparse, and which arrays of the batch name their rows."""

from __future__ import annotations

from collections.abc import Sequence

from fleetlearn_protocol.manifest import Input, SparseRows

from fleetlearn_export.errors import ExportError
from fleetlearn_export.model.train_step import TrainStep, names_matching


def sparse_rows(tables: Sequence[str], step: TrainStep, batch: Sequence[Input]) -> SparseRows:
    """Return what ``sparse=`` names. batch: the manifest's arrays. Raises ExportError."""
    found = names_matching(
        tables, list(step.travelling), "sparse", "trained parameter that travels"
    )
    shapes = {name: tuple(step.values[name].shape) for name in step.travelling if name in found}
    flat = [name for name, shape in shapes.items() if len(shape) < 2]
    if flat:
        raise ExportError(
            f"sparse= names {flat[0]}, of shape {shapes[flat[0]]}; expected tables of rows, with "
            "two axes or more, such as the weight of nn.Embedding"
        )
    sizes = {shape[0] for shape in shapes.values()}
    if len(sizes) > 1:
        listed = ", ".join(f"{name} {shape[0]}" for name, shape in shapes.items())
        raise ExportError(
            f"sparse= names tables with different numbers of rows: {listed}. A bundle's sparse "
            "tables have the same rows: name those of one kind of item, the largest"
        )
    if step.buffers:
        raise ExportError(
            f"sparse= and {min(step.buffers)}, which training changes without a gradient; a model "
            "with sparse tables has no such buffers: use a normalisation without statistics of the "
            "batch, such as LayerNorm"
        )
    refused = {"correction", "previous"} & {*step.references}
    if refused or step.rule.optimizer == "custom" or step.rule.weight_decay or step.kept:
        raise ExportError(
            "sparse= needs a LocalStep without correction, contrastive, weight decay and kept "
            "state: these need or change rows that a device does not have"
        )
    (rows,) = sizes
    arrays = tuple(
        array.name
        for array in batch
        if array.below == rows and array.ignored is None and array.dtype in ("int64", "int32")
    )
    if not arrays:
        raise ExportError(
            f"sparse= names tables of {rows} rows, and no array of the example names rows: "
            "expected one of int64 or int32 with which the model looks up in them, such as "
            "nn.Embedding does"
        )
    return SparseRows(tuple(shapes), arrays, rows)

"""Bundles of public examples, whose class scores devices tell each other (FedMD): written, read,
and compared with a device's own model.

Li and Wang 2019, "FedMD: Heterogenous Federated Learning via Model Distillation", arXiv 1910.03581.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from fleetlearn_protocol.bundle import Bundle, pack_bundle, write_bundle
from fleetlearn_protocol.errors import BundleError, Code
from fleetlearn_protocol.manifest import (
    FORMAT,
    MAX_ELEMENTS,
    PARAMETERS,
    PUBLIC,
    PUBLIC_VERSION,
    Input,
    LocalStep,
    Manifest,
    Parameter,
    PublicExamples,
)

SCORES = "scores"
"""The only row of the parameter table, and the name of the output."""
DIGEST_LOSS = "digest_loss"
"""The metric that every such bundle has: how far a device's model was from the consensus, the mean
of KL(consensus || model) over the examples. There is none in a device's first round."""
LARGEST_SCORE = 2.0**20
"""A class score of greater magnitude counts as this: its model has decided already."""
DTYPES = ("float32", "float64", "int64", "int32", "uint8", "bool")


def write_public_bundle(
    target: str | os.PathLike[str],
    name: str,
    arrays: Mapping[str, NDArray[Any]],
    classes: int,
    metrics: Sequence[str] = (),
) -> Path:
    """Write the bundle of a run in which devices tell class scores of public examples, as one file,
    the same bytes each time. Returns ``target``.

    Args:
        name: The bundle's, for people.
        arrays: What the devices' models take, by name, shape (N, ...) each, such as ``{"x": x}``:
            without labels, and prepared as the models take them.
        classes: C, the scores of an example: every device's model must return (n, C).
        metrics: Names of what devices measure of their own models beside the loss, such as
            ``["accuracy"]``: every device's bundle must have them.

    Raises ValueError (what cannot be such examples), BundleError, OSError.
    """
    counts = {array.shape[0] if array.ndim else 0 for array in arrays.values()}
    if len(counts) != 1 or not max(counts):
        found = ", ".join(f"{key} {list(array.shape)}" for key, array in arrays.items())
        raise ValueError(
            f"the arrays are {found or 'none'}; expected at least one, with one row for each "
            "example, as many in each"
        )
    (examples,) = counts
    if classes < 2:
        raise ValueError(f"classes is {classes}; expected at least 2")
    if examples * classes > MAX_ELEMENTS:
        raise ValueError(
            f"{examples} examples of {classes} classes have {examples * classes} scores; a bundle "
            f"can have {MAX_ELEMENTS}. Take fewer examples"
        )
    if SCORES in arrays:
        raise ValueError(f"an array cannot be named {SCORES}, which is what devices tell")
    for key, array in arrays.items():
        if array.dtype.name not in DTYPES:
            raise ValueError(
                f"array {key} is {array.dtype.name}; expected one of {', '.join(DTYPES)}"
            )
        if not np.isfinite(array).all():
            raise ValueError(f"array {key} has values that are not finite")
    shape = (examples, classes)
    manifest = Manifest(
        format=FORMAT,
        version=PUBLIC_VERSION,
        name=name,
        parameters=(Parameter(SCORES, shape, 0),),
        batch=tuple(
            Input(key, array.dtype.name, array.shape[1:])  # type: ignore[arg-type]  # one of DTYPES
            for key, array in arrays.items()
        ),
        outputs=(Input(SCORES, "float32", (classes,)),),
        hyper=(),
        step=LocalStep("custom"),
        metrics=(DIGEST_LOSS, *metrics),
        files={},
        public=PublicExamples(examples, classes),
        made_by="fleetlearn_protocol",
    )
    contents: dict[str, bytes | Path] = {
        PARAMETERS: save({SCORES: np.zeros(shape, np.float32)}),
        PUBLIC: save({key: np.ascontiguousarray(array) for key, array in arrays.items()}),
    }
    target = Path(target)
    with tempfile.TemporaryDirectory(dir=target.absolute().parent) as folder:
        return pack_bundle(write_bundle(Path(folder, "bundle"), manifest, contents), target)


def read_public_examples(bundle: Bundle, inputs: Sequence[Input]) -> dict[str, NDArray[Any]]:
    """Return the arrays of a bundle's public examples that a model takes, in its dtypes. Raises
    BundleError (damaged)."""
    try:
        given = load(bundle.read(PUBLIC))
    except SafetensorError as error:
        raise BundleError(
            Code.BAD_MESSAGE, f"{bundle.path}: {PUBLIC} is damaged: {error}"
        ) from None
    examples = bundle.manifest.parameters[0].shape[0]
    arrays = {}
    for row in inputs:
        array = given.get(row.name)
        if array is None or array.shape != (examples, *row.shape):
            raise BundleError(
                Code.BAD_MESSAGE, f"{bundle.path}: {PUBLIC} has another array {row.name}"
            )
        arrays[row.name] = np.ascontiguousarray(array, row.dtype)
    return arrays


def consensus_file(bundle: Bundle, scores: NDArray[np.float32]) -> bytes:
    """Return an .npz file with the arrays of the public examples, and ``scores``, float32, shape
    (N, C). scores: shape (N C,). Raises BundleError."""
    file = io.BytesIO()
    arrays = read_public_examples(bundle, bundle.manifest.batch)
    shape = bundle.manifest.parameters[0].shape
    np.savez(file, **{**arrays, SCORES: scores.reshape(shape)})  # type: ignore[arg-type]
    return file.getvalue()


def own_misfit(own: Manifest, inputs: Sequence[Input], public: Manifest) -> str | None:
    """Return why a device's own model cannot take part with these public examples, in words; None
    if it can. inputs: the arrays that the model takes."""
    classes = public.outputs[0].shape
    if len(own.outputs) != 1 or own.outputs[0].shape != classes:
        returned = ", ".join(f"{row.name} (n, {_sizes(row)})" for row in own.outputs)
        return (
            f"the model of bundle {own.name} returns {returned}; bundle {public.name} asks for one "
            f"array of class scores, (n, {classes[0]})"
        )
    there = {row.name: row for row in public.batch}
    for row in inputs:
        given = there.get(row.name)
        if given is None or given.shape != row.shape or not _casts(given.dtype, row.dtype):
            shown = ", ".join(
                f"{each.name} {each.dtype} (n, {_sizes(each)})" for each in there.values()
            )
            return (
                f"the model of bundle {own.name} takes {row.name} {row.dtype} (n, {_sizes(row)}); "
                f"the public examples of bundle {public.name} are {shown}"
            )
    if missing := sorted({*public.metrics} - {DIGEST_LOSS, *own.metrics}):
        return (
            f"bundle {public.name} asks for the metric {missing[0]}, and bundle {own.name} "
            f"measures {', '.join(own.metrics) or 'the loss alone'}. Export the model again with "
            "metrics="
        )
    return None


def _casts(given: str, taken: str) -> bool:
    return bool(np.can_cast(np.dtype(given), np.dtype(taken), "same_kind"))


def _sizes(row: Input) -> str:
    return ", ".join(map(str, row.shape))

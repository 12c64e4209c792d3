"""Bundles whose step distils: a student learns what teachers say of examples without labels.

``fleetlearn_export.export_distillation`` writes them, a coordinator checks them, and the process
beside it computes with them. Their batch is the arrays that the model takes, then ``teacher``, the
mean of the teachers' logits (float32, (n, C)), and ``temperature`` (float32, (n,)).
"""

from __future__ import annotations

import os
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetlearn_protocol.errors import BundleError, Code
from fleetlearn_protocol.manifest import Input, Manifest, Parameter
from fleetlearn_protocol.npz import NpzError, read_npz

TEACHER, TEMPERATURE = "teacher", "temperature"


class DistillationJob(msgspec.Struct, frozen=True, kw_only=True):
    """What a distillation depends on, beside bundles, data and models. The models of the students
    follow it, then those of the teachers: float32, little-endian."""

    seed: int
    """Which examples are in each step, and what a random step draws: 0 to 2^53 - 1."""
    steps: int
    batch_size: int
    """Examples in a step."""
    lr: float
    """Of the first step. Those of the others fall to nearly 0, as half a cosine does."""
    temperature: float
    """Both sides' logits are divided by it."""
    students: tuple[int, ...]
    """The place of each student's bundle."""
    teachers: tuple[int, ...]
    """The same of the teachers; at least one."""


class Distilled(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a student."""

    loss_before: float
    """Mean over the examples of all steps of KL(teachers || student), in evaluation mode."""
    loss_after: float


def student_inputs(manifest: Manifest) -> tuple[Input, ...]:
    """Return the arrays that the model of a distillation bundle takes. Raises BundleError if the
    bundle is another one."""
    names = [row.name for row in manifest.batch]
    if names[-2:] != [TEACHER, TEMPERATURE] or len(manifest.outputs) != 1:
        raise BundleError(
            Code.UNKNOWN_CONTENT,
            f"bundle {manifest.name} is no distillation bundle: its batch is {', '.join(names)}; "
            f"the last two arrays of one are {TEACHER} and {TEMPERATURE} (export_distillation "
            "writes it)",
        )
    return manifest.batch[:-2]


def misfit(trained: Manifest, distilled: Manifest) -> str | None:
    """Return why the model of a training bundle cannot be distilled by another bundle, in words;
    None if it can. Raises BundleError if ``distilled`` is no distillation bundle."""
    inputs = student_inputs(distilled)
    if trained.local_size != trained.size:
        return (
            f"bundle {trained.name} has parameters that never leave the devices, and without them "
            "a device's model teaches nothing"
        )
    if (differing := _different_rows(trained.parameters, distilled.parameters)) is not None:
        return (
            f"bundle {distilled.name} is of another model than bundle {trained.name}: {differing}. "
            "Export both from the same model"
        )
    expected = trained.batch[: len(inputs)]
    if [(row.name, row.shape, row.dtype) for row in inputs] != [
        (row.name, row.shape, row.dtype) for row in expected
    ]:
        return (
            f"bundle {distilled.name} takes {_shown(inputs)}; the model of bundle {trained.name} "
            f"takes {_shown(expected)}"
        )
    return None


def _different_rows(trained: tuple[Parameter, ...], distilled: tuple[Parameter, ...]) -> str | None:
    for one, other in zip(trained, distilled, strict=False):
        # where infer.onnx has a parameter does not matter
        if (one.name, one.shape, one.offset, one.buffer) != (
            other.name,
            other.shape,
            other.offset,
            other.buffer,
        ):
            return (
                f"its parameter {other.name} {list(other.shape)} is in the place of "
                f"{one.name} {list(one.shape)}"
            )
    if len(trained) != len(distilled):
        return f"they have {len(distilled)} and {len(trained)} parameters"
    return None


def _shown(rows: tuple[Input, ...]) -> str:
    return ", ".join(f"{row.name} {row.dtype} {list(row.shape)}" for row in rows)


def read_unlabelled(
    path: str | os.PathLike[str], inputs: tuple[Input, ...]
) -> dict[str, NDArray[Any]]:
    """Return the arrays of an .npz file that a model takes, in its dtypes. Further arrays of the
    file, such as labels, are not read.

    Raises NpzError: no such file, no .npz, an array that is missing, of another shape or dtype, or
    not finite, or numbers of examples that differ. The text names the file.
    """
    names = [row.name for row in inputs]
    given = read_npz(path, lambda there: [name for name in there if name in names])
    missing = [name for name in names if name not in given]
    if missing:
        raise NpzError(
            f"{path} has no array {missing[0]}; the model takes {_shown(inputs)}, each with one "
            "more axis in front, for the examples"
        )
    arrays = {}
    for row in inputs:
        array = given[row.name]
        if not array.ndim or array.shape[1:] != row.shape or not len(array):
            wanted = ["n", *map(str, row.shape)]
            raise NpzError(
                f"{path}: array {row.name} has shape {list(array.shape)}; expected "
                f"[{', '.join(wanted)}] for n examples, at least 1"
            )
        if not np.can_cast(array.dtype, row.dtype, "same_kind"):
            raise NpzError(f"{path}: array {row.name} is {array.dtype}; expected {row.dtype}")
        with np.errstate(over="ignore"):  # what becomes infinite is refused below
            arrays[row.name] = np.ascontiguousarray(array, row.dtype)
        if not np.isfinite(arrays[row.name]).all():
            raise NpzError(f"{path}: array {row.name} has values that are not finite {row.dtype}")
    counts = {name: len(array) for name, array in arrays.items()}
    if len({*counts.values()}) > 1:
        raise NpzError(f"{path}: the arrays have {counts} examples; expected as many in each")
    return arrays

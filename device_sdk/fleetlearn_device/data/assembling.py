"""Makes the bundle's batch arrays from raw arrays and columns: which are which, and their types."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import numpy as np
from fleetlearn_protocol.manifest import Input
from numpy.typing import NDArray

from fleetlearn_device.data.raw import Choices, Raw, RawRows, RawSource
from fleetlearn_device.runtimes.checks import DataError, describe

EXACT = 2**53
"""Whole numbers up to here are exact in float64."""


def with_declared(source: RawSource, rows: RawRows, choices: Choices) -> RawRows:
    """Return the rows with the arrays that were declared: ``x=a,b`` makes x of the columns a and b,
    ``x=p*`` of those that begin with p.

    Raises DataError where a column is not there.
    """
    declared = choices.columns()
    if not declared:
        return rows
    made = dict(rows.arrays)
    for name, patterns in declared.items():
        columns = matching(patterns, rows.arrays)
        absent = [column for column in columns if column not in rows.arrays]
        if absent or not columns:
            raise DataError(
                f"{source.name}: {name}={','.join(columns)} was given, and there is no column "
                f"{', '.join(absent) or 'named'}; the columns are {_listed(rows.arrays)}. The "
                f"options of this kind of data are {choices.known()}"
            )
        made[name] = stacked(rows, columns, source.name)
    return rows._replace(arrays=made)


def matching(patterns: Sequence[str], arrays: Raw) -> list[str]:
    """Return the columns' names, where ``p*`` stands for all that begin with p, in their order."""
    names: list[str] = []
    for pattern in patterns:
        fitting = [name for name in arrays if "*" in pattern and fnmatchcase(name, pattern)]
        names += fitting or [pattern]
    return names


def stacked(rows: RawRows, columns: Sequence[str], source: str) -> NDArray[Any]:
    """Return one column as it is, shape (n, ...), or several side by side: shape (n, columns).

    Raises DataError where one of several columns holds text.
    """
    if len(columns) == 1:
        return rows.arrays[columns[0]]
    parts = []
    for column in columns:
        part = rows.arrays[column]
        if part.dtype.kind not in "biuf":
            part = numbers(part, column, rows, source)
        if part.ndim != 1:
            raise DataError(
                f"{source}: column {column} has shape {part.shape}; expected (n,), to stand beside "
                "other columns"
            )
        parts.append(part)
    return np.stack(parts, axis=1)


def assembled(
    source: RawSource, rows: RawRows, inputs: Sequence[Input], choices: Choices
) -> dict[str, NDArray[Any]]:
    """Return the batch's arrays by name, from rows that no preprocessing prepares.

    Text that is a number becomes one where the bundle wants numbers. Raises DataError: a missing
    array, text that is no number, a fraction where whole numbers are wanted.
    """
    arrays = rows.arrays
    names = [input_.name for input_ in inputs]
    if not set(names) <= set(arrays) and len(source.order) == len(names):
        arrays = dict(zip(names, (arrays[name] for name in source.order), strict=True))
    absent = [name for name in names if name not in arrays]
    if absent:
        raise DataError(
            f"{source.name}: there is no array {', '.join(absent)}; expected {describe(inputs)}, "
            f"and {_listed(arrays)} are there. {_advice(names, arrays)}"
        )
    surplus = sorted(set(arrays) - set(names))
    if surplus and not rows.of_text and not choices.left:
        raise DataError(
            f"{source.name}: arrays {sorted(arrays)} were given; expected {describe(inputs)}"
        )
    return {input_.name: typed(arrays[input_.name], input_, rows, source.name) for input_ in inputs}


def typed(array: NDArray[Any], input_: Input, rows: RawRows, source: str) -> NDArray[Any]:
    """Return a column in the type that the bundle wants, as far as text and databases leave that
    open. Raises DataError."""
    if array.dtype.kind in "SUO":
        array = numbers(array, input_.name, rows, source)
    if rows.of_text:
        if input_.dtype not in ("float32", "float64"):
            array = _whole(array, input_, rows, source)
        if prod(array.shape[1:]) == prod(input_.shape):
            array = array.reshape(len(array), *input_.shape)
        _check_classes(array, input_, rows, source)
    if _without_ones(array.shape[1:]) == _without_ones(input_.shape):
        array = array.reshape(len(array), *input_.shape)
    return array


def _without_ones(shape: Sequence[int]) -> list[int]:
    """Return the sizes of the axes that are more than one long."""
    return [size for size in shape if size != 1]


def numbers(array: NDArray[Any], name: str, rows: RawRows, source: str) -> NDArray[Any]:
    """Return text as float64. Raises DataError that names the first value that is no number."""
    found = np.empty(array.shape, np.float64)
    for index in np.ndindex(array.shape):
        value = array[index]
        try:
            found[index] = float(value)
        except (TypeError, ValueError):
            raise DataError(
                f"{source}, {rows.where(index[0])}, {name}: {_shown(value)} is no number; expected "
                "one. Names of classes become numbers by classes= (images, sounds) or by the "
                "operation index of the bundle's preprocessing"
            ) from None
    return found


def _whole(array: NDArray[Any], input_: Input, rows: RawRows, source: str) -> NDArray[Any]:
    if array.dtype.kind != "f":
        return array
    good = np.isfinite(array) & (np.rint(array) == array) & (np.abs(array) <= EXACT)
    if not good.all():
        index = np.unravel_index(int(good.argmin()), array.shape)
        raise DataError(
            f"{source}, {rows.where(int(index[0]))}, {input_.name}: {array[index]} is not a whole "
            f"number; expected {input_.dtype}"
        )
    return array.astype(np.int64)


def _check_classes(array: NDArray[Any], input_: Input, rows: RawRows, source: str) -> None:
    if input_.below is None or array.dtype.kind not in "iu":
        return
    wrong = (array < 0) | (array >= input_.below)
    if input_.ignored is not None:
        wrong &= array != input_.ignored
    if wrong.any():
        index = np.unravel_index(int(wrong.argmax()), array.shape)
        raise DataError(
            f"{source}, {rows.where(int(index[0]))}, {input_.name}: {array[index]}; expected 0 to "
            f"{input_.below - 1}. {np.count_nonzero(wrong)} of {array.size} values are none of "
            "these"
        )


def _advice(names: Sequence[str], arrays: Raw) -> str:
    columns = list(arrays)
    if not columns:
        return "It holds nothing"
    example = {name: "COLUMN,COLUMN" if name == names[0] else "COLUMN" for name in names}
    return "Say which columns they are: ?" + "&".join(
        f"{name}={value}" for name, value in example.items()
    )


def _listed(arrays: Raw) -> str:
    names = list(arrays)
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")


def _shown(value: object) -> str:
    text = repr(str(value))
    return text if len(text) <= 60 else text[:57] + "..."

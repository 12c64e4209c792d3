"""Checks what is given to a runtime against the bundle's manifest: batches, hyper-parameters,
vectors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Any

import numpy as np
from fleetlearn_protocol.manifest import Hyper, Input, Manifest
from fleetlearn_protocol.messages import MAX_EXACT
from fleetlearn_protocol.vector import Vector
from numpy.typing import ArrayLike, NDArray

Arrays = tuple[NDArray[Any], ...]
Batch = Sequence[ArrayLike] | Mapping[str, ArrayLike]
"""Arrays in the manifest's order, or by the manifest's names. Their first axis is the examples'."""


class DataError(ValueError):
    """The data do not fit the bundle's batch. The text says what was given and what was
    expected."""


def describe(inputs: Sequence[Input]) -> str:
    """Return the batch's arrays for people: ``x float32 (n, 1, 8, 8), y int64 (n,)``."""
    return ", ".join(f"{input_.name} {input_.dtype} {_shape(input_)}" for input_ in inputs)


def check_batch(batch: Batch, inputs: Sequence[Input]) -> Arrays:
    """Return the batch as C-contiguous arrays in the manifest's order and dtypes; arrays that are
    so are not copied.

    A dtype is converted where numpy calls that a cast of the same kind (float64 to float32, uint8
    or int32 to int64, integers to floats) and every value fits; labels given as floats are refused.
    Raises DataError.
    """
    if isinstance(batch, Mapping):
        if set(batch) != {input_.name for input_ in inputs}:
            raise DataError(f"arrays {sorted(batch)} were given; expected {describe(inputs)}")
        batch = [batch[input_.name] for input_ in inputs]
    elif isinstance(batch, str | bytes | np.ndarray) or not isinstance(batch, Sequence):
        raise DataError(
            f"a {type(batch).__name__} was given; expected a tuple of arrays: {describe(inputs)}"
        )
    if len(batch) != len(inputs):
        raise DataError(
            f"{len(batch)} arrays were given; expected {len(inputs)}: {describe(inputs)}"
        )
    arrays = tuple(_check_array(array, input_) for array, input_ in zip(batch, inputs, strict=True))
    lengths = {input_.name: len(array) for input_, array in zip(inputs, arrays, strict=True)}
    if len(set(lengths.values())) > 1:
        raise DataError(
            f"the arrays have different numbers of examples: {lengths}; their first axes must agree"
        )
    if not len(arrays[0]):
        raise DataError(f"there are no examples; expected at least one in {describe(inputs)}")
    return arrays


def _check_array(given: ArrayLike, row: Input) -> NDArray[Any]:
    try:
        array = np.asarray(given)
    except (ValueError, TypeError, RuntimeError) as error:
        raise DataError(
            f"numpy can make no array of {row.name}, a {type(given).__name__}: {error}"
        ) from None
    if array.shape[1:] != row.shape or not array.ndim:
        raise DataError(
            f"array {row.name} has shape {array.shape}; expected {_shape(row)}, n examples"
        )
    dtype = np.dtype(row.dtype)
    if array.dtype == dtype:
        # An array in the middle of a file may begin at an odd byte, which kernels need not bear.
        # (numpy.require does the same, and takes 2 us for each array of each step.)
        whole = np.ascontiguousarray(array)
        return whole if whole.flags.aligned else whole.copy()
    if array.dtype.kind not in "biuf" or not np.can_cast(array.dtype, dtype, "same_kind"):
        raise DataError(
            f"array {row.name} has dtype {array.dtype}; expected {dtype}, or one that numpy casts "
            "to it under the rule 'same_kind'. If its values are right, convert it: "
            f"{row.name}.astype('{dtype}')"
        )
    if dtype.kind in "iu" and array.size:
        limits = np.iinfo(dtype)
        low, high = int(array.min()), int(array.max())
        if low < limits.min or high > limits.max:
            raise DataError(
                f"array {row.name} has values from {low} to {high}, which do not fit {dtype}"
            )
    try:
        with np.errstate(over="raise"):
            return np.ascontiguousarray(array, dtype)
    except FloatingPointError:
        raise DataError(
            f"array {row.name} has {array.dtype} values that are too large for {dtype}"
        ) from None


def check_ranges(arrays: Arrays, inputs: Sequence[Input], where: str = "", start: int = 0) -> None:
    """Raise DataError where an integer names no class and no row (``Input.below``). The text names
    array and example. ``start``: the number of the arrays' first example.

    One pass over the arrays of integers that have a range: 0.3 ns for each int64 of a large one, 4
    us for a small one.
    """
    for array, input_ in zip(arrays, inputs, strict=True):
        if input_.below is None or array.dtype.kind not in "iu" or not array.size:
            continue
        # As unsigned integers, negative values are the largest: one maximum finds values below and
        # above the range.
        if array.view(f"u{array.itemsize}").max() < input_.below:
            continue
        wrong = (array < 0) | (array >= input_.below)
        if input_.ignored is not None:
            wrong &= array != input_.ignored
        if not wrong.any():
            continue
        index = np.unravel_index(int(wrong.argmax()), array.shape)
        found = (int(index[0]) + start, *index[1:])
        allowed = f"0 to {input_.below - 1}" + (
            "" if input_.ignored is None else f", or {input_.ignored} for what is left out"
        )
        raise DataError(
            f"array {input_.name} has the value {array[index]} in {_example(found)}{where}; "
            f"expected {allowed}. {np.count_nonzero(wrong)} of its {array.size} values are none "
            "of these"
        )


def find_nonfinite(arrays: Arrays, inputs: Sequence[Input], start: int = 0) -> str | None:
    """Return what to say of the first NaN or infinity, or None. ``start``: the number of the
    arrays' first example."""
    for array, input_ in zip(arrays, inputs, strict=True):
        if array.dtype.kind == "f" and not (finite := np.isfinite(array)).all():
            index = np.unravel_index(int(finite.argmin()), array.shape)
            where = _example((int(index[0]) + start, *index[1:]))
            return (
                f"array {input_.name} has the value {array[index]} in {where}; expected finite "
                "numbers"
            )
    return None


def _example(place: Sequence[Any]) -> str:
    """Return which example it is, and where in the example."""
    inside = f", at {[int(index) for index in place[1:]]}" if place[1:] else ""
    return f"example {int(place[0])} (the first is 0){inside}"


def _shape(row: Input) -> str:
    return f"({', '.join(['n', *map(str, row.shape)])}{',' if not row.shape else ''})"


def check_hyper(given: Mapping[str, float], rows: Sequence[Hyper]) -> dict[str, float]:
    """Return the value of each hyper-parameter, in the manifest's order; the default where none is
    given.

    Raises ValueError: a name that the bundle does not have, no value for one without default, not a
    finite float32.
    """
    unknown = sorted(set(given) - {row.name for row in rows})
    if unknown:
        raise ValueError(
            f"hyper-parameters {unknown} are not the bundle's; it has "
            f"{[row.name for row in rows]}. They were chosen when the bundle was exported"
        )
    values = {row.name: given.get(row.name, row.default) for row in rows}
    missing = [name for name, value in values.items() if value is None]
    if missing:
        raise ValueError(
            f"hyper-parameters {missing} were not given and have no default in the bundle"
        )
    checked = {}
    for name, value in values.items():
        try:
            number = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise ValueError(f"hyper-parameter {name} is {value!r}; expected a number") from None
        if not isfinite(number) or abs(number) > float(np.finfo(np.float32).max):
            raise ValueError(f"hyper-parameter {name} is {number}; expected a finite float32")
        checked[name] = number
    return checked


def check_seed(seed: int) -> int:
    """Return ``seed``. Raises ValueError unless it is an integer from 0 to 2^53 - 1."""
    if not isinstance(seed, int | np.integer) or not 0 <= seed <= MAX_EXACT:
        raise ValueError(f"seed is {seed!r}; expected an integer from 0 to 2^53 - 1")
    return int(seed)


def check_load(
    manifest: Manifest,
    vector: Vector,
    references: Mapping[str, Vector | None],
    state: Vector | None,
) -> None:
    """Raise ValueError unless the vectors to load fit the bundle. None: not given."""
    check_vector(vector, manifest.size, manifest.local_size)
    for name, reference in references.items():
        if reference is not None:
            # Every runtime has an anchor, which updates are made against, whether its step reads it
            # or not.
            if name != "anchor" and name not in manifest.references:
                raise ValueError(
                    f"a vector {name!r} was given, which the bundle's step does not read; it reads "
                    f"{list(manifest.references)}, as was chosen when the bundle was exported"
                )
            check_vector(reference, manifest.size, what=f"the {name}")
    if state is not None:
        check_vector(state, manifest.state_size, what="the state")


def check_vector(vector: Vector, *sizes: int, what: str = "the parameter vector") -> Vector:
    """Return ``vector``. Raises ValueError unless it is a float32 array of shape (size,) for one of
    the sizes."""
    expected = " or ".join(f"({size},)" for size in dict.fromkeys(sizes))
    if not isinstance(vector, np.ndarray):
        raise ValueError(
            f"{what} is a {type(vector).__name__}; expected a float32 numpy array of shape "
            f"{expected}"
        )
    if vector.dtype != np.float32 or vector.ndim != 1 or vector.size not in sizes:
        raise ValueError(
            f"{what} is {vector.dtype} of shape {vector.shape}; expected float32 of shape "
            f"{expected}"
        )
    return vector


def copy_all(pairs: Sequence[tuple[Vector, Vector]]) -> None:
    """Copy each source to its target, as if all at once: a source may overlap another pair's
    target."""
    sources = [
        source.copy()
        if _overlaps(source, (other for _, other in pairs if other is not target))
        else source
        for source, target in pairs
    ]
    for source, (_, target) in zip(sources, pairs, strict=True):
        target[:] = source


def _overlaps(source: Vector, targets: Iterable[Vector]) -> bool:
    return any(np.may_share_memory(source, target) for target in targets)

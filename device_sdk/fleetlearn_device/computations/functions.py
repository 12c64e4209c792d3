"""Own functions on a device: those that its owner has installed and allowed, by the names that
bundles give them.

A function takes the state and rows as named arrays, and returns named arrays
(``fleetlearn_protocol.computations.function_settings``). Nothing of a bundle or a task is run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from fleetlearn_protocol import extensions
from fleetlearn_protocol.computations.fixed_point import MOST as MOST_SUM
from fleetlearn_protocol.computations.fixed_point import added, to_fixed
from fleetlearn_protocol.computations.function_layout import (
    OWN,
    check_function_sums,
    function_state,
    function_sums,
    real_numbers,
)
from fleetlearn_protocol.computations.function_settings import (
    DEVICE_FUNCTION,
    FunctionSums,
    SumArray,
)
from fleetlearn_protocol.computations.layout import Sums
from fleetlearn_protocol.user_errors import ANY_FAILURE, failure, in_one_line
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray

from fleetlearn_device.computations.columns import Columns
from fleetlearn_device.own_code import FunctionError, OwnFunction, OwnFunctions


def bound(settings: FunctionSums, functions: OwnFunctions) -> OwnFunction:
    """Return the bundle's function with its parameters: state, rows -> named arrays. Raises
    FunctionError where the owner does not allow it, or it takes no such parameters."""
    function = functions.get(settings.device)
    if function is None:
        raise FunctionError(not_allowed(settings.device, functions))
    what = f"the function {settings.device}"
    try:
        return extensions.bind(
            function, DEVICE_FUNCTION.arguments, settings.device_parameters, what
        )
    except extensions.ExtensionError as error:
        raise FunctionError(str(error)) from None


def not_allowed(name: str, functions: Iterable[str]) -> str:
    """Return that the device's owner does not allow the function, and what to do."""
    allowed = ", ".join(functions) or "none"
    return (
        f"the bundle asks for the function {name}, and the device's owner allows {allowed}. Where "
        f"it is installed, --allow-function {name if ':' in name else f'{name}=MODULE:FUNCTION'} "
        "allows it (docs/algorithms/functions.md)"
    )


def sum_up_function(
    state: Vector, batches: Iterable[Columns], settings: FunctionSums, functions: OwnFunctions
) -> Sums:
    """Return what the function makes of the rows of all batches, int64, shape (S,). Raises
    FunctionError where the function fails, or returns what the bundle does not declare, and
    ValueError where the state is not this computation's."""
    function = bound(settings, functions)
    known = function_state(settings).unpack(state)
    given = {name: known[name] for name in settings.state}
    layout = function_sums(settings)
    total: Sums = np.zeros(layout.size, np.int64)
    for rows in batches if settings.calls == "batches" else _together(batches):
        count = len(next(iter(rows.values())))
        found = _called(function, given, rows, settings)
        units: dict[str, Any] = {f"{OWN}rows": count}
        for name, array in settings.sums.items():
            units[name] = _units(name, found[name], array, count, settings.device)
        try:
            total = added(total, layout.pack(units))
        except ValueError as error:
            raise FunctionError(f"the function {settings.device}: {error}") from None
    if not total[0]:
        raise FunctionError("there are no rows")
    try:
        check_function_sums(total, settings)
    except ValueError as error:
        raise FunctionError(f"the function {settings.device}: {error}") from None
    return total


def _together(batches: Iterable[Columns]) -> Iterator[Columns]:
    """Yield the rows of all batches at once, if there are any."""
    whole = list(batches)
    if whole:
        yield {name: np.concatenate([each[name] for each in whole]) for name in whole[0]}


def _called(
    function: OwnFunction,
    state: Mapping[str, NDArray[Any]],
    rows: Columns,
    settings: FunctionSums,
) -> Mapping[str, Any]:
    """Return what the function returns for the rows. It gets copies, which it may write to."""
    name = settings.device
    try:
        found = function(
            {key: value.copy() for key, value in state.items()},
            {key: value.copy() for key, value in rows.items()},
        )
    except MemoryError:
        raise
    except ANY_FAILURE as error:  # of the owner's code, of any kind
        raise FunctionError(failure(f"the function {name}", error)) from error
    if not isinstance(found, Mapping):
        raise FunctionError(
            f"the function {name} returned a {type(found).__name__}; expected arrays by name"
        )
    if {*found} != {*settings.sums}:
        given = ", ".join(map(str, found)) or "none"
        raise FunctionError(
            f"the function {name} returned the arrays {given}; the bundle declares "
            f"{', '.join(settings.sums)}"
        )
    return found


def _units(name: str, value: Any, array: SumArray, rows: int, function: str) -> Sums:
    """Return the array as whole numbers of its unit. Raises FunctionError."""
    what = f"the function {function}: {name}"
    try:
        found = real_numbers(value)
        if array.dtype == "float64":
            found = found.astype(np.float64)
    except ANY_FAILURE as error:  # also of an array type's own code
        raise FunctionError(f"{what} is no array of numbers: {in_one_line(error)}") from None
    if found.shape != array.shape:
        raise FunctionError(
            f"{what} has the shape {list(found.shape)}; expected {list(array.shape)}"
        )
    if array.dtype == "int64" and found.dtype.kind not in "biu":
        raise FunctionError(f"{what} is {found.dtype}; expected whole numbers (int64)")
    if array.dtype == "int64":
        if found.size and not -MOST_SUM <= int(found.min()) <= int(found.max()) <= MOST_SUM:
            raise FunctionError(f"{what} has a number beyond 2^62, which cannot be added up")
        return found.astype(np.int64)
    if array.combine == "row-mean":
        found = found * rows
    try:
        return to_fixed(found, array.bits)
    except ValueError as error:
        raise FunctionError(
            f"{what}: {error}. Fewer bits than {array.bits} in the bundle allow larger numbers"
        ) from None

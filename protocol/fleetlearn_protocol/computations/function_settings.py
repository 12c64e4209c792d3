"""What a bundle says of a computation by own functions: the struct of the kind ``function``.

Nothing of it is code: the functions are named, and whoever runs a device or the coordinator has
installed and allowed them.
"""

from __future__ import annotations

from math import prod
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from fleetlearn_protocol.extensions import ExtensionPoint
from fleetlearn_protocol.messages import FunctionName, Number

ArrayName = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}\Z")]
Shape = Annotated[tuple[Annotated[int, Meta(ge=1, le=2**28)], ...], Meta(max_length=8)]
Parameters = Annotated[dict[ArrayName, Any], Meta(max_length=64)]

DEVICE_FUNCTION: ExtensionPoint[Any] = ExtensionPoint(
    "device function", object, is_callable=True, arguments=("state", "rows")
)
"""Computes what a device sends: state, rows -> named arrays."""
NEXT_STATE: ExtensionPoint[Any] = ExtensionPoint(
    "next state function", object, is_callable=True, arguments=("state", "sums", "count")
)
"""What a round's total makes of the state: state, sums, count -> state, metrics, finished."""


class RowArray(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An array of rows that the device's function takes."""

    shape: Shape = ()
    """Of one row."""
    dtype: Literal["float64", "float32", "int64"] = "float64"
    """Type of its elements."""
    columns: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=200)], ...], Meta(max_length=10_000)
    ] = ()
    """The columns of the device's table that it is made of: one, or as many as `shape` says. Empty:
    the device's data have an array of its name."""


class StateArray(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An array of the state, which all devices are sent."""

    shape: Shape | None = None
    """Its shape. null: that of `value`."""
    dtype: Literal["float64", "float32", "int64"] = "float64"
    """Type of its elements. float64 and int64 take three times the room of float32."""
    value: Any = None
    """What it is before the first round: a number, or lists of numbers. null: zeros."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Its shape, whoever says it."""
        return np.shape(self.value) if self.shape is None else self.shape


class SumArray(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An array that the device's function returns, and that is added up over all devices."""

    shape: Shape = ()
    """Its shape."""
    dtype: Literal["float64", "int64"] = "float64"
    """Type of its elements. int64: whole numbers, such as counts."""
    bits: Annotated[int, Meta(ge=-1000, le=1000)] = 30
    """Of float64: each number is rounded to a whole multiple of 2^-bits before it is added, so that
    the sum does not depend on an order."""
    range: tuple[Number, Number] | None = None
    """The least and the greatest number that the function may return. A device refuses to send
    another, and the coordinator to take one."""
    combine: Literal["sum", "row-mean", "device-mean"] = "sum"
    """What the coordinator's function gets: the sum, or the mean over devices, each weighted by its
    rows (`row-mean`) or all alike (`device-mean`)."""


class FunctionSums(
    msgspec.Struct,
    frozen=True,
    tag="function",
    tag_field="kind",
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """Sums by a function that the device's owner has installed and allowed, and a function of the
    coordinator that makes the next state of them."""

    device: FunctionName
    """The function on devices, by the name under which owners allow it."""
    coordinator: FunctionName
    """The function on the coordinator."""
    rows: Annotated[dict[ArrayName, RowArray], Meta(min_length=1, max_length=64)]
    """What the device's function takes of the device's data."""
    state: Annotated[dict[ArrayName, StateArray], Meta(min_length=1, max_length=64)]
    """What both functions take, and the coordinator's makes anew in each round."""
    sums: Annotated[dict[ArrayName, SumArray], Meta(min_length=1, max_length=64)]
    """What the device's function returns."""
    metrics: Annotated[tuple[ArrayName, ...], Meta(max_length=64)] = ()
    """Numbers that the coordinator's function returns, for people."""
    rounds: Annotated[int, Meta(ge=1, le=2**31)] = 100
    """After this many rounds the computation is done, also where the coordinator's function does
    not say so."""
    calls: Literal["once", "batches"] = "once"
    """once: the device's function is called with all rows together. batches: with some at a time,
    and what it returns is added up, so that the rows need not fit into memory."""
    device_parameters: Parameters = {}
    """Keyword parameters of the device's function."""
    coordinator_parameters: Parameters = {}
    """Keyword parameters of the coordinator's function."""

    @property
    def contradiction(self) -> str | None:
        """What of it cannot be; None: nothing."""
        for name, row in self.rows.items():
            if problem := _odd_row(row):
                return f"rows.{name}: {problem}"
        named = [name for name, row in self.rows.items() if row.columns]
        if named and len(named) < len(self.rows):
            other = next(name for name in self.rows if name not in named)
            return f"rows.{named[0]} names columns of a table, and rows.{other} names none"
        for name, array in self.state.items():
            if problem := _odd_state(array):
                return f"state.{name}: {problem}"
        for name, total in self.sums.items():
            low, high = total.range or (0.0, 1.0)
            if not low < high:
                return f"sums.{name} has the range {low:g} to {high:g}"
            if total.dtype == "int64" and total.combine != "sum":
                return f'sums.{name}: whole numbers are added up; a mean needs dtype = "float64"'
            if total.combine == "device-mean" and self.calls == "batches":
                return (
                    f"sums.{name} is a mean over devices, and with calls = "
                    '"batches" each call would count as one. Set calls = "once"'
                )
        if len({*self.metrics}) < len(self.metrics):
            return f"the metric {max(self.metrics, key=self.metrics.count)} is there twice"
        return None


def _odd_row(row: RowArray) -> str | None:
    if not row.columns:
        return None
    if len(row.shape) > 1:
        return f"columns of a table make rows of one axis at most; its shape is {list(row.shape)}"
    wanted = prod(row.shape)
    if len(row.columns) == wanted:
        return None
    return (
        f"it names {len(row.columns)} columns; its shape is {list(row.shape)}, which takes {wanted}"
    )


def _odd_state(array: StateArray) -> str | None:
    if array.value is None:
        return None if array.shape is not None else "it has neither shape nor value"
    try:
        value = np.asarray(array.value, array.dtype)
    except (ValueError, TypeError, OverflowError) as error:
        return f"its value is no array of {array.dtype}: {error}"
    if array.shape is not None and value.shape != array.shape:
        return f"its value has the shape {list(value.shape)}, and its shape is {list(array.shape)}"
    if value.size == 0 or value.ndim > 8:
        return f"its value has the shape {list(value.shape)}; expected 1 element or more"
    if not np.isfinite(value).all():
        return "its value is not finite"
    if array.dtype == "int64" and not np.array_equal(value, np.asarray(array.value, np.float64)):
        return "its value is no array of whole numbers"
    return None

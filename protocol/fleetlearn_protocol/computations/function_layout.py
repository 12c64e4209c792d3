"""How the state and the sums of own functions lie in their vectors, and what both sides check."""

from __future__ import annotations

from math import ceil, floor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetlearn_protocol.computations.function_settings import FunctionSums
from fleetlearn_protocol.computations.layout import Layout, StateField, Sums, SumsLayout
from fleetlearn_protocol.errors import many
from fleetlearn_protocol.vector import Vector

OWN = "run."
"""What the names of the fields begin with that are the computation's, and no function's."""


def real_numbers(values: object) -> NDArray[Any]:
    """Return what a function made, as an array. Raises TypeError where these are no real numbers:
    NumPy would drop imaginary parts, and read text."""
    found = np.asarray(values)
    if found.dtype.kind not in "biuf":
        raise TypeError(f"an array of {found.dtype} was made")
    return found


def function_state(settings: FunctionSums) -> Layout:
    """Return how the state lies in its vector: the function's arrays by name, the metrics, and what
    is counted."""
    # By name, as a manifest is written: whoever reads one finds the order that its writer had.
    return Layout(
        *(
            StateField(name, array.sizes, array.dtype)
            for name, array in sorted(settings.state.items())
        ),
        *(StateField(f"metric.{name}") for name in settings.metrics),
        StateField(f"{OWN}rounds", (), "int64"),
        StateField(f"{OWN}devices", (), "int64"),
        StateField(f"{OWN}rows", (), "int64"),
        StateField(f"{OWN}done", (), "int64"),
    )


def function_sums(settings: FunctionSums) -> SumsLayout:
    """Return how the sums lie in their vector: the rows, and what the function returns."""
    arrays = {name: array.shape for name, array in sorted(settings.sums.items())}
    return SumsLayout({f"{OWN}rows": (), **arrays})


def first_function_state(settings: FunctionSums) -> Vector:
    """Return the state before the first round."""
    given = {name: each.value for name, each in settings.state.items() if each.value is not None}
    return function_state(settings).pack(given)


def check_function_sums(sums: Sums, settings: FunctionSums) -> None:
    """Raise ValueError where the function of one device may not return these sums, int64, (S,)."""
    found = function_sums(settings).unpack(sums)
    rows = int(found[f"{OWN}rows"])
    if rows < 1:
        raise ValueError(f"sums of {many(rows, 'row')} were given; expected 1 or more")
    for name, array in settings.sums.items():
        if array.range is None or not found[name].size:
            continue
        # A mean was multiplied by the rows before it was rounded, in each of up to `rows` calls.
        times = rows if array.combine == "row-mean" else 1
        bits = 0 if array.dtype == "int64" else array.bits
        slack = 0 if array.dtype == "int64" else rows
        low = floor(np.ldexp(array.range[0], bits) * times) - slack
        high = ceil(np.ldexp(array.range[1], bits) * times) + slack
        least, most = int(found[name].min()), int(found[name].max())
        if least < low or most > high:
            wrong = np.ldexp(float(least if least < low else most), -bits) / times
            raise ValueError(
                f"{name}: a value of {wrong:g} came; its range is {array.range[0]:g} to "
                f"{array.range[1]:g}"
            )

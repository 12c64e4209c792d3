"""Calls of functions of other packages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from fleetlearn_protocol.errors import Code, FleetError
from fleetlearn_protocol.user_errors import ANY_FAILURE, failure
from numpy.typing import NDArray

T = TypeVar("T")


def call_own(key: str, call: Callable[[], T]) -> T:
    """Return what ``call`` returns. Raises FleetError where it raises anything. ``key``: of the
    plan, which names the function."""
    try:
        return call()
    except ANY_FAILURE as error:
        raise FleetError(Code.BAD_MESSAGE, failure(key, error)) from error


def real(values: object) -> NDArray[np.float64]:
    """Return what another package's function made, as float64. Raises TypeError where these are no
    real numbers: NumPy would drop imaginary parts, and read text."""
    if values is None:  # the commonest mistake: a function without its return
        raise TypeError("nothing (None) was returned; expected an array of float64")
    found = np.asarray(values)
    if not np.can_cast(found.dtype, np.float64):
        raise TypeError(f"an array of {found.dtype} was made; expected float64")
    return found.astype(np.float64, copy=False)

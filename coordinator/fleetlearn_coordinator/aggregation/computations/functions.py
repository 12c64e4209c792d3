"""Own functions on the coordinator: what a round's sums make of the state, by a function of an
allowed module.

``fleetlearn_protocol.computations.function_settings`` says what devices are sent and return.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from fleetlearn_protocol import extensions
from fleetlearn_protocol.computations.fixed_point import from_fixed
from fleetlearn_protocol.computations.function_layout import (
    OWN,
    function_state,
    function_sums,
    real_numbers,
)
from fleetlearn_protocol.computations.function_settings import NEXT_STATE, FunctionSums, SumArray
from fleetlearn_protocol.computations.layout import Sums
from fleetlearn_protocol.errors import many
from fleetlearn_protocol.user_errors import ANY_FAILURE, failure, in_one_line
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray

WHERE = "coordinator"
"""The bundle's key that names the function."""


class Count(NamedTuple):
    """How many devices and rows a round's sums add up."""

    devices: int
    rows: int


def unready(settings: FunctionSums) -> str | None:
    """Return why the function cannot be called here, and what to do; None: it can."""
    try:
        extensions.make(NEXT_STATE, settings.coordinator, settings.coordinator_parameters, WHERE)
    except extensions.ExtensionError as error:
        return f"the computation's function: {error}"
    return None


def advance(state: Vector, total: Sums, devices: int, settings: FunctionSums) -> Vector:
    """Return the state after a round with these sums of ``devices`` devices. Raises ValueError
    where they cannot be sums of rows, or where the function does not make a state of them."""
    known = function_state(settings).unpack(state)
    found = function_sums(settings).unpack(total)
    count = Count(devices, int(found[f"{OWN}rows"]))
    if not devices <= count.rows:
        raise ValueError(f"sums of {many(count.rows, 'row')} came from {many(devices, 'device')}")
    before = {name: known[name] for name in settings.state}
    sums = {name: _combined(found[name], each, count) for name, each in settings.sums.items()}
    after, metrics, finished = _called(settings, before, sums, count)
    rounds = int(known[f"{OWN}rounds"]) + 1
    return function_state(settings).pack(
        {
            **before,
            **after,
            **{f"metric.{name}": value for name, value in metrics.items()},
            f"{OWN}rounds": rounds,
            f"{OWN}devices": count.devices,
            f"{OWN}rows": count.rows,
            f"{OWN}done": int(finished or rounds >= settings.rounds),
        }
    )


def _combined(total: Sums, array: SumArray, count: Count) -> NDArray[Any]:
    """Return what the function gets of an array's sums: int64 or float64, of its shape."""
    if array.dtype == "int64":
        return total.copy()
    found = from_fixed(total, array.bits)
    if array.combine == "sum":
        return found
    return found / (count.rows if array.combine == "row-mean" else count.devices)


def _called(
    settings: FunctionSums,
    state: dict[str, NDArray[Any]],
    sums: dict[str, NDArray[Any]],
    count: Count,
) -> tuple[dict[str, NDArray[Any]], dict[str, float], bool]:
    """Return what the function says of the next state: its arrays, the metrics, whether it is the
    last. Raises ValueError."""
    name = settings.coordinator
    try:
        function = extensions.make(NEXT_STATE, name, settings.coordinator_parameters, WHERE)
        given = {key: value.copy() for key, value in state.items()}
        with np.errstate(all="ignore"):  # what is not finite is refused below
            made = function(given, sums, count)
    except extensions.ExtensionError:
        raise
    except ANY_FAILURE as error:  # of a stranger's code, of any kind: the round ends, no process
        raise ValueError(failure(f"the function {name}", error)) from error
    if not (isinstance(made, tuple) and len(made) == 3 and isinstance(made[0], Mapping)):
        raise ValueError(
            f"the function {name} returned a {type(made).__name__}; expected a tuple of the next "
            "state's arrays by name, the metrics by name, and whether it is finished"
        )
    after, metrics, finished = made
    return _arrays(name, after, settings), _metrics(name, metrics, settings), bool(finished)


def _arrays(
    function: str, after: Mapping[str, Any], settings: FunctionSums
) -> dict[str, NDArray[Any]]:
    found = {}
    for name, value in after.items():
        declared = settings.state.get(name)
        if declared is None:
            raise ValueError(
                f"the function {function} returned the state's array {name}; the bundle declares "
                f"{', '.join(settings.state)}"
            )
        text = f"the function {function}: state.{name} is no array of {declared.dtype}"
        try:
            given = real_numbers(value)
            with np.errstate(all="ignore"):  # what is not finite is refused below
                array = given.astype(declared.dtype)
        except ANY_FAILURE as error:  # also of an array type's own code
            raise ValueError(f"{text}: {in_one_line(error)}") from None
        if declared.dtype == "int64" and not np.array_equal(array, given):
            raise ValueError(f"{text}: it has numbers that are not whole, or beyond 64 bits")
        if array.shape != declared.sizes:
            raise ValueError(
                f"the function {function}: state.{name} has the shape {list(array.shape)}; "
                f"expected {list(declared.sizes)}"
            )
        if not np.isfinite(array).all():
            raise ValueError(f"the function {function}: state.{name} is not finite")
        found[name] = array
    return found


def _metrics(function: str, metrics: Any, settings: FunctionSums) -> dict[str, float]:
    if not isinstance(metrics, Mapping) or {*metrics} != {*settings.metrics}:
        listed = ", ".join(settings.metrics) or "none"
        given = ", ".join(map(str, metrics)) if isinstance(metrics, Mapping) else repr(metrics)
        raise ValueError(
            f"the function {function} returned the metrics {given or 'none'}; the bundle declares "
            f"{listed}"
        )
    try:
        found = {name: float(value) for name, value in metrics.items()}
    except ANY_FAILURE as error:
        text = f"the function {function}: a metric is no number: {in_one_line(error)}"
        raise ValueError(text) from None
    for name, value in found.items():
        if not np.isfinite(value):
            raise ValueError(f"the function {function}: the metric {name} is {value}")
    return found


def is_done(state: Vector, settings: FunctionSums) -> bool:
    """Return whether the function said that it is finished, or all rounds are done."""
    return bool(function_state(settings).unpack(state)[f"{OWN}done"])


def progress(state: Vector, settings: FunctionSums) -> str:
    """Return where it stands, in one line."""
    known = function_state(settings).unpack(state)
    rounds = int(known[f"{OWN}rounds"])
    metrics = [f"{name} {float(known[f'metric.{name}']):.6g}" for name in settings.metrics]
    if not rounds:
        return f"no round of at most {settings.rounds} so far"
    end = "" if known[f"{OWN}done"] else f" of at most {settings.rounds}"
    return ", ".join([f"{many(rounds, 'round')}{end}", *metrics])


def result(state: Vector, settings: FunctionSums) -> dict[str, Any]:
    """Return the state's arrays and what is known of the last round."""
    known = function_state(settings).unpack(state)
    return {
        "done": bool(known[f"{OWN}done"]),
        "rounds": int(known[f"{OWN}rounds"]),
        "devices": int(known[f"{OWN}devices"]),
        "rows": int(known[f"{OWN}rows"]),
        "metrics": {name: float(known[f"metric.{name}"]) for name in settings.metrics},
        "state": {name: known[name].tolist() for name in settings.state},
    }

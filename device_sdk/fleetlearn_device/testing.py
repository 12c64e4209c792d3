"""Checks for the authors of own functions and own local algorithms, to be called from pytest.

from fleetlearn_device.testing import check_function

def test_my_function() -> None:
    check_function(my_function, "my_function.toml", {"x": x})
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from fleetlearn_protocol.bundle import open_bundle
from fleetlearn_protocol.computations.fixed_point import MOST
from fleetlearn_protocol.computations.function_layout import (
    OWN,
    first_function_state,
    function_state,
    function_sums,
)
from fleetlearn_protocol.computations.function_settings import FunctionSums, SumArray
from fleetlearn_protocol.vector import Vector
from numpy.typing import NDArray

from fleetlearn_device.computations.columns import Columns
from fleetlearn_device.computations.functions import bound, sum_up_function
from fleetlearn_device.own_code import FunctionError, OwnFunction

Array = NDArray[Any]
PARTS = 3
"""Into so many batches the rows are divided."""
TOLERANCE = 1e-9
"""How far the sums of all rows may be from what those of their batches add up to, as a share of the
largest: a sum of floating-point numbers depends on its order."""
COARSE = 1e-4
"""An array whose unit is a larger share of its largest number than this is rounded too much."""


def check_function(
    function: OwnFunction,
    declaration: FunctionSums | str | os.PathLike[str],
    rows: Mapping[str, Array],
    *,
    state: Mapping[str, Array] | None = None,
    cohort: int = 1000,
) -> None:
    """Raise AssertionError where a device's function does not do what its declaration says.

    declaration: what ``make-bundle`` takes: a TOML file, or its settings. rows: arrays of rows as
    ``rows`` declares them, at least 3 rows. state: arrays of the state, by name; None: those of the
    first round. cohort: most devices of a round, whose sums must fit into 64 bits.

    Checked are the returned names, shapes, types, ranges and finite numbers; that the function
    returns the same of the same rows, and takes a single row; that ``bits`` leaves room for the
    cohort, and rounds by no more than 1e-4 of an array's largest number; with ``calls =
    "batches"``, that the sums of batches add up to those of all rows.
    """
    settings = _settings(declaration)
    columns = _columns(settings, rows)
    known = _state(settings, state)
    functions = {settings.device: function}

    def sums(*batches: Columns) -> dict[str, Any]:
        try:
            found = sum_up_function(known, batches, settings, functions)
        except FunctionError as error:
            raise AssertionError(str(error)) from error.__cause__
        return function_sums(settings).unpack(found)

    whole = sums(columns)
    _check_same(whole, sums(columns))
    sums({name: values[:1] for name, values in columns.items()})
    for name, array in settings.sums.items():
        _check_room(name, array, whole[name], cohort)
    _check_rounding(settings, function, known, columns)
    if settings.calls == "batches":
        _check_parts(settings, whole, sums(*_divided(columns)))


def check_algorithm(
    function: Callable[..., Any],
    bundle: str | os.PathLike[str],
    data: Mapping[str, Array],
    *,
    parameters: Mapping[str, float] = MappingProxyType({}),
    epochs: int = 2,
    batch_size: int = 20,
    **hyper: float,
) -> None:
    """Raise AssertionError where an own local algorithm does not do what devices expect of it.

    bundle: the folder of a bundle with graphs. data: the device's examples, as ``Device`` takes
    them. parameters: the function's. hyper: values of the bundle's step, such as lr.

    Checked are that the update is finite, float32, of the model's shape and not 0 everywhere; that
    the same seed gives the same bits, whatever model the runtime had before; that the round's model
    is not changed in place; that the result counts the data's examples and at least one step; and
    that a training which is told to stop ends.
    """
    # Late: ONNX Runtime takes a while.
    from fleetlearn_device.runtimes.open_runtime import open_runtime
    from fleetlearn_device.training.algorithms import UnsupportedError, run_algorithm
    from fleetlearn_device.training.data import as_data
    from fleetlearn_device.training.kept_state import load_model
    from fleetlearn_device.training.own_algorithm import checked
    from fleetlearn_device.training.train import StoppedError, TrainingError
    from fleetlearn_device.training.work import Inputs, TaskOutcome, TaskSettings

    opened, examples = open_bundle(Path(bundle)), as_data(data)
    name = getattr(function, "__qualname__", "function")
    values = {**hyper, **parameters}
    settings = TaskSettings(values, epochs, batch_size, seed=1, own=checked(name, function))

    def outcome(settings: TaskSettings, before: float = 0.0) -> TaskOutcome:
        model = opened.parameters()[: opened.manifest.size]
        runtime = open_runtime(opened, kind="onnx")
        # as after an earlier task
        load_model(runtime, opened, model + np.float32(before), None)
        return run_algorithm("own", runtime, opened, examples, Inputs(model), settings)

    try:
        first, again = outcome(settings), outcome(settings, before=1.0)
    except (UnsupportedError, TrainingError) as error:
        raise AssertionError(str(error)) from error
    update, result = first.parts["update"], first.result
    assert np.array_equal(update, again.parts["update"]), (
        f"{name}: another update of the same task and data. A device that dies trains again: what "
        "is random is drawn from work.settings.seed, and work.load() comes before work.train()"
    )
    assert update.any(), f"{name}: the update is 0"
    assert result.examples == examples.examples, (
        f"{name}: result.examples is {result.examples}, and the data have {examples.examples}"
    )
    assert result.steps > 0, f"{name}: result.steps is {result.steps}"
    try:
        outcome(settings._replace(should_stop=lambda: True))
    except StoppedError:
        return
    except (UnsupportedError, TrainingError) as error:
        raise AssertionError(f"{name}, told to stop: {error}") from error
    raise AssertionError(
        f"{name} went on after it was told to stop. work.train() ends by itself; around steps of "
        "your own ask work.settings.should_stop()"
    )


def _settings(declaration: FunctionSums | str | os.PathLike[str]) -> FunctionSums:
    if isinstance(declaration, FunctionSums):
        settings: Any = declaration
        problem = settings.contradiction
        assert problem is None, f"the declaration: {problem}"
        return declaration
    # Late: it imports what all kinds of computations compute with.
    from fleetlearn_protocol.computations.bundle import read_questions

    try:
        settings = read_questions(declaration).settings
    except ValueError as error:
        raise AssertionError(f"{os.fspath(declaration)}: {error}") from None
    assert isinstance(settings, FunctionSums), f'{os.fspath(declaration)} is not kind = "function"'
    return settings


def _columns(settings: FunctionSums, rows: Mapping[str, Array]) -> dict[str, Array]:
    """Return the rows in the declared types."""
    assert {*rows} == {*settings.rows}, (
        f"rows {', '.join(rows) or 'none'} were given; the declaration has "
        f"{', '.join(settings.rows)}"
    )
    columns = {name: np.asarray(rows[name], row.dtype) for name, row in settings.rows.items()}
    count = len(next(iter(columns.values())))
    for name, row in settings.rows.items():
        wanted = count, *row.shape
        found = columns[name].shape
        assert found == wanted, f"rows.{name} has the shape {found}; expected {wanted}"
    assert count >= PARTS, f"{count} rows were given; expected {PARTS} or more"
    return columns


def _state(settings: FunctionSums, state: Mapping[str, Array] | None) -> Vector:
    first = first_function_state(settings)
    if state is None:
        return first
    layout = function_state(settings)
    try:
        return layout.pack({**layout.unpack(first), **state})
    except ValueError as error:
        raise AssertionError(f"the state that was given: {error}") from None


def _divided(columns: Columns) -> Iterator[Columns]:
    count = len(next(iter(columns.values())))
    ends = [count * part // PARTS for part in range(PARTS + 1)]
    for begin, end in pairwise(ends):
        yield {name: values[begin:end] for name, values in columns.items()}


def _check_same(first: Mapping[str, Array], again: Mapping[str, Array]) -> None:
    for name, values in first.items():
        assert np.array_equal(values, again[name]), (
            f"{name} is another one at a second call with the same rows. A device that dies "
            "computes again: what is random needs a fixed seed"
        )


def _check_room(name: str, array: SumArray, units: Array, cohort: int) -> None:
    largest = int(np.abs(units).max()) if units.size else 0
    assert largest * cohort <= MOST, (
        f"{name} has a sum of {largest:.3g} units; {cohort} such devices go beyond 2^62. Fewer "
        f"bits than {array.bits} leave more room"
    )


def _check_rounding(
    settings: FunctionSums, function: OwnFunction, state: Vector, columns: Columns
) -> None:
    """Check that the unit of each array is small beside what the function returns."""
    known = function_state(settings).unpack(state)
    call = bound(settings, {settings.device: function})
    found = call(
        {name: known[name] for name in settings.state},
        {name: values.copy() for name, values in columns.items()},
    )
    for name, array in settings.sums.items():
        if array.dtype == "int64":
            continue
        largest = float(np.abs(np.asarray(found[name], np.float64)).max(initial=0.0))
        unit = float(np.ldexp(1.0, -array.bits))
        assert not largest or unit <= COARSE * largest, (
            f"{name}: its largest number is {largest:.3g}, and it is rounded to multiples of "
            f"{unit:.3g}. More bits than {array.bits} round it less"
        )


def _check_parts(
    settings: FunctionSums, whole: Mapping[str, Array], parts: Mapping[str, Array]
) -> None:
    assert whole[f"{OWN}rows"] == parts[f"{OWN}rows"]
    for name, array in settings.sums.items():
        # As floating-point numbers: differences of int64 may have no room.
        all_rows, added = (np.asarray(each[name], np.float64) for each in (whole, parts))
        largest = np.abs(all_rows).max(initial=0.0)
        allowed = 0.0 if array.dtype == "int64" else max(PARTS, TOLERANCE * largest)
        assert (np.abs(all_rows - added) <= allowed).all(), (
            f'{name} of {PARTS} batches does not add up to that of all rows, and calls = "batches" '
            'adds it up. Return sums over the rows, or set calls = "once"'
        )

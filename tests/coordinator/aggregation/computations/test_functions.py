from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from fleetlearn_coordinator.aggregation.computations.registry import BadTotalError, RunComputation
from fleetlearn_protocol import extensions
from fleetlearn_protocol.computations.function_layout import function_sums
from fleetlearn_protocol.computations.function_settings import NEXT_STATE, FunctionSums, SumArray
from own_functions import KIND, MEAN, computed_by, mean_sums, next_mean

TOTAL = {"run.rows": 4, "total": 6 * 2**30, "count": 4}


@pytest.fixture(autouse=True)
def apart() -> Iterator[None]:
    with extensions.apart():
        extensions.register(NEXT_STATE, "next-mean", next_mean)
        yield


def advance(made: Any = None, settings: FunctionSums = MEAN, **total: Any) -> Any:
    """Return the result of one round in which the function returns this; None: of the mean."""
    if made is not None:
        extensions.register(NEXT_STATE, "own", lambda state, sums, count: made)
        settings = msgspec.structs.replace(settings, coordinator="own")
    run = RunComputation("function", settings)
    sums = function_sums(settings).pack({**TOTAL, **total})
    state = run.advance(KIND.first(settings), sums, 2)
    return run.result(state)


def test_a_rounds_sums_make_the_next_state() -> None:
    assert advance() == {
        "done": False,
        "rounds": 1,
        "devices": 2,
        "rows": 4,
        "metrics": {"moved": 1.5},
        "state": {"mean": 1.5, "seen": [2, 4]},
    }


def test_the_run_is_over_when_the_function_says_so_or_all_rounds_are_done() -> None:
    tables = [{"x": np.array([1.0, 2.0])}, {"x": np.array([9.0])}]
    found, states = computed_by(MEAN, tables, {"mean": mean_sums})
    assert (found["state"]["mean"], found["rounds"], len(states)) == (4.0, 2, 3)
    endless = msgspec.structs.replace(MEAN, coordinator_parameters={"stop_at": -1.0})
    assert computed_by(endless, tables, {"mean": mean_sums})[0]["rounds"] == MEAN.rounds
    run = RunComputation("function", endless)
    assert run.progress(KIND.first(endless)) == "no round of at most 5 so far"
    assert run.progress(states[1]) == "1 round of at most 5, moved 4"
    assert run.progress(states[2]) == "2 rounds, moved 0"


def test_arrays_that_are_not_returned_stay() -> None:
    assert advance(({}, {"moved": 0}, True))["state"] == {"mean": 0.0, "seen": [0, 0]}


def test_means_are_of_rows_or_of_devices() -> None:
    seen = []

    def told(state: Any, sums: Any, count: Any) -> Any:
        seen.append({name: float(value) for name, value in sums.items()})
        return {}, {"moved": 0.0}, False

    extensions.register(NEXT_STATE, "told", told)
    sums = {"total": SumArray(combine="row-mean"), "count": SumArray(combine="device-mean")}
    settings = msgspec.structs.replace(MEAN, coordinator="told", sums=sums, calls="once")
    advance(settings=settings, count=3 * 2**30)
    assert seen == [{"total": 1.5, "count": 1.5}]


@pytest.mark.parametrize(
    ("made", "text"),
    [
        ({"mean": 1.0}, "returned a dict; expected a tuple"),
        (({"centre": 1.0}, {"moved": 0}, False), "the state's array centre; the bundle declares"),
        (({"mean": [1.0]}, {"moved": 0}, False), "state.mean has the shape [1]; expected []"),
        (({"mean": np.inf}, {"moved": 0}, False), "state.mean is not finite"),
        (({"mean": "a"}, {"moved": 0}, False), "state.mean is no array of float64"),
        (({"mean": 10**400}, {"moved": 0}, False), "an array of object was made"),
        (({"mean": 1j}, {"moved": 0}, False), "an array of complex128 was made"),
        (({"seen": np.array([1, np.nan])}, {"moved": 0}, False), "numbers that are not whole"),
        (({"seen": [1, 2.5]}, {"moved": 0}, False), "numbers that are not whole"),
        (({"seen": [1, 1e19]}, {"moved": 0}, False), "beyond 64 bits"),
        (({}, {"moved": 10**400}, False), "a metric is no number"),
        (({}, {}, False), "returned the metrics none; the bundle declares moved"),
        (({}, {"moved": "far"}, False), "a metric is no number"),
        (({}, {"moved": np.nan}, False), "the metric moved is nan"),
    ],
)
def test_what_is_no_next_state_abandons_the_round(made: Any, text: str) -> None:
    with pytest.raises(BadTotalError) as caught:
        advance(made)
    assert text in str(caught.value)
    assert "own" in str(caught.value)


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_an_exception_of_the_function_abandons_the_round(error: type[BaseException]) -> None:
    def broken(state: Any, sums: Any, count: Any) -> Any:
        raise error("no rows")

    name = f"broken-{error.__name__}"
    extensions.register(NEXT_STATE, name, broken)
    with pytest.raises(
        BadTotalError, match=rf"{name} failed: {error.__name__}: no rows .in broken"
    ):
        advance(settings=msgspec.structs.replace(MEAN, coordinator=name))


def test_sums_of_fewer_rows_than_devices_are_none() -> None:
    with pytest.raises(BadTotalError, match="sums of 1 row came from 2 devices"):
        advance(**{"run.rows": 1})


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"coordinator": "os:getcwd"}, "the module os is not allowed here"),
        ({"coordinator": "nobody"}, "is no own algorithm's name"),
        ({"coordinator_parameters": {"speed": 1}}, "has no parameter speed; it takes stop_at"),
    ],
)
def test_a_function_that_is_not_there_is_said_before_the_run(
    fields: dict[str, Any], text: str
) -> None:
    why = RunComputation("function", msgspec.structs.replace(MEAN, **fields)).unready()
    assert why is not None
    assert text in why
    assert RunComputation("function", MEAN).unready() is None

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fleetlearn_device.computations.functions import bound, sum_up_function
from fleetlearn_device.own_code import FunctionError, read_functions
from fleetlearn_protocol.computations.function_layout import function_sums
from fleetlearn_protocol.computations.function_settings import SumArray
from own_functions import KIND, MEAN, mean_sums

ROWS = {"x": np.array([0.5, 1.25, -7.0])}


def sums_of(function: Callable[..., Any], settings: Any = MEAN, *batches: Any) -> dict[str, Any]:
    found = sum_up_function(
        KIND.first(settings), batches or [ROWS], settings, {settings.device: function}
    )
    return {name: value.tolist() for name, value in function_sums(settings).unpack(found).items()}


def test_what_the_function_returns_is_written_in_whole_units() -> None:
    assert sums_of(mean_sums) == {"run.rows": 3, "total": -5.25 * 2**30, "count": 3}


def test_batches_are_added_up() -> None:
    parts = [{"x": ROWS["x"][:1]}, {"x": ROWS["x"][1:]}]
    assert sums_of(mean_sums, MEAN, *parts) == sums_of(mean_sums)


def test_a_function_that_is_called_once_gets_all_rows() -> None:
    seen = []

    def told(state: Any, rows: Any) -> dict[str, Any]:
        seen.append(rows["x"].tolist())
        return mean_sums(state, rows)

    parts = [{"x": ROWS["x"][:1]}, {"x": ROWS["x"][1:]}]
    sums_of(told, msgspec.structs.replace(MEAN, calls="once"), *parts)
    assert seen == [ROWS["x"].tolist()]


def test_means_are_weighted_by_rows() -> None:
    sums = {"total": SumArray(combine="row-mean"), "count": SumArray(dtype="int64")}
    settings = msgspec.structs.replace(MEAN, sums=sums)
    assert sums_of(mean_sums, settings)["total"] == 3 * -5.25 * 2**30


def test_a_function_may_write_to_what_it_gets() -> None:
    def vandal(state: Any, rows: Any) -> dict[str, Any]:
        found = mean_sums(state, rows)
        rows["x"][:] = 0
        state["mean"][...] = 7
        return found

    assert sums_of(vandal) == sums_of(vandal)
    assert ROWS["x"].tolist() == [0.5, 1.25, -7.0]


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (None, "returned a NoneType; expected arrays by name"),
        ({"total": 1.0}, "returned the arrays total; the bundle declares total, count"),
        ({"total": [1.0], "count": 1}, "total has the shape [1]; expected []"),
        ({"total": "a", "count": 1}, "total is no array of numbers"),
        ({"total": 10**400, "count": 1}, "total is no array of numbers"),
        ({"total": 1j, "count": 1}, "an array of complex128 was made"),
        ({"total": np.nan, "count": 1}, "the value nan cannot be added up"),
        ({"total": 1e30, "count": 1}, "Fewer bits than 30"),
        ({"total": 2e6, "count": 1}, "its range is -1e+06 to 1e+06"),
        ({"total": 1.0, "count": 1.5}, "count is float64; expected whole numbers"),
        ({"total": 1.0, "count": 2**63 - 1}, "beyond 2^62"),
        ({"total": 1.0, "count": np.uint64(2**64 - 1)}, "beyond 2^62"),
    ],
)
def test_what_the_bundle_does_not_declare_is_refused(returned: Any, text: str) -> None:
    with pytest.raises(FunctionError) as caught:
        sums_of(lambda state, rows: returned)
    assert text in str(caught.value)
    assert "mean" in str(caught.value)


@pytest.mark.parametrize("error", [KeyError, SystemExit])
def test_an_exception_of_the_function_is_told_with_its_place(error: type[BaseException]) -> None:
    def broken(state: Any, rows: Any) -> dict[str, Any]:
        raise error("weight")

    says = rf"{error.__name__}: '?weight'? .in broken, test_functions.py"
    with pytest.raises(FunctionError, match=says):
        sums_of(broken)


def test_without_rows_there_is_nothing_to_send() -> None:
    with pytest.raises(FunctionError, match="there are no rows"):
        sum_up_function(KIND.first(MEAN), [], MEAN, {"mean": mean_sums})


def test_a_function_that_is_not_allowed_is_not_called() -> None:
    with pytest.raises(FunctionError, match="asks for the function mean, and the device's owner"):
        bound(MEAN, {"median": mean_sums})


def test_parameters_are_held_against_the_functions_own() -> None:
    def scaled(state: Any, rows: Any, *, scale: float) -> dict[str, Any]:
        return {"total": scale, "count": 1}

    def asked(**parameters: Any) -> Any:
        return msgspec.structs.replace(MEAN, device_parameters=parameters)

    assert sums_of(scaled, asked(scale=2))["total"] == 2 * 2**30
    for settings, text in (
        (asked(), "needs the parameters scale too"),
        (asked(scale=1.0, power=2), "has no parameter power; it takes scale"),
        (asked(scale="a"), "scale = 'a' is refused"),
    ):
        with pytest.raises(FunctionError, match=text):
            sums_of(scaled, settings)
    with pytest.raises(FunctionError, match="takes the arguments state; expected state, rows"):
        sums_of(lambda state: {})


def test_functions_are_imported_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rules.py").write_text("def one(state, rows): ...\ntwo = 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = read_functions(["my_rules:one", "first=my_rules:one"])
    assert [*found] == ["my_rules:one", "first"]
    assert found["first"] is found["my_rules:one"]
    assert read_functions({"own": mean_sums}) == {"own": mean_sums}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["no_such_module_here:f"], "it is neither installed nor in"),
        (["os:no_such_function"], "has no function no_such_function"),
        (["os"], "'os' is no function that can be imported"),
        (["a=os:getcwd", "a=os:getpid"], "a is there twice"),
        (["a b=os:getcwd"], "'a b' is no function's name"),
        ({"a": 1}, "the function a is a int"),
        ("os:getcwd", "expected several, in a list"),
        ([f"f{number}=os:getcwd" for number in range(65)], "65 functions are allowed"),
    ],
)
def test_what_is_no_function_is_said(given: Any, text: str) -> None:
    with pytest.raises(FunctionError) as caught:
        read_functions(given)
    assert text in str(caught.value)

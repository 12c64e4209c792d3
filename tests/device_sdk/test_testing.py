"""The test kit for own functions: ours pass, and planted mistakes are found."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import msgspec
import numpy as np
import pytest
from fleetlearn_device.testing import check_function
from fleetlearn_protocol.computations.function_settings import FunctionSums, SumArray
from own_functions import EXAMPLES, MEAN, allowed_examples, mean_sums, patients, points

ROWS = {"x": np.array([0.5, 1.25, -7.0, 3.0])}


@pytest.mark.parametrize("name", ["kmeans", "newton", "partial_fit"])
def test_the_examples_pass(name: str) -> None:
    if name == "partial_fit":
        pytest.importorskip("sklearn")
    own = {"kmeans": "kmeans:sums", "newton": "newton:sums", "partial_fit": "partial_fit:fit"}
    with allowed_examples() as functions:
        rows = points(1)[0] if name == "kmeans" else patients(1)[0]
        check_function(functions[own[name]], EXAMPLES / f"{name}.toml", rows)


def test_a_state_may_be_given() -> None:
    seen = []

    def told(state: Any, rows: Any) -> dict[str, Any]:
        seen.append(float(state["mean"]))
        return mean_sums(state, rows)

    check_function(told, MEAN, ROWS, state={"mean": np.array(2.5)})
    assert {*seen} == {2.5}
    with pytest.raises(AssertionError, match="the state that was given: centre is no field"):
        check_function(told, MEAN, ROWS, state={"centre": np.array(2.5)})


def changed(**fields: Any) -> FunctionSums:
    return msgspec.structs.replace(MEAN, **fields)


numbers = count()
MISTAKES: dict[str, tuple[Callable[..., Any], FunctionSums, str]] = {
    "another name": (lambda state, rows: {"totals": 1.0, "count": 1}, MEAN, "arrays totals, count"),
    "another shape": (lambda state, rows: {"total": [1.0], "count": 1}, MEAN, r"shape \[1\]"),
    "not finite": (lambda state, rows: {"total": np.inf, "count": 1}, MEAN, "cannot be added up"),
    "out of range": (lambda state, rows: {"total": 2e6, "count": 1}, MEAN, "its range is"),
    "random": (
        lambda state, rows: {"total": rows["x"].sum(), "count": next(numbers)},
        MEAN,
        "count is another one at a second call",
    ),
    "fails with one row": (
        lambda state, rows: {"total": rows["x"][1] * 0 + rows["x"].sum(), "count": len(rows["x"])},
        MEAN,
        "failed: IndexError",
    ),
    "means in place of sums": (
        lambda state, rows: {"total": rows["x"].mean(), "count": len(rows["x"])},
        MEAN,
        "total of 3 batches does not add up",
    ),
    "counts that do not add up": (
        lambda state, rows: {"total": rows["x"].sum(), "count": 1},
        MEAN,
        "count of 3 batches does not add up",
    ),
    "no room": (
        mean_sums,
        changed(sums={"total": SumArray(bits=58), "count": SumArray(dtype="int64")}),
        "Fewer bits than 58",
    ),
    "too coarse": (
        mean_sums,
        changed(sums={"total": SumArray(bits=3), "count": SumArray(dtype="int64")}),
        "More bits than 3",
    ),
    "a contradiction": (mean_sums, changed(metrics=("a", "a")), "the metric a is there twice"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes_are_found(mistake: str) -> None:
    function, settings, text = MISTAKES[mistake]
    with pytest.raises(AssertionError, match=text):
        check_function(function, settings, ROWS)


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ({"y": ROWS["x"]}, "rows y were given; the declaration has x"),
        ({"x": np.zeros((4, 2))}, r"rows.x has the shape \(4, 2\); expected \(4,\)"),
        ({"x": np.zeros(2)}, "2 rows were given; expected 3 or more"),
    ],
)
def test_rows_that_are_not_those_of_the_declaration_are_said(rows: Any, text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        check_function(mean_sums, MEAN, rows)


def test_a_file_that_is_no_declaration_is_said(tmp_path: Any) -> None:
    (tmp_path / "a.toml").write_text('name = "a"\nkind = "function"\n')
    with pytest.raises(AssertionError, match="device"):
        check_function(mean_sums, tmp_path / "a.toml", ROWS)

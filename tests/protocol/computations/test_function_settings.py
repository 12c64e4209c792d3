from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.computations.bundle import read_settings, write_computation_bundle
from fleetlearn_protocol.computations.function_layout import (
    check_function_sums,
    first_function_state,
    function_state,
    function_sums,
)
from fleetlearn_protocol.computations.function_settings import (
    FunctionSums,
    RowArray,
    StateArray,
    SumArray,
)
from fleetlearn_protocol.computations.kinds import KINDS
from fleetlearn_protocol.preprocessing import Preprocessing
from own_functions import MEAN


def changed(**fields: Any) -> FunctionSums:
    return msgspec.structs.replace(MEAN, **fields)


def test_the_first_state_has_the_values_that_are_declared() -> None:
    settings = changed(
        state={
            "a": StateArray(value=[[1.5, -2.0]]),
            "b": StateArray((3,), "float32"),
            "c": StateArray((), "int64", 2**40),
        }
    )
    found = function_state(settings).unpack(first_function_state(settings))
    assert found["a"].tolist() == [[1.5, -2.0]]
    assert found["b"].dtype == np.float32
    assert found["b"].tolist() == [0, 0, 0]
    assert found["c"] == 2**40
    assert (found["run.rounds"], found["run.done"], found["metric.moved"]) == (0, 0, 0)


def test_names_may_stand_in_any_order(tmp_path: Path) -> None:
    """A manifest has its keys in the alphabet's order. The state before the first round, rows and
    sums of who reads it are those of who wrote it."""
    settings = changed(
        rows={"x": RowArray(), "t_x": RowArray((2,))},
        state={"mean": StateArray(value=[1.0, 2.0]), "bias": StateArray(value=[3.0, 4.0])},
        sums={"total": SumArray((2,)), "count": SumArray((3,))},
    )
    bundle = open_bundle(write_computation_bundle(tmp_path / "a.bundle", "means", settings))
    read = bundle.manifest.computation
    assert isinstance(read, FunctionSums)
    state = function_state(read).unpack(bundle.parameters())
    assert state["mean"].tolist() == [1.0, 2.0]
    assert state["bias"].tolist() == [3.0, 4.0]
    both = function_sums(read), function_sums(settings)
    assert [*both[0].shapes.items()] == [*both[1].shapes.items()]
    assert bundle.manifest.batch == KINDS["function"].arrays(settings)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"rows": {"x": RowArray((2,), columns=("a",))}}, "names 1 columns; its shape is [2]"),
        ({"rows": {"x": RowArray((2, 2), columns=("a",) * 4)}}, "rows of one axis at most"),
        (
            {"rows": {"x": RowArray(columns=("a",)), "y": RowArray()}},
            "rows.x names columns of a table, and rows.y names none",
        ),
        ({"state": {"m": StateArray()}}, "state.m: it has neither shape nor value"),
        (
            {"state": {"m": StateArray((2,), value=[1.0])}},
            "has the shape [1], and its shape is [2]",
        ),
        ({"state": {"m": StateArray(value=[[1.0], [1.0, 2.0]])}}, "is no array of float64"),
        ({"state": {"m": StateArray(value="a")}}, "is no array of float64"),
        ({"state": {"m": StateArray(value=[])}}, "expected 1 element or more"),
        ({"state": {"m": StateArray(dtype="int64", value=1.5)}}, "no array of whole numbers"),
        ({"sums": {"s": SumArray(range=(1, 1))}}, "sums.s has the range 1 to 1"),
        ({"sums": {"s": SumArray(dtype="int64", combine="row-mean")}}, "whole numbers are added"),
        ({"sums": {"s": SumArray(combine="device-mean")}}, 'Set calls = "once"'),
        ({"metrics": ("a", "a")}, "the metric a is there twice"),
    ],
)
def test_what_cannot_be_is_said(fields: dict[str, Any], text: str) -> None:
    problem = changed(**fields).contradiction
    assert problem is not None
    assert text in problem


def test_what_can_be_is_not_refused() -> None:
    assert MEAN.contradiction is None
    assert changed(calls="once", sums={"s": SumArray(combine="device-mean")}).contradiction is None


@pytest.mark.parametrize("name", ["1a", "a b", "run.rows", ""])
def test_a_name_of_an_array_is_a_word(name: str) -> None:
    given = msgspec.to_builtins(changed(sums={name: SumArray()}))
    with pytest.raises(ValueError, match=r"docs/algorithms/functions\.md"):
        read_settings(given)


def test_columns_of_a_table_are_read_as_numbers() -> None:
    kind = KINDS["function"]
    settings = changed(
        rows={"x": RowArray((2,), columns=("a", "b")), "y": RowArray((), "int64", ("label",))}
    )
    told = kind.preprocessing(settings)
    assert isinstance(told, Preprocessing)
    assert told.arrays["x"].columns == ("a", "b")
    assert told.arrays["y"].columns == "label"
    assert [each.name for each in kind.arrays(settings)] == ["x", "y"]
    assert kind.preprocessing(MEAN) is msgspec.UNSET


@pytest.mark.parametrize(
    ("total", "rows", "fits"),
    [(1e6, 1, True), (-1e6, 1, True), (1e6 + 1, 1, False), (-1e6 - 1, 1, False), (0.0, 0, False)],
)
def test_sums_of_a_device_are_within_their_range(total: float, rows: int, fits: bool) -> None:
    found = {"run.rows": rows, "total": np.int64(np.ldexp(total, 30)), "count": 1}
    sums = function_sums(MEAN).pack(found)
    if fits:
        check_function_sums(sums, MEAN)
    else:
        with pytest.raises(ValueError, match=r"range is -1e\+06 to 1e\+06|sums of 0 rows"):
            check_function_sums(sums, MEAN)


def test_a_mean_over_rows_is_held_to_the_range_of_a_row() -> None:
    settings = changed(sums={"share": SumArray(range=(0.0, 1.0), combine="row-mean")})
    layout = function_sums(settings)
    for share, fits in ((1.0, True), (0.0, True), (1.01, False), (-0.01, False)):
        sums = layout.pack({"run.rows": 50, "share": np.int64(np.ldexp(share * 50, 30))})
        if fits:
            check_function_sums(sums, settings)
        else:
            with pytest.raises(ValueError, match=f"share: a value of {share:g} came"):
                check_function_sums(sums, settings)

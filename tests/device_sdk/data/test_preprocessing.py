"""Preprocessing against what a few lines of Python make of the same rows."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from fleetlearn_device.data.preprocessing import OPERATIONS, prepare, prepared_rows
from fleetlearn_device.data.raw import RawRows
from fleetlearn_device.runtimes.checks import DataError
from fleetlearn_protocol.manifest import Input
from fleetlearn_protocol.preprocessing import Operation, read_preprocessing
from hypothesis import given, settings
from hypothesis import strategies as st
from line_bundle import write_line_bundle


def made(told: dict[str, Any], raw: dict[str, Any], **dtypes: str) -> dict[str, Any]:
    """The arrays that preprocessing makes; dtypes: of the batch, float64 unless given."""
    preprocessing = read_preprocessing(told)
    inputs = [Input(name, dtypes.get(name, "float64"), ()) for name in preprocessing.arrays]  # type: ignore[arg-type]
    rows = RawRows({name: np.asarray(array) for name, array in raw.items()})
    return prepared_rows(rows, preprocessing, inputs, "mine.csv").arrays


def worked(values: Any, *steps: dict[str, Any], dtype: str = "float64") -> Any:
    return made({"arrays": {"x": {"columns": "x", "steps": steps}}}, {"x": values}, x=dtype)["x"]


def test_each_operation_by_hand() -> None:
    x = np.array([[1.0, 2.0], [3.0, 5.0]])
    assert worked(x, {"op": "standardise", "mean": 1, "std": 2}).tolist() == [[0, 0.5], [1, 2]]
    given = {"op": "standardise", "mean": [1, 2], "std": [2, 0.5]}
    assert worked(x, given).tolist() == [[0, 0], [1, 6]]
    assert worked(x[..., None], given | {"axis": 1}).tolist() == [[[0], [0]], [[1], [6]]]
    assert worked(x, {"op": "scale", "factor": 10, "offset": -1}).tolist() == [[9, 19], [29, 49]]
    assert worked(x, {"op": "clip", "low": 2, "high": 3}).tolist() == [[2, 2], [3, 3]]
    assert worked([0, math.e - 1], {"op": "log", "offset": 1}).tolist() == [0, 1]
    assert worked([1.9, -1.9], {"op": "cast", "dtype": "int64"}, dtype="int64").tolist() == [1, -1]
    words = {"op": "index", "values": ["run", "a", "walk"]}
    assert worked(["walk", "run", "a"], words, dtype="int64").tolist() == [2, 0, 1]
    numbers = {"op": "index", "values": [7, 3]}
    assert worked([3.0, 7.0, 3.0], numbers, dtype="int64").tolist() == [1, 0, 1]
    hot = {"op": "one_hot", "classes": 3}
    assert worked([2, 0], hot).tolist() == [[0, 0, 1], [1, 0, 0]]
    channels = np.arange(12).reshape(2, 3, 2)
    assert worked(channels, {"op": "channels_first"}).tolist() == [
        [[0, 2, 4], [1, 3, 5]],
        [[6, 8, 10], [7, 9, 11]],
    ]
    both = worked([2.0, 4.0], {"op": "scale", "factor": 2}, {"op": "clip", "low": 0, "high": 5})
    assert both.tolist() == [4, 5]


def test_categories_beside_numbers_become_codes() -> None:
    raw = {
        "age": ["3", "NA", "4.5", "7"],
        "ward": ["east", " west", "", "north"],
        "grade": [3.0, 1.0, float("nan"), 9.0],
    }
    step = {"op": "codes", "values": [[], ["west", "east"], ["1", "3"]]}
    x = {"columns": ["age", "ward", "grade"], "steps": [step]}
    nan = float("nan")
    expected = np.array([[3, 1, 1], [nan, 0, 0], [4.5, nan, nan], [7, -1, -1]])
    np.testing.assert_array_equal(made({"arrays": {"x": x}}, raw)["x"], expected)
    with pytest.raises(DataError, match="codes has categories of 3 columns"):
        made({"arrays": {"x": {"columns": ["age", "ward"], "steps": [step]}}}, raw)
    with pytest.raises(DataError, match="a number or nothing"):
        made({"arrays": {"x": x}}, {**raw, "age": ["3", "old", "1", "2"]})


def test_every_operation_that_a_bundle_may_name_is_there() -> None:
    assert set(OPERATIONS) == set(get_args(Operation))


def test_columns_stand_side_by_side_and_the_batch_has_its_types() -> None:
    told = {"arrays": {"x": {"columns": ["b", "a"]}, "y": {"columns": "label"}}}
    arrays = made(told, {"a": [1, 2], "b": [3, 4], "label": [0.0, 1.0]}, x="float32", y="int64")
    assert arrays["x"].tolist() == [[3, 1], [4, 2]]
    assert (arrays["x"].dtype, arrays["y"].dtype) == (np.float32, np.int64)


STREAM = {
    "arrays": {
        "x": {"columns": ["a", "b"]},
        "y": {"columns": "label", "label": "last"},
        "z": {"columns": "label", "label": "majority"},
    },
    "windows": {"length": 3, "hop": 2},
    "streams": "run",
}


def test_windows_by_hand() -> None:
    raw = {
        "a": np.arange(9.0),
        "b": -np.arange(9.0),
        "label": [0, 0, 1, 1, 1, 5, 5, 6, 6],
        "run": [1, 1, 1, 1, 1, 1, 2, 2, 2],
    }
    arrays = made(STREAM, raw)
    assert arrays["x"].tolist() == [
        [[0, 0], [1, -1], [2, -2]],
        [[2, -2], [3, -3], [4, -4]],
        [[6, -6], [7, -7], [8, -8]],
    ]
    assert arrays["y"].tolist() == [1, 1, 6]
    assert arrays["z"].tolist() == [0, 1, 6]


@settings(max_examples=60, deadline=None)
@given(
    runs=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    length=st.integers(1, 4),
    hop=st.integers(1, 5),
    labels=st.lists(st.integers(0, 2), min_size=36, max_size=36),
)
def test_windows_are_those_of_a_loop(
    runs: list[int], length: int, hop: int, labels: list[int]
) -> None:
    run = [number for number, count in enumerate(runs) for _ in range(count)]
    rows = len(run)
    windows = []
    for number in range(len(runs)):
        mine = [row for row in range(rows) if run[row] == number]
        begins = range(0, len(mine) - length + 1, hop)
        windows += [mine[begin : begin + length] for begin in begins]
    told = STREAM | {"windows": {"length": length, "hop": hop}}
    raw = {"a": np.arange(rows), "b": np.arange(rows), "label": labels[:rows], "run": run}
    if not windows:
        with pytest.raises(DataError, match="the longest stream has"):
            made(told, raw)
        return
    arrays = made(told, raw)
    assert arrays["x"][..., 0].tolist() == windows
    assert arrays["y"].tolist() == [labels[window[-1]] for window in windows]
    most = [Counter(labels[row] for row in window) for window in windows]
    assert arrays["z"].tolist() == [min(c, key=lambda v: (-c[v], v)) for c in most]


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.floats(0.01, 2.0), min_size=1, max_size=30),
    rate=st.sampled_from([0.5, 1.0, 3.0, 50.0]),
    start=st.floats(-5, 1e9),
)
def test_resampling_is_linear_interpolation(steps: list[float], rate: float, start: float) -> None:
    time = np.cumsum([start, *steps])
    values = np.sin(np.arange(len(time)) * 1.7)
    labels = np.arange(len(time)) % 5
    told = {
        "arrays": {"x": {"columns": "v"}, "y": {"columns": "l", "label": "last"}},
        "resample": {"time": "t", "rate": rate},
        "windows": {"length": 1, "hop": 1},
    }
    arrays = made(told, {"t": time, "v": values, "l": labels})
    expected = []
    for k in range(10**6):
        at = time[0] + k / rate
        if at > time[-1] + 1e-6 / rate:
            break
        row = max(r for r in range(len(time)) if time[r] <= at + 1e-6 / rate)
        after = min(row + 1, len(time) - 1)
        part = 0.0 if after == row else (at - time[row]) / (time[after] - time[row])
        expected.append((values[row] + part * (values[after] - values[row]), labels[row]))
    assert len(arrays["x"]) in (len(expected), len(expected) - 1, len(expected) + 1)
    both = min(len(arrays["x"]), len(expected))
    tolerance = 1e-4 * rate + 1e-6 * abs(start)  # 1e9 seconds in float64 are exact to 1e-7
    np.testing.assert_allclose(
        arrays["x"][:both, 0], [value for value, _ in expected[:both]], atol=tolerance, rtol=0
    )


def test_resampling_by_hand() -> None:
    told = {
        "arrays": {"x": {"columns": "v"}, "word": {"columns": "w", "label": "last"}},
        "resample": {"time": "t", "rate": 2},
        "windows": {"length": 1, "hop": 1},
        "streams": "run",
    }
    told["arrays"]["word"]["steps"] = [{"op": "index", "values": ["a", "b", "c"]}]  # type: ignore[index]
    raw = {
        "t": [10.0, 10.4, 11.0, 3.0, 3.5],
        "v": [0.0, 4.0, 10.0, 1.0, 2.0],
        "w": ["a", "b", "c", "a", "b"],
        "run": [0, 0, 0, 1, 1],
    }
    arrays = made(told, raw)
    np.testing.assert_allclose(arrays["x"][:, 0], [0, 5, 10, 1, 2], rtol=1e-12)
    assert arrays["word"].tolist() == [0, 1, 2, 0, 1]


@settings(max_examples=40, deadline=None)
@given(
    x=st.lists(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=2), min_size=1, max_size=2100),
    mean=st.floats(-100, 100),
    std=st.floats(0.1, 100),
)
def test_numbers_are_numpys(x: list[list[float]], mean: float, std: float) -> None:
    array = np.array(x)
    chain = (
        {"op": "standardise", "mean": mean, "std": std},
        {"op": "clip", "low": -3, "high": 3},
        {"op": "scale", "factor": 0.5, "offset": 0.25},
    )
    expected = np.clip((array - mean) / std, -3, 3) * 0.5 + 0.25
    np.testing.assert_array_equal(worked(array, *chain), expected)
    np.testing.assert_array_equal(worked(array, *chain, dtype="float32"), expected.astype("f4"))


WORDS = {"op": "index", "values": ["a", "b"]}


@pytest.mark.parametrize(
    ("values", "steps", "dtype", "words"),
    [
        (["a", "c"], [WORDS], "int64", "mine.csv, example 1 (the first is 0), x: c was found; exp"),
        (["a", "b"], [], "float32", "'a' is text; expected numbers, or the operation index"),
        (["a"], [{"op": "log"}], "float32", "'a' is text"),
        ([1.0, 0.0], [{"op": "log"}], "float32", "0.0 was found; expected more than -0, for its"),
        ([1.0, 0.5], [], "int64", "example 1 (the first is 0), x: 0.5 was found; expected a whole"),
        ([1.0, 300.0], [], "uint8", "300.0 was found; expected what fits uint8"),
        (
            [0, 3],
            [{"op": "one_hot", "classes": 3}],
            "float32",
            "expected a whole number from 0 to 2",
        ),
        ([1.0, np.nan], [{"op": "cast", "dtype": "int64"}], "int64", "expected a finite number"),
        ([1.0], [{"op": "channels_first"}], "float32", "expected at least (n, length, channels)"),
        (
            np.ones((2, 3)),
            [{"op": "standardise", "mean": [0, 0], "std": 1}],
            "float32",
            "standardise has 2 numbers along axis -1 of an array of shape ('n', 3)",
        ),
    ],
)
def test_what_does_not_fit_is_said_with_its_place(
    values: Any, steps: Any, dtype: str, words: str
) -> None:
    with pytest.raises(DataError) as caught:
        worked(values, *steps, dtype=dtype)
    assert words in str(caught.value)


def test_streams_that_cannot_be_cut() -> None:
    raw: dict[str, Any] = {name: np.arange(2) for name in ("a", "b", "label", "run")}
    with pytest.raises(DataError, match="the longest stream has 1 rows; expected at least 3"):
        made(STREAM, raw)
    del raw["b"]
    with pytest.raises(DataError, match="there is no column b, which the bundle's preprocessing"):
        made(STREAM, raw)
    told = {"arrays": {"x": {"columns": "v"}}, "resample": {"time": "t", "rate": 1}}
    with pytest.raises(DataError, match=r"t: 1.0 comes after 2.0; expected times that rise"):
        made(told, {"t": [0.0, 2.0, 1.0], "v": [0, 0, 0]})


def test_a_prediction_needs_no_labels(tmp_path: Path) -> None:
    bundle = write_line_bundle(tmp_path / "line.bundle")
    told = {
        "arrays": {
            "x": {"columns": ["a", "b", "c"], "steps": [{"op": "scale", "factor": 2}]},
            "y": {"columns": "label"},
        }
    }
    preprocessing = read_preprocessing(told)
    manifest = msgspec.structs.replace(bundle.manifest, preprocessing=preprocessing, version=3)
    raw = {"a": np.arange(2.0), "b": np.arange(2.0), "c": np.ones(2)}
    arrays = prepare(raw, manifest)
    assert {name: array.tolist() for name, array in arrays.items()} == {"x": [[0, 0, 2], [2, 2, 2]]}
    assert prepare(raw, bundle.manifest) == raw

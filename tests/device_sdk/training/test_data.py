from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleetlearn_device.runtimes.checks import DataError
from fleetlearn_device.training.data import ArrayData, BatchData, as_data, load_npz
from fleetlearn_protocol.manifest import Input, Manifest
from fleetlearn_protocol.manifest_file import read_manifest

INPUTS = (Input("x", "float32", (2,)), Input("y", "int64", ()))
X, Y = np.arange(14, dtype=np.float32).reshape(7, 2), np.arange(7)


def labels(data: ArrayData, *args: Any) -> list[list[int]]:
    return [np.asarray(batch[1]).tolist() for batch in data.fit(INPUTS).batches(*args)]


def test_a_pass_visits_each_example_once_and_the_last_batch_is_partial() -> None:
    passed = labels(ArrayData((X, Y)), 3, 5)
    assert [len(batch) for batch in passed] == [3, 3, 1]
    assert sorted(label for batch in passed for label in batch) == list(range(7))


def test_the_arrays_of_a_batch_stay_together() -> None:
    for x, y in ArrayData((X, Y)).batches(3, 5):
        np.testing.assert_array_equal(x[:, 0], 2 * np.asarray(y))


def test_batch_size_zero_is_one_batch_of_all() -> None:
    assert [len(batch) for batch in labels(ArrayData((X, Y)), 0, 5)] == [7]


def test_without_seed_the_order_is_the_arrays_own() -> None:
    assert labels(ArrayData((X, Y)), 4, None) == [[0, 1, 2, 3], [4, 5, 6]]


def test_seed_and_epoch_decide_the_order() -> None:
    data = ArrayData((X, Y))
    assert labels(data, 7, 5, 1) == labels(ArrayData((X, Y)), 7, 5, 1)
    assert labels(data, 7, 5, 1) != labels(data, 7, 5, 2)
    assert labels(data, 7, 5, 1) != labels(data, 7, 6, 1)


def test_arrays_that_fit_are_not_copied_and_others_cast_once() -> None:
    data = ArrayData({"y": Y.astype(np.uint8), "x": X}).fit(INPUTS)
    (batch,) = data.batches(0, None)
    x, y = batch
    assert np.shares_memory(x, X)
    assert np.asarray(y).dtype == np.int64


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ((), "at least one array"),
        ((X, Y[:3]), "{'0': 7, '1': 3}"),
        ({"x": X[:0], "y": Y[:0]}, "{'x': 0, 'y': 0}"),
        ((np.float32(1),), "{'0': None}"),
    ],
)
def test_arrays_without_a_common_number_of_examples_are_refused(arrays: Any, words: str) -> None:
    with pytest.raises(DataError) as caught:
        ArrayData(arrays)
    assert words in str(caught.value)


def test_arrays_that_the_manifest_does_not_have_are_refused() -> None:
    with pytest.raises(DataError, match=r"arrays \['a', 'x'\] were given; expected x float32"):
        ArrayData({"x": X, "a": Y}).fit(INPUTS)


def test_a_negative_batch_size_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_size is -1; expected at least 1"):
        list(ArrayData((X, Y)).batches(-1, 0))


def test_batches_of_the_users_own_are_passed_through_each_time() -> None:
    own = [(X[:5], Y[:5]), (X[5:], Y[5:])]
    data = as_data(own, examples=7)
    assert isinstance(data, BatchData)
    for epoch in range(2):
        assert list(data.fit(INPUTS).batches(3, 1, epoch)) == own


def test_as_data_knows_arrays_from_batches() -> None:
    assert isinstance(as_data((X, Y)), ArrayData)
    assert isinstance(as_data([X, Y]), ArrayData)
    assert isinstance(as_data({"x": X, "y": Y}), ArrayData)
    data = as_data((X, Y), examples=7)
    assert data.examples == 7
    assert as_data(data) is data


@pytest.mark.parametrize(
    ("source", "examples", "words"),
    [
        ([(X, Y)], None, "a list was given without examples="),
        (
            iter([(X, Y)]),
            7,
            "a list_iterator was given; training passes over the data several times",
        ),
        (
            ((X, Y) for _ in range(2)),
            7,
            "a generator was given; training passes over the data several times",
        ),
        ([(X, Y)], 0, "examples=0; expected how many examples a pass yields"),
        (5, 7, "a int was given"),
        (X, None, "an array of shape (7, 2) was given; expected a tuple of arrays, such as (x, y)"),
        ((X, Y), 8, "examples=8 was given; the arrays have 7"),
    ],
)
def test_what_is_no_data_is_refused(source: Any, examples: int | None, words: str) -> None:
    with pytest.raises(DataError) as caught:
        as_data(source, examples)
    assert words in str(caught.value)


@pytest.fixture
def manifest(cases: Any) -> Manifest:
    return read_manifest((cases("softmax").path / "manifest.json").read_bytes())


def test_a_file_of_arrays_is_read_in_the_manifests_order_and_dtypes(
    tmp_path: Path, manifest: Manifest
) -> None:
    np.savez(tmp_path / "a.npz", y=np.arange(5, dtype=np.int32), x=np.ones((5, 64)))
    arrays = load_npz(tmp_path / "a.npz", manifest)
    assert [(name, array.dtype.name, array.shape) for name, array in arrays.items()] == [
        ("x", "float32", (5, 64)),
        ("y", "int64", (5,)),
    ]
    assert as_data(load_npz(tmp_path / "a.npz")).examples == 5


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        (
            {"x": np.ones((5, 64))},
            "arrays ['x'] were given; expected x float32 (n, 64), y int64 (n,)",
        ),
        ({"x": np.ones((5, 64)), "y": Y[:5], "z": Y}, "arrays ['x', 'y', 'z'] were given"),
        ({"x": np.ones((5, 64)), "y": Y[:4]}, "different numbers of examples: {'x': 5, 'y': 4}"),
        ({"x": np.ones((5, 8, 8)), "y": Y[:5]}, "array x has shape (5, 8, 8); expected (n, 64)"),
        ({"x": np.ones((5, 64)), "y": np.ones(5)}, "array y has dtype float64; expected int64"),
        (
            {"x": np.ones((5, 64)), "y": np.array([1, 2, 3, 4, 10])},
            "array y has the value 10 in example 4",
        ),
        (
            {"x": np.ones((5, 64)), "y": np.array([1, None, 2, 3, 4])},
            "the array y holds Python objects; expected plain",
        ),
    ],
)
def test_a_file_that_does_not_fit_is_refused(
    tmp_path: Path, manifest: Manifest, arrays: Any, words: str
) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError) as caught:
        load_npz(tmp_path / "a.npz", manifest)
    assert str(caught.value).startswith(str(tmp_path / "a.npz"))
    assert words in str(caught.value)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist; expected an"):
        load_npz(tmp_path / "none.npz")
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(DataError, match="is a text file, such as CSV"):
        load_npz(tmp_path / "text.npz")
    (tmp_path / "empty.npz").write_bytes(b"")
    with pytest.raises(DataError, match="npz file of plain arrays"):
        load_npz(tmp_path / "empty.npz")
    np.savez(tmp_path / "whole.npz", x=X, y=Y)
    whole = (tmp_path / "whole.npz").read_bytes()
    (tmp_path / "half.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="npz file of plain arrays"):
        load_npz(tmp_path / "half.npz")
    (tmp_path / "changed.npz").write_bytes(whole.replace(X.tobytes(), X.tobytes()[::-1]))
    with pytest.raises(DataError, match="npz file of plain arrays"):
        load_npz(tmp_path / "changed.npz")
    np.savez_compressed(tmp_path / "compressed.npz", x=X)
    compressed = bytearray((tmp_path / "compressed.npz").read_bytes())
    compressed[60:120] = bytes(60)
    (tmp_path / "compressed.npz").write_bytes(compressed)
    with pytest.raises(DataError, match="npz file of plain arrays"):
        load_npz(tmp_path / "compressed.npz")
    np.save(tmp_path / "single.npy", X)
    with pytest.raises(DataError, match="is a single array"):
        load_npz(tmp_path / "single.npy")
    with pytest.raises(DataError, match="npz file of plain arrays"):
        load_npz(tmp_path)

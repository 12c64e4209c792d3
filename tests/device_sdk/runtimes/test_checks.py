from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fleetlearn_device.runtimes.checks import (
    DataError,
    check_batch,
    check_hyper,
    check_ranges,
    check_seed,
    check_vector,
    copy_all,
    find_nonfinite,
)
from fleetlearn_protocol.manifest import Hyper, Input

INPUTS = (Input("x", "float32", (2, 3)), Input("y", "int64", ()))
X, Y = np.ones((4, 2, 3), np.float32), np.arange(4)


def test_fitting_arrays_are_not_copied() -> None:
    x, y = check_batch((X, Y), INPUTS)
    assert x is X
    assert y is Y


def test_a_dict_is_put_in_the_manifests_order() -> None:
    x, y = check_batch({"y": Y, "x": X}, INPUTS)
    assert x is X
    assert y is Y


@pytest.mark.parametrize("dtype", ["float64", "float16", "int32", "uint8", "bool", ">f4"])
def test_casts_of_the_same_kind_are_done(dtype: str) -> None:
    x, _ = check_batch((X.astype(dtype), Y), INPUTS)
    assert x.dtype == np.float32
    assert x.dtype.isnative
    np.testing.assert_array_equal(x, X)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "uint64", "bool"])
def test_labels_of_another_integer_type_are_cast(dtype: str) -> None:
    _, y = check_batch((X, Y.astype(dtype)), INPUTS)
    assert y.dtype == np.int64
    np.testing.assert_array_equal(y, Y.astype(dtype))


def test_arrays_are_made_contiguous_and_lists_arrays() -> None:
    x, y = check_batch((np.asfortranarray(X), [1, 2, 3, 4]), INPUTS)
    assert x.flags.c_contiguous
    assert y.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((X,), "1 arrays were given; expected 2: x float32 (n, 2, 3), y int64 (n,)"),
        ((X, Y, Y), "3 arrays were given; expected 2"),
        (X, "a ndarray was given; expected a tuple of arrays"),
        ({"x": X, "label": Y}, "arrays ['label', 'x'] were given; expected x float32"),
        ((X[:, :1], Y), "array x has shape (4, 1, 3); expected (n, 2, 3)"),
        ((X, Y[:, None]), "array y has shape (4, 1); expected (n,)"),
        ((X, np.int64(3)), "array y has shape (); expected (n,)"),
        ((X, Y.astype(np.float32)), "array y has dtype float32; expected int64"),
        ((X, Y.astype(str)), "array y has dtype <U21; expected int64"),
        ((X, Y.astype(object)), "array y has dtype object; expected int64"),
        ((X.astype(np.complex64), Y), "array x has dtype complex64; expected float32"),
        ((X, [[1], [2, 3], [4], [5]]), "numpy can make no array of y, a list"),
        ((X, Y[:3]), "different numbers of examples: {'x': 4, 'y': 3}"),
        ((X[:0], Y[:0]), "there are no examples"),
        ((X * np.float64(1e300), Y), "array x has float64 values that are too large for float32"),
        ((X, np.full(4, 2**63, np.uint64)), "array y has values from 9223372036854775808 to"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(batch: Any, words: str) -> None:
    with pytest.raises(DataError) as caught:
        check_batch(batch, INPUTS)
    assert words in str(caught.value)


def test_hyper_parameters_come_in_the_manifests_order_with_defaults() -> None:
    rows = (Hyper("lr"), Hyper("mu", 0.25))
    assert list(check_hyper({"lr": 1}, rows).items()) == [("lr", 1.0), ("mu", 0.25)]
    assert check_hyper({"mu": np.float32(0.5), "lr": 0.1}, rows) == {"lr": 0.1, "mu": 0.5}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "['lr'] were not given"),
        ({"lr": 0.1, "momentum": 0.9}, "['momentum'] are not the bundle's; it has ['lr', 'mu']"),
        ({"lr": float("nan")}, "hyper-parameter lr is nan; expected a finite float32"),
        ({"lr": 1e39}, "hyper-parameter lr is 1e+39; expected a finite float32"),
        ({"lr": "fast"}, "hyper-parameter lr is 'fast'; expected a number"),
    ],
)
def test_hyper_parameters_that_do_not_fit_are_refused(given: Any, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        check_hyper(given, (Hyper("lr"), Hyper("mu", 0.25)))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("vector", "words"),
    [
        (np.zeros(3), "is float64 of shape (3,); expected float32 of shape (3,)"),
        (np.zeros(4, np.float32), "is float32 of shape (4,); expected float32 of shape (3,)"),
        ([0.0, 0.0, 0.0], "is a list; expected a float32 numpy array of shape (3,)"),
    ],
)
def test_vectors_that_do_not_fit_are_refused(vector: Any, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        check_vector(vector, 3)
    assert words in str(caught.value)


def test_a_vector_may_have_either_of_two_sizes() -> None:
    for size in (3, 5):
        assert check_vector(np.zeros(size, np.float32), 3, 5).shape == (size,)
    with pytest.raises(
        ValueError, match=r"the state is float32 of shape \(4,\); expected .* \(3,\) or \(5,\)"
    ):
        check_vector(np.zeros(4, np.float32), 3, 5, what="the state")


def test_vectors_can_change_places() -> None:
    both = np.array([1, 1, 2, 2], np.float32)
    third = np.zeros(2, np.float32)
    copy_all([(both[2:], both[:2]), (both[:2], both[2:]), (both[:2], third)])
    assert both.tolist() == [2, 2, 1, 1]
    assert third.tolist() == [1, 1]


def test_a_part_can_be_copied_onto_itself_shifted() -> None:
    vector = np.arange(5, dtype=np.float32)
    copy_all([(vector[:4], vector[1:])])
    assert vector.tolist() == [0, 0, 1, 2, 3]


@pytest.mark.parametrize("seed", [0, 2**53 - 1, np.int64(7)])
def test_seeds(seed: int) -> None:
    assert check_seed(seed) == seed


@pytest.mark.parametrize("seed", [-1, 2**53, 1.0, "1", None])
def test_what_is_no_seed(seed: Any) -> None:
    with pytest.raises(ValueError, match=r"expected an integer from 0 to 2\^53 - 1"):
        check_seed(seed)


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8"])
def test_integers_within_their_range_are_let_through(dtype: Any) -> None:
    row = Input("y", dtype, (2,), 10)
    check_ranges((np.arange(10, dtype=dtype).reshape(5, 2),), (row,))
    # the bundle knows no range
    check_ranges((np.full((5, 2), 250, dtype),), (Input("y", dtype, (2,)),))
    check_ranges((np.zeros((0, 2), dtype),), (row,))


@pytest.mark.parametrize(
    ("dtype", "value", "ignored", "words"),
    [
        (
            "int64",
            -1,
            None,
            "array y has the value -1 in example 3 (the first is 0), at [1]; expected 0 to 9. 1 of",
        ),
        (
            "int64",
            10,
            -100,
            (
                "the value 10 in example 3 (the first is 0), at [1]; expected 0 to 9, or -100 for "
                "what is"
            ),
        ),
        ("int64", -(2**63), None, "has the value -9223372036854775808 in example 3"),
        ("int32", 2**31 - 1, 7, "has the value 2147483647 in example 3"),
        ("uint8", 255, None, "has the value 255 in example 3"),
    ],
)
def test_an_integer_that_names_no_class_is_named(
    dtype: Any, value: int, ignored: int | None, words: str
) -> None:
    y = np.full((5, 2), 9, dtype)
    y[3, 1] = value
    with pytest.raises(DataError) as caught:
        check_ranges((y,), (Input("y", dtype, (2,), 10, ignored),))
    assert words in str(caught.value)
    assert "1 of its 10 values are none of these" in str(caught.value)


def test_what_the_loss_leaves_out_is_let_through() -> None:
    row = Input("y", "int64", (), 10, -100)
    check_ranges((np.array([3, -100, 9]),), (row,))
    with pytest.raises(DataError, match=r"the value -1 in example 2 .* 1 of its 3 values"):
        check_ranges((np.array([3, -100, -1]),), (row,))


def test_what_is_not_finite_is_found() -> None:
    x = X.copy()
    assert find_nonfinite((x, Y), INPUTS) is None
    x[2, 1, 0] = -np.inf
    found = find_nonfinite((x, Y), INPUTS, start=100)
    assert found == (
        "array x has the value -inf in example 102 (the first is 0), at [1, 0]; expected finite "
        "numbers"
    )


def test_an_array_at_an_odd_byte_of_a_file_is_moved() -> None:
    """As the arrays of an .npz file lie that is mapped from the disk."""
    odd = np.zeros(8 * 4 + 1, np.uint8)[1:].view(np.float32).reshape(4, 2)
    odd[:] = np.arange(8).reshape(4, 2)
    assert not odd.flags.aligned
    (found,) = check_batch((odd,), (Input("x", "float32", (2,)),))
    assert found.flags.aligned
    np.testing.assert_array_equal(found, odd)
    (same,) = check_batch((found,), (Input("x", "float32", (2,)),))
    assert same is found

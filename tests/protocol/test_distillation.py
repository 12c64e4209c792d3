"""Distillation bundles beside training bundles, and the files of examples without labels."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fleetlearn_protocol.distillation import (
    TEACHER,
    TEMPERATURE,
    misfit,
    read_unlabelled,
    student_inputs,
)
from fleetlearn_protocol.errors import BundleError
from fleetlearn_protocol.manifest import Input, LocalStep, Manifest, Parameter
from fleetlearn_protocol.npz import NpzError

X = Input("x", "float32", (2,))
WEIGHT, BIAS = Parameter("w", (3, 2), 0), Parameter("b", (3,), 6)


def made(*batch: Input, **fields: Any) -> Manifest:
    values = {
        "format": "fleetlearn.bundle",
        "version": 1,
        "name": "a",
        "parameters": (WEIGHT, BIAS),
        "batch": batch,
        "outputs": (Input("output", "float32", (3,)),),
        "hyper": (),
        "step": LocalStep(),
        "metrics": (),
        "files": {},
    }
    return Manifest(**(values | fields))


TRAINED = made(X, Input("y", "int64", ()), name="trained")
LAST = Input(TEACHER, "float32", (3,)), Input(TEMPERATURE, "float32", ())
DISTILLED = made(X, *LAST, name="distilled")


def test_bundles_of_one_model_fit() -> None:
    assert student_inputs(DISTILLED) == (X,)
    assert misfit(TRAINED, DISTILLED) is None
    elsewhere = msgspec.structs.replace(WEIGHT, infer_offset=100)
    moved = msgspec.structs.replace(DISTILLED, parameters=(elsewhere, BIAS))
    assert misfit(TRAINED, moved) is None, "where infer.onnx has a parameter does not matter"


def test_another_bundle_is_no_distillation_bundle() -> None:
    with pytest.raises(BundleError, match="trained is no distillation bundle: its batch is x, y;"):
        misfit(DISTILLED, TRAINED)


@pytest.mark.parametrize(
    ("distilled", "text"),
    [
        ({"parameters": (Parameter("w", (4, 2), 0), BIAS)},
         r"its parameter w \[4, 2\] is in the place of w \[3, 2\]"),
        ({"parameters": (Parameter("v", (3, 2), 0), BIAS)}, "its parameter v"),
        ({"parameters": (WEIGHT, Parameter("b", (3,), 6, True))}, "its parameter b"),
        ({"parameters": (WEIGHT,)}, "they have 1 and 2 parameters"),
        ({"batch": (Input("x", "float32", (5,)), *LAST)}, r"takes x float32 \[5\]; the model of"),
        ({"batch": (Input("z", "float32", (2,)), *LAST)}, r"takes z float32 \[2\]; the model of"),
    ],
)  # fmt: skip
def test_a_bundle_of_another_model_is_named(distilled: dict[str, Any], text: str) -> None:
    found = misfit(TRAINED, msgspec.structs.replace(DISTILLED, **distilled))
    assert found is not None
    assert re.search(text, found), found


def test_a_model_with_personal_parameters_teaches_nothing() -> None:
    own = Parameter("b", (3,), 6, False, True)
    trained = msgspec.structs.replace(TRAINED, parameters=(WEIGHT, own))
    assert "never leave the devices" in str(misfit(trained, DISTILLED))


def test_examples_are_read_in_the_models_dtypes_without_their_labels(tmp_path: Path) -> None:
    path = tmp_path / "u.npz"
    np.savez(path, x=np.arange(6, dtype=np.float64).reshape(3, 2), y=np.array(["a", "b", "c"]))
    (found,) = read_unlabelled(path, (X,)).values()
    assert found.dtype == np.float32
    assert found.tolist() == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"z": np.zeros((3, 2))}, r"u.npz has no array x; the model takes x float32 \[2\]"),
        ({"x": np.zeros((3, 4))}, r"array x has shape \[3, 4\]; expected \[n, 2\] for n examples"),
        ({"x": np.zeros((0, 2))}, r"array x has shape \[0, 2\]"),
        ({"x": np.zeros((3, 2), complex)}, "array x is complex128; expected float32"),
        ({"x": np.array([[1.0, np.nan]])}, "array x has values that are not finite float32"),
        ({"x": np.array([[1.0, 1e300]])}, "array x has values that are not finite float32"),
    ],
)
def test_a_file_that_does_not_fit_is_named(
    tmp_path: Path, arrays: dict[str, Any], text: str
) -> None:
    np.savez(tmp_path / "u.npz", **arrays)
    with pytest.raises(NpzError, match=text):
        read_unlabelled(tmp_path / "u.npz", (X,))


def test_arrays_of_different_lengths_are_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "u.npz", x=np.zeros((3, 2)), y=np.zeros(2))
    with pytest.raises(NpzError, match=r"the arrays have .'x': 3, 'y': 2. examples"):
        read_unlabelled(tmp_path / "u.npz", (X, Input("y", "float32", ())))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NpzError, match=r"u.npz does not exist"):
        read_unlabelled(tmp_path / "u.npz", (X,))

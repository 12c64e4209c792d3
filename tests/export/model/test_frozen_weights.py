from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch
from backbone import classifier, images
from fleetlearn_export import ExportError
from fleetlearn_export.model.checked_user_model import make_user_model
from fleetlearn_export.model.fine_tuning import fine_tuning
from fleetlearn_export.model.frozen_weights import (
    Stored,
    effect_of_rounding,
    encode,
    find_codes,
    rounded,
)
from torch.nn import functional

random = np.random.default_rng(0)
WEIGHTS = (
    random.standard_normal((16, 12, 3, 3)) * 10.0 ** random.integers(-3, 6, (16, 1, 1, 1))
).astype(np.float32)
FEWER: list[Stored] = ["int8", "float16"]


def test_int8_worked_out_by_hand() -> None:
    values = np.array([[127.0, -63.4, 0.6], [-2.54, 1.0, 0.0], [0.0, 0.0, 0.0]], np.float32)
    coded = encode(values, "int8")
    assert coded.codes.dtype == np.int8
    np.testing.assert_array_equal(coded.codes, [[127, -63, 1], [-127, 50, 0], [0, 0, 0]])
    np.testing.assert_allclose(coded.scales, [1.0, 0.02, 1.0], rtol=1e-6)


@pytest.mark.parametrize(("stored", "error"), [("int8", 0.5 / 127), ("float16", 2.0**-12)])
def test_the_error_is_half_a_step_at_most(stored: Stored, error: float) -> None:
    coded = encode(WEIGHTS, stored)
    largest = np.abs(WEIGHTS).max(axis=(1, 2, 3), keepdims=True)
    assert np.isfinite(coded.codes.astype(np.float32)).all(), (
        "weights may be larger than float16's largest number"
    )
    differences = np.abs(coded.decode() - WEIGHTS) / largest
    assert error / 4 < differences.max() <= error * 1.001
    assert (differences.max(axis=(1, 2, 3)) > 0).all()


@pytest.mark.parametrize("stored", FEWER)
def test_codes_are_found_again(stored: Stored) -> None:
    """Also where each channel was multiplied by a number, and where axes were exchanged."""
    coded = encode(WEIGHTS, stored)
    again = find_codes(coded.decode(), stored)
    assert again is not None
    np.testing.assert_array_equal(again.codes, coded.codes)
    factors = random.uniform(-2, 2, (16, 1, 1, 1)).astype(np.float32)
    folded = find_codes(coded.decode() * factors, stored)
    assert folded is not None
    np.testing.assert_array_equal(
        folded.codes, coded.codes * np.sign(factors).astype(coded.codes.dtype)
    )
    exchanged = find_codes(np.ascontiguousarray(coded.decode().transpose(1, 0, 2, 3)), stored)
    assert exchanged is not None
    assert exchanged.axis == 1
    np.testing.assert_array_equal(exchanged.codes, coded.codes.transpose(1, 0, 2, 3))


@pytest.mark.parametrize("stored", FEWER)
def test_other_weights_have_no_codes(stored: Stored) -> None:
    assert find_codes(WEIGHTS, stored) is None
    changed = encode(WEIGHTS, stored).decode()
    changed[3, 0, 0, 0] += (
        0.2 * encode(WEIGHTS, "int8").scales[3]
        if stored == "int8"
        else 1e-4 * np.abs(changed[3]).max()
    )
    assert find_codes(changed, stored) is None


@pytest.mark.parametrize("stored", get_args(Stored))
def test_the_frozen_weights_are_rounded_for_a_while(stored: Stored) -> None:
    model = classifier()
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    with fine_tuning(model, "head"), rounded(model, stored) as weights:
        assert set(weights) == (
            set() if stored == "float32" else {f"backbone.{i}.weight" for i in (0, 4, 9)}
        )
        for name, value in model.named_parameters():
            assert torch.equal(value, before[name]) == (name not in weights)
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())


def test_restored_on_an_error() -> None:
    model = classifier().requires_grad_(False)
    before = model.backbone[4].weight.clone()

    def fail() -> None:
        with rounded(model, "int8"):
            assert not torch.equal(model.backbone[4].weight, before)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert torch.equal(model.backbone[4].weight, before)


def test_an_unknown_dtype() -> None:
    with (
        pytest.raises(ExportError, match="frozen='int4'; expected one of float32, float16, int8"),
        rounded(classifier(), "int4"),
    ):  # type: ignore[arg-type]
        pass


def test_the_effect_is_measured_in_evaluation_mode() -> None:
    model = classifier()
    user = make_user_model(model, functional.cross_entropy, images(4), {}, None, 1)
    effects = {}
    for stored in get_args(Stored):
        with fine_tuning(model, "head"), rounded(model, stored) as weights:
            effects[stored] = effect_of_rounding(user, weights)
            with torch.no_grad():
                after = model.eval()(images(4)[0])
        with torch.no_grad():
            before = model.eval()(images(4)[0])
        if stored != "float32":
            assert effects[stored] == pytest.approx(
                float((after - before).abs().max() / before.abs().max()), rel=1e-4
            )
    assert effects["float32"] is None
    assert effects["int8"] is not None
    assert effects["float16"] is not None
    assert 0 < 4 * effects["float16"] < effects["int8"] < 0.1

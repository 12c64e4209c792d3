"""Code for float32, computed in float64."""

from __future__ import annotations

import pytest
import torch
from fleetlearn_export.checks.double_precision import Doubled, DoublePrecision, as_double
from torch import nn
from torch.nn import functional

CONSTANT = torch.tensor([1.0, 2.0, 5.0])


def test_constants_casts_and_new_tensors_are_float64() -> None:
    with DoublePrecision():
        x = torch.arange(3)
        for value in (
            CONSTANT + 1,
            x.float(),
            x.half(),
            torch.zeros(3),
            torch.ones_like(x, dtype=torch.float32),
        ):
            assert value.dtype == torch.float64
        assert x.dtype == torch.int64
        # A third is another number in float32.
        assert float(torch.full((), 1.0) / 3) == 1 / 3
    assert (CONSTANT + 1).dtype == CONSTANT.dtype == torch.float32


def test_views_may_stay_until_they_are_computed_with() -> None:
    third = torch.tensor([[1.0, 1.0], [3.0, 3.0]])
    with DoublePrecision(views_stay=True):
        view = third.t()[0]
        found = view[0] / view[1]
    assert view.dtype == torch.float32
    assert view.data_ptr() == third.data_ptr()
    assert float(found) == 1 / 3
    with DoublePrecision():
        assert third.t().dtype == torch.float64


def test_gradients_are_those_of_a_double_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
    )
    x, y = torch.randn(5, 2, 4, 4), torch.randint(3, (5,))
    values = {
        name: value.detach().double().requires_grad_() for name, value in model.named_parameters()
    }
    with DoublePrecision():
        outputs = torch.func.functional_call(model, values, (x.double(),))
        loss = functional.cross_entropy(outputs, y, weight=CONSTANT)
        found = torch.autograd.grad(loss, list(values.values()))
    model = model.double()
    expected_loss = functional.cross_entropy(model(x.double()), y, weight=CONSTANT.double())
    expected = torch.autograd.grad(expected_loss, list(model.parameters()))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_nested_values() -> None:
    found = as_double({"a": [CONSTANT, 3, torch.float32, torch.int32, torch.arange(2)], "b": None})
    assert found["a"][0].dtype == torch.float64
    assert found["a"][1:4] == [3, torch.float64, torch.int32]
    assert found["a"][4].dtype == torch.int64
    assert found["b"] is None


def test_a_doubled_model_has_the_gradients_of_a_double_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(16, 8),
        nn.Unflatten(1, (2, 4)),
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
        nn.LSTM(4, 3, batch_first=True),
    )
    x = torch.randn(5, 2, 4, 4).double()
    found = []
    for double in (Doubled, torch.Tensor.double):
        leaves = {
            name: double(value.detach()).requires_grad_()
            for name, value in model.named_parameters()
        }
        with DoublePrecision():
            outputs, _ = torch.func.functional_call(model, leaves, (x,))
            outputs.square().sum().backward()
        found.append([value.grad for value in leaves.values()])
    assert all(type(value) is torch.Tensor and value.dtype == torch.float64 for value in found[0])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_nobody_writes_into_a_doubled_tensor() -> None:
    with pytest.raises(
        TypeError, match=r"aten.add_.Tensor writes into a tensor that nobody may write into"
    ):
        Doubled(torch.ones(2)).add_(1)

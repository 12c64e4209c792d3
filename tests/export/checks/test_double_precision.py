"""Code for float32, computed in float64."""

from __future__ import annotations

import torch
from fleetlearn_export.checks.double_precision import DoublePrecision, as_double
from torch import nn
from torch.nn import functional

CONSTANT = torch.tensor([1.0, 2.0, 5.0])


def test_constants_casts_and_new_tensors_are_float64() -> None:
    with DoublePrecision():
        x = torch.arange(3)
        for value in (CONSTANT + 1, x.float(), x.half(), torch.zeros(3), torch.ones_like(x, dtype=torch.float32)):
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
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    x, y = torch.randn(5, 2, 4, 4), torch.randint(3, (5,))
    values = {name: value.detach().double().requires_grad_() for name, value in model.named_parameters()}
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

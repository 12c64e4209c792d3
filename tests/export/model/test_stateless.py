from __future__ import annotations

import pytest
import torch
from fleetlearn_export.model.stateless import (
    attributes_restored,
    call_with,
    functional_call,
    holding,
    own_tensors_restored,
)
from torch import nn


class Twice(nn.Module):
    """One module in two places, and a buffer that is replaced."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(2, 2)
        self.two = self.one
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        result: torch.Tensor = self.two(self.one(x))
        return result


def test_a_module_in_two_places_has_its_own_tensors_again() -> None:
    """With W the double of the identity and b = 1: 2 (2 x + 1) + 1 = 4 x + 3."""
    model = Twice()
    own = (model.one.weight, model.one.bias, model.count)
    given = {"one.weight": 2 * torch.eye(2), "one.bias": torch.ones(2), "count": torch.tensor(5.0)}
    outputs = functional_call(model, given, (torch.tensor([[1.0, -1.0]]),))
    assert outputs.tolist() == [[7.0, -1.0]]
    assert float(given["count"]) == 6.0
    assert all(
        a is b for a, b in zip((model.two.weight, model.two.bias, model.count), own, strict=True)
    )


def test_a_function_sees_other_tensors_in_the_model() -> None:
    """Whoever asks the model has the other ones, and a buffer that is replaced comes back."""
    model = Twice()
    own = model.one.weight
    leaf = (2 * torch.eye(2)).requires_grad_()
    given = {"one.weight": leaf, "one.bias": torch.ones(2), "count": torch.tensor(5.0)}

    def function() -> bool:
        loss = model(torch.ones(1, 2)).sum() + sum(value.sum() for value in model.parameters())
        loss.backward()
        return model.two.weight is leaf

    assert call_with(model, given, function)
    assert leaf.grad is not None
    assert own.grad is None
    assert model.two.weight is own
    assert float(given["count"]) == 6.0
    assert float(model.count) == 0.0


def test_parameters_hold_other_values_for_a_while() -> None:
    """They are the same objects: a list that has one sees the value, and a step changes what was
    given."""
    model = Twice()
    kept, hooked = [model.one.weight], []
    model.one.weight.register_hook(hooked.append)
    own, memory, buffer = (
        model.one.weight.detach().clone(),
        model.one.weight.data_ptr(),
        model.count,
    )
    gradient = model.one.weight.grad = torch.ones(2, 2)
    given = {"one.weight": 2 * torch.eye(2), "one.bias": torch.zeros(2), "count": torch.tensor(5.0)}
    with holding(model, given):
        assert kept[0].grad is None
        assert torch.equal(kept[0], 2 * torch.eye(2))
        model(torch.ones(1, 2)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        assert float(model.count) == 6.0
    assert len(hooked) == 1
    # y = W (W x + b) + b with b = 0: the gradient of sum(y) is u (W x)^T + (W^T u) x^T, 4 with u
    # and x of ones.
    assert torch.equal(given["one.weight"], 2 * torch.eye(2) - 4)
    assert torch.equal(kept[0], own)
    assert kept[0].data_ptr() == memory
    assert kept[0].grad is gradient
    assert model.count is buffer
    assert float(buffer) == 0.0


def test_after_an_error_too() -> None:
    def change(model: Twice) -> None:
        model.one.weight = nn.Parameter(torch.zeros(2, 2))
        raise KeyError

    model = Twice()
    own = model.one.weight
    with pytest.raises(KeyError), own_tensors_restored(model):
        change(model)
    assert model.two.weight is own


def test_what_modules_keep_between_calls_is_forgotten() -> None:
    model = Twice()
    model.table, model.calls = {"a": 1}, [1]
    with attributes_restored(model):
        model.table["b"] = torch.ones(1)
        model.calls.append(2)
        model.calls = []
        model.extra = torch.ones(1)
        model.two = nn.Linear(1, 1)
    assert model.table == {"a": 1}
    assert model.calls == [1]
    assert not hasattr(model, "extra")
    assert model.two is model.one


def test_hooks_of_the_first_call_are_forgotten_with_the_attribute_that_says_so() -> None:
    """transformers registers hooks at the first call that asks a model for its hidden states."""

    class Hooked(Twice):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "hooked"):
                self.hooked = self.one.register_forward_hook(
                    lambda module, given, result: result + 1
                )
            return super().forward(x)

    model, x = Hooked(), torch.ones(1, 2)
    with attributes_restored(model):
        once = model(x)
    assert torch.equal(model(x), once)
    assert torch.equal(model(x), once)

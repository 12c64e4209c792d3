from __future__ import annotations

import pytest
import torch
from fleetlearn_export.model.stateless import attributes_restored, functional_call, own_tensors_restored
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
    assert all(a is b for a, b in zip((model.two.weight, model.two.bias, model.count), own, strict=True))


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
                self.hooked = self.one.register_forward_hook(lambda module, given, result: result + 1)
            return super().forward(x)

    model, x = Hooked(), torch.ones(1, 2)
    with attributes_restored(model):
        once = model(x)
    assert torch.equal(model(x), once)
    assert torch.equal(model(x), once)

from __future__ import annotations

import pytest
import torch
from fleetlearn_export import ExportError
from fleetlearn_export.model.gradient_hooks import (
    gradient_hooks,
    hooked,
    refuse_accumulation_hooks,
    register,
)
from torch import Tensor, nn


def halved_in_place(gradient: Tensor) -> None:
    gradient.mul_(0.5)


def test_hooks_are_called_as_autograd_calls_them() -> None:
    """In their order, each with what the one before made; one that returns nothing may change the
    gradient in place."""
    layer = nn.Linear(2, 1, bias=False)
    layer.weight.register_hook(lambda gradient: gradient + 1)
    layer.weight.register_hook(halved_in_place)
    removed = layer.weight.register_hook(lambda gradient: 100 * gradient)
    removed.remove()
    layer(torch.tensor([[3.0, 5.0]])).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [[2.0, 3.0]]

    hooks = gradient_hooks(nn.Sequential(layer, nn.Linear(1, 1)))
    assert hooks.keys() == {"0.weight"}
    assert hooked(torch.tensor([[3.0, 5.0]]), hooks["0.weight"]).tolist() == [[2.0, 3.0]]

    leaf = torch.zeros(1, 2, requires_grad=True)
    register(hooks, {"0.weight": leaf})
    (leaf * torch.tensor([[3.0, 5.0]])).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [[2.0, 3.0]]


def test_hooks_behind_the_accumulation_are_refused_where_a_parameter_is_trained() -> None:
    layer = nn.Linear(2, 1)
    handle = layer.weight.register_post_accumulate_grad_hook(halved_in_place)
    with pytest.raises(
        ExportError, match=r"parameter weight has a hook of register_post_accumulate_grad_hook"
    ):
        refuse_accumulation_hooks(layer)
    layer.weight.requires_grad_(False)
    refuse_accumulation_hooks(layer)
    layer.weight.requires_grad_(True)
    handle.remove()
    refuse_accumulation_hooks(layer)

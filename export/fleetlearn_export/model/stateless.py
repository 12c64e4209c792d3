"""Calls of a model with other tensors in the place of its parameters and buffers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Result = TypeVar("Result")


def functional_call(model: nn.Module, tensors: dict[str, Tensor], arrays: tuple[Any, ...]) -> Any:
    """Call ``torch.func.functional_call``. If the model replaces a buffer, ``tensors`` holds the
    new one afterwards.

    Where no gradients are recorded, as in evaluation, the model finds parameters that require
    gradients as its own do: it may differentiate with respect to them itself, under
    ``torch.enable_grad()``.
    """
    if not torch.is_grad_enabled():
        for name, value in model.named_parameters():
            if value.requires_grad and name in tensors and not tensors[name].requires_grad:
                tensors[name] = tensors[name].detach().requires_grad_()
    with own_tensors_restored(model):
        return torch.func.functional_call(model, tensors, arrays)


def call_with(
    model: nn.Module, tensors: dict[str, Tensor], function: Callable[[], Result]
) -> Result:
    """Return ``function()``. While it runs, the model has other tensors in the place of its
    parameters and buffers.

    So a loss that reads the model's parameters, calls the model again or is one of its methods sees
    these tensors, and so does a backward pass inside ``function`` that computes a part of the model
    again. If the model replaces a buffer, ``tensors`` holds the new one afterwards.
    """
    prefixed = {f"{_Caller.PREFIX}{name}": value for name, value in tensors.items()}
    result: Result = functional_call(_Caller(model), prefixed, (function,))
    tensors |= {name: prefixed[f"{_Caller.PREFIX}{name}"] for name in tensors}
    return result


class _Caller(nn.Module):
    """A module around the model that calls a function instead of the model."""

    PREFIX = "model."

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[], Any]) -> Any:
        return function()


@contextmanager
def holding(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Let the model's own parameters and buffers hold other values, until the block ends.

    The parameters stay the same objects, with the user's hooks, and whoever has them in a list or
    in a closure sees the values too. Training changes ``tensors`` in place. ``.grad`` is empty at
    the beginning, and the user's own afterwards.
    """
    rows = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    own = [(tensor, tensor.data, tensor.grad) for tensor in rows.values()]
    with own_tensors_restored(model):
        try:
            for row, _, _ in own:
                row.grad = None
            for name, value in tensors.items():
                rows[name].data = value
            yield
        finally:
            for row, values, gradient in own:
                row.grad = None
                # In this order: PyTorch checks a gradient against the data that it belongs to.
                row.data = values
                row.grad = gradient


@contextmanager
def own_tensors_restored(model: nn.Module) -> Iterator[None]:
    """Give the model its own tensors again when the block ends.

    For a module in two places of the model PyTorch 2.13 does not: under the second name it saves,
    and later restores, the tensors that it has already put there under the first.
    """
    own: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for module in model.modules():
        own += [(row, dict(row)) for row in (module._parameters, module._buffers)]
    try:
        yield
    finally:
        for row, before in own:
            row.update(before)


@contextmanager
def attributes_restored(model: nn.Module) -> Iterator[None]:
    """Give the model's modules their attributes again, and what these dicts and lists held, when
    the block ends.

    Models keep what they computed between calls, such as a table of positions. What tracing left
    there has no values. Some also register hooks at their first call, and keep an attribute that
    says so: both go together.
    """
    own = [vars(module) for module in model.modules()]
    containers = [
        value for row in own for value in row.values() if type(value) in (dict, OrderedDict, list)
    ]
    # The same objects get their contents back, since others may refer to them.
    before = [(value, copy(value)) for value in (*own, *containers)]
    try:
        yield
    finally:
        for value, copied in before:
            value.clear()
            if isinstance(value, dict):
                value.update(copied)
            else:
                value.extend(copied)

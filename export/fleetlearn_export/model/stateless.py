"""Calls of a model with other tensors in the place of its parameters and buffers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn


def functional_call(model: nn.Module, tensors: dict[str, Tensor], arrays: tuple[Any, ...]) -> Any:
    """Call ``torch.func.functional_call``. If the model replaces a buffer, ``tensors`` holds the new one afterwards.

    Where no gradients are recorded, as in evaluation, the model finds parameters that require gradients as its own do:
    it may differentiate with respect to them itself, under ``torch.enable_grad()``.
    """
    if not torch.is_grad_enabled():
        for name, value in model.named_parameters():
            if value.requires_grad and name in tensors and not tensors[name].requires_grad:
                tensors[name] = tensors[name].detach().requires_grad_()
    with own_tensors_restored(model):
        return torch.func.functional_call(model, tensors, arrays)


@contextmanager
def own_tensors_restored(model: nn.Module) -> Iterator[None]:
    """Give the model its own tensors again when the block ends.

    For a module in two places of the model PyTorch 2.13 does not: under the second name it saves, and later restores,
    the tensors that it has already put there under the first.
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
    """Give the model's modules their attributes again, and what these dicts and lists held, when the block ends.

    Models keep what they computed between calls, such as a table of positions. What tracing left there has no values.
    Some also register hooks at their first call, and keep an attribute that says so: both go together.
    """
    own = [vars(module) for module in model.modules()]
    kept = [value for row in own for value in row.values() if type(value) in (dict, OrderedDict, list)]
    before = [(value, copy(value)) for value in (*own, *kept)]
    try:
        yield
    finally:
        for value, copied in before:
            value.clear()
            if isinstance(value, dict):
                value.update(copied)
            else:
                value.extend(copied)

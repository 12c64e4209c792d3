"""Calling a model with tensors that are not its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def functional_call(model: nn.Module, tensors: dict[str, Tensor], arrays: tuple[Any, ...]) -> Any:
    """``torch.func.functional_call``. Where the model gives a buffer another tensor, ``tensors`` has it afterwards."""
    with untouched(model):
        return torch.func.functional_call(model, tensors, arrays)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """The model has its own tensors again after it.

    Of a module in two places of the model, PyTorch 2.13 restores what it had by the first name, and by the second
    what it found there then, which are the tensors given.
    """
    own: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for module in model.modules():
        own += [(row, dict(row)) for row in (module._parameters, module._buffers)]
    try:
        yield
    finally:
        for row, before in own:
            row.update(before)

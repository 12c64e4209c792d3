"""Functions that the user has registered on a parameter, and that autograd calls with its
gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fleetlearn_export.errors import ExportError

Hook = Callable[[Tensor], Any]
"""Gets a gradient. Returns another one in its place; or None, and may have changed it in place."""


def gradient_hooks(model: nn.Module) -> dict[str, list[Hook]]:
    """Return the hooks of ``Tensor.register_hook`` of each parameter that has some."""
    rows = {
        name: list((value._backward_hooks or {}).values())
        for name, value in model.named_parameters()
    }
    return {name: hooks for name, hooks in rows.items() if hooks}


def hooked(gradient: Tensor, hooks: Iterable[Hook]) -> Tensor:
    """Return the gradient that the hooks make of this one, called one after the other as autograd
    calls them."""
    with torch.no_grad():
        for hook in hooks:
            found = hook(gradient)
            gradient = gradient if found is None else found
    return gradient


def register(hooks: Mapping[str, Iterable[Hook]], leaves: Mapping[str, Tensor]) -> None:
    """Register the parameters' hooks on tensors that stand for them."""
    for name, rows in hooks.items():
        for hook in rows if name in leaves else ():
            leaves[name].register_hook(hook)  # type: ignore[no-untyped-call]


def refuse_accumulation_hooks(model: nn.Module) -> None:
    """Raise ExportError if a trained parameter has a hook that runs once its gradient is in
    ``.grad``."""
    for name, value in model.named_parameters():
        if value.requires_grad and value._post_accumulate_grad_hooks:
            raise ExportError(
                f"parameter {name} has a hook of register_post_accumulate_grad_hook, which no "
                "graph can call: there is no .grad in it. A hook that changes the gradient can be "
                "exported as register_hook(...), whose function returns the new gradient. A hook "
                "that does an optimizer's step: remove it, since the bundle has its own step "
                "(step=LocalStep(...))"
            )

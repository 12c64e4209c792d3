"""Freezes a model for one export: all parameters that are not to be trained, and the modules that
hold only such."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn

from fleetlearn_export.errors import ExportError
from fleetlearn_export.model.train_step import names_matching

Trained = str | Sequence[str] | Callable[[str, nn.Parameter], bool]
"""A name, a name with wildcards (``head.*``), a module's name, a list of these, or a function
``(name, parameter) -> bool`` that says whether the parameter is trained."""


@contextmanager
def fine_tuning(model: nn.Module, train: Trained | None) -> Iterator[None]:
    """Freeze all parameters that ``train`` does not choose, and keep frozen modules in evaluation
    mode.

    A module is frozen if it has parameters and none of them is trained. It runs in evaluation mode
    whatever mode the model is put in, with all modules inside it: BatchNorm uses its running
    statistics and does not change them, dropout does nothing. With None nothing changes:
    ``requires_grad`` decides, and no module is kept in evaluation mode.

    Restores the model when the block ends. Raises ExportError if ``train`` chooses nothing.
    """
    if train is None or not isinstance(model, nn.Module):
        yield
        return
    chosen = _chosen(model, train)
    before = [(value, value.requires_grad) for value in model.parameters()]
    flags_before = []
    try:
        for value, _ in before:
            value.requires_grad_(id(value) in chosen)
        for module in model.modules():
            own = list(module.parameters())
            if own and not any(value.requires_grad for value in own):
                flags_before.append((module, vars(module).get("train")))
                vars(module)["train"] = MethodType(stay_in_evaluation_mode, module)
        yield
    finally:
        for module, own_train in flags_before:
            del vars(module)["train"]
            if own_train is not None:
                vars(module)["train"] = own_train
        for value, was in before:
            value.requires_grad_(was)


@contextmanager
def freezing(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Freeze the parameters of these names; no module changes its mode. Restores the model when the
    block ends."""
    values = [model.get_parameter(name) for name in names]
    try:
        for value in values:
            value.requires_grad_(False)
        yield
    finally:
        for value in values:
            value.requires_grad_(True)


def _chosen(model: nn.Module, train: Trained) -> set[int]:
    """Return the ids of the trained parameters. A tied parameter is trained if one of its names is
    chosen."""
    rows = list(model.named_parameters(remove_duplicate=False))
    if callable(train):
        names = {name for name, value in rows if train(name, value)}
    else:
        patterns = [train] if isinstance(train, str) else train
        names = names_matching(patterns, [name for name, _ in rows], "train", "parameter")
    if not names:
        raise ExportError("train chooses none of the model's parameters: there is nothing to train")
    for name, value in rows:
        if name in names and not value.is_floating_point():
            raise ExportError(
                f"train chooses parameter {name}, which is {value.dtype}; trained parameters are "
                "float32"
            )
    return {id(value) for name, value in rows if name in names}


def stay_in_evaluation_mode(module: nn.Module, mode: bool = True) -> Any:
    """Take the place of a module's ``train``: the module is in evaluation mode whatever is asked
    for."""
    return type(module).train(module, False)

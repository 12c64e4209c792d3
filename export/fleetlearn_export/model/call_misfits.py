"""Why the model, its loss or a metric cannot be called with the example: said instead of PyTorch's
TypeError, which names a method of PyTorch's and counts ``self``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from fleetlearn_export.errors import ExportError
from fleetlearn_export.model.user_model import UserModel


@contextmanager
def misfits_named(user: UserModel) -> Iterator[None]:
    """Say in place of a TypeError what does not take the arrays that it is called with, if that is
    what is wrong."""
    try:
        yield
    except TypeError as error:
        why = _misfit(user, by_name="keyword argument" in str(error))
        if why is None:
            raise
        raise ExportError(why) from error


def _misfit(user: UserModel, *, by_name: bool) -> str | None:
    """Return what does not take the arrays of the example, and what to do. None: everything
    does."""
    inputs, labels = list(user.without_labels()), user.labels()
    called_with = list(user.inputs())
    if not _takes(user.model, called_with, by_name=by_name):
        takes = f"the model's forward takes ({_parameters(user.model)})"
        if user.returns_loss and labels and _takes(user.model, inputs, by_name=by_name):
            return (
                f"loss= was not given, and {takes}, so it cannot compute the loss from "
                f"{_listed(labels)} itself. Give loss=, a function of the model's outputs and of "
                f"{_listed(labels)}, such as loss=torch.nn.functional.cross_entropy for classes or "
                "mse_loss for numbers"
            )
        return (
            f"the model is called with {_listed(called_with)}, and {takes}. The example has the "
            "model's inputs, then the labels; targets= says how many of its last arrays are labels"
        )
    if user.returns_loss:
        return None
    for what, function in {"the loss": user.loss, **_metrics(user)}.items():
        if not _takes(function, ["outputs", *labels], by_name=False):
            names = ", ".join(["outputs", *labels])
            return (
                f"{what} is called with ({names}), and takes ({_parameters(function)}). It gets "
                "what the model returns, then the labels of the example; targets= says how many "
                "there are"
            )
    return None


def _metrics(user: UserModel) -> dict[str, Callable[..., Any]]:
    return {f"metric {name}": metric for name, metric in user.metrics.items()}


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        return inspect.signature(called)
    except (TypeError, ValueError):  # PyTorch's own functions in C++ do not say it
        return None


def _takes(function: Callable[..., Any], names: Sequence[str], *, by_name: bool) -> bool:
    """Return whether the function can be called with so many arguments, or with these names."""
    signature = _signature(function)
    if signature is None:
        return True
    try:
        if by_name:
            signature.bind(**dict.fromkeys(names))
        else:
            signature.bind(*names)
    except TypeError:
        return False
    return True


def _parameters(function: Callable[..., Any]) -> str:
    signature = _signature(function)
    return "" if signature is None else ", ".join(signature.parameters)


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))

"""Models that return their own loss, and batches that are dicts: what transformers' users have."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from fleetlearn_export.errors import ExportError

POSITIONS = ("start_positions", "end_positions")
"""Labels of transformers' models for answers in a text, whose names do not say so."""
LABELS = ("y", "target", "targets", *POSITIONS)
"""Names of arrays that are labels. So is each name with "label" in it, as in transformers'
Trainer."""
ANOTHER_LOSS = "or give loss=, a function of the model's outputs and the labels"


def label_names(names: Sequence[str]) -> list[str]:
    """Return those of a dict batch's names that are labels, by what people call them."""
    return [name for name in names if name in LABELS or "label" in name.lower()]


def fields(outputs: Any) -> dict[Any, Any] | None:
    """Return what the model returned by name or place: of a dict (such as transformers'
    ModelOutput), a dataclass, a tuple or a list. None: it is something else."""
    if isinstance(outputs, Mapping):
        return dict(outputs)
    if isinstance(outputs, list | tuple):
        names = getattr(outputs, "_fields", range(len(outputs)))
        return dict(zip(names, outputs, strict=True))
    if dataclasses.is_dataclass(outputs) and not isinstance(outputs, type):
        return {row.name: getattr(outputs, row.name) for row in dataclasses.fields(outputs)}
    return None


def returned_loss(outputs: Any, *_: Tensor) -> Tensor:
    """Return the loss in what the model returned: what is named ``loss``, or else the only scalar.

    Raises ExportError if there is none, or several.
    """
    if isinstance(outputs, Tensor):
        if not outputs.dim():
            return outputs
        raise _no_loss(f"a tensor of shape {tuple(outputs.shape)}")
    named = fields(outputs)
    if named is None:
        raise _no_loss(f"the type {type(outputs).__name__}")
    loss = named.get("loss")
    if isinstance(loss, Tensor):
        if not loss.dim():
            return loss
        raise _no_loss(f"a loss of shape {tuple(loss.shape)}", "return its mean, ")
    described = ", ".join(f"{name}: {_described(value)}" for name, value in named.items())
    if "loss" in named:
        raise _no_loss(
            f"no loss ({described})",
            "models of transformers compute it where example= has labels: give them, ",
        )
    scalars = {
        name: row for name, row in named.items() if isinstance(row, Tensor) and not row.dim()
    }
    if len(scalars) == 1:
        return next(iter(scalars.values()))
    raise _no_loss(
        f"{'several scalars' if scalars else 'no scalar'} ({described})",
        "return a dict in which the one to train on is named loss, ",
    )


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return type(value).__name__


def _no_loss(found: str, instead: str = "return it, ") -> ExportError:
    return ExportError(
        f"loss= was not given, and the model returns {found}; expected a scalar, the batch's mean "
        f"loss: alone, or in a tuple, dict or dataclass, where it is named loss or is the only "
        f"scalar: {instead}{ANOTHER_LOSS}"
    )


@contextmanager
def called_by_name(model: nn.Module, names: Sequence[str] | None) -> Iterator[None]:
    """Let calls of the model with as many arrays as ``names`` give it these by name, until the
    block ends: of a batch that is a dict. ``names`` None: calls stay as they are."""
    if names is None:
        yield
        return

    def by_name(
        _: nn.Module, arrays: tuple[Any, ...], others: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # The user's loss may call the model too, with other arguments.
        if len(arrays) != len(names) or others:
            return arrays, others
        return (), dict(zip(names, arrays, strict=True))

    handle = model.register_forward_pre_hook(by_name, prepend=True, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()

"""Habits of training code that a graph cannot follow, found while the user's model runs in
PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fleetlearn_export.errors import ExportError
from fleetlearn_export.model.source_locations import location_of_running_line


class AutocastRefused(TorchFunctionMode):
    """While active, an operator under ``torch.autocast`` raises ExportError, with the line of the
    user's code."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if torch.is_autocast_enabled("cpu"):
            raise ExportError(
                f"the model or its loss computes under torch.autocast{location_of_running_line()}. "
                "A bundle's graphs are float32: take autocast out of forward, and export outside "
                'of it. For devices that compute with float16, export_bundle(compute="float16") '
                "makes such a step"
            )
        return func(*args, **(kwargs or {}))


def refuse_growing_attributes(model: nn.Module, run: Callable[[], object]) -> None:
    """Raise ExportError if a plain tensor attribute of the model follows the calls, as a running
    mean does.

    A graph would have the attribute's first value for ever. A table that the model makes once, or a
    result that it leaves there for people, is the same after a second run on the same examples, and
    may stay.
    """
    before = dict(_attributes(model))
    run()
    once = dict(_attributes(model))
    if once.keys() == before.keys() and not _changed(before, once):
        return  # which saves the second run for nearly all models
    run()
    for name in _changed(once, dict(_attributes(model))):
        path, _, attribute = name.rpartition(".")
        owner = f"model.{path}" if path else "the model"
        raise ExportError(
            f"forward changes {attribute}, a plain tensor attribute of {owner}, at every call. A "
            "graph keeps no such attribute: make it a buffer, which travels with the model: "
            f"self.register_buffer({attribute!r}, ...) in __init__; forward stays as it is"
        )


def _attributes(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a copy of each tensor that is a plain attribute of a module: no parameter, no
    buffer."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                yield (f"{path}.{name}" if path else name), value.detach().clone()


def _changed(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> list[str]:
    """Return the names of attributes that both have, with different values."""
    return [
        name
        for name, value in after.items()
        if name in before
        and not torch.equal(value, before[name].to(value.dtype))
        and value.isfinite().all()
    ]


def refuse_missing_values(batch: Mapping[str, Tensor], loss: Tensor) -> None:
    """Raise ExportError if the loss is NaN or infinite, and so is an element of the example."""
    value = float(loss.detach())
    if math.isfinite(value):
        return
    for name, array in batch.items():
        wrong = (~array.isfinite()).nonzero()
        if len(wrong):
            index = tuple(wrong[0].tolist())
            raise ExportError(
                f"example array {name} holds {float(array[index])} at {list(index)} ({len(wrong)} "
                f"such elements in the rows that are used), and the loss is {value}: fill missing "
                "values before, or let the model do so (torch.nan_to_num), here and in the data of "
                "every device"
            )


def refuse_written_frozen(model: nn.Module, written: Sequence[str]) -> None:
    """Raise ExportError if forward writes into a frozen parameter, as a target network that follows
    the trained one.

    written: names of the parameters into which a call wrote.
    """
    frozen = [name for name in written if not model.get_parameter(name).requires_grad]
    if frozen:
        more = f" (and {len(frozen) - 1} more)" if len(frozen) > 1 else ""
        raise ExportError(
            f"forward writes into {frozen[0]}{more}, a frozen parameter, and a graph holds frozen "
            "parameters as constants. A network that follows the trained one (BYOL, a mean "
            "teacher) has buffers instead, which training may change and which travel: "
            'docs/start/your-own-model.md, "A network that follows the trained one"'
        )

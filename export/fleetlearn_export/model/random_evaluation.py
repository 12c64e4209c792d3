"""Models that draw random numbers in evaluation mode, such as a variational autoencoder that always
samples.

eval.onnx and infer.onnx have no seed. Their numbers come from a fixed one, so that each call with
the same batch gives the same. Dropout that stays on is refused: it is mostly a forgotten
``self.training``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fleetlearn_export.errors import ExportError
from fleetlearn_export.model.seeded_random import Seeded
from fleetlearn_export.model.source_locations import location_of_running_line

SEED = 0
"""The seed of all random numbers that eval.onnx and infer.onnx draw."""


def drawn_from_fixed_seed() -> Seeded:
    """Return a context for one evaluation. It counts what is drawn."""
    return Seeded(torch.tensor(SEED))


class DropoutRefused(TorchFunctionMode):
    """While active, dropout that is on raises ExportError, with the line of the user's code."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        keywords, name = kwargs or {}, getattr(func, "__name__", "")
        # torch.dropout(input, p, train); torch.nn.functional.dropout(input, p=, training=, ...)
        if "dropout" in name:
            share, on = (
                args[1:] if len(args) == 3 else (keywords.get("p"), keywords.get("training"))
            )
        else:
            share, on = keywords.get("dropout_p"), name == "scaled_dot_product_attention"
        if share and on:
            raise ExportError(
                "in evaluation mode the model drops elements by "
                f"chance{location_of_running_line()}. Let it do so in training only: nn.Dropout, "
                "or functional.dropout(x, p, self.training)"
            )
        return func(*args, **keywords)

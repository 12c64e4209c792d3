"""Models over the handwritten digits that the tests of exporting train."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fleetlearn_export import Exported
from torch import nn
from zoo import mcmahan_cnn

__all__ = ["DIGITS", "Case", "mcmahan_cnn"]

DIGITS: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "digits.py"))


class Case(NamedTuple):
    """A bundle, and what it was made of."""

    model: nn.Module
    loss: Callable[..., torch.Tensor]
    x: torch.Tensor
    y: torch.Tensor
    exported: Exported

    def batches(self, sizes: list[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Batches of these sizes, one after the other through the data."""
        start = 0
        for size in sizes:
            yield self.x[start : start + size], self.y[start : start + size]
            start += size

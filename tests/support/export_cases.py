"""Models over the handwritten digits that the tests of exporting train."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fleetlearn_export import Exported
from torch import nn

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


def mcmahan_cnn() -> nn.Module:
    """The CNN of McMahan et al. 2017 (arXiv 1602.05629), 1,663,370 parameters; float32 (n, 1, 28, 28) -> (n, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(3136, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )

"""A model of two parties, its parts, and the same training in one place with PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from fleetlearn_export import ExportedParts, LocalStep, export_vertical
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

Array = NDArray[np.float32]
ROWS, BANK, SHOP = 40, 6, 4
"""Rows, and the number of features of each party."""


class Vertical(NamedTuple):
    """The modules before training, and the table."""

    bank: nn.Module
    shop: nn.Module
    top: nn.Module
    x_bank: Array
    x_shop: Array
    y: NDArray[np.int64]


def vertical() -> Vertical:
    """Return a model with batch norm and a table that it can learn."""
    torch.manual_seed(3)
    random = np.random.default_rng(3)
    bank = nn.Sequential(nn.Linear(BANK, 5), nn.Tanh())
    # Without a bias, which batch norm takes away: its gradient is rounding alone, from which Adam
    # makes steps as large as any.
    shop = nn.Sequential(nn.Linear(SHOP, 3, bias=False), nn.BatchNorm1d(3), nn.ReLU())
    top = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2))
    x = random.normal(size=(ROWS, BANK + SHOP)).astype(np.float32)
    y = (x[:, 0] * x[:, BANK] + x[:, 1] > 0).astype(np.int64)
    return Vertical(bank, shop, top, x[:, :BANK].copy(), x[:, BANK:].copy(), y)


def accuracy(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs.argmax(1) == y).float()


def exported_vertical(path: Path, step: LocalStep, model: Vertical) -> ExportedParts:
    """Export the parts, with both parties' arrays named x."""
    return export_vertical(
        {"bank": (model.bank, (model.x_bank,)), "shop": (model.shop, (model.x_shop,))},
        model.top,
        functional.cross_entropy,
        model.y,
        path,
        step=step,
        metrics={"accuracy": accuracy},
    )


def batches(steps: int, size: int = 10) -> Iterator[NDArray[np.int64]]:
    """Yield the rows of each step."""
    random = np.random.default_rng(5)
    for _ in range(steps):
        yield random.choice(ROWS, size, replace=False)


class Joint(nn.Module):
    """All parts as one module."""

    def __init__(self, model: Vertical) -> None:
        super().__init__()
        self.bank, self.shop, self.top = model.bank, model.shop, model.top

    def forward(self, bank: Tensor, shop: Tensor) -> Tensor:
        result: Tensor = self.top(torch.cat([self.bank(bank), self.shop(shop)], 1))
        return result


def trained_in_one_place(
    model: Vertical, optimizer: str, lr: float, rows: Iterator[NDArray[np.int64]]
) -> list[float]:
    """Train the modules themselves with torch.optim on the joined table. Returns the losses."""
    joint, losses = Joint(model).train(), []
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    steps = kinds[optimizer](joint.parameters(), lr=lr)
    for chosen in rows:
        steps.zero_grad()
        arrays = (torch.from_numpy(value[chosen]) for value in (model.x_bank, model.x_shop))
        loss = functional.cross_entropy(joint(*arrays), torch.from_numpy(model.y[chosen]))
        loss.backward()
        steps.step()
        losses.append(loss.item())
    return losses

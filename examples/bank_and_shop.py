"""Write what the commands on docs/algorithms/split.md begin with: a bank's and a shop's tables of
made-up customers, the parts of a model for both, and the key that they share.

    python -m examples.bank_and_shop

It writes bank.csv, shop.csv, rows.key and the folder parts into the folder ``bank-and-shop``. The
bank has income, age and whether the customer bought (the label); the shop has visits and basket,
of other customers in part, in another order.
"""

from __future__ import annotations

import argparse
import csv
import secrets
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

CUSTOMERS = 600


class Customers(NamedTuple):
    """All customers: numbers that are near 0 and of unit variance."""

    names: list[str]
    bank: NDArray[np.float32]
    """Income and age, shape (n, 2)."""
    shop: NDArray[np.float32]
    """Visits and basket, shape (n, 2)."""
    bought: NDArray[np.int64]


def customers() -> Customers:
    """Return the customers, the same each time."""
    random = np.random.default_rng(4)
    features = random.normal(size=(CUSTOMERS, 4)).round(3).astype(np.float32)
    likely = features @ np.array([1.5, -1.0, 2.0, 1.0]) + features[:, 0] * features[:, 2]
    names = [f"customer-{number:04d}" for number in range(CUSTOMERS)]
    bought = (likely > 0).astype(np.int64)
    return Customers(names, features[:, :2], features[:, 2:], bought)


def write(folder: Path) -> None:
    """Write the files. Raises ExportError, OSError."""
    folder.mkdir(exist_ok=True)
    found = customers()
    order = np.random.default_rng(5).permutation(np.arange(40, CUSTOMERS))
    _table(folder / "bank.csv", ["customer", "income", "age", "bought"], [
        [found.names[row], *found.bank[row].tolist(), int(found.bought[row])]
        for row in range(CUSTOMERS - 60)
    ])  # fmt: skip
    _table(folder / "shop.csv", ["customer", "visits", "basket"], [
        [found.names[row], *found.shop[row].tolist()] for row in order.tolist()
    ])  # fmt: skip
    (folder / "rows.key").write_text(secrets.token_hex(32), "utf-8")
    export(folder / "parts", found)


def export(folder: Path, data: Customers) -> None:
    """Write bank.bundle, shop.bundle and top.bundle."""
    import torch
    from fleetlearn_export import LocalStep, export_vertical
    from torch import nn
    from torch.nn import functional

    def accuracy(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (outputs.argmax(1) == y).float()

    torch.manual_seed(1)
    bank = nn.Sequential(nn.Linear(2, 6), nn.Tanh())
    shop = nn.Sequential(nn.Linear(2, 6), nn.Tanh())
    top = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 2))
    export_vertical(
        {"bank": (bank, (data.bank[:8],)), "shop": (shop, (data.shop[:8],))},
        top,  # takes the activations of all parties, side by side on axis 1
        functional.cross_entropy,
        data.bought[:8],
        folder,
        step=LocalStep("adam"),
        metrics={"accuracy": accuracy},
    )


def _table(path: Path, names: list[str], rows: list[list[Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([names, *rows])


def main() -> None:
    """Write the files into a folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("bank-and-shop"))
    folder = parser.parse_args().folder
    write(folder)
    print(f"wrote bank.csv, shop.csv, rows.key and parts into {folder}: cd {folder}")


if __name__ == "__main__":
    main()

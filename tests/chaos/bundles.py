"""What the fleets train: softmax regression on the digits, with one example on each device.

So the order of examples is no matter, and a device that is given a second task for one model makes
the same update again.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from processes import DIGITS

from tests.chaos.scenario import LARGE


def write_bundle(folder: Path, name: str) -> Path:
    """Export a bundle, or take it from the tests' cache."""
    import torch
    from bundle_cache import cached_export
    from fleetlearn_export import LocalStep
    from torch import nn

    x, y = example(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model: nn.Module = nn.Linear(64, 10)
        if name == LARGE:
            model = nn.Sequential(nn.Linear(64, 4000), nn.ReLU(), nn.Linear(4000, 10))
    path = folder / f"{name}.bundle"
    step = LocalStep("sgd", proximal=True, correction=True)
    cached_export(
        model, DIGITS["loss"], (torch.from_numpy(x), torch.from_numpy(y)), path, step=step
    )
    return path


def example(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a device's example: float32 (1, 64), int64 (1,)."""
    x, y = DIGITS["data"]()[:2]
    return x[number : number + 1].reshape(1, 64), y[number : number + 1]


def write_data(path: Path, number: int) -> None:
    """Write a device's data."""
    x, y = example(number)
    np.savez(path, x=x, y=y)

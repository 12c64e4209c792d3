"""Devices whose losses are quadratics, so that optimum and fixed points are known; and the bundle
that they train.

A device's loss is the mean over its examples of a0/2 (w0 - b0)^2 + a1/2 (w1 - b1)^2. The default
two devices have f1 = (w0 - 15)^2 / 2 + w1^2 and f2 = 2 (w0 + 12)^2 + 0.7 (w1 + 15)^2.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from bundle_cache import cached_export
from fleetlearn_export import LocalStep
from fleetlearn_protocol import Bundle, open_bundle
from fleetlearn_simulator.scenario.scenario import Scenario
from numpy.typing import NDArray
from torch import Tensor, nn
from virtual import make_scenario


class Quadratic(NamedTuple):
    """The loss of a device that has one example, or ``copies`` of it."""

    curvature: tuple[float, float]
    minimum: tuple[float, float]
    copies: int = 1

    @property
    def data(self) -> dict[str, NDArray[np.float32]]:
        """The arrays of a batch: x, the minima, and y, the curvatures; both (copies, 2)."""
        rows = (self.minimum, self.curvature)
        x, y = (np.tile(np.array(row, np.float32), (self.copies, 1)) for row in rows)
        return {"x": x, "y": y}

    def gradient(self, w: NDArray[np.floating]) -> NDArray[np.floating]:
        """Return the gradient of the loss at w, shape (2,)."""
        found: NDArray[np.floating] = np.array(self.curvature) * (w - np.array(self.minimum))
        return found


TWO = (Quadratic((1.0, 2.0), (15.0, 0.0)), Quadratic((4.0, 1.4), (-12.0, -15.0)))
OPTIMUM = np.array([-6.6, -10.5 / 1.7])
"""Where the sum of the losses of ``TWO`` is least."""


def optimum(devices: Sequence[Quadratic]) -> NDArray[np.floating]:
    """Return where the sum of the devices' losses is least."""
    curvatures, minima = (
        np.array([getattr(row, name) for row in devices]) for name in ("curvature", "minimum")
    )
    found: NDArray[np.floating] = (curvatures * minima).sum(0) / curvatures.sum(0)
    return found


def fedavg_fixed_point(devices: Sequence[Quadratic], lr: float, steps: int) -> NDArray[np.floating]:
    """Return where FedAvg with equal weights stays: after K steps, y_k = b_k + (1 - lr a_k)^K (x -
    b_k)."""
    pulls = np.array([1 - (1 - lr * np.array(row.curvature)) ** steps for row in devices])
    minima = np.array([row.minimum for row in devices])
    found: NDArray[np.floating] = (pulls * minima).sum(0) / pulls.sum(0)
    return found


class Weights(nn.Module):
    """Minima (n, 2) -> w - minimum (n, 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([3.0, 4.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.w - x


def quadratic_loss(distances: Tensor, y: Tensor) -> Tensor:
    return (y * distances**2).sum(1).mean() / 2


def quadratics_bundle(path: Path, step: LocalStep | None = None, **options: Any) -> Bundle:
    """Export the model; the step is for every algorithm unless given. ``options``: of
    ``export_bundle``."""
    step = step or LocalStep("sgd", proximal=True, correction=True)
    example = tuple(torch.from_numpy(array) for array in Quadratic((1, 2), (3, 4), 3).data.values())
    cached_export(Weights(), quadratic_loss, example, path, step=step, **options)
    return open_bundle(path)


MODULE = """
import numpy as np

DEVICES = {devices!r}

def examples(device, seed):
    return DEVICES[device][2]

def make(device, seed):
    curvature, minimum, copies = DEVICES[device]
    x, y = (np.tile(np.array(row, np.float32), (copies, 1)) for row in (minimum, curvature))
    return {{"x": x, "y": y}}
"""


def quadratics_scenario(
    folder: Path, bundle: Path, devices: Sequence[Quadratic], **settings: Any
) -> Scenario:
    """A scenario of these devices; ``settings`` as ``make_scenario`` takes them."""
    data = {"kind": "function", "function": "quadratic_devices:make"}
    scenario = make_scenario(folder, bundle, len(devices), **({"data": data} | settings))
    write_quadratics(folder, devices)
    return scenario


def write_quadratics(folder: Path, devices: Sequence[Quadratic]) -> None:
    """The data of a scenario's devices."""
    (folder / "quadratic_devices.py").write_text(MODULE.format(devices=[*map(tuple, devices)]))

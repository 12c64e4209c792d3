"""Every combination of recipe, weighting, encoding, participation and model on devices whose losses are quadratics, and
where each must end.

A device's local steps are affine, y = A_k x + b_k, so that the place where a rule's steps cancel out is the solution of
a small equation, found here in float64 with NumPy alone. Recipes that end where the sum of the losses is least, or whose
place depends on what is hostile, have their own entry in ``PLACES``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from bundle_cache import cached_export
from fleetlearn_coordinator.aggregation.robust.rules import RULES
from fleetlearn_coordinator.plan.plan import PlanError
from fleetlearn_coordinator.plan.recipes import RECIPES
from fleetlearn_export import LocalStep
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.vector import views
from numpy.typing import NDArray
from quadratics import Quadratic, quadratic_loss, quadratics_scenario
from torch import Tensor, nn
from virtual import make_fleet

Point = NDArray[np.floating]

APART = (
    Quadratic((1.0, 2.0), (3.5, 3.0), 2),
    Quadratic((2.5, 1.0), (2.0, 4.5), 4),
    Quadratic((2.0, 1.5), (2.5, 3.5), 6),
    Quadratic((0.5, 3.0), (4.0, 4.0), 2),
)
"""Four devices that want different models. In batches of two, they do 1, 2, 3 and 1 steps in a pass."""
TOGETHER = tuple(device._replace(minimum=(2.0, 5.0)) for device in APART)
"""The same devices with one minimum: what every rule must find, however it chooses among updates."""
START = (3.0, 4.0)
LR, MU, EPOCHS, BATCH = 0.1, 0.2, 2, 2
MOMENTUM = 0.1
"""Of BatchNorm's running statistics."""


class Cell(NamedTuple):
    """One combination."""

    recipe: str
    weighting: str
    encoding: str
    participation: str
    model: str

    @property
    def name(self) -> str:
        return "-".join(self)


WEIGHTINGS = ("uniform", "examples", "inverse-participation")
ENCODINGS = ("float32", "float16", "int8", "int4", "topk-0.5")
PARTICIPATIONS: Mapping[str, dict[str, Any]] = {
    "all": {"goal": 4, "over_selection": 1.0, "minimum": 1},
    "some": {"goal": 2, "over_selection": 1.0, "minimum": 1},
    "carried": {"goal": 2, "over_selection": 2.0, "minimum": 1, "late": "carry"},
    "buffered": {"participation": "asynchronous", "goal": 2, "concurrency": 4},
    "single": {"participation": "asynchronous", "goal": 1, "concurrency": 4},
}
"""Name -> the plan's [round]."""
MODELS = ("plain", "buffers", "personal", "normalisation")
ALGORITHMS = (*RECIPES, "scaffold-gradient")


def cells() -> Iterator[Cell]:
    """Yield all combinations."""
    yield from map(Cell._make, product(ALGORITHMS, WEIGHTINGS, ENCODINGS, PARTICIPATIONS, MODELS))


class Net(nn.Module):
    """Minima (n, 2) -> their distances to w, and those to ``own`` where there is such a personal parameter.

    BatchNorm measures the inputs, and its output counts 0 times: its statistics are known in closed form."""

    def __init__(self, model: str, start: tuple[float, float] = START) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start))
        self.own = nn.Parameter(torch.zeros(2)) if model == "personal" else None
        self.norm = nn.BatchNorm1d(2, momentum=MOMENTUM, affine=False) if model in ("buffers", "normalisation") else None

    def forward(self, x: Tensor) -> Tensor:
        found = self.w - x
        if self.norm is not None:
            found = found + 0.0 * self.norm(x)
        return found if self.own is None else torch.cat([found, self.own - x], 1)


def loss(outputs: Tensor, y: Tensor) -> Tensor:
    return quadratic_loss(outputs, torch.cat([y] * (outputs.shape[1] // 2), 1))


def bundle_of(folder: Path, recipe: str, model: str) -> Path:
    """Export the model with the local step that the recipe needs."""
    options: dict[str, Any] = {"optimizer": "sgd"}
    if recipe in ("scaffold", "scaffold-gradient", "feddyn"):
        options["correction"] = True
    if recipe in ("fedprox", "fedprox-adaptive", "feddyn", "ditto"):
        options["proximal"] = True
    kind = "-".join(sorted(options))
    path = folder / f"{kind}-{model}.bundle"
    if not path.exists():
        personal = {"personal": {"personal": ["own"]}, "normalisation": {"personal": "normalisation"}}.get(model, {})
        example = torch.rand(4, 2), torch.rand(4, 2)
        cached_export(Net(model), loss, example, path, step=LocalStep(**options), **personal)
    return path


def plan_of(cell: Cell, rounds: int) -> dict[str, Any]:
    """Return the scenario's settings for a cell."""
    local: dict[str, Any] = {"epochs": EPOCHS, "batch_size": BATCH, "lr": LR, "evaluate": False}
    server: dict[str, Any] = {}
    recipe = cell.recipe.removesuffix("-gradient")
    if recipe in ("fedprox", "feddyn", "ditto"):
        local["mu"] = 1.0 if recipe == "feddyn" else MU
    if recipe in ("scaffold", "feddyn"):
        server["devices"] = len(APART)
    if cell.recipe == "scaffold-gradient":
        local["algorithm"] = cell.recipe
    if recipe in ("q-fedavg", "fedprox-adaptive"):
        local["evaluate"] = True
    if recipe in ("fedadagrad", "fedadam", "fedyogi"):
        server["lr"] = 0.1
    if recipe == "fedasync":
        server["lr"] = 0.1
    return {
        "plan__recipe": recipe,
        "plan__local": local,
        "plan__server": server,
        "plan__encoding": {"up": cell.encoding},
        "plan__round": {"deadline": 1e4, "weighting": cell.weighting} | PARTICIPATIONS[cell.participation],
        **({} if cell.participation in ("all", "some") else {"plan__staleness": {"max": 50}}),
        "plan__stop__rounds": rounds,
        "plan__seed": 1,
        "tiers": {"device": {"latency": 0.0, "download": 1e12, "upload": 1e12, "spread": 1.0}},
    }  # fmt: skip


class Steps(NamedTuple):
    """A device's local steps in a task as an affine map: y = slope * x + shift, by coordinate."""

    slope: Point
    shift: Point


def steps_of(device: Quadratic, pull: float = 0.0) -> Steps:
    """``pull``: mu of a proximal term."""
    count = EPOCHS * device.copies // BATCH
    curvature, minimum = np.array(device.curvature), np.array(device.minimum)
    slope, shift = np.ones(2), np.zeros(2)  # of y as a function of x
    for _ in range(count):
        shift = shift - LR * (curvature * (shift - minimum) + pull * shift)
        slope = slope - LR * (curvature * slope + pull * (slope - 1))
    return Steps(slope, shift)


def balance(shares: Sequence[float], maps: Sequence[Steps]) -> Point:
    """Return the x at which sum(share_k * (y_k - x)) is 0."""
    down = sum(share * (1 - each.slope) for share, each in zip(shares, maps, strict=True))
    up = sum(share * each.shift for share, each in zip(shares, maps, strict=True))
    return np.asarray(up / down)


def weights_of(cell: Cell) -> list[float]:
    """Return how much each device counts."""
    return [float(device.copies) if cell.weighting == "examples" else 1.0 for device in APART]

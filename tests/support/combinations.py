"""Every combination of recipe, weighting, encoding, participation and model on devices whose losses
are quadratics, and where each must end.

A device's local steps are affine, y = A_k x + b_k. So the model at which a rule's updates cancel
out is the solution of a small equation, found here in float64 with NumPy alone (``balance``).
SCAFFOLD and FedDyn must end where the sum of the losses is least, whoever takes part. What chooses
among updates, or averages over devices that come at random, is given devices that all want one
model: it must find that one.
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
from fleetlearn_coordinator.plan.recipes import RECIPES
from fleetlearn_export import LocalStep
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.computations.kinds import KINDS
from fleetlearn_protocol.errors import FleetError
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
"""Four devices that want different models. In batches of two, they do 1, 2, 3 and 1 steps in a
pass."""
TOGETHER = tuple(device._replace(minimum=(2.0, 5.0)) for device in APART)
"""The same devices with one minimum: what every rule must find, however it chooses among
updates."""
START = (3.0, 4.0)
LR, MU, EPOCHS, BATCH = 0.1, 0.2, 2, 2
INNER_STEPS, OUTER_LR = 3, 2.0
"""pFedMe's."""
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
    "all": {"participation": "synchronous", "goal": 4, "over_selection": 1.0, "minimum": 4},
    "some": {"participation": "synchronous", "goal": 2, "over_selection": 1.0, "minimum": 2},
    "carried": {
        "participation": "synchronous",
        "goal": 2,
        "over_selection": 2.0,
        "minimum": 2,
        "late": "carry",
    },
    "buffered": {"participation": "asynchronous", "goal": 2, "concurrency": 4},
    "single": {"participation": "asynchronous", "goal": 1, "concurrency": 4},
}
"""Name -> the plan's [round]."""
MODELS = ("plain", "buffers", "personal", "normalisation")
LEFT_OUT = (
    "moon",
    "feddf",
    "fedmd",
    *(name for name, recipe in RECIPES.items() if recipe.clusters),
    *(name for name, recipe in RECIPES.items() if recipe.mechanism is not None),
    *KINDS,
)
"""Recipes of which nobody knows where they end: MOON's term compares features of a deep model,
FedDF's model ends where the teachers say, FedMD's models stay on the devices, clusters are several
models, differential privacy adds noise, and computations have no model."""
ALGORITHMS = (*(name for name in RECIPES if name not in LEFT_OUT), "scaffold-gradient")
KRUMS = ("krum", "multi-krum", "bulyan")
CORRECTED = ("scaffold", "scaffold-gradient", "feddyn")


def cells() -> Iterator[Cell]:
    """Yield all combinations."""
    yield from map(Cell._make, product(ALGORITHMS, WEIGHTINGS, ENCODINGS, PARTICIPATIONS, MODELS))


class Net(nn.Module):
    """Minima (n, 2) -> their distances to w, and those to ``own`` where there is such a personal
    parameter.

    BatchNorm measures the inputs, and its output counts 0 times: its statistics are known in closed
    form."""

    def __init__(self, model: str, start: tuple[float, float] = START) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start))
        self.own = nn.Parameter(torch.zeros(2)) if model == "personal" else None
        normed = model in ("buffers", "normalisation")
        self.norm = nn.BatchNorm1d(2, momentum=MOMENTUM, affine=False) if normed else None

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
    if recipe in ("fedprox", "fedprox-adaptive", "feddyn", "ditto", "pfedme"):
        options["proximal"] = True
    kind = "-".join(sorted(options))
    path = folder / f"{kind}-{model}.bundle"
    if not path.exists():
        personal = {
            "personal": {"personal": ["own"]},
            "normalisation": {"personal": "normalisation"},
        }.get(model, {})
        example = torch.rand(4, 2), torch.rand(4, 2)
        cached_export(Net(model), loss, example, path, step=LocalStep(**options), **personal)
    return path


def plan_of(cell: Cell, rounds: int) -> dict[str, Any]:
    """Return the scenario's settings for a cell."""
    local: dict[str, Any] = {"epochs": EPOCHS, "batch_size": BATCH, "lr": LR, "evaluate": False}
    server: dict[str, Any] = {}
    recipe = cell.recipe.removesuffix("-gradient")
    if recipe in ("fedprox", "feddyn", "ditto", "pfedme"):
        local["mu"] = 1.0 if recipe == "feddyn" else MU
    if recipe == "pfedme":
        local["hyper"] = {"inner_steps": INNER_STEPS, "outer_lr": OUTER_LR}
    if recipe in ("scaffold", "feddyn"):
        server["devices"] = len(APART)
    if cell.recipe == "scaffold-gradient":
        local["algorithm"] = cell.recipe
    if recipe in ("q-fedavg", "fedprox-adaptive"):
        local["evaluate"] = True
    if recipe == "fedsgd":
        local |= {"epochs": 1, "batch_size": 0}
    if recipe in ("fedadagrad", "fedadam", "fedyogi"):
        server |= {"lr": 0.1, "tau": 0.1}
    if recipe == "fedadagrad":
        server["lr"] = 0.3
    if recipe == "fedavgm":
        server["momentum"] = 0.5  # with 0.9, stale updates make it swing ever further
    return {
        "plan__recipe": recipe,
        "plan__local": local,
        "plan__server": server,
        "plan__encoding": {"up": cell.encoding},
        "plan__round": {"deadline": 1e4, "weighting": cell.weighting}
        | PARTICIPATIONS[cell.participation],
        **({} if cell.participation in ("all", "some") else {"plan__staleness": {"max": 50}}),
        "plan__stop__rounds": rounds,
        "plan__seed": 1,
        "tiers": {"device": {"latency": 0.0, "download": 1e12, "upload": 1e12, "spread": 1.0}},
    }


class Steps(NamedTuple):
    """A device's local steps in a task as an affine map: y = slope * x + shift, by coordinate."""

    slope: Point
    shift: Point


def steps_of(device: Quadratic, count: int, pull: float = 0.0) -> Steps:
    """Return what this many steps do. ``pull``: mu of a proximal term."""
    curvature, minimum = np.array(device.curvature), np.array(device.minimum)
    slope, shift = np.ones(2), np.zeros(2)  # of y as a function of x
    for _ in range(count):
        shift = shift - LR * (curvature * (shift - minimum) + pull * shift)
        slope = slope - LR * (curvature * slope + pull * (slope - 1))
    return Steps(slope, shift)


def moreau_steps_of(device: Quadratic, count: int) -> Steps:
    """Return what pFedMe's local rounds do: theta nears the device's minimum with a pull towards
    w, and w follows theta."""
    curvature, minimum = np.array(device.curvature), np.array(device.minimum)
    (slope, shift), (own_slope, own_shift) = [(np.ones(2), np.zeros(2))] * 2
    for _ in range(count):
        for _ in range(INNER_STEPS):
            pull = own_shift - shift
            own_shift = own_shift - LR * (curvature * (own_shift - minimum) + MU * pull)
            own_slope = own_slope - LR * (curvature * own_slope + MU * (own_slope - slope))
        shift = shift - OUTER_LR * MU * (shift - own_shift)
        slope = slope - OUTER_LR * MU * (slope - own_slope)
    return Steps(slope, shift)


def balance(shares: Sequence[float], maps: Sequence[Steps]) -> Point:
    """Return the x at which sum(share_k * (y_k - x)) is 0."""
    down = sum(share * (1 - each.slope) for share, each in zip(shares, maps, strict=True))
    up = sum(share * each.shift for share, each in zip(shares, maps, strict=True))
    return np.asarray(up / down)


def weights_of(cell: Cell) -> list[float]:
    """Return how much each device counts."""
    return [float(device.copies) if cell.weighting == "examples" else 1.0 for device in APART]


def needs_one_minimum(cell: Cell) -> bool:
    """Return whether the devices of a cell must want the same model for its end to be known."""
    return cell.recipe not in CORRECTED and (cell.participation != "all" or cell.recipe in RULES)


def target_of(cell: Cell, mu: float = 0.0) -> Point:
    """Return where the model of a cell must end, (2,). mu: where a recipe's mu follows the loss."""
    if needs_one_minimum(cell):
        return np.array(TOGETHER[0].minimum)
    curvatures = np.array([each.curvature for each in APART])
    minima = np.array([each.minimum for each in APART])
    if cell.recipe in CORRECTED:
        return np.asarray((curvatures * minima).sum(0) / curvatures.sum(0))
    shares = weights_of(cell)
    counts = [1 if cell.recipe == "fedsgd" else EPOCHS * each.copies // BATCH for each in APART]
    pull = MU if cell.recipe == "fedprox" else mu
    each_device = [*zip(APART, counts, strict=True)]
    maps = [steps_of(each, count, pull) for each, count in each_device]
    if cell.recipe == "pfedme":
        maps = [moreau_steps_of(each, count) for each, count in each_device]
    if cell.recipe == "fednova":
        shares = [share / count for share, count in zip(shares, counts, strict=True)]
    if cell.recipe != "q-fedavg":
        return balance(shares, maps)
    place = balance(shares, maps)
    for _ in range(1000):  # shares times the losses at the place itself, q = 1
        # The personal parameter ends at its minimum, where its part of the loss is 0.
        losses = [
            float(np.array(each.curvature) @ (place - each.minimum) ** 2 / 2) for each in APART
        ]
        aim = balance([share * loss for share, loss in zip(shares, losses, strict=True)], maps)
        place = 0.9 * place + 0.1 * aim  # whole steps swing
    return place


class Ended(NamedTuple):
    """What became of a cell."""

    refused: str | None = None
    """Why its plan is refused."""
    last: Point | None = None
    """The model's w, the mean of the second half of the rounds, (2,)."""
    buffers: Mapping[str, Point] = {}
    """Each buffer's values after all rounds, (rounds, 2)."""


class Refusal(NamedTuple):
    """A kind of cells whose plans are refused."""

    recipes: str
    combined_with: str
    """With the recipes: the row of the table in docs/algorithms/recipes.md."""
    words: str
    """What the reason names."""
    holds: Callable[[Cell], bool]


REFUSED = (
    Refusal(
        "FedDyn", "weights other than uniform", "round.weighting",
        lambda cell: cell.recipe == "feddyn" and cell.weighting != "uniform",
    ),
    Refusal(
        "FedDyn", "asynchronous or carried updates", "synchronous rounds",
        lambda cell: cell.recipe == "feddyn" and cell.participation not in ("all", "some"),
    ),
    Refusal(
        "FedAsync", "other participation than asynchronous with `goal = 1`", "server.mix",
        lambda cell: cell.recipe == "fedasync" and cell.participation != "single",
    ),
    Refusal(
        "any", '`weighting = "inverse-participation"`, except asynchronously with a `goal` above 1',
        "inverse-participation",
        lambda cell: (
            cell.weighting == "inverse-participation" and cell.participation != "buffered"
        ),
    ),
    Refusal(
        "robust ones", "top-k encodings", "encoding.up",
        lambda cell: cell.recipe in RULES and cell.encoding.startswith("topk"),
    ),
    Refusal(
        "robust ones", "too small a `minimum` for the rule (three and more for Krum and Bulyan)",
        "round.minimum",
        lambda cell: cell.recipe in KRUMS and cell.participation != "all",
    ),
    Refusal(
        "FedPer, FedRep, FedBN", "a bundle without the personal parameters that they need",
        "personal parameters",
        lambda cell: cell.recipe in ("fedper", "fedrep") and cell.model in ("plain", "buffers"),
    ),
    Refusal(
        "FedPer, FedRep, FedBN", "a bundle without the personal parameters that they need",
        "normalisation",
        lambda cell: cell.recipe == "fedbn" and cell.model != "normalisation",
    ),
    Refusal(
        "Ditto, pFedMe, APFL", "a bundle with personal parameters", "personal",
        lambda cell: (
            cell.recipe in ("ditto", "pfedme", "apfl")
            and cell.model in ("personal", "normalisation")
        ),
    ),
)  # fmt: skip
"""Which cells must be refused. All others must train."""


def expected_refusals(cell: Cell) -> list[str]:
    """Return what the reason may name. Empty: the cell's plan is none to refuse."""
    return [refusal.words for refusal in REFUSED if refusal.holds(cell)]


def run(
    folder: Path,
    bundles: Path,
    cell: Cell,
    rounds: int,
    privacy: Mapping[str, Any] | None = None,
) -> Ended:
    """Simulate a cell; with 0 rounds, only read its plan. ``privacy``: of the plan."""
    folder.mkdir(exist_ok=True)
    devices, bundle = (
        TOGETHER if needs_one_minimum(cell) else APART,
        bundle_of(bundles, cell.recipe, cell.model),
    )
    opened = open_bundle(bundle)
    try:
        settings = plan_of(cell, max(rounds, 1))
        if privacy is not None:
            settings["plan__privacy"] = privacy
        scenario = quadratics_scenario(folder, bundle, devices, **settings)
        fleet = make_fleet(scenario)
    except FleetError as error:
        return Ended(error.text.removeprefix(f"{folder / 'scenario.toml'}, plan: "))
    models: list[Any] = []
    while rounds and fleet.advance():
        if len(fleet.history) > len(models):
            models.append(fleet.model.copy())
    if not rounds:
        return Ended()
    causes = {
        cause
        for row in fleet.history
        for cause in row["causes"]
        if cause.startswith(("failed", "rejected"))
    }
    assert not causes, causes
    found = [views(model, opened.manifest.travelling) for model in models]
    names = [row.name for row in opened.manifest.travelling if row.buffer and row.shape == (2,)]
    values = {name: np.array([each[name] for each in found]) for name in names}
    return Ended(None, np.mean([each["w"] for each in found[len(found) // 2 :]], axis=0), values)

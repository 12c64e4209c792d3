"""The network of purchase.py, which customers' devices train: who buys in the next 13 weeks."""

from __future__ import annotations

import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from _purchase_data import (
    CALIBRATION,
    END,
    FEATURES,
    LOOKS_BACK,
    WINDOW,
    bought,
    customers,
    features,
    purchases,
    windows,
)
from fleetlearn_protocol import open_bundle
from fleetlearn_protocol.vector import Vector, views
from fleetlearn_simulator import Options, simulate
from fleetlearn_simulator.scenario.scenario import Scenario
from numpy.typing import NDArray
from scipy.stats import rankdata

HERE = Path(__file__).resolve().parent
HIDDEN = 16
BATCH = len(LOOKS_BACK)
LR = 1.0
COHORT, ROUNDS = 500, 100
PRIVATE_REPORTS = 46_000
"""Of a run with differential privacy: each customer takes part twice."""
DELTA = 1e-6
NEXT_TO_NONE = 0.002
"""The noise multiplier of runs that only clip."""
BLOCK = 100, 5
"""Devices and steps of a call."""
CENTRAL_PASSES, CENTRAL_BATCH = 10, COHORT * BATCH
"""Of the training in one place: its steps see as many rows as a round."""
TESTS = {"next": CALIBRATION, "later": END - WINDOW}
"""The days after which thirteen weeks test: at once, and half a year later."""


class Way(NamedTuple):
    """One way to train."""

    name: str
    cohort: int = COHORT
    rounds: int = ROUNDS
    epochs: int = 1
    clip: float | None = None
    """The longest update; None: whatever it is, and no noise."""
    epsilon: float | None = None
    """None: next to no noise."""
    answers: tuple[float, float] | None = None
    """The arguments of ``answering``; None: all do."""


class Quality(NamedTuple):
    """How good probabilities of buying are."""

    auc: float
    log_loss: float
    mean: float
    """Of the probabilities; the share who bought is what it should be."""


def export(folder: Path) -> Path:
    """Export the network: features -> logit of buying in the next thirteen weeks."""
    import torch
    from fleetlearn_export import LocalStep, TrainMany, export_bundle
    from torch import Tensor, nn

    def loss(logit: Tensor, y: Tensor) -> Tensor:
        return (nn.functional.softplus(logit) - y * logit).mean()  # binary cross-entropy

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1), nn.Flatten(0)
    path = folder / "purchase.bundle"
    example = torch.zeros(BATCH, FEATURES), torch.zeros(BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporters that it calls
        export_bundle(
            nn.Sequential(*layers), loss, example, path, step=LocalStep(), many=TrainMany(*BLOCK)
        )
    return path


def scenario(bundle: Path, way: Way, seed: int) -> Scenario:
    people = customers(purchases())
    private = way.clip is not None
    plan: dict[str, Any] = {
        "bundle": str(bundle),
        "recipe": "dp-fedavg" if private else "fedavg",
        "local": {"epochs": way.epochs, "batch_size": BATCH, "lr": LR, "evaluate": False},
        "round": {"goal": way.cohort, "over_selection": 1.0, "weighting": "uniform"},
        "stop": {"rounds": way.rounds},
    }
    if private:
        noise = {"noise": NEXT_TO_NONE} if way.epsilon is None else {"epsilon": way.epsilon}
        plan["privacy"] = {
            "delta": DELTA,
            "population": people,
            "clip": way.clip,
            "separation": people // way.cohort - 1,
            **noise,
        }
    tables: dict[str, Any] = {
        "name": "purchase",
        "seed": seed,
        "plan": plan,
        "population": {"size": people},
        "data": {"kind": "function", "function": "_purchase_data:own_windows", "path": str(HERE)},
    }
    if way.answers is not None:
        share, weeks = way.answers
        parameters = {"share": share, "weeks": weeks}
        tables["failures"] = {"law": "_purchase_data:silent", "parameters": parameters}
    return Scenario.read(tables, bundle.parent, plugins=("_purchase_data",))


def trained(bundle: Path, way: Way, seed: int) -> dict[str, Any]:
    """Simulate one way. Returns what the model is worth, and what the run spent."""
    options = Options(backend="vectorized", workers=1, events=False, checkpoint=10**9, test=0)
    with TemporaryDirectory() as folder:
        outcome = simulate(scenario(bundle, way, seed), Path(folder) / "run", options)
    assert outcome is not None
    summary = outcome.summary
    return {
        "rounds": summary["rounds"],
        "reports": summary["reports"],
        "lost": sum(summary["lost"].values()),
        "epsilon": None if way.epsilon is None else summary["privacy"]["epsilon"],
        **tested(bundle, outcome.model),
    }


def in_one_place(bundle: Path, seed: int) -> dict[str, Any]:
    """Train the same network with all rows at hand."""
    from fleetlearn_device.runtimes.open_runtime import open_runtime
    from fleetlearn_device.training.algorithms import run_algorithm
    from fleetlearn_device.training.work import Inputs, TaskSettings

    opened, runtime = open_bundle(bundle), open_runtime(bundle)
    x, y = windows()
    rows = x.reshape(-1, FEATURES), y.reshape(-1)
    settings = TaskSettings({"lr": LR}, CENTRAL_PASSES, CENTRAL_BATCH, seed=seed)
    run_algorithm("plain", runtime, opened, rows, Inputs(opened.parameters()), settings)
    return tested(bundle, runtime.parameters)


def tested(bundle: Path, model: Vector) -> dict[str, Any]:
    """Return the quality of this model's probabilities in each of the two tests."""
    of, table = purchases(), open_bundle(bundle).manifest.travelling
    first, bias, second, bias_2 = (each.astype(np.float64) for each in views(model, table).values())
    found = {}
    for name, day in TESTS.items():
        logit = (np.tanh(features(of, day) @ first.T + bias) @ second.T + bias_2)[:, 0]
        found[name] = quality(1 / (1 + np.exp(-logit)), bought(of, day, day + WINDOW) > 0)._asdict()
    return found


def quality(chance: NDArray[np.float64], buys: NDArray[np.bool_]) -> Quality:
    """Return how good these probabilities are."""
    ranks, positive = rankdata(chance), np.count_nonzero(buys)
    pairs = positive * (len(buys) - positive)
    auc = (ranks[buys].sum() - positive * (positive + 1) / 2) / pairs
    right = np.clip(np.where(buys, chance, 1 - chance), 1e-9, None)
    return Quality(float(auc), float(-np.log(right).mean()), float(chance.mean()))

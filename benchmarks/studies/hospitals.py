"""FedAvg with E local updates on the four hospital set-ups: how far from the maximum-likelihood
estimate it ends.

Each run is the simulator's: the real engine, and a logistic regression exported for it, trained in
float32 until a round moves the model by less than epsilon. Beside it, on the same data, the same
algorithm in float64 and NumPy: until the same stop, and on to its fixed point. ``inf`` is what many
updates come to: the mean of the hospitals' own estimates. docs/studies/hospitals.md says more.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import _add_benchmarks_to_path  # noqa: F401
import _measure as measure
import numpy as np
import torch
from fleetlearn_export import export_bundle
from fleetlearn_protocol import Bundle
from fleetlearn_simulator.data.factory import source_of
from fleetlearn_simulator.data.logistic_regression import pooled_mle
from fleetlearn_simulator.data.sources import Source
from fleetlearn_simulator.results.run_folder import ROUNDS, read_rows
from fleetlearn_simulator.run import Options, simulate
from fleetlearn_simulator.scenario.scenario import Scenario
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

SETUPS = ("balanced", "damaged", "unbalanced", "non-iid")
HOSPITALS = 4
FEATURES = 2
START = 0.25
"""Each weight before the first round, as in the lecture's programs."""
FIXED = 1e-13
"""In float64 a model that a round moves by less is at the fixed point."""
Floats = NDArray[np.float64]


class Reference(NamedTuple):
    """FedAvg in float64."""

    rounds: int
    """Until a round moved the model by less than epsilon."""
    stopped: Floats
    """The model then."""
    fixed: Floats
    """The model that a round does not move."""


def export(folder: Path) -> Bundle:
    """Logistic regression without an intercept: the loss is the mean of log(1 + exp(z)) - y z with
    z = x @ w."""
    model = nn.Linear(FEATURES, 1, bias=False)
    nn.init.constant_(model.weight, START)

    def loss(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.binary_cross_entropy_with_logits(outputs[:, 0], y.to(torch.float32))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporters that it calls
        return export_bundle(
            model,
            loss,
            (torch.randn(4, FEATURES), torch.tensor([0, 1, 1, 0])),
            folder / "logistic.bundle",
        ).bundle


def scenario(
    bundle: Bundle, setup: str, seed: int, updates: int, lr: float, epsilon: float, rounds: int
) -> Scenario:
    """All four hospitals in every round, ``updates`` full-batch updates on each."""
    plan = {
        "bundle": str(bundle.path),
        "recipe": "fedavg",
        "local": {"epochs": updates, "batch_size": 0, "lr": lr, "evaluate": False},
        "round": {"goal": HOSPITALS, "minimum": HOSPITALS, "over_selection": 1.0},
        "stop": {"rounds": rounds, "epsilon": epsilon},
    }
    tables = {
        "name": "hospitals",
        "seed": seed,
        "plan": plan,
        "population": {"size": HOSPITALS},
        "data": {"kind": "hospitals", "setup": setup, "test": 0.0},
        "compute": {"step_seconds": 1e-3},  # many updates must not take until the round's deadline
    }
    return Scenario.read(tables, bundle.path.parent)


def simulated(run: Scenario, folder: Path) -> tuple[dict[str, Any], Floats]:
    """Return how the run ended, and its model."""
    done = simulate(
        run, folder, Options(backend="bundle", workers=1, events=False, checkpoint=10**9, test=0)
    )
    assert done is not None
    changes = [row["change"] for row in read_rows(folder, ROUNDS)]
    stopped = changes[-1] < (run.plan.stop.epsilon or 0.0)
    shown = {"rounds": len(changes), "stopped": stopped, "last_change": changes[-1]}
    return shown, done.model.astype(np.float64)


def reference(source: Source, updates: int, lr: float, epsilon: float) -> Reference:
    """The same rounds in float64."""
    parts = [source.arrays(device) for device in range(HOSPITALS)]
    data = [(x.astype(np.float64), y.astype(np.float64)) for x, y in parts]
    weights = np.array([len(y) for _, y in data]) / sum(len(y) for _, y in data)
    model, stopped, rounds = np.full(FEATURES, START), None, 0
    while True:
        ends = np.stack([local(model, x, y, updates, lr) for x, y in data])
        before, model = model, weights @ ends
        change = float(np.linalg.norm(model - before))
        if stopped is None:
            rounds += 1
            stopped = model if change < epsilon else None
        if stopped is not None and change < FIXED:
            return Reference(rounds, stopped, model)


def local(model: Floats, x: Floats, y: Floats, updates: int, lr: float) -> Floats:
    """A hospital's updates."""
    for _ in range(updates):
        model = model - lr / len(y) * (1 / (1 + np.exp(-(x @ model))) - y) @ x
    return model


def own_estimates(source: Source) -> Floats:
    """The mean of the hospitals' own estimates, weighted by their examples."""
    weights = source.examples(np.arange(HOSPITALS)).astype(np.float64)
    estimates = np.stack(
        [pooled_mle(source, [device], intercept=False)[0] for device in range(HOSPITALS)]
    )
    return np.asarray(weights @ estimates / weights.sum())


def standard_error(source: Source, pooled: Floats) -> float:
    """Return the standard error of the pooled estimate: the root of the trace of the inverse Fisher
    information."""
    x = np.concatenate([source.arrays(device)[0] for device in range(HOSPITALS)]).astype(np.float64)
    p = 1 / (1 + np.exp(-(x @ pooled)))
    return float(np.sqrt(np.trace(np.linalg.inv((x.T * (p * (1 - p))) @ x))))


def study(
    bundle: Bundle,
    folder: Path,
    setup: str,
    seed: int,
    updates: Sequence[int],
    settings: dict[str, Any],
) -> dict[str, dict[str, Any]]:
    """The figures of one set-up's data, by number of updates."""
    figures: dict[str, dict[str, Any]] = {}
    for number in updates:
        run = scenario(bundle, setup, seed, number, **settings)
        source = source_of(run, bundle)
        pooled, _ = pooled_mle(source, range(HOSPITALS), intercept=False)
        shown, model = simulated(run, folder / "run")
        exact = reference(source, number, settings["lr"], settings["epsilon"])
        figures[str(number)] = shown | {
            "distance": float(np.linalg.norm(model - pooled)),
            "from_fixed": float(np.linalg.norm(model - exact.fixed)),
            "float64_rounds": exact.rounds,
            "float64_distance": float(np.linalg.norm(exact.stopped - pooled)),
            "fixed_distance": float(np.linalg.norm(exact.fixed - pooled)),
        }
    figures["inf"] = {"fixed_distance": float(np.linalg.norm(own_estimates(source) - pooled))}
    figures["pooled"] = {
        "size": float(np.linalg.norm(pooled)),
        "standard_error": standard_error(source, pooled),
    }
    return figures


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument("--setups", nargs="+", choices=SETUPS, default=SETUPS)
    options.add_argument(
        "--updates", nargs="+", type=int, default=[1, 5, 20, 100], metavar="E", help="in a round"
    )
    options.add_argument("--lr", type=float, default=0.1)
    options.add_argument(
        "--epsilon",
        type=float,
        default=1e-7,
        help="the L2 norm of a round's change that ends a run",
    )
    options.add_argument("--rounds", type=int, default=50_000, help="most of them")
    options.add_argument("--seeds", type=int, default=10, help="data sets of each set-up")
    chosen = options.parse_args()
    settings = {"lr": chosen.lr, "epsilon": chosen.epsilon, "rounds": chosen.rounds}
    results: dict[str, Any] = {}
    with measure.scratch() as folder:
        bundle = export(folder)
        for setup in chosen.setups:
            runs = []
            for seed in range(chosen.seeds):
                runs.append(study(bundle, folder, setup, seed, chosen.updates, settings))
                print(".", end="", flush=True, file=sys.stderr)
            results[setup] = {
                updates: {
                    key: measure.middle([run[updates][key] for run in runs])
                    for key in runs[0][updates]
                }
                | {"runs": [run[updates] for run in runs]}
                for updates in runs[0]
            }
    print(file=sys.stderr)
    columns = (
        ("rounds", "rounds"),
        ("of float64", "float64_rounds"),
        ("distance", "distance"),
        ("of float64", "float64_distance"),
        ("of its fixed point", "fixed_distance"),
        ("from that point", "from_fixed"),
        ("last change", "last_change"),
    )
    rows = [("set-up", "E", *(title for title, _ in columns))]
    for setup, found in results.items():
        for updates, figures in found.items():
            if updates == "pooled":
                continue
            rows.append(
                (
                    setup,
                    updates,
                    *(measure.show(figures[key]) if key in figures else "" for _, key in columns),
                )
            )
    print(measure.table(rows))
    for setup, found in results.items():
        size, error = (measure.show(found["pooled"][key]) for key in ("size", "standard_error"))
        print(f"\n{setup}: the pooled estimate's length is {size}, its standard error {error}.")
    ended = [
        run
        for found in results.values()
        for row in found.values()
        for run in row["runs"]
        if "stopped" in run
    ]
    print(
        f"\n{sum(run['stopped'] for run in ended)} of {len(ended)} runs stopped by epsilon = "
        f"{chosen.epsilon:g}."
    )
    measure.write_json(
        chosen.json, {key: value for key, value in vars(chosen).items() if key != "json"}, results
    )


if __name__ == "__main__":
    main()

"""Synchronous rounds against FedBuff and FedAsync, on devices of very different speeds that are
lost now and then.

Every run is the simulator's, with the real engine and a softmax regression for scikit-learn's
digits that trains for real. First each method's learning rates are chosen on a separate seed
without dropout; then they stay. Runs are kept in --keep: started again, the command goes on with
those that are missing. docs/studies/asynchronous.md says more.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import _add_benchmarks_to_path  # noqa: F401
import _asynchronous_show as show
import _measure as measure
import numpy as np
from _asynchronous_data import EXAMPLES, SPREAD
from dropout import OPTIONS, export_digits, kept_run, target_of
from fleetlearn_device.training.train import evaluate_data
from fleetlearn_protocol import open_bundle
from fleetlearn_simulator.data.factory import source_of
from fleetlearn_simulator.results.loaded_run import series
from fleetlearn_simulator.results.run_folder import MODEL, ROUNDS, read_rows
from fleetlearn_simulator.results.run_statistics import Target, reached, wasted_share
from fleetlearn_simulator.scenario.scenario import Scenario
from fleetlearn_simulator.training.backend import PerDevice, local_settings
from safetensors.numpy import load_file

HERE = Path(__file__).parent
EPOCHS, BATCH = 2, 10
STEP_SECONDS = 15.0
"""Of a step on the median device: its task takes a minute."""
DEADLINE = 900.0
MANY = 10
"""Devices that one call trains. FedAsync's are all of different models, and each call has one."""
POPULATION = 2
"""Times as many devices as may train at a time."""
TESTS = 100
"""Tests of the model in a run, about."""
CONCURRENCY = 10
"""FedBuff: tasks out at a time for each update of its buffer."""
TUNING_SHARE = 0.5
"""Of a run, the part that is run to choose learning rates."""
ONE_SEED_AT = 10_000
"""With this many tasks at a time, or more, only one seed is run."""
LR, SERVER_LR = [0.1, 0.3, 1.0], [0.3, 1.0, 3.0]
TUNING_SEED = 1000


class Method(NamedTuple):
    recipe: str
    over_selection: float | None = None
    """None: asynchronous."""
    server_lr: list[float] = SERVER_LR
    """The values that are tried."""


METHODS = {
    "FedAvg": Method("fedavg", 1.0),
    "FedAvg, over-selection": Method("fedavg", 1.3),
    "FedAvgM": Method("fedavgm", 1.0),
    "FedAvgM, over-selection": Method("fedavgm", 1.3),
    "FedBuff": Method("fedbuff"),
    "FedAsync": Method("fedasync", None, [0.1, 0.3, 1.0]),
}
TRIPS = {100: 4000, 1000: 20_000, 10_000: 200_000}
"""Tasks out at a time -> tasks in a run, about."""
TUNED_AT = 100
"""Tasks out at a time where the learning rates are chosen. FedBuff's mean staleness is ten with any
number."""
FEDASYNC_AT = 100
"""FedAsync makes a model with each update: with more at a time its staleness would be above a
hundred."""


class Cell(NamedTuple):
    """Runs that differ in their seeds alone."""

    method: str
    concurrency: int
    dropout: float
    """The share of the tasks that are lost, whatever the device."""


class Job(NamedTuple):
    """A run that is to be done."""

    cell: Cell
    scenario: Scenario
    folder: Path
    target: Target
    test: int
    """Rounds between tests."""


def export(folder: Path) -> Path:
    """Write the softmax regression 64 -> 10, with the graph for MANY devices at once."""
    return export_digits(
        folder / "softmax.bundle", [64, 10], (MANY, EPOCHS * EXAMPLES // BATCH), BATCH
    )


def job_of(
    bundle: Path, cell: Cell, rates: Mapping[str, float], seed: int, target: Target, scale: float
) -> Job:
    """Return a run of the cell with these learning rates: plan's key -> value."""
    method, most = METHODS[cell.method], cell.concurrency
    if method.over_selection is None:
        goal = 1 if method.recipe == "fedasync" else most // CONCURRENCY
        round_: dict[str, float] = {"goal": goal, "concurrency": most}
        trips = goal
    else:
        goal = int(most / method.over_selection)
        round_, trips = {"goal": goal, "over_selection": method.over_selection}, most
    rounds = max(2, round(scale * TRIPS[most] / trips))
    plan = {
        "bundle": str(bundle),
        "recipe": method.recipe,
        "local": {
            "epochs": EPOCHS,
            "batch_size": BATCH,
            "evaluate": False,
            "lr": rates["local.lr"],
        },
        "server": {"lr": rates["server.lr"]},
        "round": {**round_, "deadline": DEADLINE},
        "stop": {"rounds": rounds},
    }
    tables = {
        "name": method.recipe,
        "seed": seed,
        "plan": plan,
        "population": {"size": POPULATION * most},
        "data": {
            "kind": "function",
            "function": "_asynchronous_data:own_digits",
            "path": str(HERE),
            "examples": EXAMPLES,
        },
        "compute": {"step_seconds": STEP_SECONDS},
        "tiers": {"device": {"spread": SPREAD}},
        "failures": {"crash": cell.dropout},
    }
    values = "-".join(f"{value:g}" for value in (cell.dropout, *rates.values(), seed, scale))
    folder = bundle.parent / str(most) / cell.method.replace(", ", "-") / values
    return Job(cell, Scenario.read(tables, bundle.parent), folder, target, max(1, rounds // TESTS))


def carry_out(job: Job) -> dict[str, Any]:
    """The figures of a run, which is simulated unless its folder has it already."""
    run = kept_run(job.scenario, job.folder, OPTIONS._replace(test=job.test))
    indices, values = series(run)["accuracy"]["test"]
    trips = np.cumsum([sum(round_.assigned.values()) for round_ in run.rows])
    there = reached(run, job.target)
    first = next(
        (index for index, value in zip(indices, values, strict=True) if value >= job.target.value),
        0,
    )
    stale = [
        round_["staleness"]["mean"]
        for round_ in read_rows(job.folder, ROUNDS)
        if "staleness" in round_
    ]
    return {
        "to_target": there and {**there._asdict(), "trips": int(trips[first])},
        "accuracy": float(np.mean(values[-10:])),
        "mean_accuracy": float(np.mean(values)),
        "wasted_share": wasted_share(run),
        "trips": int(trips[-1]),
        "time": run.rows[-1].time,
        "staleness": float(np.mean(stale)) if stale else 0.0,
        "by_tenth": accuracy_by_tenth(job),
    }


def accuracy_by_tenth(job: Job) -> list[float]:
    """Return the final model's accuracy on the test digits that are the own ones of each tenth of
    the devices by speed, the slowest first."""
    scenario = job.scenario
    bundle = open_bundle(scenario.plan.bundle)
    tensors = load_file(job.folder / MODEL)
    source = source_of(scenario, bundle)
    runtime = PerDevice(bundle, local_settings(scenario.plan, bundle), source).runtime
    runtime.load(
        np.concatenate(
            [tensors[parameter.name].ravel() for parameter in bundle.manifest.travelling]
        )
    )
    test = source.test()
    assert test is not None
    x, y = test
    evaluations = [evaluate_data(runtime, (x[y == digit], y[y == digit])) for digit in range(10)]
    return [evaluation.metric_sums["accuracy"] / evaluation.examples for evaluation in evaluations]


def tune(bundle: Path, chosen: Any) -> dict[str, dict[str, float]]:
    """Return for each method the rates with the best test accuracy, as a mean over the run."""
    best: dict[str, dict[str, float]] = {}
    for name in chosen.methods:
        tried = [
            {"local.lr": lr, "server.lr": server}
            for lr, server in product(LR, METHODS[name].server_lr)
        ]
        cell, scale = Cell(name, TUNED_AT, 0.0), chosen.scale * TUNING_SHARE
        jobs = [job_of(bundle, cell, rates, TUNING_SEED, chosen.target, scale) for rates in tried]
        scores = [row["mean_accuracy"] for row in show.progress(carry_out, jobs)]
        best[name] = tried[int(np.argmax(scores))]
    return best


def grid(chosen: Any) -> list[Cell]:
    """All methods with each dropout and the fewest tasks out at a time; with more of them, at the
    middle dropout."""
    low, middle = min(chosen.concurrency), sorted(chosen.dropout)[len(chosen.dropout) // 2]
    cells = [Cell(name, low, dropout) for dropout, name in product(chosen.dropout, chosen.methods)]
    cells += [
        Cell(name, most, middle)
        for most in chosen.concurrency
        if most != low
        for name in chosen.methods
    ]
    return [
        cell
        for cell in cells
        if METHODS[cell.method].recipe != "fedasync" or cell.concurrency <= FEDASYNC_AT
    ]


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument(
        "--keep", type=Path, default=Path("asynchronous.runs"), help="folder of the finished runs"
    )
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--scale", type=float, default=1.0, help="times the usual tasks in a run")
    options.add_argument("--target", type=target_of, default="accuracy=0.9")
    options.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    options.add_argument("--concurrency", nargs="+", type=int, choices=TRIPS, default=[*TRIPS])
    options.add_argument("--dropout", nargs="+", type=float, default=[0.0, 0.3, 0.6])
    options.add_argument(
        "--figures", type=Path, metavar="FOLDER", help="draw asynchronous-*.svg there"
    )
    chosen = options.parse_args()
    chosen.keep.mkdir(parents=True, exist_ok=True)
    bundle = export(chosen.keep.absolute())
    best = tune(bundle, chosen)
    jobs = [
        job_of(bundle, cell, best[cell.method], seed, chosen.target, chosen.scale)
        for cell in grid(chosen)
        for seed in range(1, 1 + (chosen.seeds if cell.concurrency < ONE_SEED_AT else 1))
    ]
    results: dict[Cell, list[dict[str, Any]]] = {}
    for job, row in zip(jobs, show.progress(carry_out, jobs), strict=True):
        results.setdefault(job.cell, []).append(row)
    print(show.text(results, best, chosen.target))
    if chosen.figures:
        import _asynchronous_figures  # matplotlib takes its time

        for file in _asynchronous_figures.draw(results, chosen.figures, chosen.target):
            print(file, file=sys.stderr)
    settings = {
        key: value for key, value in vars(chosen).items() if key not in ("json", "keep", "figures")
    }
    content = {
        "chosen": best,
        "cells": [cell._asdict() | {"runs": rows} for cell, rows in results.items()],
    }
    measure.write_json(chosen.json, settings | {"target": str(chosen.target)}, content)


if __name__ == "__main__":
    main()

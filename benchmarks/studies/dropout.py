"""What dropout does to training: recipes, data that differ, over-selection and deadlines, on a
fleet of four tiers.

Every run is the simulator's, with the real engine and a small network for scikit-learn's digits
that trains for real. First each recipe's learning rates and mu are chosen on a separate seed
without dropout; then they stay. Runs are kept in --keep: started again, the command goes on with
those that are missing. docs/studies/dropout.md says more.
"""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from argparse import ArgumentTypeError
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import pairwise, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import _add_benchmarks_to_path  # noqa: F401
import _dropout_tables as tables
import _measure as measure
import numpy as np
from _dropout_data import EXAMPLES, SHARES, TEST, scans
from fleetlearn_device.training.train import evaluate_data
from fleetlearn_protocol import open_bundle
from fleetlearn_simulator.data.factory import source_of
from fleetlearn_simulator.errors import SimulatorError
from fleetlearn_simulator.population.failures import TaskFates, sample_task_fates
from fleetlearn_simulator.population.traits import tiers_of
from fleetlearn_simulator.results.loaded_run import Floats, LoadedRun, read_run, series
from fleetlearn_simulator.results.run_folder import CHECKPOINT, MODEL, SUMMARY
from fleetlearn_simulator.results.run_statistics import (
    Target,
    lost_share,
    participation,
    reached,
    wasted_share,
)
from fleetlearn_simulator.run import Options, simulate
from fleetlearn_simulator.scenario.scenario import Scenario, expand
from fleetlearn_simulator.training.backend import PerDevice, local_settings
from safetensors.numpy import load_file

DEVICES = 1000
GOAL = 20
EPOCHS, BATCH = 5, 10
STEPS = EPOCHS * EXAMPLES // BATCH
STEP_SECONDS = 0.5
"""Of a step on a desktop core: as a model would take that is far larger than the one which is
trained."""
LR = [0.03, 0.1, 0.3, 1.0]
SERVER_LR = [0.01, 0.03, 0.1, 0.3, 1.0]
RECIPES: dict[str, dict[str, list[Any]]] = {
    "fedavg": {"local.lr": LR},
    "fedprox": {"local.lr": LR, "local.mu": [0.01, 0.1, 1.0]},
    "fednova": {"local.lr": LR},
    "q-fedavg": {"local.lr": LR, "aggregation.q": [0.1, 1.0, 2.0]},
    "scaffold": {"local.lr": LR},
    "fedbuff": {"local.lr": LR, "server.lr": SERVER_LR[2:]},
    "fedavgm": {"local.lr": LR, "server.lr": SERVER_LR[1:]},
    "fedadam": {"local.lr": LR, "server.lr": SERVER_LR[:4]},
    "fedyogi": {"local.lr": LR, "server.lr": SERVER_LR[:4]},
}
"""Recipe -> the plan's keys that are chosen for it, and the values that are tried."""
HERE = Path(__file__).parent
DATA: dict[str, dict[str, Any]] = {
    "alike": {"kind": "dirichlet", "alpha": 100.0, "test": TEST},
    "skewed": {"kind": "dirichlet", "alpha": 0.1, "test": TEST},
    "by tier": {"kind": "function", "function": "_dropout_data:own_digits", "path": str(HERE)},
}
"""How the devices' digits differ: hardly; each device has few; each tier has its own."""
USUAL = {"over_selection": 1.3, "deadline": 1800.0}
TUNING_SEED = 1000
OPTIONS = Options(backend="vectorized", workers=1, events=False, checkpoint=10**9)


class Cell(NamedTuple):
    """Runs that differ in their seeds alone."""

    data: str
    recipe: str
    hazard: str
    """"by time": devices vanish at the same rate in every second of training; "equal": each task is
    lost with the same probability, whatever the device."""
    dropout: float
    over_selection: float
    deadline: float


class Job(NamedTuple):
    """A run that is to be done."""

    cell: Cell
    scenario: Scenario
    folder: Path
    target: Target


def export(folder: Path) -> Path:
    """Write the network 64 -> 32 -> 10, with FedProx's term and the graph for GOAL devices at once;
    and its data."""
    bundle = folder / "digits.bundle"
    if bundle.exists():
        return bundle
    from fleetlearn_export import LocalStep  # here, since it imports PyTorch

    x, y = scans()
    np.savez(folder / "digits.npz", x=x, y=y)
    export_digits(
        corrected(bundle), [64, 32, 10], (GOAL, STEPS), BATCH, step=LocalStep(correction=True)
    )
    return export_digits(bundle, [64, 32, 10], (GOAL, STEPS), BATCH, step=LocalStep(proximal=True))


def corrected(bundle: Path) -> Path:
    """Return where the same network is for SCAFFOLD, whose step has a correction."""
    return bundle.with_name("digits-corrected.bundle")


def export_digits(
    bundle: Path, widths: Sequence[int], many: tuple[int, int], batch: int, **options: Any
) -> Path:
    """Write the bundle of a network of linear layers for the digits, unless it is there.

    widths: elements before, between and after the layers. many: devices and steps of
    train_many.onnx. batch: examples in a step. options: for ``export_bundle``.
    """
    if bundle.exists():
        return bundle
    import torch  # here, since the worker processes do not need it
    from fleetlearn_export import TrainMany, export_bundle
    from torch import nn

    def accuracy(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (outputs.argmax(1) == y).float()

    x, y = scans()
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # of the exporters that it calls
        torch.manual_seed(0)
        layers = [layer for sizes in pairwise(widths) for layer in (nn.Linear(*sizes), nn.ReLU())][
            :-1
        ]
        model = nn.Sequential(*layers) if len(layers) > 1 else layers[0]
        example = torch.from_numpy(x[:batch]), torch.from_numpy(y[:batch])
        options |= {"metrics": {"accuracy": accuracy}, "many": TrainMany(*many)}
        export_bundle(model, nn.functional.cross_entropy, example, bundle, **options)
    return bundle


def scenarios(
    bundle: Path, cell: Cell, rounds: int, sweep: Mapping[str, Sequence[Any]], rate: float
) -> list[Scenario]:
    """The cell's runs, for each combination of the sweep's values."""
    asynchronous = {"concurrency": math.ceil(GOAL * cell.over_selection)}
    part = asynchronous if cell.recipe == "fedbuff" else {"over_selection": cell.over_selection}
    plan = {
        "bundle": str(corrected(bundle) if cell.recipe == "scaffold" else bundle),
        "recipe": cell.recipe,
        "local": {"epochs": EPOCHS, "batch_size": BATCH, "evaluate": cell.recipe == "q-fedavg"},
        "round": {"goal": GOAL, "deadline": cell.deadline, **part},
        "server": {"devices": DEVICES} if cell.recipe == "scaffold" else {},
        "stop": {"rounds": rounds},
    }
    arrays = (
        {"arrays": str(bundle.with_name("digits.npz"))}
        if DATA[cell.data]["kind"] == "dirichlet"
        else {}
    )
    tables = {
        "name": cell.recipe,
        "plan": plan,
        "population": {"size": DEVICES},
        "data": {**DATA[cell.data], **arrays, "examples": EXAMPLES},
        "compute": {"step_seconds": STEP_SECONDS},
        "tiers": {name: {"like": name, "share": share} for name, share in SHARES.items()},
        "failures": {"train": rate} if cell.hazard == "by time" else {"crash": cell.dropout},
        "sweep": {key: list(values) for key, values in sweep.items()},
    }
    return expand(Scenario.read(tables, bundle.parent))


def folder_of(bundle: Path, cell: Cell) -> Path:
    """Return where the cell's runs are kept."""
    rates = f"dropout-{cell.dropout:g}-select-{cell.over_selection:g}"
    values = f"{cell.hazard}-{rates}-deadline-{cell.deadline:g}"
    return bundle.with_name(cell.data.replace(" ", "-")) / cell.recipe / values.replace(" ", "-")


def training(bundle: Path) -> TaskFates:
    """Return the simulator's fates of many devices of the fleet: how long all local steps of each
    take."""
    (run,) = scenarios(
        bundle, Cell("alike", "fedavg", "by time", 0.0, **USUAL), 1, {"plan.local.lr": [0.1]}, 0.0
    )
    ids = np.arange(100_000)
    steps, size = np.full(len(ids), STEPS), np.full(len(ids), 4 * open_bundle(bundle).manifest.size)
    return sample_task_fates(run, ids, 1, now=0.0, deadline=1e9, steps=steps, down=size, up=size)


def rate_of(seconds: Floats, dropout: float) -> float:
    """Return the constant hazard at which this share of the devices vanishes during its seconds of
    training."""
    low, high = 0.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if np.mean(-np.expm1(-middle * seconds)) < dropout else (low, middle)
        )
    return float(f"{high:.4g}") if dropout else 0.0


def kept_run(scenario: Scenario, folder: Path, options: Options = OPTIONS) -> LoadedRun:
    """Return the scenario's run from its folder. It is simulated first unless the folder has it
    already, and from its checkpoint if it was stopped."""
    given, kept = (
        json.dumps({"tables": scenario.tables, "setting": scenario.setting}, indent=1),
        folder / "given.json",
    )
    same = kept.exists() and kept.read_text("utf-8") == given
    if not (same and (folder / SUMMARY).exists()):
        folder.mkdir(parents=True, exist_ok=True)
        if not same:  # what is there is another run's
            for name in (SUMMARY, CHECKPOINT):
                (folder / name).unlink(missing_ok=True)
            kept.write_text(given, "utf-8")
        simulate(scenario, folder, options, resume=same and (folder / CHECKPOINT).exists())
    return read_run(folder)


def carry_out(job: Job) -> dict[str, Any]:
    """The figures of a run, which is simulated unless its folder has it already."""
    folder, scenario = job.folder, job.scenario
    run, manifest = kept_run(scenario, folder), open_bundle(scenario.plan.bundle).manifest
    # none where no round had a number
    _, values = series(run).get("accuracy", {}).get("test", (None, np.zeros(1)))
    there = reached(run, job.target)
    part = participation(run)
    return {
        "to_target": None if there is None else there._asdict(),
        "accuracy": float(np.mean(values[-10:])),
        "mean_accuracy": float(np.mean(values)),
        "lost_share": lost_share(run),
        "wasted_share": wasted_share(run),
        "wasted_bytes_share": wasted_bytes(
            run, 4 * sum(map(manifest.elements_of, scenario.plan.parts(manifest)))
        ),
        "committed": len(run.committed),
        "abandoned": len(run.rows) - len(run.committed),
        "partial_share": sum(round_.partial for round_ in run.committed)
        / max(1, sum(round_.reports for round_ in run.committed)),
        "time": run.rows[-1].time,
        "evenness": part.evenness,
        "heard": dict(zip(part.tiers, part.heard.tolist(), strict=True)),
        "kept": dict(zip(part.tiers, part.kept.tolist(), strict=True)),
        **own_accuracy(scenario, folder),
    }


def wasted_bytes(run: LoadedRun, model: int) -> float:
    """Return the share of the sent bytes that was wasted: models that led to no accepted report,
    and reports that were refused or whose round was abandoned. The graphs of a device's first task
    are kept, and so are not wasted."""
    sent = run.total(lambda row: row.bytes)
    reports = sum(round_.reports for round_ in run.committed)
    lost = run.total(lambda row: row.assigned).total() - reports
    return float((lost * model + sent["up"] - reports * model) / sent.total())


def own_accuracy(scenario: Scenario, folder: Path) -> dict[str, Any]:
    """Return the final model's accuracy for the devices: the mean of each tier, and the mean of the
    worst tenth. A device's accuracy is on held-out digits, with the classes in the proportions of
    the device's own data."""
    bundle = open_bundle(scenario.plan.bundle)
    tensors = load_file(folder / MODEL)
    model = np.concatenate(
        [tensors[parameter.name].ravel() for parameter in bundle.manifest.travelling]
    )
    source = source_of(scenario, bundle)
    runtime = PerDevice(bundle, local_settings(scenario.plan, bundle), source).runtime
    runtime.load(model)
    test = source.test()
    assert test is not None
    x, y = test
    right = []
    for digit in range(10):
        evaluation = evaluate_data(runtime, (x[y == digit], y[y == digit]))
        right.append(evaluation.metric_sums["accuracy"] / evaluation.examples)
    ids = np.arange(scenario.population.size)
    counts = np.stack([np.bincount(source.arrays(int(device))[1], minlength=10) for device in ids])
    own = counts / counts.sum(axis=1, keepdims=True) @ np.array(right)
    tier = tiers_of(scenario, ids)
    return {
        "tier_accuracy": {
            name: float(own[tier == number].mean()) for number, name in enumerate(scenario.tiers)
        },
        "worst_decile": float(np.sort(own)[: len(own) // 10].mean()),
    }


def work(jobs: Sequence[Job], workers: int) -> list[dict[str, Any]]:
    """The figures of each run, in the order of the jobs."""
    results: dict[int, dict[str, Any]] = {}
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(carry_out, job): number for number, job in enumerate(jobs)}
        for done in as_completed(waiting):
            results[waiting[done]] = done.result()
            if sys.stderr.isatty():
                print(f"\r{len(results)} of {len(jobs)} runs", end="", flush=True, file=sys.stderr)
    print(f"\r{len(jobs)} runs    ", file=sys.stderr)
    return [results[number] for number in range(len(jobs))]


def tune(bundle: Path, chosen: Any) -> dict[str, dict[str, float]]:
    """Return for each recipe the values with the best test accuracy, as a mean over all rounds and
    kinds of data."""
    jobs: list[Job] = []
    for recipe, data in product(chosen.recipes, chosen.data):
        cell = Cell(data, recipe, "by time", 0.0, **USUAL)
        sweep = {f"plan.{key}": values for key, values in RECIPES[recipe].items()} | {
            "seed": [TUNING_SEED]
        }
        runs = scenarios(bundle, cell, chosen.rounds, sweep, 0.0)
        folder = folder_of(bundle.with_name("tuning") / bundle.name, cell)
        jobs += [Job(cell, run, folder / run.name, chosen.target) for run in runs]
    scores: dict[str, Counter[tuple[float, ...]]] = {recipe: Counter() for recipe in chosen.recipes}
    for job, row in zip(jobs, work(jobs, chosen.workers), strict=True):
        values = tuple(job.scenario.setting[f"plan.{key}"] for key in RECIPES[job.cell.recipe])
        scores[job.cell.recipe][values] += row["mean_accuracy"]
    best = {
        recipe: max(score, key=lambda values: score[values]) for recipe, score in scores.items()
    }
    return {
        recipe: dict(zip(RECIPES[recipe], values, strict=True)) for recipe, values in best.items()
    }


def runs_of(
    bundle: Path, chosen: Any, best: Mapping[str, Mapping[str, float]], rates: Mapping[float, float]
) -> list[Job]:
    """The runs of all cells, with what was chosen for their recipes."""
    jobs: list[Job] = []
    for cell in grid(chosen):
        sweep = {f"plan.{key}": [value] for key, value in best[cell.recipe].items()}
        sweep["seed"] = list(range(1, chosen.seeds + 1))
        runs = scenarios(bundle, cell, chosen.rounds, sweep, rates[cell.dropout])
        jobs += [Job(cell, run, folder_of(bundle, cell) / run.name, chosen.target) for run in runs]
    return jobs


def target_of(text: str) -> Target:
    """For the command line."""
    try:
        return Target.parse(text)
    except SimulatorError as error:
        raise ArgumentTypeError(error.text) from None


def grid(chosen: Any) -> list[Cell]:
    """All recipes on all kinds of data; FedAvg on the first and the last kind with other plans, and
    on the last with another kind of dropout; on the last FedNova with other deadlines, where
    devices do unequal work."""
    last, ends = chosen.data[-1], dict.fromkeys((chosen.data[0], chosen.data[-1]))
    usual = [
        Cell(data, recipe, "by time", 0.0, **USUAL)
        for data, recipe in product(chosen.data, chosen.recipes)
    ]
    others = product(ends, chosen.over_selection, chosen.deadlines)
    plans = [
        Cell(data, "fedavg", "by time", 0.0, share, deadline) for data, share, deadline in others
    ]
    equal = [
        Cell(last, "fedavg", "equal", 0.0, share, USUAL["deadline"])
        for share in (1.0, USUAL["over_selection"])
    ]
    work = [
        usual[-1]._replace(recipe="fednova", deadline=deadline) for deadline in chosen.deadlines
    ]
    unequal = work if "fednova" in chosen.recipes else []
    cells = [
        cell._replace(dropout=share)
        for cell in (*usual, *plans, *equal, *unequal)
        for share in chosen.dropout
    ]
    return list(
        dict.fromkeys(cell if cell.dropout else cell._replace(hazard="by time") for cell in cells)
    )


def main() -> None:
    options = measure.parser(__doc__)
    options.add_argument(
        "--keep", type=Path, default=Path("dropout.runs"), help="folder of the finished runs"
    )
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--rounds", type=int, default=100, help="committed rounds of a run")
    options.add_argument("--target", type=target_of, default="accuracy=0.9")
    options.add_argument("--recipes", nargs="+", choices=RECIPES, default=[*RECIPES])
    options.add_argument("--data", nargs="+", choices=DATA, default=[*DATA])
    options.add_argument("--dropout", nargs="+", type=float, default=[0.0, 0.3, 0.6, 0.9])
    options.add_argument("--over-selection", nargs="+", type=float, default=[1.0, 1.3, 2.0])
    options.add_argument(
        "--deadlines", nargs="+", type=float, default=[1800.0, 60.0, 25.0], help="seconds"
    )
    options.add_argument(
        "--workers", type=int, default=len(os.sched_getaffinity(0)), help="runs at a time"
    )
    options.add_argument("--figures", type=Path, metavar="FOLDER", help="draw dropout-*.svg there")
    chosen = options.parse_args()
    chosen.keep.mkdir(parents=True, exist_ok=True)
    bundle = export(chosen.keep.absolute())
    fleet = training(bundle)
    rates = {dropout: rate_of(fleet.train, dropout) for dropout in chosen.dropout}
    chosen.recipes = list(dict.fromkeys(["fedavg", *chosen.recipes]))
    best = tune(bundle, chosen)
    jobs = runs_of(bundle, chosen, best, rates)
    results: dict[Cell, list[dict[str, Any]]] = {}
    for job, row in zip(jobs, work(jobs, chosen.workers), strict=True):
        results.setdefault(job.cell, []).append(row)
    print(tables.text(results, best, rates, fleet, chosen.target))
    if chosen.figures:
        import _dropout_figures  # matplotlib takes its time

        for file in _dropout_figures.draw(results, chosen.figures, chosen.target):
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
